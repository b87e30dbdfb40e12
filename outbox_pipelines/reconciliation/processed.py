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
from outbox_pipelines.reconciliation import ids, messages, reconciliation_sql
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


@dataclass(frozen=True, slots=True)
class Handled:
    """What the findings of a consumer need in addition to the tables."""

    kept_ms: int
    """Records of messages since this time are certainly kept."""
    notes: list[str]


def load(
    settings: OutboxSettings,
    day: date,
    consumer: Consumer,
    span: tuple[str, str],
    space: Workspace,
    progress: Callable[[str], None],
) -> Handled:
    """Fill the tables of a consumer, and find what it has not processed.

    Raises:
        UnavailableError: its database or Kafka does not answer.
        SetupError: its database has no `processed_events`.
    """
    own = settings.model_copy(
        update={
            "dsn": consumer.dsn or settings.require_dsn(),
            "db_schema": consumer.schema or settings.db_schema,
        }
    )
    has_inbox = _require_tables(own, consumer)
    space.run(reconciliation_sql.MAKE_CONSUMER)
    space.run(
        reconciliation_sql.ADD_TAKEN, topics=list(consumer.topics), event_types=list(consumer.event_types)
    )
    notes = _commits(settings, consumer, space)
    wanted = {
        "source": sql.Literal(consumer.source),
        "buckets": sql.Literal(ids.buckets(ids.milliseconds(span[0]), ids.milliseconds(span[1]))),
        "first": sql.Literal(span[0]),
        "end": sql.Literal(span[1]),
    }
    rows = 0
    with reading(own.require_dsn(), own.db_schema) as read:
        for batch in read(sql.SQL(reconciliation_sql.PROCESSED).format(**wanted)):
            space.add(reconciliation_sql.ADD_PROCESSED, batch)
            rows += batch.num_rows
        progress(f"{consumer.name}: {counted(rows, 'id')} read")
        if has_inbox:
            for batch in read(sql.SQL(reconciliation_sql.INBOX).format(**wanted)):
                space.add(reconciliation_sql.ADD_INBOX, batch)
    now_ms = int(time.time() * 1000)
    space.run(reconciliation_sql.FIND_UNHANDLED.format(grace_ms=now_ms - _GRACE_MS))
    ((any_passed,),) = space.rows(reconciliation_sql.ANY_PASSED)
    return Handled(_kept(own, day, consumer, now_ms) if any_passed else 0, notes)


def _require_tables(own: OutboxSettings, consumer: Consumer) -> bool:
    """Return whether the consumer's database also has an inbox."""
    with _entered(own, consumer) as connection:
        ((has_processed, has_inbox),) = connection.execute(reconciliation_sql.HAS_TABLES)
    if not has_processed:
        raise SetupError(
            f"consumer {consumer.name}: its database has no table processed_events in schema "
            f"{own.db_schema!r}: set its dsn and schema in outbox.toml"
        )
    return bool(has_inbox)


def _entered(own: OutboxSettings, consumer: Consumer) -> Connection:
    setting = f"dsn of [consumers.{consumer.name}]"
    return connect(own, name=f"outbox reconcile: {consumer.name}", setting=setting)


def _commits(settings: OutboxSettings, consumer: Consumer, space: Workspace) -> list[str]:
    names = dict(space.rows(reconciliation_sql.TOPICS))
    numbers = {name: number for number, name in names.items()}
    places = [
        TopicPartition(names[topic], partition)
        for topic, partition in space.rows(reconciliation_sql.PARTITIONS)
    ]
    if not places:
        return ["none of the day's events is in a topic that it reads"]
    found = [each for each in messages.committed(settings, consumer.group, places) if each.offset >= 0]
    for each in found:
        space.run(
            reconciliation_sql.ADD_COMMITTED,
            topic=numbers[each.topic],
            partition=each.partition,
            offset=each.offset,
        )
    if found:
        return []
    return [f"group {consumer.group} has no offsets in Kafka: events older than an hour count as skipped"]


def _kept(own: OutboxSettings, day: date, consumer: Consumer, now_ms: int) -> int:
    """Return the time in ms since which records of processed messages are certainly kept."""
    if consumer.keep_days is None:
        start, end = ids.bounds(day)
        given = {"buckets": ids.buckets(start, end), "first": ids.floor(start), "end": ids.floor(end)}
        with _entered(own, consumer) as connection:
            ((first_kept,),) = connection.execute(reconciliation_sql.FIRST_KEPT, given)
        if first_kept is not None and first_kept < end:
            return 0
    return now_ms - (consumer.keep_days or _LEAST_DAYS) * ids.DAY_MS
