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
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

import psycopg

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.parking import parking_sql
from outbox_pipelines.relay.read import contents
from outbox_pipelines.settings import OutboxSettings

# Larger than any payload that the outbox accepts.
_MOST_SHOWN: Final = 2_000_000

_POLL_SECONDS: Final = 0.25

Action = Literal["replay", "discard"]
CONDITIONS: Final = ("ids", "event_type", "aggregate_type", "aggregate_id", "error", "since", "until")
"""What selects dead letters: those that meet all given conditions; an error contains the given text."""


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A dead letter, without its content."""

    id: str
    seq: int | None
    """None in an existing table."""
    aggregate_type: str
    aggregate_id: str
    event_type: str
    state: str
    attempts: int | None
    """None in an existing table without such a column; so are `failed_at` and `created_at`."""
    failed_at: datetime | None
    created_at: datetime | None
    error: str


@dataclass(frozen=True, slots=True)
class FoundDeadLetters:
    """Dead letters, newest first, and their number by reason."""

    total: int
    by_error: dict[str, int]
    rows: list[DeadLetterRow]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay."""

    done: int
    """How many were replayed."""
    again: list[DeadLetterRow]
    """Events that became dead letters again."""
    untried: int | None
    """Number of events that no relay has tried yet; None where that is not recorded."""


class ParkedDeadLetters:
    """Those in the table `outbox_parked`: implements `kinds.DeadLetters`."""

    def __init__(self, settings: OutboxSettings) -> None:
        self._settings = settings

    def find(self, given: Mapping[str, Any], *, limit: int = 50, discarded: bool = False) -> FoundDeadLetters:
        state = "discarded" if discarded else "failed"
        parameters = _parameters(given) | {"limit": limit, "state": state}
        with connect(self._settings, name="outbox dead-letters") as connection:
            counts = connection.execute(parking_sql.COUNT_DEAD_LETTERS, parameters).fetchall()
            rows = connection.execute(parking_sql.LIST_DEAD_LETTERS, parameters).fetchall()
        by_error: dict[str, int] = dict(counts)
        return FoundDeadLetters(sum(by_error.values()), by_error, [DeadLetterRow(*row) for row in rows])

    def show(self, given: str) -> list[dict[str, Any]]:
        """Return everything known about the parked events and dead letters with this id, with their audit.

        If an application chooses ids, several events may have the same id.
        """
        with connect(self._settings, name="outbox dead-letters") as connection:
            rows = connection.execute(parking_sql.SHOW_PARKED, {"id": _id(given)}).fetchall()
            return [{**event, **_content(connection, event["seq"])} for (event,) in rows]

    def check_action(self, action: Action, given: Mapping[str, Any]) -> None:
        """Refuse nothing: each dead letter here can be replayed and discarded."""

    def act(self, action: Action, given: Mapping[str, Any], *, actor: str, reason: str) -> int:
        return self._act(action, given, actor, reason)[1]

    def replay(self, given: Mapping[str, Any], *, actor: str, reason: str, seconds: float) -> Replayed:
        seqs, done = self._act("replay", given, actor, reason)
        deadline = time.monotonic() + seconds
        with connect(self._settings, name="outbox dead-letters replay") as connection:
            while True:
                result = connection.execute(parking_sql.AFTER_REPLAY, {"seqs": seqs}).fetchall()
                rows = [DeadLetterRow(*row) for row in result]
                again = [row for row in rows if row.state == "failed"]
                if len(again) == len(rows) or time.monotonic() >= deadline:
                    return Replayed(done, again, len(rows) - len(again))
                time.sleep(_POLL_SECONDS)

    def _act(
        self, action: Action, given: Mapping[str, Any], actor: str, reason: str
    ) -> tuple[list[int], int]:
        """Return the `seq` of each selected dead letter, and how many were changed."""
        if not reason.strip():
            raise SetupError("no reason is given: use --reason; it is recorded in the audit")
        conditions = {name: value for name, value in given.items() if value}
        with connect(self._settings, name=f"outbox dead-letters {action}") as connection:
            seqs = [row[0] for row in connection.execute(parking_sql.MEANT, _parameters(given)).fetchall()]
            done = connection.execute(
                parking_sql.ACT,
                {
                    "action": action,
                    "seqs": seqs,
                    "reason": reason.strip(),
                    "filter": json.dumps(conditions, default=str),
                    "on_behalf_of": actor,
                },
            ).fetchone()
        return seqs, int(done[0]) if done else 0


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the queries; raise `SetupError` if an id is no UUID."""
    return {**dict.fromkeys(CONDITIONS), **given, "ids": list(map(_id, given.get("ids") or ())) or None}


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise SetupError(f"{text!r} is not a valid UUID: use the ids that `list` shows") from None


def _content(connection: Connection, seq: int) -> dict[str, Any]:
    """Return payload and headers, or a note if they cannot be shown: they may be the cause of the failure."""
    try:
        row = connection.execute(parking_sql.SHOW_CONTENT, {"seq": seq, "most": _MOST_SHOWN}).fetchone()
    except psycopg.Error as error:
        if not contents.is_about_a_row(error):
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
