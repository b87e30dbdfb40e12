"""The view `outbox_events`: what became of each event, in the shape of the textbook."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
import pytest

from tests.schema.events import insert, one
from tests.schema.servers import Connection, Database

STATUS = "SELECT status, processed_at, retry_count, last_error FROM outbox_events WHERE id = %s"
PARK = """
INSERT INTO outbox_parked SELECT o.*, %s, 3, NULL, 'too large' FROM outbox o WHERE id = %s"""


class Relay:
    """Sets positions as a relay does."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def settle(self, last_seq: int | None = None, *, progress: bool = True) -> datetime | None:
        """Published: all that a snapshot sees, or, within a tick, the part of it up to `last_seq`."""
        c = self._connection
        if last_seq is None:
            c.execute("UPDATE outbox_shards SET done = pg_current_snapshot(), target = NULL, last_seq = NULL")
        else:
            c.execute("UPDATE outbox_shards SET target = pg_current_snapshot(), last_seq = %s", [last_seq])
        if not progress:
            return None
        row = one(
            c,
            "INSERT INTO outbox_progress (shard, done, target, last_seq, events) "
            "SELECT shard, done, target, last_seq, 1 FROM outbox_shards RETURNING at",
        )
        return row[0]  # type: ignore[no-any-return]


def status(connection: Connection, event: UUID) -> tuple[Any, ...]:
    return one(connection, STATUS, event)


@pytest.fixture
def session(kept: Database) -> Iterator[Connection]:
    """Each statement a transaction of its own, as positions count transactions."""
    with kept.connect() as connection:
        yield connection


def test_status_follows_the_position(session: Connection) -> None:
    """Guards against an event shown as processed before it was, or pending permanently afterwards."""
    relay = Relay(session)
    first, second = insert(session), insert(session)
    assert status(session, first.id) == ("PENDING", None, 0, None)

    # In the middle of a tick.
    then = relay.settle(last_seq=first.seq)
    assert status(session, first.id) == ("PROCESSED", then, 0, None)
    assert status(session, second.id) == ("PENDING", None, 0, None)

    later = relay.settle()
    third = insert(session)
    relay.settle(progress=False)
    # The first row that covers an event tells its time; later ones do not change it.
    assert status(session, first.id) == ("PROCESSED", then, 0, None)
    assert status(session, second.id) == ("PROCESSED", later, 0, None)
    # Between two rows of progress the time is not known yet.
    assert status(session, third.id) == ("PROCESSED", None, 0, None)


def test_an_open_transaction_is_not_covered(session: Connection, kept: Database) -> None:
    """Guards against an event that committed behind the position, shown as processed: the last place to
    notice a loss."""
    relay = Relay(session)
    with kept.connect(autocommit=False) as late:
        written = insert(late)
        insert(session)
        relay.settle()
        late.commit()
    assert status(session, written.id)[0] == "PENDING"
    relay.settle()
    assert status(session, written.id)[0] == "PROCESSED"


@pytest.mark.parametrize(
    ("state", "shown"),
    [("waiting", "PENDING"), ("retrying", "PENDING"), ("failed", "FAILED"), ("discarded", "DISCARDED")],
)
def test_parked_events_are_not_processed(session: Connection, state: str, shown: str) -> None:
    """Guards against a dead letter that looks published because the position has passed it."""
    parked, published = insert(session), insert(session)
    session.execute(PARK, [state, parked.id])
    then = Relay(session).settle()
    assert status(session, parked.id) == (shown, None, 3, "too large")
    assert status(session, published.id) == ("PROCESSED", then, 0, None)
    # Published after all, a parked event is a published one.
    session.execute("DELETE FROM outbox_parked WHERE id = %s", [parked.id])
    assert status(session, parked.id)[0] == "PROCESSED"


def test_columns_are_those_of_the_event(connection: Connection) -> None:
    """Guards against columns swapped between table and view, or events shown twice."""
    written = insert(
        connection, idempotency_key="k", correlation_id="c", causation_id="a", traceparent="t", version=2
    )
    assert one(
        connection,
        "SELECT id, seq, aggregate_type, aggregate_id, event_type, event_data, headers, idempotency_key, "
        "correlation_id, causation_id, traceparent, version, created_at = now() FROM outbox_events",
    ) == (*written, "order", "42", "order.placed", {"total": 5}, None, "k", "c", "a", "t", 2, True)


@pytest.mark.parametrize(
    "change", ["DELETE FROM outbox_events", "UPDATE outbox_events SET status = 'PENDING'"]
)
def test_it_is_read_only(connection: Connection, change: str) -> None:
    """Guards against a status that can be set by hand, as in the textbook's table."""
    insert(connection)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        connection.execute(change.encode())
