"""`python -m tests.mutants [AREA]...`: mutate SQL and settings, and show which mutants no test finds.

Invariants:
- Results are kept in build/mutants: a run continues where the last one ended. The order is drawn from a seed,
  so that a part of a run is a sample.
- `killed.txt` names each constant of which every mutant is killed or explained, with a hash of its text: it
  is not run again until the text changes, or with --again.
- The exit code is 1 if a mutant survived that `equal.toml` does not explain, or if an explanation is stale.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import tomllib
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Final

import pytest

from tests.mutants import catalog
from tests.mutants.catalog import Mutant
from tests.mutants.record import Recorder, leave_out
from tests.mutants.run import Covering, Result, Runner

BUILD: Final = catalog.ROOT / "build" / "mutants"
EQUAL: Final = Path(__file__).parent / "equal.toml"
KILLED: Final = Path(__file__).parent / "killed.txt"
_AREAS: Final = ("partitions", "relay", "cdc", "marked", "archive", "consumer")
# A slower test is too slow to run for each mutant.
_TEST_SECONDS: Final = 20
_NOT_FOUND: Final = ("survived", "untested")


class _Selecting:
    """Leaves out what was not recorded."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        leave_out(config, items)


def main(arguments: list[str] | None = None) -> int:
    given = _arguments(arguments)
    code = 0
    for area in given.areas or _AREAS:
        every = catalog.of_area(area)
        mutants = [each for each in every if re.search(given.mutant, each.id)]
        if given.list:
            print(*mutants, sep="\n")
            continue
        if given.record:
            _recorded(area).unlink(missing_ok=True)
        known = _known(area)
        if not given.again:
            _add_settled(every, known)
        if given.save:
            _save(every, known)
            continue
        # A seed alone decides the order.
        random.Random(given.seed).shuffle(mutants)
        asked = [
            each
            for each in mutants[: given.sample or None]
            if given.again or (each.id not in _reasons() and (given.mutant or each.id not in known))
        ]
        if given.survivors:
            asked = [
                each
                for each in mutants
                if known.get(each.id, {}).get("outcome") in _NOT_FOUND and each.id not in _reasons()
            ]
        if asked:
            if not _is_recorded(area):
                _record(area, given.seconds)
            # Mutants of a constant in a row.
            places = {(each.file, each.name): n for n, each in reversed(list(enumerate(asked)))}
            asked.sort(key=lambda each: places[each.file, each.name])
            _run(area, asked, known, given)
        code = max(code, _summary(area, mutants, known, show=given.show), _stale(every))
    return code


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("areas", nargs="*", choices=[*catalog.AREAS], metavar="AREA")
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    parser.add_argument("--record", action="store_true", help="record again which tests send which statement")
    parser.add_argument("--sample", type=int, default=0, help="only so many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutant", default="", help="only mutants whose id this regular expression finds")
    parser.add_argument("--again", action="store_true", help="also those whose result is known")
    parser.add_argument("--survivors", action="store_true", help="only those that no test has found so far")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no mutant after so long")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of tests for each mutant")
    parser.add_argument("--workers", type=int, default=2, help="mutants that run at a time")
    parser.add_argument("--save", action="store_true", help="only write what is known into killed.txt")
    parser.add_argument("--show", action="store_true", help="list every survivor")
    return parser.parse_args(arguments)


def _recorded(area: str) -> Path:
    return BUILD / f"{area}.json"


def _is_recorded(area: str) -> bool:
    file = _recorded(area)
    return file.exists() and bool(json.loads(file.read_text())["is_complete"])


def _folders(area: str) -> list[str]:
    return [
        path.relative_to(catalog.ROOT).as_posix()
        for each in catalog.AREAS[area][1]
        for path in sorted((catalog.ROOT / "tests").glob(each))
    ]


def _record(area: str, seconds: float) -> None:
    recorder = Recorder(_recorded(area), seconds)
    recorder.watch()
    pytest.main(["-p", "no:cacheprovider", f"--timeout={_TEST_SECONDS}", *_folders(area)], plugins=[recorder])


