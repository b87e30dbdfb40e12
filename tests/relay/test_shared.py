"""What waits between the threads of a relay: little, in order, and as one where it is small."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.core.blocked import BlockedAggregates
from outbox_pipelines.relay.core.delivery import Delivery
from outbox_pipelines.relay.core.ledger import SettleRequest
from outbox_pipelines.relay.core.settler import MANY_EVENTS
from outbox_pipelines.relay.core.transactions import Phase, TransactionalPublisher
from outbox_pipelines.relay.shared import SharedBatchQueue, SharedLedger


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


def test_a_batch_that_is_read_can_be_taken() -> None:
    """Guards against reads, in exactly_once, whose batches only wait for the end of a transaction."""
    batches = SharedBatchQueue()
    # In an outage nothing is wanted, and the reader waits as usual.
    assert not batches.await_demand(0)
    threading.Timer(0.01, batches.want).start()
    assert batches.await_demand(60)
    assert not batches.await_demand(60)
    batches.put(_tick(0, 1), 0)
    _get(batches)
    threading.Timer(0.01, batches.want).start()
    assert batches.await_demand(60)


@pytest.mark.parametrize("what", ["nothing", "few", "many", "a request", "the end"])
def test_only_few_complete_events_wait_for_the_next_tick(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two statements for each transaction, and against a drain that waits to be settled."""
    ledger = SharedLedger(60.0)
    waits: list[float] = []

    def wait_for(is_so: Callable[[], object], timeout: float) -> None:
        if not is_so():
            waits.append(timeout)

    monkeypatch.setattr(ledger._changed, "wait_for", wait_for)
    if what != "nothing":
        seqs = range(1, MANY_EVENTS + 1 if what == "many" else 3)
        delivery = Delivery(_tick(0, *seqs), 0.0)
        delivery.unsent, delivery.acknowledged = [], len(seqs)
        ledger.hand_over([delivery.complete()])
    if what == "a request":
        ledger.request(SettleRequest())
    if what == "the end":
        ledger.finish()
    ledger.wait_for_work(1.0)
    assert waits == {"nothing": [1.0], "few": [60.0]}.get(what, [])


class _Client:
    """Kafka's client, which acknowledges nothing."""

    has_failed = is_outdated = False
    in_flight = 0

    def __init__(self) -> None:
        self.waits: list[tuple[float, bool]] = []

    def send(self, delivery: Delivery, events: list[Event], gate: object) -> list[Event]:
        self.in_flight += len(events)
        return []

    def serve(self, seconds: float, *, linger: bool) -> None:
        self.waits.append((seconds, linger))

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None


def test_a_flushed_transaction_is_awaited_and_not_polled() -> None:
    """Guards against threads of relay and client that wake up each millisecond until Kafka has all of it."""
    client, clock = _Client(), lambda: 0.0
    publisher = TransactionalPublisher(
        *(cast("Any", client), BlockedAggregates(clock), Position(Snapshot(0, 0, ())), None),
        patience=10.0,
        clock=clock,
        new_id=lambda: "tick",
    )
    publisher.requests = cast("Any", _Client())
    publisher.publish(_tick(0, 1))
    client.waits.clear()
    publisher.poll(0.001, linger=False)
    assert publisher._phase is Phase.FLUSHING
    [(seconds, linger)] = client.waits
    assert seconds > 0.01
    assert not linger
