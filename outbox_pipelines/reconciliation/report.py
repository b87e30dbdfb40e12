"""The findings of a reconciliation (each a query, a name, and what to do), and the report of them.

Invariants:
- A finding without events is omitted.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Final

from outbox_pipelines.config.consumers import Consumer
from outbox_pipelines.core.text import counted
from outbox_pipelines.quality.rules import Status
from outbox_pipelines.reconciliation import reconciliation_sql
from outbox_pipelines.reconciliation.workspace import Workspace

EXAMPLES: Final = 10
"""Maximum examples of each finding."""


@dataclass(frozen=True, slots=True)
class FindingKind:
    """A kind of finding."""

    name: str
    query: str = field(repr=False)
    """Finds the places."""
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

    kind: FindingKind
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
        return max((finding.kind.status for finding in self.findings), default=Status.OK)


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
        return "; ".join(found) or f"{counted(self.events, 'event')}: {who} have all"

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
                    "findings": [_described(finding) for finding in side.findings],
                }
                for side in self.sides
            ],
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        messages = counted(self.messages, "message")
        said = [f"{self.day}: {counted(self.events, 'event')} in the {self.source}, {messages} read"]
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


_OF_TOPICS: Final = (
    FindingKind(
        "missing",
        reconciliation_sql.MISSING,
        Status.ERROR,
        "recorded as published, but not in any topic",
        "check whether the topic was recreated or rerouted, then resend: docs/reconciliation.md, missing",
    ),
    FindingKind(
        "wrong_topic",
        reconciliation_sql.WRONG_TOPIC,
        Status.ERROR,
        "published, but in another topic than the settings name",
        "check OUTBOX_TOPIC, OUTBOX_EVENT_TYPES and OUTBOX_AGGREGATE_TYPES, of the relay and of this "
        "command: docs/reconciliation.md, wrong_topic",
    ),
    FindingKind(
        "phantom",
        reconciliation_sql.PHANTOM,
        Status.ERROR,
        "messages of the day whose id belongs to no event",
        "find the other producer of the topic; after a failover or a restore, the database has lost "
        "these events: docs/reconciliation.md, phantom",
    ),
    FindingKind(
        "out_of_order",
        reconciliation_sql.OUT_OF_ORDER,
        Status.ERROR,
        "published after a later event of their aggregate",
        "check that writers lock the aggregate before they insert: docs/reconciliation.md, out_of_order",
    ),
    FindingKind(
        "duplicated",
        reconciliation_sql.DUPLICATED,
        Status.WARN,
        "extra messages: their event was already in the topic",
        "normal after a crash with at_least_once; idempotent consumers skip ids that they have processed",
    ),
    FindingKind(
        "lagging",
        reconciliation_sql.LAGGING,
        Status.WARN,
        "not published yet",
        "run `outbox status` for the cause and the fix; then run this again",
    ),
    FindingKind(
        "unreadable",
        reconciliation_sql.UNREADABLE,
        Status.WARN,
        "messages without a valid event id",
        "find the other producer of the topic, or correct OUTBOX_HEADER_NAMES",
    ),
    FindingKind(
        "unknowable",
        reconciliation_sql.UNKNOWABLE,
        Status.WARN,
        "published, but no longer or not yet in the topic",
        "reconcile within the topic's retention; consumers are compared with the remaining messages",
    ),
    FindingKind(
        "late_replays", reconciliation_sql.LATE_REPLAYS, Status.OK, "dead letters published late, by a replay"
    ),
    FindingKind(
        "dead_letters", reconciliation_sql.DEAD, Status.OK, "not published: see `outbox dead-letters list`"
    ),
    FindingKind(
        "discarded", reconciliation_sql.GIVEN_UP, Status.OK, "not published: discarded by an operator"
    ),
)

_OF_CONSUMER: Final = (
    FindingKind(
        "missing",
        reconciliation_sql.NOT_HANDLED,
        Status.ERROR,
        "in the topic, but skipped: never recorded",
        "check the consumer's types and topics, then set its group's offsets back: "
        "recorded events are skipped",
    ),
    FindingKind(
        "phantom",
        reconciliation_sql.STRANGE,
        Status.ERROR,
        "recorded ids of the day that belong to no event",
        "find the producer; if the source also handles other outboxes, set handles_others = true",
    ),
    FindingKind(
        "dead_letters",
        reconciliation_sql.CONSUMER_DEAD,
        Status.WARN,
        "received, but all attempts of their handler failed",
        "fix the cause, then run `outbox consumer dead-letters replay` in the consumer's database",
    ),
    FindingKind(
        "lagging",
        reconciliation_sql.CONSUMER_LAGGING,
        Status.WARN,
        "not handled yet",
        "check that it runs; reconcile again later",
    ),
    FindingKind(
        "forgotten",
        reconciliation_sql.FORGOTTEN,
        Status.WARN,
        "cannot be verified: the consumer's rows of that time are pruned",
        "if they are not pruned, set keep_days; otherwise reconcile earlier, before they are pruned",
    ),
    FindingKind(
        "discarded",
        reconciliation_sql.CONSUMER_GIVEN_UP,
        Status.OK,
        "received, then discarded by an operator",
    ),
)


# Found by the step that has all places of an aggregate.
_OF_ORDER: Final = frozenset({reconciliation_sql.OUT_OF_ORDER, reconciliation_sql.LATE_REPLAYS})


def of_topics(space: Workspace) -> list[Finding]:
    """Return the findings of the topics, except those of `of_order`."""
    return [_find(space, kind.query, kind) for kind in _OF_TOPICS if kind.query not in _OF_ORDER]


def of_order(space: Workspace) -> list[Finding]:
    """Return the findings about the order of an aggregate's events."""
    return [_find(space, kind.query, kind) for kind in _OF_TOPICS if kind.query in _OF_ORDER]


