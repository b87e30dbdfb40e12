"""The circuit breaker, with the time as an argument."""

from __future__ import annotations

import itertools

from outbox_pipelines.relay.core.breaker import Breaker, State


def _open(breaker: Breaker, at: float = 100.0) -> None:
    breaker.quiet(at, "gone")
    breaker.quiet(at + 5, "gone")
    assert breaker.state is State.OPEN


def test_it_opens_only_when_nothing_comes_back_for_its_patience() -> None:
    """Guards against a breaker that opens on a slow broker, or on an idle relay."""
    breaker = Breaker(5)
    breaker.quiet(100, "slow")
    breaker.quiet(104.9, "slow")
    assert breaker.state is State.CLOSED
    breaker.acknowledged()
    breaker.quiet(105.1, "slow")
    breaker.idle()
    breaker.quiet(200, "slow")
    assert breaker.state is State.CLOSED
    breaker.quiet(205, "gone")
    assert (breaker.state, breaker.reason) == (State.OPEN, "gone")


def test_it_closes_at_the_first_acknowledgement() -> None:
    """Guards against a relay that does not return to a broker that works."""
    breaker = Breaker(5)
    _open(breaker)
    breaker.acknowledged()
    assert (breaker.state, breaker.reason) == (State.CLOSED, None)


def test_probes_come_seldom_and_ever_more_so() -> None:
    """Guards against a busy loop around a broker that is unavailable."""
    breaker = Breaker(5)
    _open(breaker)
    now, probes = 105.0, []
    while now < 165:
        if breaker.wants_probe(now):
            probes.append(now)
            breaker.probed(now, answered=False)
        now += 0.1
    pauses = [b - a for a, b in itertools.pairwise(probes)]
    assert pauses == sorted(pauses)
    assert 9 < pauses[-1] < 11
    assert len(probes) < 12


def test_an_answered_probe_lets_events_in_flight_try() -> None:
    """Guards against a broker that answers, but takes nothing: flapping, or without a leader."""
    breaker = Breaker(5)
    _open(breaker)
    assert not breaker.wants_probe(105.1)
    assert breaker.wants_probe(105.6)
    breaker.probed(105.6, answered=True)
    assert breaker.state is State.HALF_OPEN
    assert not breaker.wants_probe(106)
    breaker.quiet(106, "no leader")
    breaker.quiet(110.9, "no leader")
    assert breaker.state is State.HALF_OPEN
    breaker.quiet(111, "no leader")
    assert (breaker.state, breaker.reason) == (State.OPEN, "no leader")
    assert not breaker.wants_probe(111.9)
    assert breaker.wants_probe(112.1)


def test_half_open_takes_one_batch() -> None:
    """Guards against a relay that sees no other topic than the one in an outage, or that fills its memory."""
    breaker = Breaker(5)
    taken = [breaker.takes]
    _open(breaker)
    taken.append(breaker.takes)
    breaker.probed(105.6, answered=True)
    taken.append(breaker.takes)
    breaker.took()
    taken.append(breaker.takes)
    breaker.acknowledged()
    assert [*taken, breaker.takes] == [True, False, True, False, True]
