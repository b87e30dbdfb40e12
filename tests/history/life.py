"""A script of all that happens to a relay, so that each durable step occurs.

It has parking and release, dead letters and their replay, an outage, crashes, another number of shards, and a
change of the mode.

Invariants:
- Phases wait for what they are about, not for a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import psycopg

from tests.history import business
from tests.history.processes import Process
from tests.history.run import Run
from tests.history.watched import Order

_SECONDS = 180.0
# Of each log, when it has failed.
_TOLD = 4_000
# Batches that topics take: none of the large events, then some, then all.
_LEAST, _SOME = 30_000, 60_000
_LARGE, _LARGER = 40_000, 80_000
# A kind whose topic is missing at first, and the account that is parked.
MISSING = "shipment"
_ACCOUNT = 30


def live(run: Run) -> None:
    """All of it, with a relay that is started here; `finish` the run afterwards."""
    first, second = run.relays[:2]
    if run.mode == "at_least_once":
        _come_from_exactly_once(run, first)
    run.limit_topics(_LEAST)
    _write(run)
    run.start_relay(first)
    _wait(run, "a dead letter", lambda: run.failed() == 1)
    # Now the first one is accepted, and one behind it is not; Kafka stands still when others are released.
    run.limit_topics(_SOME)
    run.end(first)
    run.start_relay(first, _stall(run))
    run.replay()
    _wait(run, "the first large event", lambda: run.failed() == 0)
    _wait(run, "the second one to be refused", lambda: run.failed() == 1)
    run.limit_topics(None)
    if run.mode != "table":
        _die(run, first)
    run.create_missing()
    run.replay()
    _wait(run, "nothing parked", lambda: run.parked() == 0, replays=True)
    _outage(run)
    second.start()
    if run.mode != "table":
        for number in (2, 1):
            run.change_shards(number)
            run.wait_for_command()
    _hand_over(run, first)


def _write(run: Run) -> None:
    with psycopg.connect(run.dsn) as connection:
        for size in (_LARGE, 0, 0, _LARGER, 0, 0):
            business.count(connection, "order", _ACCOUNT, size)
        for account in range(40, 50):
            business.count(connection, "payment", account)
        business.count(connection, MISSING, _ACCOUNT)


def _write_one(run: Run) -> None:
    with psycopg.connect(run.dsn) as connection:
        business.count(connection, "payment", _ACCOUNT)


def _come_from_exactly_once(run: Run, relay: Process) -> None:
    _write_one(run)
    arrived = run.arrived
    relay.orders = {"OUTBOX_DELIVERY": "exactly_once"}
    relay.start()
    _wait(run, "the first event", lambda: run.arrived > arrived)
    relay.kill()


def _stall(run: Run) -> Order | None:
    """Of Kafka, right before the first event that was tried alone lets those behind it go."""
    kafka = run.servers.kafka._process
    assert kafka is not None
    steps = {"at_least_once": "remove released", "exactly_once": "record acceptance"}
    step = steps.get(run.mode or "")
    return Order(step, "stall", process=kafka.pid, seconds=3) if step else None


def _die(run: Run, relay: Process) -> None:
    """Twice in a row, first while released events are in flight: the next relay is careful with all."""
    before = len(run.steps_of(relay))
    first = Order("commit", "before", released=True)
    if run.mode == "at_least_once":
        # The first to be removed has been tried alone.
        first = Order("remove released", "before", 2)
    second = Order("settle", "before")
    run.end(relay)
    run.next_orders.append(second)
    run.start_relay(relay, first)
    run.replay()
    _wait(run, str(first), partial(_has, run, relay, before, f"! {first}"))
    _write_one(run)
    _wait(run, str(second), partial(_has, run, relay, before, f"! {second}"))


def _has(run: Run, relay: Process, before: int, step: str) -> bool:
    return step in run.steps_of(relay)[before:]


def _outage(run: Run) -> None:
    """So long that it is reported."""
    relay = run.relays[0]
    before = len(run.steps_of(relay))
    run.servers.kafka_proxy.swallow()
    try:
        _write_one(run)
        step = "show the breaker"
        if run.mode == "table":
            run.wait(1)
        else:
            _wait(run, "the breaker", partial(_has, run, relay, before, step))
    finally:
        run.servers.kafka_proxy.heal()


def _hand_over(run: Run, relay: Process) -> None:
    run.end(relay)
    arrived = run.arrived
    _write_one(run)
    _wait(run, "the other relay", lambda: run.arrived > arrived)


def _wait(run: Run, what: str, until: Callable[[], bool], *, replays: bool = False) -> None:
    def is_so() -> bool:
        if replays:
            run.replay_again()
        return until()

    if not run.wait(_SECONDS, is_so, pace=0.1):
        words = f"{what} did not come within {_SECONDS:.0f} s"
        log = run.describe_standstill(words)
        texts = [
            f"{each.name}: {each.read_text(errors='replace')[-_TOLD:]}" for each in log.parent.glob("*.log")
        ]
        raise AssertionError("\n".join((words, *texts)))
