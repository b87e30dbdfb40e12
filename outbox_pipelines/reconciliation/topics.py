"""Find the topics of the day's events: the offsets to read, and which messages can be absent.

Invariants:
- The end is read after the events: every published event is before it.
- An event that a topic has deleted, compacted or not yet committed is not reported as missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec

from outbox_pipelines.config.topics import IllegalTopicError
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.reconciliation import queries
from outbox_pipelines.reconciliation.workspace import Workspace
from outbox_pipelines.relay.kafka import client
from outbox_pipelines.relay.kafka.routing import Router
from outbox_pipelines.settings import Settings

# Untyped there.
_FIRST: Final[Any] = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LAST: Final[Any] = OffsetSpec.latest()  # type: ignore[no-untyped-call]
_TOPICS: Final = pa.schema([("topic", pa.uint32()), ("name", pa.string())])
_ROUTES: Final = pa.schema([("kind", pa.uint32()), ("topic", pa.uint32())])
_SECONDS: Final = 15.0
# Allowed difference between the clocks of relay and database.
SLACK_MS: Final = 600_000
# Longer than the broker's timeout for the transaction of a crashed relay.
_HELD_SECONDS: Final = 10.0


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
    doubt: str | None = None
    """Why an event can be absent without being lost."""


def route(settings: Settings, space: Workspace) -> dict[str, int]:
    """Assign each kind of event its topic; return the topics' numbers by name."""
    router = Router(settings)
    numbers: dict[str, int] = {}
    routed: list[tuple[int, int]] = []
    for kind, aggregate_type, event_type in space.rows(queries.KINDS):
        try:
            name = router.topic(aggregate_type, event_type)
        except IllegalTopicError:
            # An event without a valid topic is never published.
            continue
        routed.append((kind, numbers.setdefault(name, len(numbers) + 1)))
    space.add(queries.ADD_TOPICS, pa.table({"topic": list(numbers.values()), "name": list(numbers)}, _TOPICS))
    kinds, topics = zip(*routed, strict=True) if routed else ((), ())
    space.add(queries.ROUTE, pa.table({"kind": kinds, "topic": topics}, _ROUTES))
    return numbers


def consumer(settings: Settings, group: str = "outbox-reconcile") -> Consumer:
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
    settings: Settings,
    kafka: Consumer,
    numbers: dict[str, int],
    day_ms: int,
    progress: Callable[[str], None],
) -> tuple[list[Topic], list[str]]:
    """Return the topics that exist, and the names of those that do not.

    Args:
        day_ms: the start of the day.

    Raises:
        UnavailableError: no broker answers.
        SetupError: no permission to read a topic.
    """
    admin = AdminClient(client.consumer_config(settings), logger=client.LOG)
    found, gone = [], []
    for name, number in numbers.items():
        partitions = _partitions(settings, kafka, name)
        if not partitions:
            gone.append(name)
            continue
        topic = Topic(number, name)
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
        found.append(topic)
    return found, gone


def _partitions(settings: Settings, kafka: Consumer, name: str) -> list[TopicPartition]:
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
    settings: Settings,
    admin: AdminClient,
    partitions: list[TopicPartition],
    progress: Callable[[str], None],
) -> tuple[dict[int, int], bool]:
    """Return each end once all messages before it are committed, and whether that took too long."""
    ends = _offsets(settings, admin, partitions, _LAST, IsolationLevel.READ_UNCOMMITTED)
    deadline = time.monotonic() + settings.transaction_seconds + _HELD_SECONDS
    is_told = False
    while True:
        stable = _offsets(settings, admin, partitions, _LAST, IsolationLevel.READ_COMMITTED)
        if all(stable[partition] >= end for partition, end in ends.items()):
            return ends, False
        if time.monotonic() > deadline:
            return {partition: min(end, stable[partition]) for partition, end in ends.items()}, True
        if not is_told:
            progress(f"waiting for a transaction in {partitions[0].topic}")
            is_told = True
        time.sleep(0.1)


def _offsets(
    settings: Settings,
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


def committed(settings: Settings, group: str, partitions: list[TopicPartition]) -> list[TopicPartition]:
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


def _no_answer(settings: Settings, error: BaseException) -> UnavailableError:
    reason = error.args[0].str() if isinstance(error, KafkaException) else "timeout"
    return UnavailableError(f"no broker answers at {settings.kafka} (OUTBOX_KAFKA): {reason}")


def kept_from(topic: Topic, first_ms: dict[int, int]) -> int | None:
    """Return the time since which the topic is complete; None if it has the whole day.

    Args:
        first_ms: the time of the first message that was read in each partition.
    """
    now = int(time.time() * 1000)
    cut = [first_ms.get(partition, now) for partition, part in topic.parts.items() if part.is_cut]
    return max(cut, default=None)
