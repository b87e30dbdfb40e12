"""What a batch costs the database, in statements: a slow path that creeps in shows here, on any machine."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.relay import service
from outbox_pipelines.relay.read.snapshots import SnapshotSource
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, either
from tests.relay.topic import NOISE, create_topic

PIECE = 500


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Statements of this process, by their first words."""
    found: Counter[str] = Counter()
    lock = threading.Lock()

    def counting(method: Any) -> Any:
        def counted(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
            with lock:
                found[" ".join(str(query).split()[:3])] += 1
            return method(self, query, *arguments, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("execute", "stream"):
            patch.setattr(psycopg.Cursor, name, counting(getattr(psycopg.Cursor, name)))
        yield found


def _drain(outbox: Outbox, batches: int, **more: object) -> Counter[str]:
    """What the drain of so many batches takes."""
    settings = outbox.settings.model_copy(update={"batch_events": PIECE, **more})
    # After an error of a busy server a relay starts over, and reads again: not what is counted here.
    for _ in range(5):
        outbox.fill(batches * PIECE)
        with _counted() as found:
            totals = service.relay(settings, until_empty=True)
        assert totals.events + totals.unpublished >= batches * PIECE
        if found["UPDATE outbox_shards s"] == 1:
            return found
    pytest.fail(f"the relay started over in each of five drains: {found}")


@pytest.mark.parametrize("delivery", either("at_least_once", "exactly_once"))
def test_a_batch_is_one_read_and_at_most_one_settle(outbox: Outbox, delivery: str) -> None:
    """Guards against a look-up, a lock or a commit for each batch, or each event."""
    few, many = _drain(outbox, 10, delivery=delivery), _drain(outbox, 50, delivery=delivery)
    more = many - few
    assert more["SELECT seq, id::text,"] == 40
    # Reads, settles, and less than one of any other statement: some depend on the time, not on a batch.
    assert more.total() < 3 * 40, more


@pytest.mark.extended
def test_a_batch_with_a_blocked_aggregate_is_two_more(outbox: Outbox) -> None:
    """Guards against a statement for each event that is parked."""
    create_topic(outbox, **{"max.message.bytes": "10000"})
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "order", 1, "order.placed", NOISE)
    assert service.relay(outbox.settings, until_empty=True).unpublished == 1
    few, many = _drain(outbox, 10), _drain(outbox, 50)
    more = many - few
    assert more["SELECT present, twice"] == 40
    others = more.total() - more["SELECT seq, id::text,"] - more["UPDATE outbox_shards SET"]
    assert others < 2.5 * 40, more


def test_a_small_tick_is_a_snapshot_and_a_read(outbox: Outbox) -> None:
    """Guards against more statements and plans where events come one by one: each adds to the latency."""
    with outbox.connect() as connection:
        ((now,),) = connection.execute("SELECT pg_current_snapshot()::text")
        position = Position(Snapshot.parse(now))
        source = SnapshotSource(connection, position, batch_events=PIECE, batch_bytes=8_000_000)
        for n in range(5):
            outbox.write(n)
            with _counted() as found:
                batch = source.read()
            assert batch is not None
            assert len(batch.events) == 1
            # Once a minute it asks which days are closed; the first time, it has reads planned once. While
            # events come one after the other, one statement is both.
            assert found.total() == (4, 2, 1, 1, 1)[n]
        plans = """
            SELECT sum(generic_plans)::int, sum(custom_plans)::int FROM pg_prepared_statements
            WHERE statement LIKE '%tick%'"""
        # Planning takes five times as long as such a read.
        assert connection.execute(plans).fetchone() == (5, 0)
