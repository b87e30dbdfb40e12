"""The end of the rows of before the switch: published by a relay, or by what reads the table's slot.

Invariants:
- The relay of the outbox continues only when the table has no pending row; if what reads a slot publishes it,
  when each event of before the switch is published: the slot has confirmed the position of the switch, or
  every event that the slot would deliver again is in its topic.
- Nothing is confirmed in place of the program, unless the operator lets this command publish the rest.
- The rest is in a table of its own before the slot lets go of it, and a program that starts then does not get
  it again. That table has all of these events or does not exist; it is dropped when all are published.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from psycopg import sql

from outbox_pipelines.config import parsed
from outbox_pipelines.config.table_mapping import METADATA, Mapping
from outbox_pipelines.core.text import counted, size
from outbox_pipelines.database import Connection, slot_reader
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.existing import existing_sql as marked
from outbox_pipelines.existing.adopt import adopt_sql, adopted_table, unsent
from outbox_pipelines.existing.adopt import slot as slots
from outbox_pipelines.existing.adopt.adopted_table import Facts, State
from outbox_pipelines.existing.adopt.renaming import Say
from outbox_pipelines.existing.adopt.slot import Slot
from outbox_pipelines.existing.adopt.unsent import Row
from outbox_pipelines.relay import service
from outbox_pipelines.relay.read.slot.stream import InUseError
from outbox_pipelines.settings import OutboxSettings, ProcessSettings, RelaySettings

_POLL: Final = 0.2
# A connector confirms each minute by default (offset.flush.interval.ms).
_QUIET_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 10.0
_STOP: Final = "stop the connector (PUT /connectors/NAME/stop), and run the command again"
_ENTRIES: Final = (
    *("id", "aggregate_type", "aggregate_id", "event_type", "payload", "created_at", "headers", "trace_id"),
    *METADATA,
)


@dataclass(frozen=True, slots=True)
class Table:
    """The table that was adopted, and the session of the command."""

    settings: ProcessSettings
    connection: Connection
    mapping: Mapping
    found: Facts
    state: State


class Rest(Enum):
    """What happens to events that the program has not published."""

    WAIT = "wait"
    """The program publishes them."""
    PUBLISH = "publish"
    """This command publishes them, in place of the program."""
    SKIP = "skip"
    """They count as published."""


def drain_marks(table: Table, *, until: float, say: Say) -> int:
    """Publish the pending rows of the table; return how many.

    Raises:
        NotReadyError: some could not be published in time, or block their aggregates.
    """
    settings, connection, found, state = table.settings, table.connection, table.found, table.state
    kept, published = replace(table.mapping, table=state.kept_as), 0
    # By its name of now: under the other one relays are refused once the table is adopted.
    named = parsed.table_named(settings, str(kept))
    given = settings.model_copy(update={"delivery": "at_least_once", "table": named})
    while adopted_table.exists(connection, kept, settings, found):
        published += publish_due(given, until, say)
        if time.monotonic() > until:
            left = adopted_table.count(connection, kept, found, settings, marked.BACKLOG)
            wait = "; new events wait for them" if state.state == "draining" else ""
            raise NotReadyError(
                f"{found} still has {counted(left, 'pending row')}{wait}. Run the command again; see `outbox "
                "status` for refused rows"
            )
    failed = adopted_table.count(connection, kept, found, settings, marked.FAILURES)
    if failed and settings.on_dead_letter != "block":
        say(f"left in {found}: {counted(failed, 'dead letter')}; publish or delete before `finish --drop`")
    if failed and state.state == "draining" and settings.on_dead_letter == "block":
        raise NotReadyError(
            f"{found} has {counted(failed, 'dead letter')} that must not be overtaken "
            "(OUTBOX_ON_DEAD_LETTER=block): publish what failed (docs/existing-tables.md), or set it to "
            "continue, and its aggregates are free"
        )
    return published


def has_rows_to_drain(connection: Connection, kept: Mapping, settings: RelaySettings, found: Facts) -> bool:
    """Return whether `drain` has something to do."""
    return adopted_table.exists(connection, kept, settings, found) or (
        adopted_table.has_keys(kept) and adopted_table.has_rows(connection, found.schema, kept.table)
    )


def publish_due(settings: ProcessSettings, until: float, say: Say) -> int:
    """Publish everything that is due now, or wait for the relay that does."""
    try:
        events = service.relay(settings, until_empty=True, standby=service.Standby.REFUSE).events
    except service.ShardOwnedError as error:
        say(f"waiting: {error}")
        events = 0
    if not events:
        time.sleep(min(_POLL, max(0.0, until - time.monotonic())))
    return events


def _has_rest(connection: Connection) -> bool:
    return connection.execute(adopt_sql.REST_EXISTS).fetchone() == (True,)


def _drop_rest(connection: Connection) -> None:
    connection.execute(adopt_sql.DROP_REST)


def _keep_rest(settings: OutboxSettings, connection: Connection, found: Facts, rows: list[Row]) -> None:
    """Store the events, in place of those that an earlier command has stored."""
    columns = [column for column in found.columns.values() if column.name in rows[0]]
    names = {
        "rest": sql.Identifier(settings.db_schema, adopt_sql.REST),
        "names": sql.SQL(", ").join(sql.Identifier(column.name) for column in columns),
        "columns": sql.SQL(", ").join(
            sql.SQL("{} {} {}").format(
                sql.Identifier(column.name),
                sql.SQL(column.type),
                sql.SQL("NOT NULL" if column.not_null else ""),
            )
            for column in columns
        ),
    }
    with connection.transaction(), connection.cursor() as cursor:
        _drop_rest(connection)
        cursor.execute(sql.SQL(adopt_sql.CREATE_REST).format(**names))
        cursor.execute(sql.SQL(adopt_sql.INDEX_REST).format(**names))
        with cursor.copy(sql.SQL(adopt_sql.COPY_REST).format(**names)) as copy:
            for row in rows:
                copy.write_row([row.get(column.name) for column in columns])


def _publish_rest(
    settings: ProcessSettings, connection: Connection, mapping: Mapping, *, until: float, say: Say
) -> int:
    """Publish the events of the table, and drop it; return how many there were.

    Raises:
        NotReadyError: some could not be published in time.
    """
    given = settings.model_copy(
        update={
            "table": _description(settings, mapping),
            "delivery": "at_least_once",
            "on_dead_letter": "block",
        }
    )
    published = 0
    while (left := connection.execute(adopt_sql.REST_LEFT).fetchone()) is not None and left[0]:
        published += publish_due(given, until, say)
        left = connection.execute(adopt_sql.REST_LEFT).fetchone()
        if time.monotonic() > until and left is not None and left[0]:
            why = f" ({left[1]:,} were rejected: {left[2]})" if left[1] else ""
            raise NotReadyError(
                f"not published yet: {counted(left[0], 'event')} of before the switch{why}; new events "
                f"wait. See {settings.db_schema}.{adopt_sql.REST}: correct or delete what is rejected there, "
                "and run the command again"
            )
    _drop_rest(connection)
    return published


def _description(settings: OutboxSettings, mapping: Mapping) -> dict[str, Any]:
    columns: dict[str, str] = {name: mapping.columns[name] for name in _ENTRIES if name in mapping.columns}
    columns |= {"seq": "seq_of_rest", "published_at": "published_at_of_rest"}
    columns |= {"retry_count": "retries_of_rest", "last_error": "error_of_rest"}
    given: dict[str, Any] = {"name": f"{settings.db_schema}.{adopt_sql.REST}", "columns": columns}
    if mapping.aggregate_type:
        given["aggregate_type"] = "".join(
            literal + ("" if spec is None else "{event_type:first}" if spec else "{event_type}")
            for literal, spec in mapping.aggregate_type
        )
    return given


def drain_slot(table: Table, what: Rest, *, until: float, say: Say) -> int:
    """Wait until every event of before the switch is published; return how many this command has published.

    Raises:
        NotReadyError: some are not.
        SetupError: the slot cannot say it.
    """
    name, lsn = table.state.slot, table.state.switched_lsn
    assert name is not None
    assert lsn is not None
    waiting = _Waiting(say)
    while True:
        slot = slots.read(table.connection, name, lsn)
        if what is Rest.SKIP:
            return _skip(table, slot)
        if (slot is None or slot.lost or slot.is_past) and _has_rest(table.connection):
            # Stored before, by this command or by one that was ended; no other program gets it any more.
            return _publish_rest(table.settings, table.connection, table.mapping, until=until, say=say)
        if wrong := slots.problem(table.connection, slot, name):
            raise SetupError(
                f"{wrong}. If everything of before the switch is published: `outbox adopt drain --rest skip`"
            )
        assert slot is not None
        if slot.is_past:
            return 0
        if slot.reader is None and slot.plugin == slots.PLUGIN and waiting.is_new(slot):
            try:
                with unsent.reading(table.settings, table.connection, slot, table.found, lsn) as reading:
                    rows = unsent.unpublished(
                        table.settings, table.mapping, table.found, reading.rows(table.found), reading.stay
                    )
                    if rows and what is Rest.PUBLISH:
                        _keep_rest(table.settings, table.connection, table.found, rows)
                        reading.confirm()
                        _await(lambda: _is_past(table), f"the slot {slot.name} was not confirmed")
                if not rows:
                    return 0
                if what is Rest.PUBLISH:
                    say(f"the slot {name} is past what its connector knows: {slots.FORGET}")
                    continue
                waiting.found(slot, rows, table.mapping)
            except InUseError:
                pass
        if time.monotonic() > until:
            raise NotReadyError(waiting.why(slot, slot_reader.reader(table.connection, name)))
        waiting.say(slot)
        time.sleep(_POLL)


class _Waiting:
    """What is waited for, and what was said about it."""

    def __init__(self, say: Say) -> None:
        self._say, self._said, self._since = say, "", time.monotonic()
        self._seen: tuple[object, ...] = ()
        self._looked: str | None = None
        self._missing = ""

    def is_new(self, slot: Slot) -> bool:
        """Return whether the slot has to be looked into."""
        return self._looked != slot.confirmed

    def found(self, slot: Slot, rows: list[Row], mapping: Mapping) -> None:
        """Remember what is missing."""
        self._looked = slot.confirmed
        first = rows[0][mapping.columns["id"]]
        self._missing = (
            f"missing in Kafka: {counted(len(rows), 'event')} of before the switch, the first with id "
            f"{first}: start the connector again (PUT /connectors/NAME/resume), which publishes what is "
            "missing. If it cannot, `outbox adopt drain --rest publish` does. If OUTBOX_TOPIC or "
            "OUTBOX_HEADER_NAMES differ from what the connector does, correct them"
        )

    def say(self, slot: Slot) -> None:
        """Say what is waited for, when it changes or takes long."""
        if slot.reader is not None:
            self._looked = None
        seen = (slot.reader is None, slot.confirmed)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        is_quiet = time.monotonic() - self._since > _QUIET_SECONDS
        text = self.why(slot) if is_quiet or slot.reader is None else self._behind(slot)
        if text != self._said:
            self._said = text
            self._say(f"waiting: {text}")

    def why(self, slot: Slot, by: str | None = None) -> str:
        """Return why the events of before the switch are not known to be published.

        Args:
            by: who reads the slot.
        """
        if slot.reader is not None:
            return (
                f"{self._behind(slot)}, and {by or 'a connector'} reads it. A connector does not confirm its "
                f"last transaction before a later one: if this does not change, {_STOP}"
            )
        if slot.plugin != slots.PLUGIN:
            return (
                f"{self._behind(slot)}, has the plugin {slot.plugin}, and no session reads it: start the "
                f"connector again, with {slots.HEARTBEATS}"
            )
        return self._missing or f"{self._behind(slot)}: {_STOP}"

    def _behind(self, slot: Slot) -> str:
        return f"the slot {slot.name} is {size(slot.behind)} of the log before the switch"


def _is_past(table: Table) -> bool:
    assert table.state.slot is not None
    slot = slots.read(table.connection, table.state.slot, table.state.switched_lsn)
    return slot is not None and slot.is_past


def _skip(table: Table, slot: Slot | None) -> int:
    if slot is not None and not slot.is_past:
        by = slot_reader.await_end(table.connection, slot.name, seconds=slot_reader.LEAVE_SECONDS)
        if by is not None:
            raise NotReadyError(
                f"{by} reads the slot {slot.name}, and may still publish events of before the switch: {_STOP}"
            )
    _drop_rest(table.connection)
    return 0


def _await(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _ANSWER_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise NotReadyError(f"{what}: run the command again")
        time.sleep(_POLL)
