"""What a run asks its database, and how it gives refused events another try.

Invariants:
- Each statement names what it counts; a run has no SQL of its own.
"""

from __future__ import annotations

from typing import Any

import psycopg

from tests.history.steps import Mode
from tests.history.writers import APPLICATION

# With a row in the audit, by which relays hear of it. What a relay is changing is left to it: to wait for one
# row while others are locked could deadlock with it.
_REPLAY = """
WITH free AS (
    SELECT seq, state AS was FROM outbox_parked WHERE state IN ('failed', 'retrying') FOR UPDATE SKIP LOCKED
), replayed AS (
    UPDATE outbox_parked p SET state = 'replaying', next_attempt_at = NULL, crashes = 0
    FROM free WHERE free.seq = p.seq AND was = 'failed' RETURNING p.seq
), hurried AS (
    UPDATE outbox_parked p SET next_attempt_at = clock_timestamp()
    FROM free WHERE free.seq = p.seq AND was = 'retrying' RETURNING p.seq
)
INSERT INTO outbox_audit (on_behalf_of, action, reason, filter, events)
SELECT 'history', 'replay', 'corrected', '{}', array_agg(seq)
FROM (SELECT seq FROM replayed UNION ALL SELECT seq FROM hurried) tried HAVING count(*) > 0"""
_MEND_TABLE = """
UPDATE events SET retry_count = 0, next_attempt_at = NULL
WHERE published_at IS NULL AND retry_count > 0"""
_PARKED = "SELECT count(*) FROM outbox_parked"
_PENDING = "SELECT count(*) FROM events WHERE published_at IS NULL"
_WRITING = f"""
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = '{APPLICATION}'"""

_PUBLISHED = "SELECT event_data ->> 'token' FROM outbox_events WHERE status = 'PROCESSED'"
_OPEN_REPLAY = "SELECT id::text FROM outbox_replays WHERE state IN ('running', 'stopped')"
_REPLAYS = "SELECT id::text, reason FROM outbox_replays WHERE state = 'done'"


def published(connection: psycopg.Connection[Any]) -> list[str]:
    """The tokens of the events that the outbox calls published."""
    return [str(token) for (token,) in connection.execute(_PUBLISHED)]


def open_replay(connection: psycopg.Connection[Any]) -> str | None:
    """The id of a replay that is to be resumed."""
    row = connection.execute(_OPEN_REPLAY).fetchone()
    return None if row is None else str(row[0])


def replays(connection: psycopg.Connection[Any]) -> list[tuple[str, str]]:
    """The id and the reason of each replay that is done."""
    return connection.execute(_REPLAYS).fetchall()


def parked(connection: psycopg.Connection[Any], mode: Mode | None) -> int:
    """How many events are not published because they, or others of their aggregate, were refused."""
    return number(connection, _PENDING if mode == "table" else _PARKED)


def failed(connection: psycopg.Connection[Any], mode: Mode | None) -> int:
    """How many of them are dead letters."""
    if mode == "table":
        return number(connection, f"{_PENDING} AND last_error LIKE 'outbox: dead letter: %'")
    return number(connection, f"{_PARKED} WHERE state = 'failed'")


def replay(connection: psycopg.Connection[Any], mode: Mode | None) -> None:
    """Gives every dead letter another try, and tries now what was to be tried later."""
    connection.execute(_MEND_TABLE if mode == "table" else _REPLAY)


def writing(connection: psycopg.Connection[Any]) -> int:
    """How many sessions of writers there are."""
    return number(connection, _WRITING)


def figures(connection: psycopg.Connection[Any]) -> dict[str, int]:
    """What was written, and published late."""
    row = connection.execute("SELECT count(*), sum(octet_length(payload::text)) FROM outbox").fetchone()
    assert row is not None
    released = number(connection, "SELECT count(*) FROM outbox_released")
    return {"events": int(row[0]), "bytes": int(row[1] or 0), "parked and published later": released}


def number(connection: psycopg.Connection[Any], query: str) -> int:
    """What a query for one number returns."""
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])
