"""The lag of events that were backfilled: since they were written, not since the day they are of."""

from __future__ import annotations

from outbox_pipelines.relay import queries
from tests.partitions import days
from tests.schema.servers import Database


def test_a_backfill_is_no_lag(database: Database) -> None:
    """Guards against an alarm of days because somebody has written the past."""
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
        ((_, lag, _),) = connection.execute(queries.SETTLE_WITH_PROGRESS, given).fetchall()
    assert 0 <= lag < 3600
