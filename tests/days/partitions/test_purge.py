"""Purging: what has served is deleted by age, in batches; what is still needed stays."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.archive import drop
from outbox_pipelines.days.partitions import close, partitions_sql
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.writer import emit
from tests.days.partitions import days
from tests.days.partitions.days import DAY
from tests.schema.servers import Database

_KEYS = """
INSERT INTO outbox_keys (key, event_id, created_at)
SELECT gen_random_uuid(), gen_random_uuid(), now() - make_interval(days => %s) FROM generate_series(1, %s)"""
_PROGRESS = """
INSERT INTO outbox_progress (shard, at, done, events)
SELECT shard, now() - make_interval(days => %s, secs => i), pg_current_snapshot(), 1
FROM generate_series(1, %s) i, generate_series(0, 1) shard"""


def test_old_keys_go(database: Database) -> None:
    """Guards against a table of keys that grows without limit, and a key that is forgotten too early."""
    for _ in range(3):
        database.rows(_KEYS, 31, 4000)
        database.rows(_KEYS, 29, 100)
    with database.connect(autocommit=False) as connection:
        emit(connection, "order", 1, "order.placed", {}, idempotency_key="k")
        emit(connection, "order", 1, "e", {}, idempotency_key="delayed", deliver_after=timedelta(days=60))
    database.rows(
        "UPDATE outbox_keys SET created_at = now() - interval '31 days' WHERE key = outbox_key('delayed')"
    )
    assert close.purge(database.settings).keys == 12_000
    assert database.value("SELECT count(*) FROM outbox_keys") == 302
    with database.connect(autocommit=False) as connection:
        assert emit(connection, "order", 1, "order.placed", {}, idempotency_key="k").duplicate


def test_keys_are_remembered_as_long_as_is_said(database: Database) -> None:
    """Guards against a setting that is never read."""
    database.rows(_KEYS, 5, 10)
    shown = database.outbox("partitions", "purge", "--json", OUTBOX_IDEMPOTENCY_KEY_RETENTION_DAYS="6")
    assert json.loads(shown.output)["keys"] == 0
    shown = database.outbox("partitions", "purge", "--json", OUTBOX_IDEMPOTENCY_KEY_RETENTION_DAYS="4")
    assert json.loads(shown.output)["keys"] == 10


def test_a_purge_is_many_small_transactions(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against G7 broken: who wants a purged key again waits for the whole purge."""
    monkeypatch.setattr(partitions_sql, "PAGES", 2)
    database.rows(_KEYS, 31, 2000)
    before = database.value("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    assert close.purge(database.settings).keys == 2000
    after = database.value("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    pages = database.value("SELECT pg_relation_size('outbox_keys') / 8192")
    assert after - before >= pages / 2 - 1


def test_progress_stays_until_its_day_is_archived(database: Database, tmp_path: Path) -> None:
    """Guards against an archive that cannot say when its events were published."""
    settings = days.archiving(database, tmp_path).model_copy(update={"retention_days": 0})
    days.fill(database)
    days.relayed(database)
    database.rows(_PROGRESS, 20, 6000)
    # What is left of the week stays in any case: it plots.
    database.rows(_PROGRESS, 5, 10)
    database.rows("UPDATE outbox_days SET day = day - 30 WHERE day = %s", DAY)
    assert close.purge(settings).progress == 0
    database.rows("UPDATE outbox_days SET day = day + 30 WHERE day = %s - 30", DAY)
    assert database.outbox("partitions", "close").exit_code == 0
    database.rows("UPDATE outbox_days SET day = day - 30 WHERE state = 'closed' AND day = %s", DAY)
    assert close.purge(settings).progress == 0
    database.rows("UPDATE outbox_days SET day = day + 30 WHERE day = %s - 30", DAY)
    archive.archive(settings, DAY)
    # An archived day keeps nothing, however old it is.
    database.rows("UPDATE outbox_days SET day = day - 30 WHERE day = %s", DAY)
    assert close.purge(settings).progress == 12_000
    assert database.value("SELECT count(*) FROM outbox_progress") == 20


def test_what_became_of_parked_events(database: Database, tmp_path: Path) -> None:
    """Guards against dead letters that are purged, and against discarded ones that are never purged."""
    settings = days.archiving(database, tmp_path)
    days.closed(database)
    leaf = f"outbox_{DAY:%Y%m%d}"
    for state in ("failed", "discarded"):
        database.rows(
            f"INSERT INTO outbox_parked SELECT *, %s, 5, NULL, 'no', now(), now() - interval '40 days' "
            f"FROM {leaf} o WHERE NOT EXISTS (SELECT FROM outbox_parked p WHERE p.seq = o.seq) LIMIT 3",
            state,
        )
    database.rows("UPDATE outbox_parked SET created_at = created_at - interval '40 days'")
    # Written, or discarded, in the last days: they are kept with their day.
    for times in ("now() - interval '40 days', now()", "now(), now() - interval '40 days'"):
        database.rows(
            "INSERT INTO outbox_parked (id, seq, tx, aggregate_type, aggregate_id, event_type, payload, "
            "state, created_at, failed_at) "
            "SELECT gen_random_uuid(), nextval('outbox_seq'), '3', 'order', '1', 'kept', "
            f"'{{}}', 'discarded', {times}"
        )
    database.rows(
        "INSERT INTO outbox_released SELECT d, gen_random_uuid(), now() - make_interval(days => d), 1 "
        "FROM unnest(ARRAY[1, 40]) d"
    )
    archive.archive(settings, DAY)
    purged = close.purge(settings)
    assert (purged.released, purged.discarded) == (1, 3)
    kept = database.rows("SELECT state, event_type FROM outbox_parked ORDER BY 1, 2")
    assert kept == [("discarded", "kept")] * 2 + [("failed", "order.placed")] * 3
    assert database.rows("SELECT seq FROM outbox_released") == [(1,)]


class _Slow(datetime):
    """The clock of a machine that is an hour behind."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) - timedelta(hours=1)


def test_nothing_is_removed_while_the_clocks_differ(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against keys and days that are removed too early because the clock of the database is ahead."""
    database.rows(_KEYS, 100, 10)
    monkeypatch.setattr(close, "datetime", _Slow)
    for remove in (close.purge, drop.due):
        with pytest.raises(
            UnavailableError, match="the clocks of the database and of this machine differ by 60 minutes"
        ):
            remove(database.settings)
    monkeypatch.undo()
    assert close.purge(database.settings).keys == 10
