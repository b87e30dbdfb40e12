"""Relays judged by whole runs: calm, under every kind of fault, and broken ones that chance must undo."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.history import __main__ as program
from tests.history import nemesis, tapes
from tests.history.__main__ import report
from tests.history.load import GENTLE, LARGE
from tests.history.record import HANDLES_REPLAYS
from tests.history.relays import RELAYS, Relay
from tests.history.run import Run
from tests.history.servers import Servers

_CLIENTS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"


@contextmanager
def _run(servers: Servers, name: str, seed: int, directory: Path, **more: Any) -> Iterator[Run]:
    """Under way; ended with the block."""
    run = Run(servers, name, RELAYS[name], seed, directory, **({"load": GENTLE} | more))
    try:
        run.start()
        yield run
    finally:
        run.close()


def test_a_calm_run_has_no_duplicate(servers: Servers, seed: int, tmp_path: Path) -> None:
    """Guards G5: without a fault each event comes once, and no relay ends."""
    with _run(servers, "at_least_once", seed, tmp_path) as run:
        run.wait(3)
        verdict = report(run.finish())
    assert verdict.wrong == []
    assert verdict.redelivered == 0
    assert verdict.committed > 100
    assert run.history.figures[tapes.PLAYED] > 1_000
    assert all(event.at for event in run.history.committed), "without times no dirty read is found"


# In two halves, so that each can fail alone and both stay short; all of each in `make thorough`, and half of
# them otherwise, as the seed draws them.
@pytest.mark.thorough
@pytest.mark.parametrize("half", [0, 1])
def test_kinds_of_fault(servers: Servers, seed: int, tmp_path: Path, half: int, is_thorough: bool) -> None:
    """Guards G1, G2 and G5 against what hurts relay, writers, servers and the networks between them."""
    chance = random.Random(seed)
    kinds = list(nemesis.KINDS)
    chance.shuffle(kinds)
    with _run(servers, "at_least_once", seed, tmp_path) as run:
        for name in kinds[half :: 2 if is_thorough else 4]:
            print(f"{run.arrived:8}  {name}")
            run.disturb({name: nemesis.KINDS[name]}, chance, chance.uniform(0.1, 2))
        verdict = report(run.finish())
    assert verdict.wrong == []


@pytest.mark.parametrize("name", ["at_least_once", "exactly_once"])
def test_the_source_changes(servers: Servers, seed: int, tmp_path: Path, name: str) -> None:
    """Guards G1, G2 and G5 where events come from a slot, from snapshots, and from one after the other."""
    chance = random.Random(seed)
    deadline = time.monotonic() + 120
    with _run(servers, name, seed, tmp_path) as run:
        # A seed may draw no other change to a slot. A busy machine may take longer than the command waits.
        while not any("reading from the slot" in relay.log.read_text() for relay in run.relays):
            assert time.monotonic() < deadline
            run.change_source("cdc")
            run.wait_for_command()
        for more in ([], ["kill relay"], ["refuse large events"], ["freeze relay"], ["kill database"]):
            names = ["change source", *more]
            print(f"{run.arrived:8}  {' + '.join(names)}")
            run.disturb({name: nemesis.ALL[name] for name in names}, chance, chance.uniform(0.5, 2))
        verdict = report(run.finish())
    assert verdict.wrong == []


@pytest.mark.thorough(only=True)
@pytest.mark.parametrize("name", ["at_least_once", "exactly_once"])
def test_the_source_changes_twenty_times_each_way(
    servers: Servers, seed: int, tmp_path: Path, name: str
) -> None:
    """Guards G1, G2 and G5 across changes of the source, each with a fault at the same time."""
    chance = random.Random(seed)
    faults = ["kill relay", "freeze relay", "kill database", "refuse large events", "kill broker"]
    with _run(servers, name, seed, tmp_path) as run:
        for n in range(40):
            run.change_source("polling" if n % 2 else "cdc")
            fault = chance.choice(faults)
            print(f"{run.arrived:8}  change {n} + {fault}")
            run.disturb({fault: nemesis.ALL[fault]}, chance, chance.uniform(0.2, 1))
            run.wait_for_command()
        verdict = report(run.finish())
        logs = "".join(relay.log.read_text() for relay in run.relays)
    assert verdict.wrong == []
    # A fault may keep a change from its aim.
    assert logs.count("reading from the slot") >= 10


def test_crashes_at_steps_while_a_large_backlog_drains(servers: Servers, seed: int, tmp_path: Path) -> None:
    """Guards G1, G2 and G5 between durable steps, with parked events and other shards too."""
    chance = random.Random(seed)
    run = Run(servers, "exactly_once", RELAYS["exactly_once"], seed, tmp_path, load=LARGE)
    try:
        run.start()
        with run.without_relays():
            run.pile_up(2_000)
        for names in (["refuse large events", "kill relays at steps"], ["change shards"]):
            print(f"{run.arrived:8}  {' + '.join(names)}")
            run.disturb({name: nemesis.ALL[name] for name in names}, chance, 5)
        verdict = report(run.finish())
    finally:
        run.close()
    assert verdict.wrong == []
    assert run.history.figures["bytes"] > 2_000_000


def test_some_kinds_of_fault_of_consumers(servers: Servers, seed: int, tmp_path: Path) -> None:
    """Guards effects exactly once, in order, while members of a group die, freeze and lose their database."""
    chance = random.Random(seed)
    with _run(servers, "at_least_once", seed, tmp_path, consumer="idempotent") as run:
        _disturb(run, chance, chance.sample(list(nemesis.CONSUMER_KINDS), 5))
        verdict = report(run.finish())
    assert verdict.wrong == []
    assert verdict.committed == len(run.history.effects) > 100


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "consumer"), [("at_least_once", HANDLES_REPLAYS), ("exactly_once", "idempotent")]
)
def test_replays_beside_live_events(
    servers: Servers, seed: int, tmp_path: Path, name: str, consumer: str
) -> None:
    """Guards G1, G2 and G5 of live events while replays run and die, the replays' own, and that consumers
    tell both apart."""
    chance = random.Random(seed)
    with _run(servers, name, seed, tmp_path, consumer=consumer) as run:
        run.pile_up(1_500)
        assert run.wait(120, lambda: run.arrived > 1_500)
        for more in ([], [chance.choice(["kill relay", "kill consumer", "kill broker", "kill database"])]):
            names = ["kill replay", *more]
            print(f"{run.arrived:8}  {' + '.join(names)}")
            run.disturb({name: nemesis.ALL[name] for name in names}, chance, chance.uniform(2, 4))
        verdict = report(run.finish())
    assert verdict.wrong == []
    assert len(run.history.replays) == 2
    assert all(replay.due for replay in run.history.replays)
    assert any(replay.resumed for replay in run.history.replays)


def test_commits_that_are_not_durable_and_long_keys(servers: Servers, seed: int, tmp_path: Path) -> None:
    """Guards G1 and G10 where the database forgets what no session made durable, and no index has a key."""
    chance = random.Random(seed)
    load = replace(GENTLE, long_keys=True)
    with _run(
        servers, "at_least_once", seed, tmp_path, consumer="idempotent", load=load, asynchronous=True
    ) as run:
        _disturb(run, chance, ["kill database", "kill consumer", "kill database"])
        verdict = report(run.finish())
    assert verdict.wrong == []
    assert verdict.committed == len(run.history.effects) > 100
    assert len({event.account for event in run.history.committed} & {"60", "61", "62"}) == 3


def _disturb(run: Run, chance: random.Random, names: list[str]) -> None:
    for name in names:
        print(f"{run.arrived:8}  {name}")
        run.disturb({name: nemesis.ALL[name]}, chance, chance.uniform(0.1, 3))


def test_a_broken_relay_is_found_without_any_fault(
    servers: Servers, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against writers and runs too tame to undo a broken relay, twice started at that."""
    monkeypatch.setenv("HISTORIES", str(tmp_path))
    with _run(servers, "broken.polls_by_seq", seed, tmp_path, patience=3) as run:
        run.wait(5)
        verdict = report(run.finish())
    assert verdict.lost_write
    assert verdict.duplicate
    assert not verdict.phantom


