"""How processes divide shards, by a clock of the test."""

from __future__ import annotations

import threading

from outbox_pipelines.relay.fleet.division import SETTLE_SECONDS, Division, Unit
from outbox_pipelines.relay.fleet.fleet_host import FleetTurn

UNITS = [Unit(f"o{n}", 0) for n in range(10)]


class Clock:
    """Seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def _division(clock: Clock, *, others: int) -> Division:
    division = Division(len(UNITS), clock)
    clock.now += SETTLE_SECONDS
    for unit in UNITS:
        division.saw(unit, others=others, is_free=True)
    return division


def test_a_process_takes_its_share() -> None:
    """Guards against one of three that takes all, and against shards that none takes."""
    clock = Clock()
    division = _division(clock, others=2)
    assert sum(division.take(unit) for unit in UNITS) == 4
    clock.now += 10
    for unit in UNITS:
        division.saw(unit, others=2, is_free=unit not in UNITS[:4])
    # No other process takes them.
    assert sum(division.take(unit) for unit in UNITS) == 6


def test_a_process_passes_on_what_is_more_than_its_share() -> None:
    """Guards against a new process that gets nothing, and against all shards that pause at once."""
    clock = Clock()
    division = _division(clock, others=0)
    assert all(division.take(unit) for unit in UNITS)
    for unit in UNITS:
        division.saw(unit, others=1, is_free=False)
    assert sum(division.must_pass_on(unit) for unit in UNITS) == 1
    passed = 1
    for _ in range(20):
        clock.now += 1
        passed += sum(division.must_pass_on(unit) for unit in UNITS)
    assert passed == 5


def test_a_shard_that_the_others_do_not_take_is_kept() -> None:
    """Guards against a shard that changes its owner without end, because another process cannot relay it."""
    clock = Clock()
    division = _division(clock, others=1)
    for unit in UNITS[:5]:
        assert division.take(unit)
    clock.now += 5
    assert division.take(UNITS[5])
    clock.now += 5
    division.saw(UNITS[5], others=1, is_free=False)
    assert not division.must_pass_on(UNITS[5])
    assert division.must_pass_on(UNITS[0])


def test_one_relay_at_a_time_is_suspected() -> None:
    """Guards against two relays that publish what may have crashed the process at the same time."""
    lock = threading.Lock()
    one, other = FleetTurn(lock), FleetTurn(lock)
    assert one.take()
    assert one.take()
    assert not other.take()
    one.give_back()
    assert other.take()
    other.wait(lambda: False)
    assert not one.take()
