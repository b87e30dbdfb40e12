"""The end of the events of before the switch, if what reads a slot publishes them, such as Debezium.

Invariants:
- The relay of the outbox continues only when each event of before the switch is published: the slot has
  confirmed the position of the switch, or every event that the slot would deliver again is in its topic.
- Nothing is confirmed in place of the program, unless the operator lets this command publish the rest.
- The rest is in a table before the slot lets go of it, and a program that starts then does not get it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.core.text import size
from outbox_pipelines.database import Connection, slot_reader
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.existing.adopt import rest, unsent
from outbox_pipelines.existing.adopt import slot as slots
from outbox_pipelines.existing.adopt.facts import Facts
from outbox_pipelines.existing.adopt.renaming import Say
from outbox_pipelines.existing.adopt.slot import Slot
from outbox_pipelines.existing.adopt.state import State
from outbox_pipelines.existing.adopt.unsent import Row
from outbox_pipelines.relay.read.slot.stream import InUseError
from outbox_pipelines.settings import Settings

_POLL: Final = 0.2
# A connector confirms each minute by default (offset.flush.interval.ms).
_QUIET_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 10.0
_STOP: Final = "stop the connector (PUT /connectors/NAME/stop), and run the command again"


class Rest(Enum):
    """What happens to events that the program has not published."""

    WAIT = "wait"
    """The program publishes them."""
    PUBLISH = "publish"
    """This command publishes them, in place of the program."""
    SKIP = "skip"
    """They count as published."""


@dataclass(frozen=True, slots=True)
class Table:
    """The table that was adopted, and the session of the command."""

    settings: Settings
    connection: Connection
    mapping: Mapping
    found: Facts
    state: State


def drain(table: Table, what: Rest, *, until: float, say: Say) -> int:
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
        if (slot is None or slot.lost or slot.is_past) and rest.exists(table.connection):
            # Stored before, by this command or by one that was ended; no other program gets it any more.
            return rest.publish(table.settings, table.connection, table.mapping, until=until, say=say)
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
                        rest.keep(table.settings, table.connection, table.found, rows)
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
            f"{len(rows):,} events of before the switch are not in their topics, the first with id {first}: "
            "start the connector again (PUT /connectors/NAME/resume), which publishes them. If it cannot, "
            "`outbox adopt drain --rest publish` does. If OUTBOX_TOPIC or OUTBOX_HEADER_NAMES differ from "
            "what the connector does, correct them"
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
    rest.drop(table.connection)
    return 0


def _await(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _ANSWER_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise NotReadyError(f"{what}: run the command again")
        time.sleep(_POLL)
