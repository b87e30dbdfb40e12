"""Explore scopes: ``python -m tests.model [SCOPE…]``.

Invariants:
- Exit 0: every invariant held, and everything was seen that has to be. Exit 1: not so, and the story is
  printed. Exit 2: usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.model.consumer.breaks import BREAKS, Break, broken
from tests.model.explore import Result
from tests.model.marked import breaks as marked
from tests.model.random_runs import Runs
from tests.model.relay.__main__ import main as print_relay_breaks
from tests.model.scope import Scope
from tests.model.scopes import SCOPES

_ALL = "exhausted:"


def main(words: Sequence[str] | None = None) -> int:
    given = _parsed(words)
    if given.list:
        for name, scope in SCOPES.items():
            size = "small" if scope.is_small else "large"
            print(f"{name:26} {size}  {scope.extent(given.states, given.seeds):28} {scope.about}")
        return 0
    if unknown := set(given.scope) - SCOPES.keys():
        print(f"there is no scope {min(unknown)}; run with --list", file=sys.stderr)
        return 2
    if given.breaks:
        found = [_finds(each) for each in BREAKS.values()]
        missed = print_relay_breaks() + print_relay_breaks(marked.BREAKS, marked.found)
        return 0 if all(found) and not missed else 1
    names = given.scope or [name for name, scope in SCOPES.items() if scope.is_small or not given.small]
    run = partial(_run, states=given.states, seconds=given.seconds, seeds=given.seeds, first=given.first)
    good = True
    extents: dict[str, str] = {}
    for name, (text, extent, is_good) in zip(names, _each(run, names, given.processes), strict=True):
        print(text, flush=True)
        extents[name] = extent
        good = good and is_good
    print(_summary(extents))
    return 0 if good else 1


def _summary(extents: Mapping[str, str]) -> str:
    """Which scopes are exhausted, and where the others were cut off."""
    exhausted = [name for name, extent in extents.items() if extent.startswith(_ALL)]
    lines = [f"exhausted: {len(exhausted)} of {len(extents)} scopes: {', '.join(exhausted) or 'none'}"]
    lines += [f"not exhausted: {name}: {extent}" for name, extent in extents.items() if name not in exhausted]
    return "\n".join(lines)


def _parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description="Explore models of the world.")
    parser.add_argument("scope", nargs="*", help="names of scopes (default: all)")
    parser.add_argument("--list", action="store_true", help="list the scopes")
    parser.add_argument("--breaks", action="store_true", help="look for each defect on purpose instead")
    parser.add_argument("--small", action="store_true", help="only the scopes of make test-system")
    parser.add_argument("--states", type=int, help="stop a scope after about so many states")
    parser.add_argument("--seconds", type=float, help="stop a scope after about so many seconds")
    parser.add_argument("--seeds", type=int, help="so many random histories")
    parser.add_argument("--first", type=int, default=0, help="seed of the first random history")
    parser.add_argument("--processes", type=int, default=1, help="so many scopes at once")
    return parser.parse_args(words)


def _each(
    run: partial[tuple[str, str, bool]], names: Sequence[str], processes: int
) -> Iterator[tuple[str, str, bool]]:
    if processes > 1:
        with ProcessPoolExecutor(processes) as pool:
            yield from pool.map(run, names)
    else:
        yield from map(run, names)


def _run(
    name: str, *, states: int | None, seconds: float | None, seeds: int | None, first: int
) -> tuple[str, str, bool]:
    scope = SCOPES[name]
    if scope.seeds:
        runs = scope.at_random(first=first, seeds=seeds, seconds=seconds)
        extent = f"{runs.histories:,} random histories"
        return _told_runs(name, scope, runs), extent, runs.broken is None
    result = scope.explored(states=states, seconds=seconds)
    extent = f"{_ALL if result.exhausted else 'cut off at'} {result.states:,} states, depth {result.depth}"
    return _told(name, scope, result, extent), extent, result.is_good


def _finds(each: Break) -> bool:
    """Whether the model finds a defect; prints a row of the table of breaks."""
    with broken(each):
        result = SCOPES[each.scope].explored()
    found = result.broken.invariant if result.broken else "not found"
    print(f"| {each.about} | {found} | {result.states:,} |", flush=True)
    return found == each.invariant


def _told(name: str, scope: Scope, result: Result, extent: str) -> str:
    rate = result.transitions / max(result.seconds, 1e-9)
    lines = [
        f"{name}: {scope.about}",
        f"  {extent}, {result.transitions:,} transitions, {result.seconds:.1f} s, {rate:,.0f} transitions/s",
        f"  {result.done:,} states in which everything is done, {result.deadends:,} without a next step",
        f"  seen: {_counted(result)}",
    ]
    if result.missing:
        lines.append(f"  never seen: {', '.join(sorted(result.missing))}")
    return "\n".join([*lines, *_broken(scope, result)])


def _told_runs(name: str, scope: Scope, runs: Runs) -> str:
    rate = 60 * runs.histories / max(runs.seconds, 1e-9)
    lines = [
        f"{name}: {scope.about}",
        f"  {runs.histories:,} random histories, {runs.steps:,} steps, {runs.seconds:.1f} s, "
        f"{rate:,.0f} histories/min",
        f"  seen: {_counted(runs)}",
    ]
    if runs.broken:
        lines.append(f"  seed {runs.seed} fails; its history, made shorter:")
    return "\n".join([*lines, *_broken(scope, runs)])


def _broken(scope: Scope, found: Result | Runs) -> list[str]:
    if found.broken is None:
        return []
    return [f"  BROKEN: {found.broken.invariant}: {found.broken.why}", scope.told(found)]


def _counted(found: Result | Runs) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(found.covered.items()))


if __name__ == "__main__":
    raise SystemExit(main())