@pytest.mark.parametrize("restarts", [True, False])
def test_a_relay_that_ends_on_its_own(
    servers: Servers, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """Guards against a relay that falls over unseen, and a harness that forgives where it should not."""
    monkeypatch.setenv("HISTORIES", str(tmp_path))
    falls = Relay(((sys.executable, "-c", "raise SystemExit('cannot')"),), restarts=restarts)
    run = Run(servers, "falls", falls, seed, tmp_path, load=GENTLE, patience=2)
    try:
        run.start()
        verdict = report(run.finish())
    finally:
        run.close()
    assert (len(verdict.exited) > 1) is restarts
    assert verdict.exited[0].endswith("relay 1 with 1: cannot")
    assert verdict.stuck == ["no events for 2 s after the start"]


def test_a_standstill_is_described(servers: Servers, seed: int, tmp_path: Path) -> None:
    """Guards against a finding that cannot be explained, since its processes are gone."""
    run = Run(
        servers, "at_least_once", RELAYS["at_least_once"], seed, tmp_path, consumer="idempotent", patience=2
    )
    consumer = run.consumers[0]

    def description() -> str:
        run.describe_standstill("nothing flows")
        (log,) = tmp_path.glob("*-standstill.log")
        return log.read_text()

    def polls() -> bool:
        # It may be somewhere else at the moment.
        consumer.dump_stacks()
        return "consumer/membership.py" in consumer.log.read_text()

    try:
        consumer.start()
        assert run.wait(60, lambda: run.count(_CLIENTS) > 1)
        assert run.wait(60, lambda: "ConsumerGroupState.STABLE" in description(), pace=0.5)
        assert "idle" in description()
        assert run.wait(60, polls, pace=0.5)
    finally:
        run.close()
    assert run.history.stuck[0] == "nothing flows"


def test_the_soak_as_a_command(capfd: pytest.CaptureFixture[str]) -> None:
    """Guards against a soak that is found broken on the night it was meant for."""
    assert (
        program.main(
            [
                "run",
                "--seconds",
                "2",
                "--seed",
                "7",
                "--brokers",
                "1",
                "--asynchronous",
                "--no-long-keys",
                "--fault",
                "kill relay",
            ]
        )
        == 0
    )
    printed = capfd.readouterr().out
    assert "SEED 7: usual load, asynchronous commits, brokers: 1\n" in printed
    assert "kill relay" in printed
