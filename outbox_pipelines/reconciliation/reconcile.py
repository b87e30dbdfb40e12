"""Reconcile a day: its events, the topics, and each configured consumer.

Invariants:
- The events are read before the ends of the topics are taken, those before consumers' offsets, and those
  before consumers' rows: an event that is in flight at that time is never reported as lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import date
from pathlib import Path

from outbox_pipelines.config.consumers import Consumer
from outbox_pipelines.database.schema import require_schema
from outbox_pipelines.reconciliation import day_events, ids, messages, processed, reconciliation_sql, report
from outbox_pipelines.reconciliation.report import Report, Side
from outbox_pipelines.reconciliation.workspace import Workspace, workspace
from outbox_pipelines.settings import DaySettings, Settings


def reconcile(
    settings: Settings,
    day: date,
    names: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
    handled: Path | None = None,
) -> Report:
    """Compare all events of a UTC day with the topics and with the consumers of the settings.

    Args:
        names: only these consumers; without names, all consumers of the settings.
        progress: called with a message about every million rows.
        handled: a Parquet file for when each consumer handled which event of the day.

    Raises:
        SetupError: a setting is missing or wrong, the outbox has no such day, or its events do not exist.
        UnavailableError: a database, the archive or Kafka does not answer.
    """
    started = time.monotonic()
    require_schema(settings)
    settings.require_kafka()
    wanted = processed.chosen(settings, names)
    with workspace() as space:
        source, is_over = day_events.load(settings, day, space, progress)
        count, span = _span(space, day)
        topic_side, read, notes = _topics(settings, day, span, space, progress)
        if not is_over:
            notes.insert(0, "the day is not over: the result is preliminary")
        space.run(reconciliation_sql.MAKE_HANDLED)
        sides = [topic_side, *(_consumer(settings, day, each, span, space, progress) for each in wanted)]
        if handled is not None:
            space.write(reconciliation_sql.HANDLED, handled)
    return Report(day, source, count, read, sides, notes, round(time.monotonic() - started, 3))


def _span(space: Workspace, day: date) -> tuple[int, tuple[str, str]]:
    """Return the number of events, and the range of times in which the relevant ids were generated."""
    start, end = ids.bounds(day)
    count, first, last = space.row(reconciliation_sql.SPAN)
    if first is not None:
        # Transactions begin before their ids are generated, and applications can supply their own ids.
        start, end = min(start, ids.milliseconds(first)), max(end, ids.milliseconds(last) + 1)
    return count, (ids.floor(start), ids.floor(end))


def _topics(
    settings: Settings,
    day: date,
    span: tuple[str, str],
    space: Workspace,
    progress: Callable[[str], None],
) -> tuple[Side, int, list[str]]:
    start, end = ids.bounds(day)
    numbers = messages.route(settings, space)
    with closing(messages.consumer(settings)) as kafka:
        found, gone = messages.find(settings, kafka, numbers, start, progress)
        read, first = messages.load(settings, kafka, found, span, (start, end), space, progress)
    notes = [f"topic {name} does not exist" for name in gone]
    for topic in found:
        of_topic = {partition: ms for (number, partition), ms in first.items() if number == topic.number}
        kept_from = messages.kept_from(topic, of_topic)
        if kept_from is not None:
            notes.append(f"topic {topic.name} has messages since {ids.at(kept_from):%Y-%m-%d %H:%M:%S}")
        if topic.doubt is not None:
            notes.append(f"topic {topic.name}: {topic.doubt}")
        space.run(reconciliation_sql.DOUBT, topic=topic.number, kept_from=kept_from, doubt=topic.doubt)
    space.run(reconciliation_sql.COMPARE)
    space.run(reconciliation_sql.SET_ASTRAY_ASIDE)
    space.run(reconciliation_sql.FIND_LATE)
    of_day = {"first": ids.floor(start), "end": ids.floor(end), "start_ms": start, "end_ms": end}
    space.run(reconciliation_sql.FIND_UNKNOWN.format(**of_day))
    notes += day_events.forget(settings, day, "topics", space)
    progress("topics compared")
    (published,) = space.row(reconciliation_sql.PUBLISHED)
    return Side("topics", published, report.of_topics(space)), read, notes


def _consumer(
    settings: DaySettings,
    day: date,
    consumer: Consumer,
    span: tuple[str, str],
    space: Workspace,
    progress: Callable[[str], None],
) -> Side:
    handled = processed.load(settings, day, consumer, span, space, progress)
    notes = list(handled.notes)
    space.run(reconciliation_sql.KEEP_HANDLED, consumer=consumer.name)
    if not consumer.handles_others:
        start, end = ids.bounds(day)
        side = report.side(consumer)
        space.run(
            reconciliation_sql.FIND_STRANGE.format(side=side, first=ids.floor(start), end=ids.floor(end))
        )
        notes += day_events.forget(settings, day, side, space)
    (expected,) = space.row(reconciliation_sql.EXPECTED)
    return Side(consumer.name, expected, report.of_consumer(space, consumer, handled), notes)
