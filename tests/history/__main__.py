"""Soaks and saved histories: ``python -m tests.history run`` and ``python -m tests.history check FILE``.

Invariants:
- Exit 0: all guarantees held; 1: they did not, and what was found is printed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.history import nemesis, porcupine
from tests.history.consumers import CONSUMERS
from tests.history.figures import Figures
from tests.history.judge import Verdict, judge
from tests.history.load import LOADS
from tests.history.record import History, load, save
from tests.history.relays import RELAYS
from tests.history.run import Run
from tests.history.servers import own_servers

# How often a fault meets a backlog that has just been written.
_DRAINS = 0.6
# How often a round has commits that are not durable by default, or long keys.
_RARELY = 0.3
# A round has its own database and topics, so that a night's soak stays small in memory.
_ROUND_SECONDS = 300.0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.history", description="Judge relays and consumers by histories."
    )
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run", help="faults drawn from a seed, on servers of their own")
    run.add_argument("--seconds", type=float, default=600.0)
    run.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    run.add_argument("--relay", choices=RELAYS, default="at_least_once")
    run.add_argument("--consumer", choices=(*CONSUMERS, "none"), default="idempotent")
    run.add_argument(
        "--load", action="append", choices=LOADS, help="drawn from these in each round; all by default"
    )
    run.add_argument("--fault", action="append", choices=nemesis.ALL, help="only these; may be repeated")
    run.add_argument(
        "--brokers",
        type=int,
        choices=(1, 3),
        help="one, or a cluster of three; drawn from the seed by default",
    )
    either = argparse.BooleanOptionalAction
    run.add_argument(
        "--asynchronous", action=either, help="synchronous_commit=off in the database; drawn by default"
    )
    run.add_argument(
        "--long-keys", action=either, help="some aggregates have ids of 3,000 characters; drawn by default"
    )
    run.add_argument("--patience", type=float, default=60.0, help="seconds until missing events are lost")
    run.add_argument("--calm", action="store_true", help="without faults: then nothing excuses a duplicate")
    check = commands.add_parser("check", help="judge a saved history again")
    check.add_argument("file", type=Path)
    arguments = parser.parse_args(words)
    if arguments.command == "check":
        verdict, second = judge(load(arguments.file)), porcupine.check(arguments.file)
        verdict.porcupine = second[1:]
        print(verdict, *second[:1], sep="\n")
        return 1 if verdict.wrong else 0
    return _soak(arguments)


def report(history: History) -> Verdict:
    """Judges, twice if Porcupine is built; keeps the history where something is wrong, and says where."""
    verdict, second = judge(history), porcupine.judge(history)
    verdict.porcupine = second[1:]
    print(f"SEED {history.seed} of {history.relay}: {verdict}", *second[:1], sep="\n", flush=True)
    for words, count in Counter(f"{exit.code}: {exit.words}" for exit in history.exits).items():
        print(f"  {count} x exit {words}", flush=True)
    if verdict.wrong:
        path = _histories() / f"{history.relay}-{history.seed}-{time.time():.0f}.jsonl"
        save(history, path)
        for fault in history.faults:
            print(f"  {fault.at:.2f} to {fault.until:.2f}: {fault.name}", flush=True)
        print(f"kept: python -m tests.history check {path}", flush=True)
    return verdict


def _keep_logs(directory: Path, seed: int) -> None:
    """What the programs printed, and the relays' durable steps, beside the history."""
    to = _histories() / f"logs-{seed}-{time.time():.0f}"
    to.mkdir(parents=True)
    for path in (*directory.glob("*.log"), *directory.glob("*.steps")):
        shutil.copy(path, to)
    print(f"logs: {to}", flush=True)


def _histories() -> Path:
    return Path(os.environ.get("HISTORIES", "histories"))


def _soak(arguments: argparse.Namespace) -> int:
    figures = Figures()
    try:
        return _rounds(arguments, figures)
    finally:
        print(figures, flush=True)


def _rounds(arguments: argparse.Namespace, figures: Figures) -> int:
    brokers = arguments.brokers or random.Random(arguments.seed).choice([1, 1, 3])
    with (
        tempfile.TemporaryDirectory(prefix="history-") as directory,
        own_servers(Path(directory), brokers) as servers,
    ):
        until = time.monotonic() + arguments.seconds
        for seed in itertools.count(arguments.seed):
            left = until - time.monotonic()
            if left <= 0:
                return 0
            relay = RELAYS[arguments.relay]
            chance = random.Random(seed)
            name = chance.choice(arguments.load or list(LOADS))
            asynchronous, long_keys = (
                chance.random() < _RARELY if asked is None else asked
                for asked in (arguments.asynchronous, arguments.long_keys)
            )
            load = replace(LOADS[name], long_keys=long_keys)
            options = (", asynchronous commits" * asynchronous) + (", long keys" * long_keys)
            print(f"SEED {seed}: {name} load{options}, brokers: {brokers}", flush=True)
            run = Run(
                servers,
                arguments.relay,
                relay,
                seed,
                Path(directory),
                load=load,
                # Handlers would take ten times as long as the relay.
                consumer="" if load.backlog else arguments.consumer.replace("none", ""),
                asynchronous=asynchronous,
                patience=arguments.patience,
            )
            try:
                run.start()
                names = arguments.fault or nemesis.of(
                    relay, has_consumers=bool(run.consumers), is_cluster=brokers > 1
                )
                _round(run, chance, min(left, _ROUND_SECONDS), names, calm=arguments.calm)
                verdict = report(run.finish())
                figures.add(run.history)
                if verdict.wrong:
                    _keep_logs(Path(directory), seed)
                    return 1
            finally:
                run.close()
            run.remove()
    return 0


def _round(run: Run, chance: random.Random, seconds: float, names: Sequence[str], *, calm: bool) -> None:
    until = time.monotonic() + seconds
    if calm:
        run.wait(seconds)
    while not calm and time.monotonic() < until and not run.history.stuck:
        if run.load.backlog and chance.random() < _DRAINS:
            _pile_up(run, chance)
            run.wait(chance.uniform(0, 3))
        kinds = nemesis.draw(chance, names)
        length = nemesis.length(chance)
        print(f"{run.arrived:8}  {' + '.join(kinds)}, {length:.1f} s", flush=True)
        run.disturb(kinds, chance, length)
        run.wait(chance.uniform(0, 2))


def _pile_up(run: Run, chance: random.Random) -> None:
    """A backlog, which is then drained: written while no relay runs, or while relays run."""
    events = chance.randint(run.load.backlog // 20, run.load.backlog)
    is_down = chance.random() < 0.5
    print(f"{run.arrived:8}  a backlog of {events} events{', without a relay' * is_down}", flush=True)
    if is_down:
        with run.without_relays():
            run.pile_up(events)
    else:
        run.pile_up(events)


if __name__ == "__main__":
    sys.exit(main())
