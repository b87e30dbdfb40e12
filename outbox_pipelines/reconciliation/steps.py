"""Reconcile a day: its events, the topics, and each consumer. Each step can run in a process of its own.

1. `begin` passes on the day's events, and takes the ends of the topics.
2. `read` passes on some partitions of the topics, or the records of a consumer; in any order.
3. `compare` takes one slice of the ids: all rows with an id, from wherever they were read.
4. `order` takes one slice of the aggregates: where their events are, as `compare` has found.
5. `merge` adds up the findings.

Invariants:
- Every topic, table and file is read once, whatever the number of slices. The events are read before the ends
  of the topics are taken, those before consumers' offsets, and those before consumers' rows: an event that is
  in flight at that time is never reported as lost.
- All findings but those of order compare rows of one id. An event in two partitions or topics, or in none,
  is seen as a whole, because slices follow the id, not the place. The findings of order compare places of one
  aggregate in one partition. So counts add up, and the findings do not depend on the number of slices.
- Memory is that of the workspace, the disk of a slice its share of the rows.
- `reconcile` runs the steps one after the other, so that memory and disk are those of one slice.
- A step without its note ends `merge` with an error: a report is of all slices or none.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import date
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from outbox_pipelines.config.consumers import Consumer
from outbox_pipelines.core.files import require_replaceable
from outbox_pipelines.database.schema import require_schema
from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation import (
    day_events,
    messages,
    own_topics,
    processed,
    reconciliation_sql,
    report,
)
from outbox_pipelines.reconciliation import exchange as exchanges
from outbox_pipelines.reconciliation.day_events import Events
from outbox_pipelines.reconciliation.exchange import Exchange
from outbox_pipelines.reconciliation.messages import Part, Topic
from outbox_pipelines.reconciliation.processed import Records
from outbox_pipelines.reconciliation.report import Report, Side
from outbox_pipelines.reconciliation.workspace import Workspace, workspace
from outbox_pipelines.settings import Settings

MOST_SLICES: Final = 250
"""Each step that reads has as many files open, of at most 1,024 by default, for each kind of rows."""
DAY: Final = "day"
COMPARED: Final = ("written", "parked", "messages", "unreadable", "processed", "inbox")
"""The kinds of rows that only `compare` reads."""
_TOPICS: Final = "topics"
_KINDS: Final = pa.schema(
    [
        ("kind", pa.uint32()),
        ("aggregate_type", pa.string()),
        ("event_type", pa.string()),
        ("topic", pa.uint32()),
    ]
)
_DESCRIBED: Final = pa.schema(
    [("topic", pa.uint32()), ("name", pa.string()), ("kept_from", pa.int64()), ("doubt", pa.string())]
)
Progress = Callable[[str], None]


@dataclasses.dataclass(slots=True)
class Day:
    """What `begin` passes on to the other steps."""

    day: date
    started_ms: int
    slices: int
    events: Events
    kinds: list[tuple[int, str, str, int | None]]
    """Number, aggregate type, event type, and the number of the topic."""
    topics: list[Topic]
    consumers: list[str]
    notes: list[str]
    """About topics that are not read."""

    @property
    def readers(self) -> list[str]:
        """The steps of `read`."""
        parts = sum(part.start < part.end for topic in self.topics for part in topic.parts.values())
        of_topics = range(max(1, min(self.slices, parts)))
        return [*(f"topics_{n}" for n in of_topics), *(f"consumer_{n}" for n in range(len(self.consumers)))]

    @property
    def of_topics(self) -> list[str]:
        """Those of them that read topics."""
        return [step for step in self.readers if step.startswith("topics_")]

    @property
    def span(self) -> tuple[str, str]:
        """The range of times in which the ids of the day were generated, as ids."""
        start, end = day_events.bounds(self.day)
        if self.events.first is not None and self.events.last is not None:
            # Transactions begin before their ids are generated, and applications can supply their own ids.
            start = min(start, day_events.milliseconds(self.events.first))
            end = max(end, day_events.milliseconds(self.events.last) + 1)
        return day_events.floor(start), day_events.floor(end)

    def share(self, step: str) -> list[Topic]:
        """Return the topics with the partitions that a step reads."""
        every = [
            (part.end - part.start, topic.number, partition)
            for topic in self.topics
            for partition, part in topic.parts.items()
            if part.start < part.end
        ]
        # The largest first, so that each step has about the same number of messages.
        mine = set(sorted(every, reverse=True)[self.of_topics.index(step) :: len(self.of_topics)])
        places = {(number, partition) for _, number, partition in mine}
        return [
            dataclasses.replace(
                topic, parts={n: part for n, part in topic.parts.items() if (topic.number, n) in places}
            )
            for topic in self.topics
        ]


def begin(
    settings: Settings, day: date, names: Sequence[str], slices: int, exchange: Exchange, progress: Progress
) -> Day:
    """Pass on the events of the day, and what the other steps have to do.

    Raises:
        SetupError: a setting is missing or wrong, the outbox has no such day, or its events do not exist.
        UnavailableError: a database, the archive or Kafka does not answer.
    """
    if not 1 <= slices <= MOST_SLICES:
        raise SetupError(f"a day cannot be divided into {slices} slices: choose 1 to {MOST_SLICES:,}")
    started_ms = int(time.time() * 1000)
    require_schema(settings)
    settings.require_kafka()
    wanted = processed.chosen(settings, names)
    with workspace() as space:
        events = day_events.read(settings, day, DAY, slices, exchange, space, progress)
        kinds = space.rows(reconciliation_sql.KINDS)
    routed = messages.route(settings, kinds)
    start, _ = day_events.bounds(day)
    with closing(messages.consumer(settings)) as kafka:
        own, notes = own_topics.find(settings, kafka, start, kinds, processed.chosen(settings, ()))
        topics = messages.find(settings, kafka, sorted({*routed.values(), *own}), start, progress)
    numbers = {topic.name: topic.number for topic in topics}
    found = Day(
        day,
        started_ms,
        slices,
        events,
        [(kind, *types, numbers.get(routed.get(kind, ""))) for kind, *types in kinds],
        topics,
        [each.name for each in wanted],
        notes,
    )
    exchange.finish(DAY, **{**dataclasses.asdict(found), "day": str(day)})
    return found


def day_of(exchange: Exchange) -> Day:
    """Return what `begin` has passed on."""
    note = exchange.note(DAY)
    del note["rows"]
    note["day"] = date.fromisoformat(note["day"])
    note["events"] = Events(**note["events"])
    note["kinds"] = [tuple(each) for each in note["kinds"]]
    note["topics"] = [
        Topic(**{**each, "parts": {int(n): Part(**part) for n, part in each["parts"].items()}})
        for each in note["topics"]
    ]
    return Day(**note)


def read(settings: Settings, step: str, exchange: Exchange, progress: Progress) -> None:
    """Pass on the messages or the records that a step of `Day.readers` reads.

    Raises:
        SetupError, UnavailableError: as `begin`.
    """
    of = day_of(exchange)
    if step.startswith("consumer_"):
        _read_consumer(settings, of, step, exchange, progress)
        return
    start_ms, end_ms = day_events.bounds(of.day)
    first, end = of.span
    query = reconciliation_sql.SCATTER_MESSAGES.format(first=first, end=end)
    others = reconciliation_sql.SCATTER_UNREADABLE.format(start_ms=start_ms, end_ms=end_ms)
    with (
        workspace() as space,
        exchange.writing(space, step, "messages", query, of.slices) as readable,
        exchange.writing(space, step, "unreadable", others, of.slices) as unreadable,
        closing(messages.consumer(settings)) as kafka,
    ):

        def add(batch: pa.Table) -> None:
            readable.add(batch)
            unreadable.add(batch)

        count, times = messages.read(settings, kafka, of.share(step), add, progress)
    exchange.finish(step, messages=count, times=[[*place, ms] for place, ms in times.items()])


def _read_consumer(settings: Settings, of: Day, step: str, exchange: Exchange, progress: Progress) -> None:
    consumer = _consumer(settings, of, step)
    with workspace() as space:
        _describe(space, of, {})
        _take(space, consumer)
        numbers = {number for (number,) in space.rows(reconciliation_sql.TAKEN_TOPICS)}
        topics = [topic for topic in of.topics if topic.number in numbers]
        found = processed.read(
            settings, consumer, topics, of.span, step, of.slices, exchange, space, progress
        )
    exchange.finish(step, **dataclasses.asdict(found))


def compare(settings: Settings, number: int, exchange: Exchange, progress: Progress) -> None:
    """Find what differs in one slice of the ids.

    Raises:
        SetupError: the rows of an earlier step are missing; as `begin`.
        UnavailableError: as `begin`.
    """
    of, step = day_of(exchange), f"slice_{number}"
    start, end = day_events.bounds(of.day)
    bounds = {"first": day_events.floor(start), "end": day_events.floor(end)}
    with _slice(of, number, exchange) as (space, attach):
        attach("written", DAY)
        attach("parked", DAY)
        attach("messages", *of.of_topics)
        attach("unreadable", *of.of_topics)
        space.run(reconciliation_sql.MAKE_EVENTS.format(is_archived=of.events.is_archived))
        space.run(reconciliation_sql.COMPARE)
        space.run(reconciliation_sql.SET_ASTRAY_ASIDE)
        with exchange.writing(space, step, "placed", reconciliation_sql.SCATTER_PLACED, of.slices) as out:
            for batch in space.batches(reconciliation_sql.PLACED):
                out.add(batch)
        space.run(reconciliation_sql.FIND_UNKNOWN.format(**bounds, start_ms=start, end_ms=end))
        notes = day_events.forget(settings, of.day, _TOPICS, space)
        (published,) = space.row(reconciliation_sql.PUBLISHED)
        sides = [_side(published, report.of_topics(space), notes)]
        with exchange.writing(space, step, "handled", reconciliation_sql.KEEP_ALL, 1) as out:
            for reader in of.readers[len(of.of_topics) :]:
                attach("processed", reader)
                attach("inbox", reader)
                consumer = _consumer(settings, of, reader)
                for batch in space.batches(reconciliation_sql.KEEP_HANDLED, consumer=consumer.name):
                    out.add(batch)
                _take(space, consumer)
                records = _records(exchange, reader)
                kept_ms = processed.find_unhandled(settings, of.day, consumer, records, space)
                notes = []
                if not consumer.handles_others:
                    side = report.side(consumer)
                    space.run(reconciliation_sql.FIND_STRANGE.format(side=side, **bounds))
                    notes = day_events.forget(settings, of.day, side, space)
                (expected,) = space.row(reconciliation_sql.EXPECTED)
                sides.append(_side(expected, report.of_consumer(space, consumer, kept_ms), notes))
    exchange.finish(step, sides=sides)
    progress(f"slice {number + 1} of {of.slices} compared")


def order(number: int, exchange: Exchange) -> None:
    """Find what is out of order in one slice of the aggregates.

    Raises:
        SetupError: the rows of an earlier step are missing.
    """
    of = day_of(exchange)
    with _slice(of, number, exchange) as (space, attach):
        attach("placed", *_slices(of))
        with exchange.reading("replayed", 0, [DAY]) as files:
            space.attach("replayed", files)
            space.run(reconciliation_sql.FIND_LATE)
            found = report.passed_on(report.of_order(space))
    exchange.finish(f"order_{number}", findings=found)


def merge(settings: Settings, exchange: Exchange) -> Report:
    """Return the report of all slices.

    Raises:
        SetupError: a slice is missing.
    """
    of = day_of(exchange)
    slices = [exchange.note(step)["sides"] for step in _slices(of)]
    orders = [exchange.note(f"order_{number}")["findings"] for number in range(of.slices)]
    sides = []
    for position, name in enumerate([_TOPICS, *of.consumers]):
        parts = [each[position] for each in slices]
        findings = [found for each in parts for found in each["findings"]]
        compared = sum(each["compared"] for each in parts)
        # A note is that of each slice in which it holds.
        notes = list(dict.fromkeys(note for each in parts for note in each["notes"]))
        if position == 0:
            findings += [found for each in orders for found in each]
            of_topics, notes = notes, []
        else:
            reader = of.readers[len(of.of_topics) + position - 1]
            own = processed.notes(_consumer(settings, of, reader), _records(exchange, reader), compared)
            notes = own + notes
        sides.append(Side(name, compared, report.merged(position == 0, findings), notes))
    notes = [] if of.events.is_over else ["the day is not over: the result is preliminary"]
    notes += of.notes + _notes(of, _kept_from(of, exchange)) + of_topics
    read = sum(exchange.note(step)["messages"] for step in of.of_topics)
    source = "archive" if of.events.is_archived else "table"
    seconds = round(time.time() - of.started_ms / 1000, 3)
    return Report(of.day, source, of.events.count, read, sides, notes, seconds)


@contextmanager
def workspace_of_handled(exchange: Exchange) -> Iterator[Workspace]:
    """Provide a workspace with the view `handled` of all slices."""
    with workspace() as space, exchange.reading("handled", 0, _slices(day_of(exchange))) as files:
        space.attach("handled", files)
        yield space


def _slices(of: Day) -> list[str]:
    return [f"slice_{number}" for number in range(of.slices)]


@contextmanager
def _slice(of: Day, number: int, exchange: Exchange) -> Iterator[tuple[Workspace, Callable[..., None]]]:
    """Provide the workspace of a slice, and a function that attaches a kind of rows of some steps to it."""
    with workspace() as space, ExitStack() as files:
        _describe(space, of, _kept_from(of, exchange))

        def attach(kind: str, *steps: str) -> None:
            space.attach(kind, files.enter_context(exchange.reading(kind, number, steps)))

        yield space, attach


def _describe(space: Workspace, of: Day, kept_from: dict[int, int | None]) -> None:
    """Fill `kinds` and `topics`."""
    kinds = [dict(zip(_KINDS.names, each, strict=True)) for each in of.kinds]
    space.add(reconciliation_sql.ADD_ROUTED, pa.Table.from_pylist(kinds, _KINDS))
    topics = [
        {
            "topic": topic.number,
            "name": topic.name,
            "kept_from": kept_from.get(topic.number),
            "doubt": topic.doubt,
        }
        for topic in of.topics
    ]
    space.add(reconciliation_sql.ADD_TOPICS, pa.Table.from_pylist(topics, _DESCRIBED))


def _take(space: Workspace, consumer: Consumer) -> None:
    space.run(reconciliation_sql.MAKE_CONSUMER)
    space.run(
        reconciliation_sql.ADD_TAKEN, topics=list(consumer.topics), event_types=list(consumer.event_types)
    )


def _kept_from(of: Day, exchange: Exchange) -> dict[int, int | None]:
    """Return since when each topic is complete, as `messages.kept_from`."""
    times = {
        (topic, partition): ms
        for step in of.of_topics
        for topic, partition, ms in exchange.note(step)["times"]
    }
    return {topic.number: messages.kept_from(topic, times, of.started_ms) for topic in of.topics}


def _notes(of: Day, kept_from: dict[int, int | None]) -> list[str]:
    notes = [f"topic {topic.name} does not exist" for topic in of.topics if not topic.parts]
    for topic in of.topics:
        since = kept_from[topic.number]
        if since is not None:
            notes.append(f"topic {topic.name} has messages since {day_events.at(since):%Y-%m-%d %H:%M:%S}")
        if topic.doubt is not None:
            notes.append(f"topic {topic.name}: {topic.doubt}")
    return notes


def _consumer(settings: Settings, of: Day, reader: str) -> Consumer:
    name = of.consumers[int(reader.removeprefix("consumer_"))]
    (found,) = processed.chosen(settings, [name])
    return found


def _records(exchange: Exchange, reader: str) -> Records:
    note = exchange.note(reader)
    return Records(note["now_ms"], [tuple(each) for each in note["committed"]])


def _side(compared: int, findings: Sequence[report.Finding], notes: list[str]) -> dict[str, Any]:
    return {"compared": compared, "findings": report.passed_on(findings), "notes": notes}


def reconcile(
    settings: Settings,
    day: date,
    names: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
    handled: Path | None = None,
    slices: int = 1,
) -> Report:
    """Compare all events of a UTC day with the topics and with the consumers of the settings.

    Args:
        names: only these consumers; without names, all consumers of the settings.
        progress: called with a message about every million rows.
        handled: a Parquet file for when each consumer handled which event of the day.
        slices: compare this share of the ids at once.

    Raises:
        SetupError: a setting is missing or wrong, the outbox has no such day, its events do not exist, or the
            file cannot be written.
        UnavailableError: a database, the archive or Kafka does not answer.
    """
    if handled is not None:
        require_replaceable(handled)
    with exchanges.local() as exchange:
        of = begin(settings, day, names, slices, exchange, progress)
        for step in of.readers:
            read(settings, step, exchange, progress)
        for number in range(slices):
            compare(settings, number, exchange, progress)
            exchange.discard(COMPARED, number)
        for number in range(slices):
            order(number, exchange)
        if handled is not None:
            with workspace_of_handled(exchange) as space:
                space.write(reconciliation_sql.HANDLED, handled)
        return merge(settings, exchange)
