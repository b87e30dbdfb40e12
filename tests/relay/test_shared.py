"""What waits between reader and publisher: little, in order, and as one where it is small."""

from __future__ import annotations

import pytest

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.shared import SharedBatchQueue


def _tick(number: int, *seqs: int, ends: bool = True) -> Batch:
    events = [Event(seq, f"id-{seq}", "order", "a", "order.placed", "{}", None) for seq in seqs]
    done, target = Snapshot(number, number, ()), Snapshot(number + 1, number + 1, ())
    return Batch(events, 2 * len(events), done, target, ends_tick=ends)


def _get(batches: SharedBatchQueue, *, wanted: bool = True) -> Batch:
    batch = batches.get(0, lambda batch: wanted)
    assert batch is not None
    return batch


def test_small_ticks_that_wait_become_one_in_order_of_seq() -> None:
    """Guards against events that wait behind a transaction which could have taken them along."""
    batches = SharedBatchQueue()
    for number, seqs in enumerate([(1, 4), (2, 3), (), (6,)]):
        assert batches.put(_tick(number, *seqs), 0)
    batch = _get(batches)
    assert [event.seq for event in batch.events] == [1, 2, 3, 4, 6]
    assert batch.done == Snapshot(0, 0, ())
    assert batch.position == Position(Snapshot(4, 4, ()))
    with pytest.raises(LookupError):
        _get(batches)


def test_what_is_not_wanted_yet_stays_and_takes_others_in() -> None:
    """Guards against a batch kept for the next transaction, and another for the one after it."""
    batches = SharedBatchQueue()
    batches.put(_tick(0, 1), 0)
    with pytest.raises(LookupError):
        _get(batches, wanted=False)
    batches.put(_tick(1, 2), 0)
    assert [event.seq for event in _get(batches).events] == [1, 2]


@pytest.mark.parametrize("number", [0, 1])
def test_parts_of_a_tick_are_not_joined(number: int) -> None:
    """Guards against a position that covers what is not published: a part does not end its tick."""
    batches = SharedBatchQueue()
    for n in range(2):
        batches.put(_tick(n, n, ends=n != number), 0)
    assert [event.seq for event in _get(batches).events] == [0]
    assert [event.seq for event in _get(batches).events] == [1]


def test_a_third_waits_and_the_end_comes_last() -> None:
    """Guards against memory that fills while Kafka is slow, and an end that overtakes what is read."""
    batches = SharedBatchQueue()
    big = tuple(range(5000))
    assert batches.put(_tick(0, *big), 0)
    assert batches.put(_tick(1, *big), 0)
    assert not batches.put(_tick(2, 1), 0)
    assert not batches.put(None, 0)
    _get(batches)
    assert batches.put(None, 0)
    _get(batches)
    assert batches.get(0, lambda batch: False) is None
