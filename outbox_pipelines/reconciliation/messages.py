"""Read the topics from the day on: the id (a header) and the place of each message.

Invariants:
- No offset is committed and no group is joined: consumers are not affected.
- Memory usage is what Kafka's client has fetched, and a few thousand ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, TopicPartition

from outbox_pipelines.config import parsed
from outbox_pipelines.consumer.event_reading import headers_of, sent_ms
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.reconciliation import queries
from outbox_pipelines.reconciliation.topics import Topic
from outbox_pipelines.reconciliation.workspace import Workspace
from outbox_pipelines.settings import Settings

_AT_ONCE: Final = 5_000
_BATCH: Final = 100_000
_SILENT_SECONDS: Final = 60.0
_SCHEMA: Final = pa.schema(
    [
        ("id", pa.binary()),
        ("topic", pa.int32()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("at_ms", pa.int64()),
    ]
)
# Of each topic and partition.
FirstTimes = dict[tuple[int, int], int]


def load(
    settings: Settings,
    kafka: Consumer,
    topics: list[Topic],
    span: tuple[str, str],
    times: tuple[int, int],
    space: Workspace,
    progress: Callable[[str], None],
) -> tuple[int, FirstTimes]:
    """Fill `messages` and `unreadable`; return their number and the first time in each partition.

    Args:
        span: ids of version 7 from the first up to but excluding the second are kept.
        times: the start and end of the day in ms; unreadable messages of other times are ignored.

    Raises:
        UnavailableError: Kafka does not answer.
        SetupError: no permission to read a topic.
    """
    name = parsed.header_names(settings)["id"]
    parts = {(topic.name, number): part for topic in topics for number, part in topic.parts.items()}
    numbers = {topic.name: topic.number for topic in topics}
    unread = {place: part for place, part in parts.items() if part.start < part.end}
    adding = (
        queries.ADD_MESSAGES.format(first=span[0], end=span[1]),
        queries.ADD_UNREADABLE.format(start_ms=times[0], end_ms=times[1]),
    )
    kafka.assign([TopicPartition(topic, number, part.start) for (topic, number), part in unread.items()])
    first: FirstTimes = {}
    rows: list[tuple[Any, ...]] = []
    read, told, heard = 0, 0, time.monotonic()
    while unread:
        # The client's types allow None, which a message from a broker never has here.
        messages: list[Any] = kafka.consume(_AT_ONCE, timeout=0.1)
        if messages:
            heard = time.monotonic()
        elif time.monotonic() > heard + _SILENT_SECONDS:
            raise UnavailableError(f"Kafka at {settings.kafka} (OUTBOX_KAFKA) has sent nothing for a minute")
        for message in messages:
            topic, partition = message.topic(), message.partition()
            part, error = unread.get((topic, partition)), message.error()
            # An error without a topic is transient, or Kafka stops answering.
            if error is not None and error.code() != KafkaError._PARTITION_EOF and topic in numbers:
                raise _judged(settings, topic, error)
            if part is None:
                continue
            offset = part.end if error is not None else message.offset()
            if offset < part.end:
                at_ms = sent_ms(message)
                first.setdefault((numbers[topic], partition), at_ms)
                rows.append((_id(headers_of(message), name), numbers[topic], partition, offset, at_ms))
                read += 1
            if offset >= part.end - 1:
                del unread[(topic, partition)]
                kafka.incremental_unassign([TopicPartition(topic, partition)])
        if len(rows) >= _BATCH or not unread:
            _store(space, adding, rows)
            rows = []
        if read >= told + 1_000_000:
            told = read
            progress(f"{read:,} messages read")
    return read, first


def _id(headers: list[tuple[str, bytes | None]], name: str) -> bytes | None:
    # The relay's headers come first; the first header of a name is used.
    for found, value in headers:
        if found == name:
            return value
    return None


def _store(space: Workspace, adding: Iterable[str], rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        return
    columns = zip(*rows, strict=True)
    batch = pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)], _SCHEMA
    )
    batch = batch.set_column(0, "id", _texts(batch.column("id")))
    for add in adding:
        space.add(add, batch)


def _texts(found: pa.ChunkedArray) -> Any:
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        # Another producer's header of that name.
        return pa.array([None if id is None else id.decode(errors="replace") for id in found.to_pylist()])


def _judged(settings: Settings, topic: str | None, error: KafkaError) -> Exception:
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return SetupError(f"topic {topic} cannot be read: grant READ on it")
    if error.code() == KafkaError._AUTO_OFFSET_RESET:
        return UnavailableError(f"topic {topic} deleted messages while it was read: run the command again")
    return UnavailableError(f"Kafka at {settings.kafka} (OUTBOX_KAFKA) reports an error: {error.str()}")
