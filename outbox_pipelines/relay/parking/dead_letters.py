"""Finds, shows, replays and discards dead letters.

Invariants:
- Nothing is lost: a discarded dead letter keeps its content; a published one is in the outbox's own table.
- Each replay and each discard writes a row to `outbox_audit`, in the same transaction: time, reason, events,
  the database role, and the person on whose behalf it acted.
- The relay notices it within a second. A replayed event is tried once: if it is refused again, it becomes a
  dead letter again, with the new reason.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

import psycopg

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import bodies
from outbox_pipelines.relay.parking import queries as parked_queries
from outbox_pipelines.settings import Settings

# Larger than any payload that the outbox accepts.
_MOST_SHOWN: Final = 2_000_000

_POLL_SECONDS: Final = 0.25

Action = Literal["replay", "discard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Selects the dead letters that meet all given conditions."""

    ids: tuple[UUID, ...] = ()
    event_type: str | None = None
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    error: str | None = None
    """Text that the reason contains."""
    since: datetime | None = None
    until: datetime | None = None
    """Bounds of the time of failure; with a time zone."""

    @property
    def is_empty(self) -> bool:
        """Whether the filter selects every dead letter."""
        return self == Filter()

    def parameters(self) -> dict[str, Any]:
        """Return the parameters for the queries."""
        return asdict(self) | {"ids": list(self.ids) or None}

    def told(self) -> dict[str, Any]:
        """Return the given conditions, for the audit."""
        given = {name: value for name, value in asdict(self).items() if value}
        return json.loads(json.dumps(given, default=str))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A dead letter, without its content."""

    id: str
    seq: int
    aggregate_type: str
    aggregate_id: str
    event_type: str
    state: str
    attempts: int
    failed_at: datetime
    created_at: datetime
    error: str


@dataclass(frozen=True, slots=True)
class Found:
    """Dead letters, newest first, and their number by reason."""

    total: int
    by_error: dict[str, int] = field(default_factory=dict)
    rows: list[DeadLetterRow] = field(default_factory=list)


def find(settings: Settings, which: Filter, *, limit: int = 50, discarded: bool = False) -> Found:
    """Return the dead letters that the filter selects.

    Args:
        limit: maximum number of rows; the counts cover all.
        discarded: return discarded ones instead.
    """
    parameters = which.parameters() | {"limit": limit, "state": "discarded" if discarded else "failed"}
    with connect(settings, name="outbox dead-letters") as connection:
        counts = connection.execute(parked_queries.COUNT_DEAD_LETTERS, parameters).fetchall()
        rows = connection.execute(parked_queries.LIST_DEAD_LETTERS, parameters).fetchall()
    by_error: dict[str, int] = dict(counts)
    return Found(sum(by_error.values()), by_error, [DeadLetterRow(*row) for row in rows])


def show(settings: Settings, event_id: UUID) -> list[dict[str, Any]]:
    """Return everything known about the parked events and dead letters with this id, with their audit.

    If an application chooses ids, several events may have the same id.
    """
    with connect(settings, name="outbox dead-letters") as connection:
        rows = connection.execute(parked_queries.SHOW_PARKED, {"id": event_id}).fetchall()
        return [{**told, **_content(connection, told["seq"])} for (told,) in rows]


def _content(connection: Connection, seq: int) -> dict[str, Any]:
    """Return payload and headers, or a note if they cannot be shown: they may be the cause of the failure."""
    try:
        row = connection.execute(parked_queries.SHOW_CONTENT, {"seq": seq, "most": _MOST_SHOWN}).fetchone()
    except psycopg.Error as error:
        if not bodies.is_about_a_row(error):
            raise
        why = f"(not shown: {first_line(error)})"
        return {"payload": why, "headers": why}
    payload, headers, has_headers = row or (None, None, False)
    too_large = f"(not shown: more than {_MOST_SHOWN:,} bytes)"
    return {
        "payload": too_large if payload is None else _read(payload),
        "headers": too_large if headers is None and has_headers else _read(headers),
    }


def _read(stored: str | None) -> Any:
    """Return the parsed JSON, or the text if it is nested too deeply (perhaps why the event failed)."""
    try:
        return None if stored is None else json.loads(stored)
    except (RecursionError, ValueError):
        return stored


def act(settings: Settings, action: Action, which: Filter, *, actor: str, reason: str) -> int:
    """Replay or discard the dead letters that the filter selects; return their number.

    Args:
        actor: on whose behalf, for the audit, which also records the database role.
        reason: why, for the audit.

    Raises:
        SetupError: no reason is given, or this role lacks the right.
    """
    _, done = _act(settings, action, which, actor, reason)
    return done


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay."""

    done: int
    """How many were replayed."""
    again: list[DeadLetterRow]
    """Events that became dead letters again."""
    untried: int | None
    """Number of events that no relay has tried yet; None where that is not recorded."""


def replay(settings: Settings, which: Filter, *, actor: str, reason: str, seconds: float) -> Replayed:
    """Replay the dead letters that the filter selects, and wait until a relay has tried each.

    Args:
        actor, reason: as for `act`.
        seconds: how long to wait, at most.

    Raises:
        SetupError: as `act`.
    """
    seqs, done = _act(settings, "replay", which, actor, reason)
    deadline = time.monotonic() + seconds
    with connect(settings, name="outbox dead-letters replay") as connection:
        while True:
            found = connection.execute(parked_queries.AFTER_REPLAY, {"seqs": seqs}).fetchall()
            rows = [DeadLetterRow(*row) for row in found]
            again = [row for row in rows if row.state == "failed"]
            if len(again) == len(rows) or time.monotonic() >= deadline:
                return Replayed(done, again, len(rows) - len(again))
            time.sleep(_POLL_SECONDS)


def _act(settings: Settings, action: Action, which: Filter, actor: str, reason: str) -> tuple[list[int], int]:
    """Return the `seq` of each selected dead letter, and how many were changed."""
    if not reason.strip():
        raise SetupError("no reason is given: use --reason; it is recorded in the audit")
    with connect(settings, name=f"outbox dead-letters {action}") as connection:
        seqs = [row[0] for row in connection.execute(parked_queries.MEANT, which.parameters()).fetchall()]
        done = connection.execute(
            parked_queries.ACT,
            {
                "action": action,
                "seqs": seqs,
                "reason": reason.strip(),
                "filter": json.dumps(which.told()),
                "on_behalf_of": actor,
            },
        ).fetchone()
    return seqs, int(done[0]) if done else 0
