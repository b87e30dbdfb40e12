"""What may be settled: a batch of which every event is acknowledged, parked or dead, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.core.delivery import Complete, Delivery, IncompleteError
from outbox_pipelines.relay.core.outcomes import WAITING, Suspect

SNAPSHOT = Snapshot(1, 1, ())
EVENTS = [Event(n, str(n), "order", "1", "order.placed", "{}", None) for n in range(1, 4)]


def _delivery(*, acknowledged: int, **state: Any) -> Delivery:
    delivery = Delivery(Batch(EVENTS, 6, SNAPSHOT, SNAPSHOT, ends_tick=True))
    delivery.unsent = []
    for _ in range(acknowledged):
        delivery.report(None, None)
    for name, value in state.items():
        setattr(delivery, name, value)
    return delivery


@pytest.mark.parametrize(
    "delivery",
    [
        _delivery(acknowledged=0, unsent=EVENTS),
        _delivery(acknowledged=2),
        _delivery(acknowledged=2, unsent=EVENTS[2:]),
        _delivery(acknowledged=3, unsent=EVENTS[2:]),
        _delivery(acknowledged=2, failed=[(None, None)]),
        _delivery(acknowledged=3, failed=[(None, None)]),
        _delivery(acknowledged=1, parked={3: (EVENTS[2], WAITING)}),
        _delivery(acknowledged=4),
    ],
)
def test_an_event_without_an_outcome_cannot_be_settled(delivery: Delivery) -> None:
    """Guards the type: none exists for a batch of which an event is unsent, in flight or refused."""
    with pytest.raises(IncompleteError, match="of 3 events"):
        Complete(delivery)


def test_every_event_has_one_outcome() -> None:
    """Guards against a proof that says another thing than the delivery."""
    second, third = EVENTS[1:]
    batch = _delivery(
        acknowledged=1, parked={3: (third, WAITING), 2: (second, Suspect("too large"))}
    ).complete()
    assert batch.published() == EVENTS[:1]
    assert batch.parked_states() == {3: ("waiting", None), 2: ("retrying", "too large")}


def test_a_position_never_goes_back() -> None:
    """Guards against a batch that ends before the position: what lies between would be published again."""
    later = Snapshot(5, 5, ())
    batch = Delivery(Batch([], 0, later, SNAPSHOT, ends_tick=True)).complete()
    with pytest.raises(ValueError, match="does not follow"):
        batch.moves(Position(later))
    batch = Delivery(Batch([], 0, SNAPSHOT, later, ends_tick=True)).complete()
    assert batch.moves(Position(SNAPSHOT)) == Position(later)


def test_a_position_moves_over_what_follows_it_alone() -> None:
    """Guards against a batch that is passed over."""
    later, last = Snapshot(5, 5, ()), Snapshot(9, 9, ())
    batch = Delivery(Batch([], 0, later, last, ends_tick=True)).complete()
    with pytest.raises(ValueError, match="does not follow"):
        batch.moves(Position(SNAPSHOT))
