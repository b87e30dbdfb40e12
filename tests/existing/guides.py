"""The five outbox tables that widely copied guides teach, each with the columns and the writers of its guide.

None has an integer that orders its rows; in three of them the writer sends ids and times of its own.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import psycopg

Write = Callable[[psycopg.Connection[Any], str, str, dict[str, Any]], str]
"""Writes an event of (aggregate id, event type, body) and returns its id."""


@dataclass(frozen=True)
class Guide:
    """A table, its writers, and what its publisher sends."""

    name: str
    ddl: str
    mapping: str
    writers: tuple[Write, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    """How the relay is told what the guide's publisher sends."""
    is_key_uuid: bool = False
    lag: str = ""
    """The guide's own query for what is pending: how many."""


# The ORM makes ids, and times without a zone on the application's clock.
def _orm(connection: psycopg.Connection[Any], key: str, event_type: str, body: dict[str, Any]) -> str:
    event_id, now = str(uuid.uuid4()), datetime.now(UTC).replace(tzinfo=None)
    connection.execute(
        "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, idempotency_key, "
        "created_at) VALUES (%s, 'Order', %s, %s, %s, %s, %s)",
        [event_id, key, event_type, json.dumps(body), f"key-{event_id}", now],
    )
    return event_id


def _without_id(connection: psycopg.Connection[Any], key: str, event_type: str, body: dict[str, Any]) -> str:
    row = connection.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
        "VALUES ('Order', %s, %s, %s) RETURNING id",
        [key, event_type, json.dumps(body)],
    ).fetchone()
    assert row is not None
    return str(row[0])


def _serial(connection: psycopg.Connection[Any], key: str, event_type: str, body: dict[str, Any]) -> str:
    row = connection.execute(
        "INSERT INTO outbox_events (aggregate_id, event_type, event_data) VALUES (%s, %s, %s) RETURNING id",
        [key, event_type, json.dumps(body)],
    ).fetchone()
    assert row is not None
    return str(row[0])


def _own_clock(connection: psycopg.Connection[Any], key: str, event_type: str, body: dict[str, Any]) -> str:
    event_id = str(uuid.uuid4())
    connection.execute(
        "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at) "
        "VALUES (%s, 'Order', %s, %s, %s, %s)",
        [event_id, key, event_type, json.dumps(body), datetime.now(UTC)],
    )
    return event_id


def _traced(connection: psycopg.Connection[Any], key: str, event_type: str, body: dict[str, Any]) -> str:
    row = connection.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, trace_id) "
        "VALUES ('Order', %s, %s, %s, %s) RETURNING id",
        [key, event_type, json.dumps(body), uuid.uuid4().hex],
    ).fetchone()
    assert row is not None
    return str(row[0])


_A: Final = """
CREATE TABLE outbox (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregate_type varchar(100) NOT NULL,
    aggregate_id uuid NOT NULL, event_type varchar(100) NOT NULL, payload jsonb NOT NULL,
    idempotency_key varchar(255) UNIQUE, created_at timestamptz DEFAULT now(), published_at timestamptz,
    retry_count int DEFAULT 0, last_error text);
CREATE INDEX ON outbox (created_at) WHERE published_at IS NULL;
CREATE INDEX ON outbox (aggregate_id, created_at);
CREATE INDEX ON outbox (idempotency_key)"""
_A_MAPPING: Final = """
name = "outbox"
order = "created_at"

[columns]
published_at = "published_at"
idempotency_key = "idempotency_key"
retry_count = "retry_count"
last_error = "last_error"
"""
_C: Final = """
CREATE TABLE outbox_events (
    id serial PRIMARY KEY, aggregate_id varchar(255) NOT NULL, event_type varchar(255) NOT NULL,
    event_data jsonb NOT NULL, created_at timestamp DEFAULT current_timestamp, processed_at timestamp,
    status varchar(50) DEFAULT 'PENDING', retry_count int DEFAULT 0, version int DEFAULT 1);
CREATE INDEX ON outbox_events (status, created_at);
CREATE INDEX ON outbox_events (aggregate_id)"""
_C_MAPPING: Final = """
name = "outbox_events"
order = "created_at"
aggregate_type = "{event_type:first}"

[columns]
payload = "event_data"
status = "status"
processed_at = "processed_at"
retry_count = "retry_count"
"""
_D: Final = """
CREATE TABLE outbox (
    id uuid PRIMARY KEY, aggregate_type varchar(255) NOT NULL, aggregate_id varchar(255) NOT NULL,
    event_type varchar(255) NOT NULL, payload jsonb NOT NULL, created_at timestamptz NOT NULL,
    published_at timestamptz, retry_count int NOT NULL DEFAULT 0, last_error text);
CREATE INDEX ON outbox (created_at) WHERE published_at IS NULL;
CREATE INDEX ON outbox (aggregate_type, aggregate_id)"""
_D_MAPPING: Final = """
name = "outbox"
order = "created_at"

[columns]
published_at = "published_at"
retry_count = "retry_count"
last_error = "last_error"
"""
_E: Final = """
CREATE TABLE outbox (
    id uuid NOT NULL DEFAULT gen_random_uuid(), aggregate_type varchar(255) NOT NULL,
    aggregate_id varchar(255) NOT NULL, event_type varchar(255) NOT NULL, payload jsonb NOT NULL,
    trace_id varchar(64), created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz,
    PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at);
CREATE TABLE outbox_old PARTITION OF outbox FOR VALUES FROM ('2020-01-01') TO ('2026-01-01');
CREATE TABLE outbox_new PARTITION OF outbox DEFAULT;
CREATE INDEX ON outbox (created_at) WHERE published_at IS NULL"""
_E_MAPPING: Final = """
name = "outbox"
order = "created_at"

[columns]
published_at = "published_at"
trace_id = "trace_id"
"""
_UNPUBLISHED: Final = "SELECT count(*) FROM outbox WHERE published_at IS NULL"

A: Final = Guide("A", _A, _A_MAPPING, (_orm,), is_key_uuid=True, lag=_UNPUBLISHED)
B: Final = Guide("B", _A, _A_MAPPING, (_without_id,), is_key_uuid=True, lag=_UNPUBLISHED)
C: Final = Guide(
    "C", _C, _C_MAPPING, (_serial,), lag="SELECT count(*) FROM outbox_events WHERE status = 'PENDING'"
)
D: Final = Guide("D", _D, _D_MAPPING, (_own_clock,), {"value_format": "envelope"}, lag=_UNPUBLISHED)
E: Final = Guide("E", _E, _E_MAPPING, (_traced,), lag=_UNPUBLISHED)
ALL: Final = (A, B, C, D, E)
