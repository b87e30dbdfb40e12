"""Read the state of an outbox's connector, from Kafka Connect and from PostgreSQL.

Invariants:
- It waits for Kafka Connect for two seconds at most, and writes nothing.
- A connector that reports RUNNING and sends nothing is seen by its events: those that committed after the
  last one it has confirmed, and how long ago.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.debezium.connect import Connect, MissingError
from outbox_pipelines.debezium.connector_config import OUTBOX, connector_name, mapping, slot_name, table
from outbox_pipelines.debezium.connector_state import Connector, Task
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import OutboxSettings

STATE: Final = """
SELECT r.active, pg_wal_lsn_diff(pg_current_wal_insert_lsn(), r.confirmed_flush_lsn)::bigint,
       pg_wal_lsn_diff(pg_current_wal_insert_lsn(), r.restart_lsn)::bigint,
       wal_status = 'lost' OR to_jsonb(r) ->> 'invalidation_reason' IS NOT NULL,
       r.catalog_xmin::text::bigint
FROM pg_replication_slots r WHERE r.slot_name = %(slot)s AND r.database = current_database()"""
# The oldest event that began after the last one that the connector has confirmed. Connect knows transactions
# without their epoch: the latest of that number is meant. Both conditions, because a transaction with a
# higher id may have committed earlier; then it began earlier as well.
WAITING: Final[LiteralString] = """
WITH now AS (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS xmax),
     confirmed AS (SELECT (xmax - ((xmax - %(tx)s) & 4294967295))::text::xid8 AS tx FROM now)
SELECT extract(epoch FROM clock_timestamp() - min(o.created_at))::float8
FROM (SELECT created_at FROM outbox
      WHERE tx > (SELECT tx FROM confirmed) AND created_at > to_timestamp(%(at)s)
      ORDER BY tx LIMIT 1000) o"""
# The same of a table whose rows have no transaction.
WAITING_IN_TABLE: Final[LiteralString] = """
SELECT extract(epoch FROM clock_timestamp() - oldest)::float8
FROM (SELECT {created_at}::timestamptz AS oldest FROM {table}
      WHERE {created_at} > to_timestamp(%(at)s) ORDER BY {created_at} LIMIT 1) o"""
# Of all calls together: a scrape of metrics waits three seconds.
_SECONDS: Final = 2.0
# An existing table may have no index on its times.
_PATIENCE: Final = "SET LOCAL statement_timeout = '2s'"


@dataclass(frozen=True, slots=True)
class Reported:
    """What Kafka Connect says."""

    error: str | None = None
    status: dict[str, Any] | None = None
    """None: there is no connector."""
    slot: str | None = None
    """Of its configuration."""
    offset: dict[str, Any] | None = None
    """None: it has confirmed nothing."""


def read(settings: OutboxSettings) -> Connector:
    """Return the state of the connector.

    Raises:
        SetupError: OUTBOX_CONNECT_URL is not set, or the database is unavailable.
    """
    reported = ask(settings)
    with closing(connect(settings, name="outbox: connector")) as connection:
        return combine(settings, connection, reported)


def ask(settings: OutboxSettings) -> Reported:
    """Return what Kafka Connect says; that it does not answer is a part of it."""
    deadline = time.monotonic() + _SECONDS
    try:
        cluster = Connect(settings.require_connect(), deadline=deadline)
        name = connector_name(settings)
        try:
            config = cluster.config(name)
        except MissingError:
            return Reported()
        try:
            status = cluster.status(name)
        except MissingError:
            # It was made a moment ago.
            status = {"connector": {"state": "UNASSIGNED", "worker_id": ""}, "tasks": []}
        offsets = cluster.offsets(name)
    except SetupError as error:
        return Reported(error=str(error))
    return Reported(None, status, config.get("slot.name"), offsets[0].get("offset") if offsets else None)


def combine(settings: OutboxSettings, connection: Connection, reported: Reported) -> Connector:
    """Return the state, with what PostgreSQL knows."""
    slot = reported.slot or slot_name(settings, connection.info.dbname)
    row = connection.execute(STATE, {"slot": slot}).fetchone()
    active, unconfirmed, retained, is_lost, catalog_xmin = row or (False, None, None, False, None)
    waits = 0.0
    if reported.status is not None:
        waits = _waiting(settings, connection, reported.offset, catalog_xmin)
    own = (reported.status or {}).get("connector") or {}
    tasks = [
        Task(int(task["id"]), str(task["state"]), str(task.get("worker_id", "")), task.get("trace"))
        for task in (reported.status or {}).get("tasks") or []
    ]
    return Connector(
        name=connector_name(settings),
        error=reported.error,
        state=own.get("state"),
        worker=own.get("worker_id"),
        trace=own.get("trace"),
        tasks=tasks,
        slot=slot,
        slot_exists=row is not None,
        slot_lost=bool(is_lost),
        slot_active=bool(active),
        unconfirmed_bytes=unconfirmed,
        retained_bytes=retained,
        waiting_seconds=waits,
    )


def _waiting(
    settings: OutboxSettings, connection: Connection, offset: dict[str, Any] | None, catalog_xmin: int | None
) -> float:
    """Return the age of the oldest event that committed after the last one that is confirmed."""
    # Before the first: all that the slot has not seen ended.
    tx = (offset or {}).get("txId", (catalog_xmin or 0) - 1)
    at = (offset or {}).get("ts_usec", 0) / 1e6
    described = mapping(settings)
    if described is OUTBOX:
        if tx < 0:
            return 0.0
        row = connection.execute(WAITING, {"tx": tx, "at": at}).fetchone()
    else:
        created_at = described.columns.get("created_at")
        if created_at is None or not at:
            return 0.0
        query = sql.SQL(WAITING_IN_TABLE).format(
            created_at=sql.Identifier(created_at), table=sql.Identifier(*table(settings))
        )
        with connection.transaction():
            connection.execute(_PATIENCE)
            try:
                with connection.transaction():
                    row = connection.execute(query, {"at": at}).fetchone()
            except psycopg.errors.QueryCanceled:
                return 0.0
    return max(0.0, row[0]) if row and row[0] is not None else 0.0
