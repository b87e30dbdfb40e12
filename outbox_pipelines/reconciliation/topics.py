"""The topics that the day's events go to: from where to where they are to be read, and what they may lack.

Invariants:
- An end is taken after the events were read: whatever they say is published lies before it.
- What a topic has deleted, compacted or not yet committed is no proof that anything is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec  # type: ignore[attr-defined]

from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.parsers.topics import IllegalTopicError
from outbox_pipelines.reconciliation import queries
from outbox_pipelines.reconciliation.workspace import Workspace
from outbox_pipelines.relay.kafka import client
from outbox_pipelines.relay.kafka.routing import Router
from outbox_pipelines.settings import Settings

# Untyped there.
_FIRST: Final[Any] = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LAST: Final[Any] = OffsetSpec.latest()  # type: ignore[no-untyped-call]
_SECONDS: Final = 15.0
# The clocks of relay and database may differ by so much.
SLACK_MS: Final = 600_000
# Beyond the time after which the broker ends the transaction of a relay that died.
_HELD_SECONDS: Final = 10.0


@dataclass(slots=True)
class Part:
    """A partition to be read from `start` to before `end`."""

    start: int
    end: int
    is_cut: bool
    """Whether messages that would lie before `start` are deleted."""


@dataclass(slots=True)
class Topic:
    """A topic to be read."""

    number: int
    name: str
    parts: dict[int, Part] = field(default_factory=dict)
    doubt: str | None = None
    """Why an event that is not there may have been."""


def route(settings: Settings, space: Workspace) -> dict[str, int]:
    """Gives each kind of event its topic; the topics' numbers by name."""
    router = Router(settings)
    numbers: dict[str, int] = {}
    for kind, aggregate_type, event_type in space.rows(queries.KINDS):
        try:
            name = router.topic(aggregate_type, event_type)
        except IllegalTopicError:
            # Such an event is never published.
            continue
        if name not in numbers:
            numbers[name] = len(numbers) + 1
            space.run(queries.ADD_TOPIC, topic=numbers[name], name=name)
        space.run(queries.ROUTE, topic=numbers[name], kind=kind)
    return numbers


def consumer(settings: Settings, group: str = "outbox-reconcile") -> Consumer:
    """A client that reads without a trace.

    Raises:
        SetupError: the client refuses the settings.
    """
    own = {
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "allow.auto.create.topics": False,
        # Transactions take offsets of their own: the end is told, not counted.
        "enable.partition.eof": True,
        "queued.max.messages.kbytes": 32_768,
        "fetch.max.bytes": 16_777_216,
    }
    try:
        return Consumer({**client.consumer_config(settings), **own}, logger=client.LOG)
    except KafkaException as error:
        raise SetupError(f"Kafka's client refuses its settings: {error.args[0].str()}") from None


def find(
    settings: Settings,
    kafka: Consumer,
    numbers: dict[str, int],
    day_ms: int,
    progress: Callable[[str], None],
) -> tuple[list[Topic], list[str]]:
    """The topics that are there, and the names of those that are not.

    Args:
        day_ms: when the day begins.

    Raises:
        UnavailableError: no broker answers.
        SetupError: a topic may not be read.
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
            # Nothing older than the first that is left: whether there was anything, nobody knows.
            is_cut = first[partition] > 0 and start <= first[partition]
            topic.parts[partition] = Part(max(start, first[partition]), ends[partition], is_cut)
        if is_held:
            topic.doubt = "an open transaction holds the end of the topic back"
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
    """Where each ends now, once what is before it is committed; and whether that took too long."""
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
    """By partition; -1 where there is none."""
    asked: dict[TopicPartition, Future[Any]] = admin.list_offsets(
        dict.fromkeys(partitions, spec), isolation_level=isolation, request_timeout=_SECONDS
    )
    try:
        return {each.partition: future.result(_SECONDS + 5).offset for each, future in asked.items()}
    except (KafkaException, TimeoutError) as error:
        raise _no_answer(settings, error) from None


def _is_compacted(admin: AdminClient, name: str) -> bool:
    """False also where nobody may ask."""
    resource = ConfigResource(ConfigResource.Type.TOPIC, name)
    try:
        config = admin.describe_configs([resource], request_timeout=_SECONDS)[resource].result(_SECONDS + 5)
    except (KafkaException, TimeoutError):
        return False
    return "compact" in config["cleanup.policy"].value


def committed(settings: Settings, group: str, partitions: list[TopicPartition]) -> list[TopicPartition]:
    """How far a group has come; a negative offset where it has none.

    Raises:
        UnavailableError: no broker answers.
        SetupError: the group may not be asked about.
    """
    kafka = consumer(settings, group)
    try:
        return kafka.committed(partitions, timeout=_SECONDS)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise SetupError(f"group {group} cannot be asked about: grant DESCRIBE on it") from None
        raise _no_answer(settings, error) from None
    finally:
        kafka.close()


def _no_answer(settings: Settings, error: BaseException) -> UnavailableError:
    reason = error.args[0].str() if isinstance(error, KafkaException) else "it takes too long"
    return UnavailableError(f"no broker answers at {settings.kafka} (OUTBOX_KAFKA): {reason}")


def kept_from(topic: Topic, first_ms: dict[int, int]) -> int | None:
    """The time from which on the topic has everything; None where it has all of the day.

    Args:
        first_ms: of the first message that was read in each partition.
    """
    now = int(time.time() * 1000)
    cut = [first_ms.get(partition, now) for partition, part in topic.parts.items() if part.is_cut]
    return max(cut, default=None)
