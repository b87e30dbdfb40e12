"""Read the topics of the day's events: the id and the place of each message, and what can be absent.

Invariants:
- The end is read after the events: every published event is before it.
- An event that a topic has deleted, compacted or not yet committed is not reported as missing.
- Messages of replays are passed over: the first publication of an event is compared.
- No offset is committed and no group is joined: consumers are not affected.
- Memory usage is what Kafka's client has fetched, and a few thousand ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec

from outbox_pipelines.config import parsed
from outbox_pipelines.config.message_names import REPLAY_ID
from outbox_pipelines.config.rules import Router
from outbox_pipelines.config.topics import IllegalTopicError
from outbox_pipelines.consumer.kafka_messages import headers_of, sent_ms
from outbox_pipelines.core.text import counted
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.relay.kafka import client
from outbox_pipelines.settings import MessageSettings, OutboxSettings, RelaySettings

# Untyped there.
_FIRST: Final[Any] = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LAST: Final[Any] = OffsetSpec.latest()  # type: ignore[no-untyped-call]
_SECONDS: Final = 15.0
# Allowed difference between the clocks of relay and database.
SLACK_MS: Final = 600_000
# Longer than the broker's timeout for the transaction of a crashed relay.
_HELD_SECONDS: Final = 10.0
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


@dataclass(slots=True)
class Part:
    """A partition to be read from `start` up to but excluding `end`."""

    start: int
    end: int
    is_cut: bool
    """Whether messages before `start` were deleted."""


@dataclass(slots=True)
class Topic:
    """A topic to be read."""

    number: int
    name: str
    parts: dict[int, Part] = field(default_factory=dict)
    """By the number of the partition."""
    doubt: str | None = None
    """Why an event can be absent without being lost."""


def route(settings: MessageSettings, kinds: Sequence[tuple[int, str, str]]) -> dict[int, str]:
    """Return the topic of each kind of event (number, aggregate type, event type) that has a valid one."""
    router = Router(settings)
    topics: dict[int, str] = {}
    for kind, aggregate_type, event_type in kinds:
        # An event without a valid topic is never published.
        with suppress(IllegalTopicError):
            topics[kind] = router.topic(aggregate_type, event_type)
    return topics


def consumer(settings: OutboxSettings, group: str = "outbox-reconcile") -> Consumer:
    """Create a client that reads without joining a group or committing offsets.

    Raises:
        SetupError: the client rejects the settings.
    """
    own = {
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "allow.auto.create.topics": False,
        # Transaction markers occupy offsets, so the end comes from the client's event, not from counting.
        "enable.partition.eof": True,
        "queued.max.messages.kbytes": 32_768,
        "fetch.max.bytes": 16_777_216,
    }
    try:
        return Consumer({**client.consumer_config(settings), **own}, logger=client.LOG)
    except KafkaException as error:
        raise SetupError(f"Kafka's client rejects its settings: {error.args[0].str()}") from None


def find(
    settings: RelaySettings,
    kafka: Consumer,
    names: Sequence[str],
    day_ms: int,
    progress: Callable[[str], None],
) -> list[Topic]:
    """Return the topics that exist, and those that do not: without partitions.

    Args:
        day_ms: the start of the day.

    Raises:
        UnavailableError: no broker answers.
        SetupError: no permission to read a topic.
    """
    admin = AdminClient(client.consumer_config(settings), logger=client.LOG)
    found = []
    for number, name in enumerate(sorted(names), 1):
        partitions = _partitions(settings, kafka, name)
        topic = Topic(number, name)
        found.append(topic)
        if not partitions:
            continue
        first = _offsets(settings, admin, partitions, _FIRST)
        since = _offsets(settings, admin, partitions, OffsetSpec.for_timestamp(day_ms - SLACK_MS))
        ends, is_held = _ends(settings, admin, partitions, progress)
        for each in partitions:
            partition = each.partition
            start = since[partition] if since[partition] >= 0 else ends[partition]
            # No message is older than the first remaining one: it is unknown whether there were others.
            is_cut = first[partition] > 0 and start <= first[partition]
            topic.parts[partition] = Part(max(start, first[partition]), ends[partition], is_cut)
        if is_held:
            topic.doubt = "an open transaction delays the end of the topic"
        if _is_compacted(admin, name):
            topic.doubt = "the topic is compacted"
    return found


def partitions(settings: OutboxSettings, kafka: Consumer) -> dict[str, list[int]]:
    """Return the partitions of each topic that the role sees.

    Raises:
        UnavailableError: no broker answers.
    """
    try:
        topics = kafka.list_topics(timeout=_SECONDS).topics
    except KafkaException as error:
        raise _no_answer(settings, error) from None
    return {name: sorted(each.partitions) for name, each in topics.items() if each.error is None}


def spans(
    settings: RelaySettings, topics: Mapping[str, Sequence[int]], day_ms: int
) -> dict[str, dict[int, tuple[int, int, int]]]:
    """Return of topics with messages since a day, by partition: the first offset, that of the day, the end.

    A partition that does not answer is left out.
    """
    places = [TopicPartition(name, number) for name, numbers in topics.items() for number in numbers]
    if not places:
        return {}
    admin = AdminClient(client.consumer_config(settings), logger=client.LOG)
    answers = [
        admin.list_offsets(dict.fromkeys(places, spec), request_timeout=_SECONDS)
        for spec in (_FIRST, OffsetSpec.for_timestamp(day_ms - SLACK_MS), _LAST)
    ]
    found: dict[str, dict[int, tuple[int, int, int]]] = {}
    for place in places:
        with suppress(KafkaException, TimeoutError):
            first, start, end = (answer[place].result(_SECONDS + 5).offset for answer in answers)
            if 0 <= start < end:
                found.setdefault(place.topic, {})[place.partition] = (first, start, end)
    return found


def _partitions(settings: OutboxSettings, kafka: Consumer, name: str) -> list[TopicPartition]:
    try:
        found = kafka.list_topics(name, timeout=_SECONDS).topics[name]
    except KafkaException as error:
        raise _no_answer(settings, error) from None
    if found.error is None:
        return [TopicPartition(name, number) for number in sorted(found.partitions)]
    if found.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
        return []
    raise SetupError(f"topic {name} cannot be read: {found.error.str()}: grant READ and DESCRIBE on it")


def _ends(
    settings: RelaySettings,
    admin: AdminClient,
    partitions: list[TopicPartition],
    progress: Callable[[str], None],
) -> tuple[dict[int, int], bool]:
    """Return each end once all messages before it are committed, and whether that took too long."""
    ends = _offsets(settings, admin, partitions, _LAST, IsolationLevel.READ_UNCOMMITTED)
    deadline = time.monotonic() + settings.transaction_seconds + _HELD_SECONDS
    is_reported = False
    while True:
        stable = _offsets(settings, admin, partitions, _LAST, IsolationLevel.READ_COMMITTED)
        if all(stable[partition] >= end for partition, end in ends.items()):
            return ends, False
        if time.monotonic() > deadline:
            return {partition: min(end, stable[partition]) for partition, end in ends.items()}, True
        if not is_reported:
            progress(f"waiting for a transaction in {partitions[0].topic}")
            is_reported = True
        time.sleep(0.1)


def _offsets(
    settings: OutboxSettings,
    admin: AdminClient,
    partitions: list[TopicPartition],
    spec: Any,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[int, int]:
    """Return the offsets by partition; -1 if there is none."""
    asked: dict[TopicPartition, Future[Any]] = admin.list_offsets(
        dict.fromkeys(partitions, spec), isolation_level=isolation, request_timeout=_SECONDS
    )
    try:
        return {each.partition: future.result(_SECONDS + 5).offset for each, future in asked.items()}
    except (KafkaException, TimeoutError) as error:
        raise _no_answer(settings, error) from None


def _is_compacted(admin: AdminClient, name: str) -> bool:
    """Return False also if the permission to ask is missing."""
    resource = ConfigResource(ConfigResource.Type.TOPIC, name)
    try:
        config = admin.describe_configs([resource], request_timeout=_SECONDS)[resource].result(_SECONDS + 5)
    except (KafkaException, TimeoutError):
        return False
    return "compact" in config["cleanup.policy"].value


def committed(settings: OutboxSettings, group: str, partitions: list[TopicPartition]) -> list[TopicPartition]:
    """Return the committed offsets of a group; negative if it has none.

    Raises:
        UnavailableError: no broker answers.
        SetupError: no permission to describe the group.
    """
    kafka = consumer(settings, group)
    try:
        return kafka.committed(partitions, timeout=_SECONDS)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise SetupError(f"group {group} cannot be described: grant DESCRIBE on it") from None
        raise _no_answer(settings, error) from None
    finally:
        kafka.close()


def _no_answer(settings: OutboxSettings, error: BaseException) -> UnavailableError:
    reason = error.args[0].str() if isinstance(error, KafkaException) else "timeout"
    return UnavailableError(f"no broker answers at {settings.kafka} (OUTBOX_KAFKA): {reason}")


def kept_from(topic: Topic, first: FirstTimes, now_ms: int) -> int | None:
    """Return the time in ms since which the topic is complete; None if it has the whole day.

    Args:
        first: the time of the first message that was read in each partition.
        now_ms: used for a partition without messages.
    """
    cut = [
        first.get((topic.number, partition), now_ms) for partition, part in topic.parts.items() if part.is_cut
    ]
    return max(cut, default=None)


def read(
    settings: MessageSettings,
    kafka: Consumer,
    topics: Sequence[Topic],
    add: Callable[[pa.Table], None],
    progress: Callable[[str], None],
) -> tuple[int, FirstTimes]:
    """Pass all messages of these partitions to `add`; return their number and each partition's first time.

    Raises:
        UnavailableError: Kafka does not answer.
        SetupError: no permission to read a topic.
    """
    name = parsed.header_names(settings)["id"]
    parts = {(topic.name, number): part for topic in topics for number, part in topic.parts.items()}
    numbers = {topic.name: topic.number for topic in topics}
    unread = {place: part for place, part in parts.items() if part.start < part.end}
    kafka.assign([TopicPartition(topic, number, part.start) for (topic, number), part in unread.items()])
    first: FirstTimes = {}
    rows: list[tuple[Any, ...]] = []
    read, reported, heard = 0, 0, time.monotonic()
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
                read += 1
                headers = headers_of(message)
                if not any(header == REPLAY_ID for header, _ in headers):
                    rows.append((_id(headers, name), numbers[topic], partition, offset, at_ms))
            if offset >= part.end - 1:
                del unread[(topic, partition)]
                kafka.incremental_unassign([TopicPartition(topic, partition)])
        if len(rows) >= _BATCH or not unread:
            _add(add, rows)
            rows = []
        if read >= reported + 1_000_000:
            reported = read
            progress(f"{counted(read, 'message')} read")
    return read, first


def _id(headers: list[tuple[str, bytes | None]], name: str) -> bytes | None:
    # The relay's headers come first; the first header of a name is used.
    for found, value in headers:
        if found == name:
            return value
    return None


def _add(add: Callable[[pa.Table], None], rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        return
    columns = zip(*rows, strict=True)
    batch = pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)], _SCHEMA
    )
    add(batch.set_column(0, "id", _texts(batch.column("id"))))


def _texts(found: pa.ChunkedArray) -> Any:
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        # Another producer's header of that name.
        return pa.array(
            [None if id is None else id.decode(errors="replace") for id in found.to_pylist()], pa.string()
        )


def _judged(settings: OutboxSettings, topic: str | None, error: KafkaError) -> Exception:
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return SetupError(f"topic {topic} cannot be read: grant READ on it")
    if error.code() == KafkaError._AUTO_OFFSET_RESET:
        return UnavailableError(f"topic {topic} deleted messages while it was read: run the command again")
    return UnavailableError(f"Kafka at {settings.kafka} (OUTBOX_KAFKA) reports an error: {error.str()}")
