"""What each file of `sql/` does to an installation: its locks, and that it only adds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import psycopg

from outbox_pipelines.core import scripts
from outbox_pipelines.database import schema
from tests.schema.servers import Connection, Database

# From the weakest. What a writer has too (ROW EXCLUSIVE and weaker) only a DROP or ALTER waits for.
_STRONGER: Final = (
    "SHARE UPDATE EXCLUSIVE",
    "SHARE",
    "SHARE ROW EXCLUSIVE",
    "EXCLUSIVE",
    "ACCESS EXCLUSIVE",
)
_TABLES: Final = """
SELECT array_agg(oid) FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p')"""
_LOCKS: Final = """
SELECT DISTINCT regexp_replace(c.relname, '_[0-9]{8}$', ''), l.mode
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
WHERE l.pid = pg_backend_pid() AND c.oid = ANY (%s::oid[]) ORDER BY 1"""
_VIEWS: Final = """
SELECT format('column %s.%s', c.relname, a.attname)
FROM pg_class c JOIN pg_attribute a ON attrelid = c.oid
WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'v'"""


def _applied(connection: Connection, file: Path) -> tuple[dict[str, str], set[str]]:
    """Apply a file; return its locks on tables that existed, and what it took away."""
    tables, before = connection.execute(_TABLES).fetchone(), _promised(connection)
    connection.execute(file.read_bytes())
    taken: dict[str, str] = {}
    for table, held in connection.execute(_LOCKS, tables):
        mode = re.sub("(?<=[a-z])(?=[A-Z])", " ", held.removesuffix("Lock")).upper()
        if mode in _STRONGER:
            taken[table] = max(mode, taken.get(table, mode), key=_STRONGER.index)
    return taken, before - _promised(connection)


def _promised(connection: Connection) -> set[str]:
    """What older programs use: each object with its definition, functions and views without."""
    views = [line for (line,) in connection.execute(_VIEWS)]
    lines = schema._describe(connection, "public")
    return {*views, *(re.sub(r"^((?:function .*\)|view \w+)) \w{32}$", r"\1", line) for line in lines)}


def test_each_file_states_its_locks_and_only_adds(empty: Database) -> None:
    """Guards against a migration for which writers wait unannounced, or after which an older relay fails."""
    for part in ("", "consumer", "keys"):
        for file in scripts.files(part):
            with empty.connect(autocommit=False) as connection:
                assert _applied(connection, file) == (scripts.locks(file), set()), file.name


def test_what_is_taken_away_is_found(connection: psycopg.Connection[Any], tmp_path: Path) -> None:
    """Guards against a later file with which older relays, writers and consumers fail."""
    more = "CREATE OR REPLACE VIEW outbox_events AS SELECT *, 1 AS more FROM ({}) AS former"
    [(view,)] = connection.execute("SELECT rtrim(pg_get_viewdef('outbox_events'), ';')").fetchall()
    for statement, lost in (
        ("ALTER TABLE outbox ADD COLUMN more int DEFAULT 1", None),
        (
            "CREATE OR REPLACE FUNCTION outbox_open_from() RETURNS date LANGUAGE sql AS 'SELECT now()::date'",
            None,
        ),
        (more.format(view), None),
        ("ALTER TABLE outbox RENAME COLUMN version TO v", "column outbox.version integer"),
        ("ALTER TABLE outbox_progress ALTER latency TYPE real", "column outbox_progress.latency double"),
        ("ALTER TABLE outbox_parked ALTER last_error SET NOT NULL", "column outbox_parked.last_error text"),
        ("DROP FUNCTION outbox_cancel(uuid)", "function outbox_cancel(id uuid)"),
        ("DROP VIEW outbox_events; CREATE VIEW outbox_events AS SELECT 1 AS id", "column outbox_events.seq"),
        ("DROP TABLE outbox_audit", "table outbox_audit"),
        ("DROP TRIGGER outbox_append_only ON outbox", "trigger outbox.outbox_append_only"),
    ):
        (tmp_path / "later.sql").write_text(statement)
        with connection.transaction(force_rollback=True):
            _, gone = _applied(connection, tmp_path / "later.sql")
        assert bool(gone) == (lost is not None), statement
        assert lost is None or any(each.startswith(lost) for each in gone), gone
