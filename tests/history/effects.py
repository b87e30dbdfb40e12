"""What a handler does in a run: a row for each event, in the order in which handlers came to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg

from outbox_pipelines import consumer
from tests.history.business import account_of
from tests.history.record import Effect, ReplayEffect, Unhandled

_TABLE = """
CREATE TABLE effect (seq bigserial PRIMARY KEY, kind text NOT NULL, account text NOT NULL, n int NOT NULL,
                     token text NOT NULL);
CREATE TABLE replay_effect (replay text NOT NULL, token text NOT NULL)"""
_MAKE = "INSERT INTO effect (kind, account, n, token) VALUES (%s, %s, %s, %s)"
_MAKE_OF_REPLAY = "INSERT INTO replay_effect (replay, token) VALUES (%s, %s)"

_UNHANDLED = """
SELECT convert_from(payload, 'UTF8')::json ->> 'token', state, attempts, coalesce(last_error, '')
FROM inbox WHERE state IN ('waiting', 'failed') ORDER BY seq"""
_HURRY = """
UPDATE inbox SET next_attempt_at = now()
WHERE state = 'waiting' AND next_attempt_at > now() + interval '5 s'"""


def prepare(connection: psycopg.Connection[Any]) -> None:
    """Makes the table, and the consumer's own."""
    consumer.migrate(connection)
    connection.execute(_TABLE)


def make(
    connection: psycopg.Connection[Any], kind: str, account: str, body: Mapping[str, Any], replay: str = ""
) -> None:
    """The effect of one event, or of a replay's, in the caller's transaction; again: once more.

    One function for both: it is what a tape has in place of the database.
    """
    if replay:
        connection.execute(_MAKE_OF_REPLAY, [replay, body["token"]])
    else:
        connection.execute(_MAKE, [kind, account_of(account), body["n"], body["token"]])


def of_replays(connection: psycopg.Connection[Any]) -> list[ReplayEffect]:
    """The committed effects of replayed events."""
    return [ReplayEffect(*row) for row in connection.execute("SELECT replay, token FROM replay_effect")]


def made(connection: psycopg.Connection[Any]) -> list[Effect]:
    """All that are committed, in their order."""
    rows = connection.execute("SELECT kind, account, n, token FROM effect ORDER BY seq")
    return [Effect(*row) for row in rows]


def unhandled(connection: psycopg.Connection[Any]) -> list[Unhandled]:
    """What waits in the consumer's inbox, and its dead letters."""
    return [Unhandled(*row) for row in connection.execute(_UNHANDLED)]


def hurry(connection: psycopg.Connection[Any]) -> None:
    """Lets what waits in the inbox be tried now: after many faults it may wait for minutes."""
    connection.execute(_HURRY)


def count(connection: psycopg.Connection[Any]) -> int:
    """How many events have an effect."""
    row = connection.execute("SELECT count(DISTINCT token) FROM effect").fetchone()
    assert row is not None
    return int(row[0])