def _results(area: str) -> Path:
    return BUILD / f"{area}-results.json"


def _known(area: str) -> dict[str, dict[str, object]]:
    file = _results(area)
    found: dict[str, dict[str, object]] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _constants(mutants: list[Mutant]) -> dict[str, tuple[str, list[Mutant]]]:
    """Return for each constant a hash of its text, and its mutants."""
    found: dict[str, list[Mutant]] = {}
    for each in mutants:
        found.setdefault(f"{each.file}:{each.name}", []).append(each)
    texts = {name: repr([(one.id, one.around) for one in its]) for name, its in found.items()}
    return {name: (hashlib.sha1(texts[name].encode()).hexdigest()[:10], its) for name, its in found.items()}


def _add_settled(mutants: list[Mutant], known: dict[str, dict[str, object]]) -> None:
    """Add what `killed.txt` knows of constants that have not changed."""
    lines = KILLED.read_text().splitlines() if KILLED.exists() else []
    settled = dict(line.rsplit(" ", 1) for line in lines)
    for name, (digest, its) in _constants(mutants).items():
        if settled.get(name) == digest:
            for each in its:
                known.setdefault(each.id, {"outcome": "killed"})


def _save(mutants: list[Mutant], known: dict[str, dict[str, object]]) -> None:
    """Write the constants of these mutants into `killed.txt`, if all of theirs are killed or explained."""
    lines = KILLED.read_text().splitlines() if KILLED.exists() else []
    settled = dict(line.rsplit(" ", 1) for line in lines)
    for name, (digest, its) in _constants(mutants).items():
        settled.pop(name, None)
        if all(known.get(each.id, {}).get("outcome") == "killed" or each.id in _reasons() for each in its):
            settled[name] = digest
    KILLED.write_text("".join(f"{name} {digest}\n" for name, digest in sorted(settled.items())))


def _run(
    area: str, mutants: list[Mutant], known: dict[str, dict[str, object]], given: argparse.Namespace
) -> None:
    def report(mutant: Mutant, result: Result) -> None:
        known[mutant.id] = asdict(result)
        _results(area).write_text(json.dumps(known, indent=1))
        print(
            f"{result.outcome:9} {result.seconds:5.1f} s  {mutant}", f" by {result.by}" if result.by else ""
        )
        sys.stdout.flush()

    options = ["-p", "no:cacheprovider", "-s", f"--timeout={_TEST_SECONDS}"]
    covering = Covering(_recorded(area), given.budget)
    runner = Runner(mutants, covering, report, given.seconds, given.workers)
    pytest.main([*options, *_folders(area)], plugins=[_Selecting(), runner])


def _summary(area: str, mutants: list[Mutant], known: dict[str, dict[str, object]], *, show: bool) -> int:
    reasons = _reasons()
    outcomes: Counter[str] = Counter()
    survivors = []
    for each in mutants:
        outcome = str(known.get(each.id, {}).get("outcome", "not run"))
        if each.id in reasons:
            outcome = "equal"
        outcomes[outcome] += 1
        if outcome in _NOT_FOUND:
            survivors.append((outcome, each))
    ran = outcomes["killed"] + len(survivors)
    score = f"{100 * outcomes['killed'] / ran:.1f}%" if ran else "–"
    counts = ", ".join(
        f"{outcomes[each]} {each}" for each in ("killed", "equal", "survived", "untested", "not run")
    )
    print(f"{area}: {len(mutants)} mutants: {counts}; score {score}")
    if show:
        for outcome, each in survivors:
            print(f"  {outcome:9} {each}")
    return int(bool(survivors))


def _reasons() -> dict[str, str]:
    return {one["id"]: one["reason"] for one in tomllib.loads(EQUAL.read_text()).get("equal", [])}


def _stale(mutants: list[Mutant]) -> int:
    files, ids = {each.file for each in mutants}, {each.id for each in mutants}
    stale = [one for one in _reasons() if one.partition(":")[0] in files and one not in ids]
    for one in stale:
        print(f"equal.toml names {one}, which is no mutant any more: remove it")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
