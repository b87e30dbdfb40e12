"""The start position of an outbox that has never been relayed.

Invariants:
- `outbox migrate` sets the position before the first event, so that a first relay publishes every row.
  Another start is chosen once, for all shards, before any relay has taken one.
- A start is a snapshot: an event whose transaction was still running then is published.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, LiteralString

import psycopg

from outbox_pipelines.database import Connection, slot_reader
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import kinds, relay_sql
from outbox_pipelines.relay.read.slot.behind import position_behind
from outbox_pipelines.settings import ProcessSettings

NOW: Final = "now"
BEGINNING: Final = "beginning"
_SNAPSHOT: Final = re.compile(r"\d+:\d+:(\d+(,\d+)*)?")
_SLOT: Final = "slot:"
_FORMS: Final = (
    "now, beginning, a time with its zone (2026-11-20T06:00:00Z), slot:NAME, "
    "or what SELECT pg_current_snapshot() returned (750:760:755)"
)


@dataclass(frozen=True, slots=True)
class Start:
    """The snapshot from which events are published, and the number of events before it."""

    snapshot: str
    skipped: int


def start_at(settings: ProcessSettings, start: str) -> Start | None:
    """Set where the first relay begins; return None for the beginning, which changes nothing.

    Args:
        start: `now`, `beginning`, an ISO 8601 time with a zone, a `pg_snapshot` of this database, or
            `slot:NAME`: what the program that reads this slot has not published.

    Raises:
        SetupError: the start is none of these, or the outbox has been relayed before.
    """
    if not kinds.of(settings).has_positions:
        raise SetupError(
            "--start-at: the marks in OUTBOX_TABLE decide what is published; mark rows to skip them"
        )
    is_text = start in (NOW, BEGINNING) or _SNAPSHOT.fullmatch(start) or start.startswith(_SLOT)
    since = None if is_text else _time(start)
    with connect_to_outbox(settings, name="outbox relay: start") as connection, connection.transaction():
        if any(epoch > 0 for (epoch,) in connection.execute(relay_sql.LOCK_EPOCHS)):
            raise SetupError(
                "--start-at: this outbox has been relayed already and continues where it stopped. "
                "Start the relay without --start-at"
            )
        if start == BEGINNING:
            return None
        if start.startswith(_SLOT):
            slot, seconds = start.removeprefix(_SLOT), slot_reader.LEAVE_SECONDS
            snapshot = str(position_behind(settings, connection, slot, seconds=seconds))
        else:
            snapshot = _snapshot(connection, start, since)
        connection.execute(relay_sql.START, {"at": snapshot})
        return Start(snapshot, _value(connection, relay_sql.SKIPPED, at=snapshot))


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise SetupError(f"--start-at: {text!r} is none of: {_FORMS}") from None
    if time.tzinfo is None:
        raise SetupError(f"--start-at: {text!r} has no time zone: append Z or an offset such as +02:00")
    return time


def _snapshot(connection: Connection, start: str, since: datetime | None) -> str:
    if start == NOW:
        return str(_value(connection, relay_sql.SNAPSHOT))
    if since is not None:
        return str(_value(connection, relay_sql.SNAPSHOT_SINCE, since=since))
    try:
        known = _value(connection, relay_sql.IS_KNOWN, at=start)
    except psycopg.DataError:
        known = False
    if not known:
        raise SetupError(f"--start-at: {start} is not a snapshot of this database")
    return start


def _value(connection: Connection, query: LiteralString, **parameters: Any) -> Any:
    ((value,),) = connection.execute(query, parameters)
    return value