def of_consumer(space: Workspace, consumer: Consumer, kept_ms: int) -> list[Finding]:
    """Return the findings of a consumer, whose views are attached.

    Args:
        kept_ms: records of messages since this time are certainly kept.
    """
    given = {"{kept_ms}": str(kept_ms), "{side}": side(consumer)}
    findings = []
    for kind in _OF_CONSUMER:
        filled = kind.query
        for name, value in given.items():
            filled = filled.replace(name, value)
        findings.append(_find(space, filled, kind))
    return findings


def passed_on(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return findings as JSON, for `merged`."""
    return [
        {
            "name": finding.kind.name,
            "count": finding.count,
            "examples": [dataclasses.asdict(example) for example in finding.examples],
        }
        for finding in findings
        if finding.count
    ]


def merged(is_topics: bool, parts: Iterable[dict[str, Any]]) -> list[Finding]:
    """Return the findings of all slices as those of one: counts are added, the first examples kept."""
    counts: Counter[str] = Counter()
    examples: defaultdict[str, list[Example]] = defaultdict(list)
    for part in parts:
        counts[part["name"]] += part["count"]
        examples[part["name"]] += [Example(**each) for each in part["examples"]]
    return [
        Finding(kind, counts[kind.name], sorted(examples[kind.name], key=_place)[:EXAMPLES])
        for kind in (_OF_TOPICS if is_topics else _OF_CONSUMER)
        if counts[kind.name]
    ]


def _place(example: Example) -> tuple[tuple[bool, Any], ...]:
    """Return what EXAMPLES of `reconciliation_sql` sorts by, with what is unknown last."""
    values = (example.seq, example.topic, example.partition, example.offset, example.id, example.detail)
    return tuple((value is None, value) for value in values)


def side(consumer: Consumer) -> str:
    """Return the consumer's name in the table of unknown ids."""
    return "consumer " + consumer.name.replace("'", "''")


def _find(space: Workspace, query: str, kind: FindingKind) -> Finding:
    amount = "extra" if query is reconciliation_sql.DUPLICATED else "1"
    (count,) = space.row(reconciliation_sql.COUNT.format(amount=amount, finding=query))
    examples = space.rows(reconciliation_sql.EXAMPLES.format(finding=query, limit=EXAMPLES)) if count else []
    return Finding(kind, count, [Example(*each) for each in examples])
