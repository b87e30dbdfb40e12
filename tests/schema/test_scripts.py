"""The statements that Alembic and Django run, beside writers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import psycopg

from outbox_pipelines.core import scripts
from tests.conftest import wait_until
from tests.schema.servers import Database

_TRIES = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'DO $outbox$%' AND wait_event = 'PgSleep'"


def test_no_writer_waits_for_a_migration(empty: Database) -> None:
    """Guards against one idle transaction for which a migration waits, and all writers behind it."""
    first, second, guards, *_ = scripts.creating("public")
    for statement in (first, second):
        empty.rows(statement)
    with empty.connect(autocommit=False) as idle, ThreadPoolExecutor(1) as threads:
        idle.execute("LOCK TABLE outbox IN ROW EXCLUSIVE MODE")
        with empty.connect() as tool:
            tool.execute("SET lock_timeout = '7s'")
            migration = threads.submit(tool.execute, guards.encode())
            wait_until(lambda: empty.rows(_TRIES), what="a try that has given up")
            until = time.monotonic() + 2.5
            longest = 0.0
            while time.monotonic() < until:
                began = time.monotonic()
                with empty.connect(autocommit=False) as writer:
                    writer.execute("SET LOCAL lock_timeout = '900ms'")
                    writer.execute("LOCK TABLE outbox IN ROW EXCLUSIVE MODE")
                longest = max(longest, time.monotonic() - began)
            assert not migration.done()
            idle.rollback()
            migration.result(60)
            assert tool.execute("SHOW lock_timeout").fetchone() == ("7s",)
    assert empty.value("SELECT count(*) FROM outbox_migrations WHERE name LIKE '0003%%'") == 1
    print(f"a writer waited {longest * 1000:.0f} ms at most")


def test_a_lock_that_stays_is_an_error(empty: Database) -> None:
    """Guards against a migration that waits forever."""
    first, second, guards, *_ = scripts.creating("public")
    for statement in (first, second):
        empty.rows(statement)
    short = guards.replace("interval '1 minute'", "interval '0'")
    with empty.connect(autocommit=False) as idle, empty.connect() as tool:
        idle.execute("LOCK TABLE outbox IN ROW EXCLUSIVE MODE")
        try:
            tool.execute(short.encode())
        except psycopg.errors.LockNotAvailable:
            pass
        else:
            raise AssertionError("the lock was free")
