"""Delayed events: moved into the outbox when they are due, and listed and canceled for an operator.

Invariants:
- Every owner of a shard does it for all shards: a shard without a relay delays no others. The function in the
  database lets in one at a time, and keeps the order.
- What cannot be moved ends no relay: events that need no move are published, and the status names the cause.
- A canceled event is recorded in the audit, in the same transaction: time, reason, the database role, and the
  person on whose behalf it acted.
- An event that another transaction has is not waited for without end: it is named, with that transaction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from outbox_pipelines.core.log import RepeatedLines
from outbox_pipelines.core.outages import code_of
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.table_locks import LOCK_PATIENCE
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.database.schema import connect_to_outbox, require_schema
from outbox_pipelines.errors import LockedError, SetupError
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.parking import parking_sql
from outbox_pipelines.settings import OutboxSettings

_LOG: Final = logging.getLogger(__name__)
_EVERY: Final = 1.0
# A call takes some 30 ms, and the thread that makes it also settles.
_MOST: Final = 500
_SECONDS: Final = 0.2
# Another session has a lock, has won, or has canceled the statement: the shard's session continues.
_PASSING: Final = frozenset(("40001", "40P01", "55P03", "55006", "57014"))


class DelayedEvents:
    """The delayed events of an outbox, for the thread of the session that owns a shard."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._look_at = 0.0
        self._lines = RepeatedLines(_LOG)

    def look(self, now: float) -> None:
        """About once a second, move what is due; for a moment only.

        Raises:
            ShardLostError: the session has ended.
        """
        if now < self._look_at:
            return
        until = time.monotonic() + _SECONDS
        is_more = True
        while is_more and time.monotonic() < until:
            is_more = self._move()
        self._look_at = now if is_more else now + _EVERY

    def move_all(self) -> None:
        """Move all that is due.

        Raises:
            ShardLostError: the session has ended.
        """
        while self._move():
            pass

    def _move(self) -> bool:
        """Move some; return whether more may be due."""
        try:
            ((moved,),) = self._shard.execute(parking_sql.MOVE_DUE, {"most": _MOST})
        except (ShardLostError, psycopg.Error) as error:
            cause = error.__cause__ or error
            if isinstance(error, ShardLostError) and code_of(cause) not in _PASSING:
                raise
            self._lines.log("move", "delayed events cannot be moved into the outbox: %s", first_line(cause))
            return False
        self._lines.end("move", "delayed events are moved again")
        return int(moved) >= _MOST


@dataclass(frozen=True, slots=True)
class Delayed:
    """A delayed event, without its content."""

    id: UUID
    aggregate_type: str
    aggregate_id: str
    event_type: str
    due: datetime
    later_events_wait: bool
    last_error: str | None
    """Why it could not be moved."""
    created_at: datetime
    """When it was written."""
    held_by: str | None = None
    """Which other transaction has it, so that it is neither moved nor canceled, and what helps."""


@dataclass(frozen=True, slots=True)
class FoundDelayedEvents:
    """Delayed events: how many there are, and the first of them."""

    total: int
    rows: list[Delayed]


def find(settings: OutboxSettings, *, overdue: bool, limit: int) -> FoundDelayedEvents:
    """Return delayed events, the next due first."""
    parameters = {"overdue": overdue, "limit": limit}
    with connect_to_outbox(settings, name="outbox delayed") as connection:
        ((total,),) = connection.execute(parking_sql.COUNT_DELAYED, parameters).fetchall()
        rows = (
            connection.cursor(row_factory=class_row(Delayed))
            .execute(parking_sql.DELAYED, parameters)
            .fetchall()
        )
        held = _holders(connection, [row.id for row in rows])
        return FoundDelayedEvents(total, [replace(row, held_by=held.get(row.id)) for row in rows])


def cancel(settings: OutboxSettings, ids: Sequence[UUID], *, reason: str, actor: str) -> int:
    """Cancel delayed events, and record it in the audit; return how many were still there.

    Raises:
        SetupError: the role is no operator, or there is no reason.
        LockedError: another transaction has one of them for longer than a command waits.
    """
    require_schema(settings)
    parameters = {"ids": [*ids], "reason": reason, "actor": actor}
    try:
        with connect(settings, name="outbox delayed") as connection:
            connection.execute(f"SET lock_timeout = {int(LOCK_PATIENCE * 1000)}".encode())
            try:
                ((canceled,),) = connection.execute(parking_sql.CANCEL_DELAYED, parameters).fetchall()
            except psycopg.errors.LockNotAvailable as error:
                held = _holders(connection, ids)
                who = next((f"{id} is in {who}" for id, who in held.items()), first_line(error))
                raise LockedError(f"waited {LOCK_PATIENCE:g} s: {who}. Nothing was canceled") from None
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.CheckViolation) as error:
        raise SetupError(f"{first_line(error)}: run it as an operator, with a reason") from None
    return int(canceled)


def _holders(connection: Connection, ids: Sequence[UUID]) -> dict[UUID, str]:
    """Return which other transactions have changed or locked delayed events, and what helps."""
    held = {}
    for id, gid, pid, role, name, since in connection.execute(parking_sql.HOLDERS, {"ids": [*ids]}):
        if pid is None:
            held[id] = f"the prepared transaction {gid}: COMMIT PREPARED or ROLLBACK PREPARED it"
        else:
            who = f"session {pid} of role {role} ({name or 'unnamed'})" + (f" since {since}" if since else "")
            held[id] = f"a transaction of {who}: wait for its end, or SELECT pg_terminate_backend({pid})"
    return held


def move(settings: OutboxSettings) -> tuple[int, int]:
    """Move all due events into the outbox; return how many were moved, and how many due ones are left."""
    with connect_to_outbox(settings, name="outbox delayed") as connection:
        ((before,),) = connection.execute(parking_sql.COUNT_DELAYED, {"overdue": True}).fetchall()
        again, more = True, True
        while more:
            ((moved,),) = connection.execute(
                parking_sql.MOVE_DUE_AGAIN, {"most": _MOST, "again": again}
            ).fetchall()
            again, more = False, moved >= _MOST
        ((left,),) = connection.execute(parking_sql.COUNT_DELAYED, {"overdue": True}).fetchall()
    return max(0, before - left), left
