"""Choose the consumers to compare, and read what each has processed of the day, from its database.

Invariants:
- The group's offsets are read before the rows: every event before these offsets must be among the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Final

from confluent_kafka import TopicPartition
from psycopg import sql

from outbox_pipelines.config import parsed
from outbox_pipelines.config.consumers import Consumer
from outbox_pipelines.core.text import counted
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation import day_events, messages, reconciliation_sql
from outbox_pipelines.reconciliation.exchange import Exchange
from outbox_pipelines.reconciliation.messages import Topic
from outbox_pipelines.reconciliation.workspace import Workspace, reading
from outbox_pipelines.settings import ConsumerSettings, OutboxSettings

# If the group has no offset: events older than this should be processed.
_GRACE_MS: Final = 3_600_000
# The minimum of `outbox consumer prune`.
_LEAST_DAYS: Final = 1


def chosen(settings: ConsumerSettings, names: Sequence[str]) -> list[Consumer]:
    """Return the consumers of the settings with these names; without names, all of them.

    Raises:
        SetupError: there is no consumer of this name.
    """
    known = parsed.consumers(settings)
    for name in names:
        if name not in known:
            there = f"there is {', '.join(known)}" if known else "there is none"
            raise SetupError(f"no consumer is named {name!r}: {there} ([consumers.NAME] in outbox.toml)")
    return [known[name] for name in names or known]


@dataclass(slots=True)
class Records:
    """What is known of a consumer when its records are read."""

    now_ms: int
    committed: list[tuple[int, int, int]]
    """Number of the topic, partition and offset."""


def read(
    settings: OutboxSettings,
    consumer: Consumer,
    topics: Sequence[Topic],
    span: tuple[str, str],
    step: str,
    slices: int,
    exchange: Exchange,
    space: Workspace,
    progress: Callable[[str], None],
) -> Records:
    """Pass on `processed` and `inbox` of a consumer.

    Args:
        topics: the topics of the day that it reads.
        span: ids of version 7 from the first up to but excluding the second are read.

    Raises:
        UnavailableError: its database or Kafka does not answer.
        SetupError: its database has no `processed_events`.
    """
    own = _own(settings, consumer)
    has_inbox = _require_tables(own, consumer)
    places = [TopicPartition(topic.name, partition) for topic in topics for partition in topic.parts]
    numbers = {topic.name: topic.number for topic in topics}
    found = messages.committed(settings, consumer.group, places) if places else []
    committed = [(numbers[each.topic], each.partition, each.offset) for each in found if each.offset >= 0]
    wanted = {
        "source": sql.Literal(consumer.source),
        "buckets": sql.Literal(
            day_events.buckets(day_events.milliseconds(span[0]), day_events.milliseconds(span[1]))
        ),
        "first": sql.Literal(span[0]),
        "end": sql.Literal(span[1]),
    }
    with reading(own.require_dsn(), own.db_schema) as rows:
        with exchange.writing(space, step, "processed", reconciliation_sql.SCATTER, slices) as out:
            for batch in rows(sql.SQL(reconciliation_sql.PROCESSED).format(**wanted)):
                out.add(batch)
        with exchange.writing(space, step, "inbox", reconciliation_sql.SCATTER, slices) as out:
            if has_inbox:
                for batch in rows(sql.SQL(reconciliation_sql.INBOX).format(**wanted)):
                    out.add(batch)
    progress(f"{consumer.name}: {counted(exchange.rows('processed'), 'id')} read")
    return Records(int(time.time() * 1000), committed)


def find_unhandled(
    settings: OutboxSettings, day: date, consumer: Consumer, records: Records, space: Workspace
) -> int:
    """Find what a consumer has not processed; return the time in ms since which it certainly keeps records.

    Raises:
        UnavailableError: its database does not answer.
    """
    for topic, partition, offset in records.committed:
        space.run(reconciliation_sql.ADD_COMMITTED, topic=topic, partition=partition, offset=offset)
    space.run(reconciliation_sql.FIND_UNHANDLED.format(grace_ms=records.now_ms - _GRACE_MS))
    ((any_passed,),) = space.rows(reconciliation_sql.ANY_PASSED)
    return _kept(_own(settings, consumer), day, consumer, records.now_ms) if any_passed else 0


def notes(consumer: Consumer, records: Records, compared: int) -> list[str]:
    """Return notes about a consumer of which this many events were compared."""
    if not compared:
        return ["none of the day's events is in a topic that it reads"]
    if not records.committed:
        return [f"group {consumer.group} has no offsets in Kafka: events older than an hour count as skipped"]
    return []


def _own(settings: OutboxSettings, consumer: Consumer) -> OutboxSettings:
    """Return the settings of the consumer's database."""
    return settings.model_copy(
        update={
            "dsn": consumer.dsn or settings.require_dsn(),
            "db_schema": consumer.schema or settings.db_schema,
        }
    )


def _require_tables(own: OutboxSettings, consumer: Consumer) -> bool:
    """Return whether the consumer's database also has an inbox."""
    with _entered(own, consumer) as connection:
        ((has_processed, has_inbox),) = connection.execute(reconciliation_sql.HAS_TABLES)
    if not has_processed:
        raise SetupError(
            f"consumer {consumer.name}: its database has no table processed_events in schema "
            f"{own.db_schema!r} that the role sees: set its dsn and schema in outbox.toml, or grant the role "
            "USAGE on the schema and SELECT on the table"
        )
    return bool(has_inbox)


def _entered(own: OutboxSettings, consumer: Consumer) -> Connection:
    setting = f"dsn of [consumers.{consumer.name}]"
    return connect(own, name=f"outbox reconcile: {consumer.name}", setting=setting)


def _kept(own: OutboxSettings, day: date, consumer: Consumer, now_ms: int) -> int:
    """Return the time in ms since which records of processed messages are certainly kept."""
    if consumer.keep_days is None:
        start, end = day_events.bounds(day)
        given = {
            "buckets": day_events.buckets(start, end),
            "first": day_events.floor(start),
            "end": day_events.floor(end),
        }
        with _entered(own, consumer) as connection:
            ((first_kept,),) = connection.execute(reconciliation_sql.FIRST_KEPT, given)
        if first_kept is not None and first_kept < end:
            return 0
    return now_ms - (consumer.keep_days or _LEAST_DAYS) * day_events.DAY_MS
