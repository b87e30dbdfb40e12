"""The state of the connector of an outbox, read from Kafka Connect and PostgreSQL: what is wrong, what to do.

Invariants:
- Reading waits for Kafka Connect for two seconds at most, and writes nothing.
- A connector that reports RUNNING and sends nothing is seen by its events: those that committed after the
  last one it has confirmed, and how long ago.
"""

from __future__ import annotations

import re
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from outbox_pipelines.core.text import size
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.debezium.connect import Connect, MissingError
from outbox_pipelines.debezium.connector_config import OUTBOX, connector_name, mapping, slot_name, table
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

_RUNNING: Final = "RUNNING"
_GUIDE: Final = "`outbox debezium config` and docs/debezium-on-connect.md"
_LET_KAFKA_TAKE_IT: Final = (
    "All events wait behind it. Let Kafka take it (max.message.bytes, the topic), then restart the "
    "connector: {}. If Kafka cannot take it, see docs/debezium-on-connect.md"
)
_LOST: Final = (
    "remove the connector with its offsets, publish what was not sent with the relay, and register it again: "
    "see docs/debezium-on-connect.md"
)
# What a trace says about the event that ended the task.
_ROWS: Final = (
    (re.compile(r"Invalid topics?: \[?([^\],\s]+)"), "an event for the topic {}, which is no valid name"),
    (re.compile(r"message is (\d+) bytes when serialized"), "an event of {} bytes, which is too large"),
    (re.compile(r"org\.apache\.kafka\.common\.errors\.RecordTooLargeException"), "an event is too large"),
    (re.compile(r"Not authorized to access topics: \[([^\]]+)\]"), "an event for {}, which is not allowed"),
)
_CAUSE: Final = re.compile(r"^Caused by: (.*)$", re.MULTILINE)
_LONGEST: Final = 300
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
class Task:
    """A task of the connector; Debezium has one."""

    id: int
    state: str
    worker: str
    trace: str | None

    @property
    def reason(self) -> str:
        """Why it failed: the first line of the trace's innermost cause, and the event if it says which."""
        if not self.trace:
            return "Kafka Connect gives no reason"
        lines = [*self.trace.splitlines()[:1], *_CAUSE.findall(self.trace)[-1:]]
        found = "; caused by ".join(dict.fromkeys(line.strip()[:_LONGEST] for line in lines))
        for pattern, event in _ROWS:
            if match := pattern.search(self.trace):
                return f"{event.format(*match.groups())} ({found})"
        return found

    @property
    def has_poison(self) -> bool:
        """Whether an event ended it, so that it ends again at each restart."""
        return any(pattern.search(self.trace or "") for pattern, _ in _ROWS)


@dataclass(frozen=True, slots=True)
class Connector:
    """A connector as Kafka Connect has it, and its slot as PostgreSQL has it."""

    name: str
    error: str | None
    """Why Kafka Connect could not be asked."""
    state: str | None
    """RUNNING, PAUSED, STOPPED, FAILED, UNASSIGNED, RESTARTING; None if there is no connector."""
    worker: str | None
    trace: str | None
    """Of the connector itself."""
    tasks: list[Task]
    slot: str
    slot_exists: bool
    slot_lost: bool
    slot_active: bool
    unconfirmed_bytes: int | None
    """From the position that the connector has confirmed to the end of the log."""
    retained_bytes: int | None
    """What the server keeps for it."""
    waiting_seconds: float
    """Age of the oldest committed event that the connector has not confirmed; 0 without one."""

    @property
    def problems(self) -> list[str]:
        """What a person must act on, each with the remedy."""
        if self.error is not None:
            return [self.error]
        if self.state is None:
            missing = f"there is no connector {self.name}"
            if self.slot_exists:
                return [
                    f"{missing}, and the server keeps its log for the slot {self.slot}: register the "
                    f"connector ({_GUIDE}), or drop the slot: SELECT pg_drop_replication_slot('{self.slot}')"
                ]
            return [f"{missing}: register it ({_GUIDE})"]
        found = []
        if self.state == "FAILED":
            reason = Task(0, "FAILED", self.worker or "", self.trace).reason
            found.append(f"the connector {self.name} has failed: {reason}. Restart it: {self._restart}")
        elif self.state in ("PAUSED", "STOPPED"):
            found.append(
                f"the connector {self.name} is {self.state.lower()}, and events wait: resume it with PUT "
                f"/connectors/{self.name}/resume"
            )
        elif self.state == _RUNNING and not self.tasks:
            found.append(f"the connector {self.name} has no task: restart it with {self._restart}")
        found += [self._of_task(task) for task in self.tasks if task.state in ("FAILED", "UNASSIGNED")]
        if not self.slot_exists:
            found.append(f"the slot {self.slot} is missing: {_LOST}")
        elif self.slot_lost:
            found.append(f"the slot {self.slot} is lost, since the server has removed its log: {_LOST}")
        return found

    @property
    def _restart(self) -> str:
        return f"POST /connectors/{self.name}/restart?includeTasks=true"

    def _of_task(self, task: Task) -> str:
        if task.state == "UNASSIGNED":
            return f"task {task.id} has no worker: start a worker, or wait until the others have taken it"
        remedy = _LET_KAFKA_TAKE_IT if task.has_poison else "Restart the connector: {}"
        return f"task {task.id} has failed on {task.worker}: {task.reason}. {remedy.format(self._restart)}"

    def lines(self) -> list[str]:
        """Return it for people."""
        if self.state is None:
            return [f"connector: {self.name} ({'none' if self.error is None else 'unknown'})"]
        return [
            f"connector: {self.name}",
            f"state: {self.state} on {self.worker}",
            *(f"task {task.id}: {task.state} on {task.worker}" for task in self.tasks),
            f"slot: {self.slot}" + ("" if self.slot_active else " (no session reads it)"),
            f"log that is not confirmed: {size(self.unconfirmed_bytes)}",
            f"log kept for it: {size(self.retained_bytes)}",
            f"oldest event that is not confirmed: {self.waiting_seconds:,.0f} s",
        ]


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


def read(settings: Settings) -> Connector:
    """Return the state of the connector.

    Raises:
        SetupError: OUTBOX_CONNECT is not set, or the database is unavailable.
    """
    reported = ask(settings)
    with closing(connect(settings, name="outbox: connector")) as connection:
        return combine(settings, connection, reported)


def ask(settings: Settings) -> Reported:
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


def combine(settings: Settings, connection: Connection, reported: Reported) -> Connector:
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
    settings: Settings, connection: Connection, offset: dict[str, Any] | None, catalog_xmin: int | None
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
