"""Dead letters of consumers, and the backlogs of their inboxes.

Invariants:
- Nothing is lost: a discarded dead letter keeps its content until it is pruned.
- Each replay and each discard leaves a row in `inbox_audit`, in its own transaction: who, when, why, which.
- Ids alone do not select dead letters of several sources to be replayed or discarded.
- A consumer sees a replayed message within a second; the message has all its attempts again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, LiteralString
from uuid import UUID

import psycopg

from outbox_pipelines.consumer import operator_queries
from outbox_pipelines.consumer.inbox import Backlog
from outbox_pipelines.errors import SetupError

Connection = psycopg.Connection[Any]
Action = Literal["replay", "discard"]
_ACT: Final[dict[Action, LiteralString]] = {
    "replay": operator_queries.REPLAY,
    "discard": operator_queries.DISCARD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Selects the dead letters that match all given conditions."""

    ids: tuple[UUID, ...] = ()
    """Of events; with `dedupe="key"` as the inbox has them."""
    source: str | None = None
    event_type: str | None = None
    key: str | None = None
    """The aggregate's id."""
    error: str | None = None
    """A part of the reason."""
    since: datetime | None = None
    until: datetime | None = None
    """When they were received; an aware time."""

    def parameters(self, state: str = "failed") -> dict[str, Any]:
        """Return the parameters of the queries."""
        return asdict(self) | {"ids": list(self.ids) or None, "state": state}


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A dead letter, without its content."""

    seq: int
    id: str
    source: str
    event_type: str
    key: str
    topic: str
    partition: int
    offset: int
    attempts: int
    received_at: datetime
    error: str


@dataclass(frozen=True, slots=True)
class Found:
    """Dead letters, the newest first, and their number by reason."""

    total: int
    by_error: dict[str, int] = field(default_factory=dict)
    rows: list[DeadLetterRow] = field(default_factory=list)


def find(connection: Connection, which: Filter, *, limit: int = 50, discarded: bool = False) -> Found:
    """Return the selected dead letters.

    Args:
        limit: rows at most; the counts are of all.
        discarded: return discarded ones instead.
    """
    given = which.parameters("discarded" if discarded else "failed") | {"limit": limit}
    counts = _rows(connection, operator_queries.COUNT_DEAD_LETTERS, given)
    rows = _rows(connection, operator_queries.LIST_DEAD_LETTERS, given)
    by_error: dict[str, int] = {error or "": count for error, count in counts}
    return Found(sum(by_error.values()), by_error, [DeadLetterRow(*row) for row in rows])


def show(connection: Connection, message_id: UUID) -> list[dict[str, Any]]:
    """Return a message with its content and audit, for each source; an empty list if it does not exist."""
    return [
        {**told, "payload": _text(payload), "headers": dict(headers)}
        for told, payload, headers in _rows(connection, operator_queries.SHOW, {"id": message_id})
    ]


def act(connection: Connection, action: Action, which: Filter, *, actor: str, reason: str) -> int:
    """Replay or discard the selected dead letters; return their number.

    Args:
        actor: who does it, for the audit.
        reason: why, for the audit.

    Raises:
        SetupError: ids are given without a source, and several sources have them.
    """
    given = which.parameters() | {"actor": actor, "reason": reason}
    with connection.transaction():
        require_one_source(connection, which)
        return connection.execute(_ACT[action], given).rowcount


def require_one_source(connection: Connection, which: Filter) -> None:
    """Raise `SetupError` if ids select dead letters of several sources."""
    if not which.ids or which.source is not None:
        return
    sources = [
        source
        for (source,) in _rows(connection, operator_queries.SOURCES_OF_DEAD_LETTERS, which.parameters())
    ]
    if len(sources) > 1:
        raise SetupError(
            f"dead letters of several sources have these ids ({', '.join(sources)}), and none was changed: "
            "add --source with the one that you mean"
        )


def backlogs(connection: Connection) -> list[Backlog]:
    """Return the backlog of every source that has waiting messages or dead letters."""
    return [Backlog.of(*row) for row in _rows(connection, operator_queries.STATUS, {})]


def _rows(connection: Connection, query: LiteralString, given: dict[str, Any]) -> list[tuple[Any, ...]]:
    with connection.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
        return cursor.execute(query, given).fetchall()


def _text(payload: bytes | None) -> Any:
    """JSON as it is meant, text as it is, bytes in hexadecimal."""
    if payload is None:
        return None
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        pass
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return payload.hex()
