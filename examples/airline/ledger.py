"""The airline's tables, in which every message that a consumer sees is ticked off.

Invariants:
- It knows neither the outbox nor the relay: the business tables are true, and messages are compared
  with them.
- No finding means: each operation in the tables has exactly one event, in its aggregate's order, and no event
  is without an operation.
- A redelivery (the same event id again) is counted and no finding: at-least-once promises no less.
- Memory is 16 bytes an event and 40 a flight: about 40 MB for a year.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

from examples.airline import queries
from examples.airline.flights import ARRIVED, CANCELLED, DEPARTED, SCHEDULED
from outbox_pipelines.database import Connection

MISSING: Final = "missing"
PHANTOM: Final = "phantom"
DISORDER: Final = "out of order"
TORN: Final = "torn"
BOARD: Final = "board"
KINDS: Final = {
    MISSING: "in the tables, but without a message",
    PHANTOM: "in a message, but not in the tables: rolled back, or never written",
    DISORDER: "received after a later movement of the same aggregate",
    TORN: "tables that contradict each other: half a transaction",
    BOARD: "aircraft and carriers whose values on a consumer's board differ from the tables",
}

_EVENT_TYPES: Final = (SCHEDULED, DEPARTED, ARRIVED, CANCELLED)
_EXAMPLES: Final = 5

# In place of a time.
_NEVER: Final = -1
_TOLD: Final = -2
# In place of an event's id.
_BYTES: Final = 16
_UNSEEN: Final = bytes(_BYTES)


class Told(NamedTuple):
    """What a message says."""

    aggregate: tuple[str, str]
    event_type: str
    event_id: bytes
    movement: int
    flight: int
    at: datetime

    def __str__(self) -> str:
        kind, name = self.aggregate
        return f"movement {self.movement} of {kind} {name}, {self.event_type} of flight {self.flight}"


@dataclass(slots=True)
class Verdict:
    """What was seen, and what is wrong with it."""

    operations: int = 0
    """What the tables tell of: as many events there should be."""
    messages: int = 0
    duplicates: int = 0
    findings: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    """The first few of each kind, in words."""

    def find(self, kind: str, what: str) -> None:
        """Notes something wrong."""
        self.findings[kind] += 1
        if self.findings[kind] <= _EXAMPLES:
            self.examples.append(f"{kind}: {what}")


class Ledger:
    """The content of the tables when the ledger is made; no session may write at that time."""

    def __init__(self, connection: Connection) -> None:
        self._verdict = Verdict()
        # Of each aggregate: how many movements it made, and the ids of their events.
        self._movements: dict[tuple[str, str], int] = {}
        self._seen: dict[tuple[str, str], bytearray] = {}
        for kind, name, movements, operations in connection.execute(queries.MOVEMENTS):
            self._movements[kind, name] = movements
            self._seen[kind, name] = bytearray()
            self._verdict.operations += operations
            if movements != operations:
                self._verdict.find(
                    TORN, f"{kind} {name} made {movements} movements, its flights {operations}"
                )
        # Of each flight: its aircraft, and when what happened to it; ids run from 1.
        row = connection.execute(queries.LAST_FLIGHT).fetchone()
        flights = 1 + (row[0] if row else 0)
        self._aircraft: list[str | None] = [None] * flights
        self._times = {event_type: array("q", [_NEVER]) * flights for event_type in _EVENT_TYPES}
        names: dict[str, str] = {}
        with connection.cursor() as cursor:
            for flight, tail_number, *times in cursor.stream(queries.FLIGHTS, size=1000):
                self._aircraft[flight] = tail_number and names.setdefault(tail_number, tail_number)
                for event_type, at in zip(_EVENT_TYPES, times, strict=True):
                    self._times[event_type][flight] = _NEVER if at is None else at

    def tick_off(self, told: Told) -> None:
        """Compares the next message with the tables."""
        self._verdict.messages += 1
        seen = self._seen.get(told.aggregate, bytearray())
        place = slice(_BYTES * (told.movement - 1), _BYTES * told.movement)
        if told.movement > 0 and seen[place] == told.event_id:
            self._verdict.duplicates += 1
        elif doubt := self._doubt(told, seen[place]):
            self._verdict.find(PHANTOM, f"{told}: {doubt}")
        else:
            if len(seen) >= place.stop:
                self._verdict.find(DISORDER, f"{told}: after movement {len(seen) // _BYTES}")
            else:
                seen.extend(bytes(place.stop - len(seen)))
            seen[place] = told.event_id
            self._times[told.event_type][told.flight] = _TOLD

    def not_ours(self, what: str) -> None:
        """Notes a message that no event of the airline can be."""
        self._verdict.messages += 1
        self._verdict.find(PHANTOM, what)

    def close(self) -> Verdict:
        """The verdict, when all messages were seen."""
        for event_type, times in self._times.items():
            for flight, at in enumerate(times):
                if at >= 0:
                    of = self._aircraft[flight] or "no aircraft"
                    self._verdict.find(MISSING, f"{event_type} of flight {flight} ({of})")
        return self._verdict

    def _doubt(self, told: Told, seen: bytearray) -> str | None:
        """Why the tables do not bear a message out; None where they do."""
        kind, name = told.aggregate
        movements = self._movements.get(told.aggregate)
        if movements is None:
            return f"there is no such {kind}"
        if not 1 <= told.movement <= movements:
            return f"it made {movements}"
        if seen not in (b"", _UNSEEN):
            return "another event has this movement"
        times = self._times.get(told.event_type, array("q"))
        if not 0 < told.flight < len(times) or times[told.flight] == _NEVER:
            return "that did not happen"
        if name != (self._aircraft[told.flight] if kind == "aircraft" else str(told.flight)):
            return f"the flight had the aircraft {self._aircraft[told.flight]}"
        if times[told.flight] == _TOLD:
            return "it was already in an event, as another movement"
        if times[told.flight] != told.at.timestamp():
            return f"it did not happen at {told.at}"
        return None
