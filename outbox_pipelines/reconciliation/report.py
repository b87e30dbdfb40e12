"""The report of a reconciliation: counts, and a few examples of each finding."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Final

from outbox_pipelines.quality.rules import Status

EXAMPLES: Final = 10
"""Maximum examples of each finding."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding."""

    name: str
    status: Status
    """Severity; OK means information only."""
    text: str
    help: str = ""
    """What to do."""


@dataclass(frozen=True, slots=True)
class Example:
    """One event or message; a field that is not known is None."""

    id: str | None
    seq: int | None = None
    event_type: str | None = None
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    detail: str | None = None

    def __str__(self) -> str:
        place = self.topic
        if self.offset is not None:
            place = f"{self.topic}, partition {self.partition}, offset {self.offset}"
        seq = None if self.seq is None else f"seq {self.seq}"
        return "  ".join(filter(None, (self.id, seq, self.event_type, place, self.detail)))


@dataclass(frozen=True, slots=True)
class Finding:
    """A kind of finding with its count and examples."""

    kind: Kind
    count: int
    examples: list[Example] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Side:
    """The topics, or one consumer."""

    name: str
    compared: int
    """Events that belong there and can be verified."""
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> Status:
        """The highest severity of its findings."""
        return max((each.kind.status for each in self.findings), default=Status.OK)


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one day."""

    day: date
    source: str
    """Where the events were read: table or archive."""
    events: int
    messages: int
    """Messages read in the topics, of any day."""
    sides: list[Side]
    """The topics first."""
    notes: list[str]
    seconds: float

    @property
    def status(self) -> Status:
        """The highest severity of all sides."""
        return max(side.status for side in self.sides)

    @property
    def equal(self) -> bool:
        """Whether there are no differences."""
        return self.status is Status.OK

    @property
    def summary(self) -> str:
        """The report in one line."""
        found = [
            f"{side.name}: {each.count:,} {each.kind.name}"
            for side in self.sides
            for each in side.findings
            if each.kind.status is not Status.OK
        ]
        who = " and ".join(["the topics", *(side.name for side in self.sides[1:])])
        return "; ".join(found) or f"{self.events:,} events: {who} have all of them"

    def described(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "day": str(self.day),
            "status": self.status.name,
            **{name: getattr(self, name) for name in ("source", "events", "messages", "seconds", "notes")},
            "sides": [
                {
                    "name": side.name,
                    "status": side.status.name,
                    "compared": side.compared,
                    "notes": side.notes,
                    "findings": [_described(each) for each in side.findings],
                }
                for side in self.sides
            ],
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        said = [f"{self.day}: {self.events:,} events in the {self.source}, {self.messages:,} messages read"]
        said += [f"  note: {note}" for note in self.notes]
        for side in self.sides:
            said.append(f"{side.name}: {side.compared:,} compared" + ("" if side.status else ", all present"))
            said += [f"  note: {note}" for note in side.notes]
            for found in side.findings:
                kind = found.kind
                said.append(f"  {_mark(kind.status)}{found.count:,} {kind.name}: {kind.text}")
                said += [f"    {example}" for example in found.examples]
                if kind.help:
                    said.append(f"    → {kind.help}")
        return said


def _mark(status: Status) -> str:
    return "" if status is Status.OK else f"{status.name} "


def _described(found: Finding) -> dict[str, Any]:
    return {
        "name": found.kind.name,
        "status": found.kind.status.name,
        "count": found.count,
        "text": found.kind.text,
        "help": found.kind.help,
        "examples": [dataclasses.asdict(each) for each in found.examples],
    }
