"""The latency of events that were backfilled: since they were written, not since the day they are of."""

from __future__ import annotations

from datetime import timedelta

import pytest

from outbox_pipelines.days.partitions.partitions_sql import WRITTEN_AT
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.relay import relay_sql
from tests.days.partitions import days
from tests.schema.servers import Database


def test_a_backfill_is_no_lag(database: Database) -> None:
    """Guards against an alarm of days because past events were written."""
    days.fill(database, events=1)
    ctid, epoch, done, newest = database.rows(
        "SELECT s.ctid::text, s.epoch, pg_current_snapshot()::text, max(o.seq) "
        "FROM outbox_shards s, outbox o GROUP BY s.ctid, s.epoch"
    )[0]
    given = {
        **{"ctid": ctid, "epoch": epoch, "done": done, "newest": newest, "open_from": "-infinity"},
        **{"target": None, "last_seq": None, "tick": None, "shard": 0, "shards": 1, "events": 1},
    }
    with database.connect() as connection:
        ((_, latency, _),) = connection.execute(relay_sql.SETTLE_WITH_PROGRESS, given).fetchall()
    assert 0 <= latency < 3600


def test_a_backfill_is_not_old(database: Database) -> None:
    """Guards against the same alarm while the backfill waits to be published."""
    days.fill(database, events=3)
    found = outbox_measurements.read(database.settings)
    assert found.unpublished == 3
    assert 0 <= found.oldest_unpublished_seconds < 3600
    # An id that tells no time: the event is as old as it says.
    with database.connect(autocommit=False) as connection:
        connection.execute("SET LOCAL outbox.backfill = on")
        connection.execute(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at) "
            "VALUES (gen_random_uuid(), 'order', '1', 'order.placed', '{}', %s::date)",
            [days.DAY],
        )
    assert outbox_measurements.read(database.settings).oldest_unpublished_seconds > 86_400


@pytest.mark.parametrize(
    ("created", "drawn", "version", "expected"),
    [
        (300, 60, 7, 60),
        # Drawn a while before or after the row's time, or in the future; an id that tells no time.
        (300, 310, 7, 300),
        (300, 270, 7, 300),
        (300, -30, 7, 300),
        (300, 60, 4, 300),
        (30, 10, 7, 30),
    ],
)
def test_when_an_event_was_written(
    database: Database, created: int, drawn: int, version: int, expected: int
) -> None:
    """Guards against an id that is believed where it tells no time, or a time that cannot be.

    Args:
        created: minutes ago, as are `drawn` and `expected`.
    """
    now = database.value("SELECT clock_timestamp()")
    stamp = round((now - timedelta(minutes=drawn)).timestamp() * 1000)
    id = f"{stamp:012x}{version}0008000000000000000"
    written = database.value(
        f"SELECT {WRITTEN_AT} FROM (VALUES (%s::uuid, %s::timestamptz)) o (id, created_at)",
        id,
        now - timedelta(minutes=created),
    )
    assert abs(now - timedelta(minutes=expected) - written) < timedelta(seconds=1)
