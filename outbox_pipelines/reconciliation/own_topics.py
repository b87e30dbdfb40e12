"""Find topics of the outbox that no event of the day names: all events of a type may be lost.

Invariants:
- A topic is the outbox's own if its own settings, grants or consumers name it, or if it has an event of the
  outbox, of any day, that belongs there. A name that merely matches OUTBOX_TOPIC can be another outbox's.
- Notes name the topics with messages since that day of which this is unknown, and why: none is skipped
  silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, Final
from uuid import UUID

import confluent_kafka
import pyarrow as pa

from outbox_pipelines.config.consumers import Consumer
from outbox_pipelines.config.rules import Router
from outbox_pipelines.core.text import counted
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation import messages, reconciliation_sql
from outbox_pipelines.reconciliation.messages import Part, Topic
from outbox_pipelines.settings import RelaySettings

# Of each partition, at the day's start and at the end.
_SAMPLE: Final = 50
# Each takes a moment; a template of fields alone matches every topic of the brokers.
_MOST: Final = 100
_SHOWN: Final = 5


def find(
    settings: RelaySettings,
    kafka: confluent_kafka.Consumer,
    day_ms: int,
    kinds: Sequence[tuple[int, str, str]],
    consumers: Sequence[Consumer],
) -> tuple[set[str], list[str]]:
    """Return existing topics to read, also those of the day's events, and notes about others.

    Args:
        day_ms: the start of the day.
        kinds: of the day's events: number, aggregate type, event type.
        consumers: all of the settings.

    Raises:
        UnavailableError: the database or Kafka does not answer.
    """
    router = Router(settings)
    partitions = messages.partitions(settings, kafka)
    with connect(settings, name="outbox reconcile: topics") as connection:
        granted = [name for (name,) in connection.execute(reconciliation_sql.GRANTED)]
        # Rules and consumers that several outboxes share can be those of another one.
        aggregate_types, event_types = (
            types if name not in settings.inherited else () for name, types in router.types.items()
        )
        own = router.topics(
            [*granted, *aggregate_types, *(each for _, each, _ in kinds)],
            [*event_types, *(each for *_, each in kinds)],
        )
        for each in consumers:
            if not each.handles_others and "consumers" not in settings.inherited:
                own |= {topic for topic in each.topics if _matches(router, topic)}
        own &= partitions.keys()
        others = {
            name: numbers
            for name, numbers in partitions.items()
            if name not in own and not name.startswith("__") and _matches(router, name)
        }
        busy = messages.spans(settings, others, day_ms)
        unknown: list[str] = []
        unread: list[str] = []
        for number, (name, spans) in enumerate(sorted(busy.items())):
            sent = sum(end - start for _, start, end in spans.values())
            said = f"{name} ({counted(sent, 'message')})"
            try:
                if number < _MOST and _is_own(settings, kafka, connection, router, name, spans):
                    own.add(name)
                else:
                    unknown.append(said)
            except SetupError as error:
                unread.append(f"{said}: {error}")
    return own, _notes(settings, unread, unknown)


def _notes(settings: RelaySettings, unread: list[str], unknown: list[str]) -> list[str]:
    notes = []
    if unread:
        notes.append(f"not read, since a sample of them could not be read: {_some(unread, '; ')}")
    if unknown:
        section = f"outboxes.{settings.name}.aggregate_types" if settings.inherited else "aggregate_types"
        notes.append(
            "not read, since no event, grant or setting shows that they are of this outbox: "
            f"{_some(unknown, ', ')}; if one is, name it as the topic of [{section}.TYPE]"
        )
    return notes


def _some(texts: Sequence[str], between: str) -> str:
    more = f" and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else ""
    return between.join(texts[:_SHOWN]) + more


def _matches(router: Router, topic: str) -> bool:
    return any(fnmatchcase(topic, pattern) for pattern in router.patterns)


def _is_own(
    settings: RelaySettings,
    kafka: confluent_kafka.Consumer,
    connection: Connection,
    router: Router,
    name: str,
    spans: Mapping[int, tuple[int, int, int]],
) -> bool:
    """Return whether a topic has an event of the outbox that belongs there, among those of a sample.

    Raises:
        SetupError: part of the sample could not be read, and the rest has no such event.
    """
    around = (
        {
            number: Part(max(first, start - _SAMPLE), start, False)
            for number, (first, start, _) in spans.items()
        },
        {number: Part(max(first, end - _SAMPLE), end, False) for number, (first, _, end) in spans.items()},
    )
    failed: SetupError | None = None
    for parts in around:
        found: list[Any] = []

        def add(batch: pa.Table, found: list[Any] = found) -> None:
            found += batch.column("id").to_pylist()

        try:
            messages.read(settings, kafka, [Topic(0, name, parts)], add, lambda _: None)
        except SetupError as error:
            failed = error
        ids = []
        for id in found:
            with suppress(ValueError):
                ids.append(UUID(id or ""))
        types = connection.execute(reconciliation_sql.TYPES_OF, {"ids": ids}).fetchall() if ids else []
        if any(router.topic_or_empty(*pair) == name for pair in types):
            return True
    if failed is not None:
        raise failed
    return False
