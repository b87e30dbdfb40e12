"""What the reader of a slot has not published of the table that was adopted: by the slot, and by the topics.

Invariants:
- The slot is only read while it is looked at, and no other program can read it then.
- An event counts as published if its id was found in its topic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import psycopg

from outbox_pipelines.config.rules import Router
from outbox_pipelines.config.table_mapping import REQUIRED, Mapping
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection, slot_reader
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.existing.adopt import adopt_sql
from outbox_pipelines.existing.adopt import slot as slots
from outbox_pipelines.existing.adopt.adopted_table import Facts
from outbox_pipelines.existing.adopt.slot import Slot
from outbox_pipelines.relay.read.slot import pgoutput
from outbox_pipelines.relay.read.slot.behind import found_in
from outbox_pipelines.relay.read.slot.stream import SlotLostError, Stream, borrowed
from outbox_pipelines.settings import MessageSettings, OutboxSettings

_NAME: Final = "outbox adopt: slot"
_WAIT_SECONDS: Final = 1.0
# More are not kept in memory: their program publishes them.
_MOST_ROWS: Final = 200_000
_TIMES: Final = ("timestamp", "timestamptz")
_MOST_BYTES: Final = 256_000_000

Row = dict[str, str | None]


@dataclass(slots=True)
class Delivered:
    """What the slot delivers again."""

    rows: list[Row] = field(default_factory=list)
    """In the order of commits, by the names of the columns."""
    since: float = float("inf")
    """When the first of these transactions committed."""
    size: int = 0


class Reading:
    """The slot, while this session reads it."""

    def __init__(self, stream: Stream, connection: Connection, slot: Slot, end: int) -> None:
        self._stream, self._connection, self._slot, self._end = stream, connection, slot, end

    def rows(self, found: Facts) -> Delivered:
        """Return the rows of the table that committed before the position.

        Raises:
            NotReadyError: there are too many.
            SetupError: the server ends the reading.
        """
        relations = {oid for (oid,) in self._connection.execute(adopt_sql.RELATIONS, {"oid": found.oid})}
        names: dict[int, list[str]] = {}
        delivered, position, committed = Delivered(), 0, 0.0
        try:
            while max(position, self._stream.position) < self._end:
                message = self._stream.receive()
                # From the begin: only a sign of life.
                self._stream.confirm(0)
                if message is None:
                    self._stream.wait(_WAIT_SECONDS)
                elif message[0] == pgoutput.RELATION:
                    relation, columns = pgoutput.read_relation(message)
                    names[relation] = columns
                elif message[0] == pgoutput.BEGIN:
                    committed = pgoutput.time_of_begin(message)
                elif message[0] == pgoutput.INSERT and pgoutput.relation_of_row(message) in relations:
                    values = pgoutput.read_row(message)
                    self._add(
                        delivered, dict(zip(names[pgoutput.relation_of_row(message)], values, strict=True))
                    )
                    delivered.since = min(delivered.since, committed)
                    delivered.size += len(message)
                elif message[0] == pgoutput.COMMIT:
                    position = pgoutput.end_of_commit(message)
        except SlotLostError as error:
            raise SetupError(_unreadable(self._slot, error)) from None
        return delivered

    def stay(self) -> None:
        """Let the server know that this session still needs the slot; it ends silent ones."""
        try:
            self._stream.confirm(0, at_once=True)
        except SlotLostError as error:
            raise NotReadyError(
                f"the server has ended the reading of the slot {self._slot.name} ({first_line(error)}): run "
                "the command again"
            ) from None

    def confirm(self) -> None:
        """Let the slot deliver nothing that committed before the position."""
        try:
            self._stream.confirm(self._end, at_once=True)
        except SlotLostError as error:
            raise NotReadyError(
                f"the slot {self._slot.name} could not be confirmed ({first_line(error)}): run the command "
                "again"
            ) from None

    def _add(self, delivered: Delivered, row: Row) -> None:
        if len(delivered.rows) >= _MOST_ROWS or delivered.size > _MOST_BYTES:
            raise NotReadyError(
                f"the slot {self._slot.name} has more than {len(delivered.rows):,} events that its reader "
                "has not confirmed: let the connector publish them (PUT /connectors/NAME/resume), then "
                "stop it and run the command again"
            )
        delivered.rows.append(row)


@contextmanager
def reading(
    settings: OutboxSettings, connection: Connection, slot: Slot, facts: Facts, lsn: str
) -> Iterator[Reading]:
    """Read the slot from what is confirmed on; nothing else can read it for the length of the block.

    Raises:
        InUseError: another session reads it and does not end.
        SetupError: this role may not read it, or no publication has the table.
    """
    if role := slot_reader.barred_role(connection):
        raise SetupError(
            f"role {role} may not read the slot {slot.name}, whose reader has not confirmed everything: "
            f"ALTER ROLE {role} REPLICATION, or start the connector with {slots.HEARTBEATS}"
        )
    named = [
        publication.name
        for publication in slots.publications(connection, facts, settings.db_schema)
        if publication.has_inserts
    ]
    if not named:
        raise SetupError(
            f"no publication has the inserts of {facts}, so the slot {slot.name} cannot be read: make the "
            "publication of the connector again"
        )
    high, low = (int(part, 16) for part in lsn.split("/"))
    arguments = (settings, connection, slot.name, named[0])
    with ExitStack() as block:
        try:
            stream, _ = block.enter_context(
                borrowed(*arguments, name=_NAME, seconds=slot_reader.LEAVE_SECONDS)
            )
        except psycopg.Error as error:
            raise SetupError(_unreadable(slot, error)) from None
        yield Reading(stream, connection, slot, (high << 32) + low)


def unpublished(
    settings: MessageSettings, mapping: Mapping, found: Facts, delivered: Delivered, stay: Callable[[], None]
) -> list[Row]:
    """Return those of the rows whose id is not in their topic.

    Args:
        stay: called several times a minute.

    Raises:
        UnavailableError: Kafka does not answer.
        SetupError: the slot does not deliver a column of the event.
    """
    _require_columns(mapping, delivered.rows)
    router, id_column = Router(settings), mapping.columns["id"]
    wanted: dict[str, set[str]] = defaultdict(set)
    since = delivered.since
    times = [column.name for column in found.columns.values() if column.base in _TIMES]
    for row in delivered.rows:
        since = min([since, *(_time(row.get(name)) for name in times)])
        topic = router.topic_or_empty(_aggregate_type(mapping, row), row[mapping.columns["event_type"]] or "")
        if topic and (event_id := row[id_column]):
            wanted[topic].add(event_id)
    published: set[str] = set()
    for topic, ids in wanted.items():
        published |= found_in(settings, topic, ids, since, stay)
    return [row for row in delivered.rows if row[id_column] not in published]


def _unreadable(slot: Slot, error: Exception) -> str:
    return (
        f"the slot {slot.name} cannot be read: {first_line(error)}. Let the connector confirm it, with "
        f"{slots.HEARTBEATS}; or, if everything of before the switch is published: `outbox adopt "
        "drain --rest skip`"
    )


def _require_columns(mapping: Mapping, rows: list[Row]) -> None:
    needed = [column for ours, column in mapping.columns.items() if ours in REQUIRED]
    for row in rows:
        if missing := [column for column in needed if column not in row]:
            raise SetupError(
                f"the slot delivers rows of {mapping} without the column {missing[0]}: the publication "
                "leaves it out, or it was renamed since. Start the connector again, with "
                f"{slots.HEARTBEATS}"
            )


def _time(text: str | None) -> float:
    """Return a row's own time, which a connector can be set up to send as the message's."""
    try:
        time = datetime.fromisoformat(text or "")
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return float("inf")


def _aggregate_type(mapping: Mapping, row: Row) -> str:
    if not mapping.aggregate_type:
        return row[mapping.columns["aggregate_type"]] or ""
    event_type = row[mapping.columns["event_type"]] or ""
    parts = {None: "", "": event_type, "first": event_type.partition(".")[0]}
    return "".join(text + parts[spec] for text, spec in mapping.aggregate_type)
