"""Load consumers by name, and run, drain or inspect them: for the commands and for Dagster.

Invariants:
- An inspection joins no group and commits no offset: the running consumer is not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from outbox_pipelines.consumer.consumer import AsyncConsumer, Consumer
from outbox_pipelines.consumer.errors import UnreadableError
from outbox_pipelines.consumer.figures import Counts
from outbox_pipelines.consumer.inbox import Backlog
from outbox_pipelines.consumer.kafka_clients import CLIENT_LOG
from outbox_pipelines.core.named_object import load_object
from outbox_pipelines.core.topic_ends import read_to_ends
from outbox_pipelines.errors import SetupError

AnyConsumer = Consumer | AsyncConsumer
SAMPLE: Final = 1000
_SECONDS: Final = 10.0
_ALIKE: Final = 0.7


def load(name: str) -> AnyConsumer:
    """Return the consumer of that name.

    Raises:
        SetupError: the consumer does not exist.
    """
    parts(name)
    found = load_object(name)
    if not isinstance(found, AnyConsumer):
        raise SetupError(f"{name} is a {type(found).__name__}: give a Consumer or AsyncConsumer")
    return found


def parts(name: str) -> tuple[str, str]:
    """Return the module and its attribute in the name of a consumer; raise `SetupError` if it is no name."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise SetupError(
            f"{name!r} is not a consumer: write module:name, for example billing.events:consumer"
        )
    return module, attribute


def run(consumer: AnyConsumer, how: Literal["run", "receive"]) -> Counts:
    """Run a consumer until SIGTERM or SIGINT."""
    if isinstance(consumer, AsyncConsumer):
        return asyncio.run(consumer.run() if how == "run" else consumer.receive())
    return consumer.run() if how == "run" else consumer.receive()


def drain(consumer: AnyConsumer, *, until_empty: bool, seconds: float | None = None) -> Counts:
    """Drain until SIGTERM or SIGINT, until nothing is due if requested, or for this many seconds."""
    if isinstance(consumer, AsyncConsumer):
        return asyncio.run(_drain(consumer, until_empty, seconds))
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set) if seconds is not None else None
    if timer is not None:
        timer.start()
    try:
        return consumer.drain(stop, until_empty=until_empty)
    finally:
        if timer is not None:
            timer.cancel()


def backlog(consumer: AnyConsumer) -> tuple[Backlog, bool]:
    """Return the backlog of a consumer's inbox, and whether an event in it is due."""
    if isinstance(consumer, AsyncConsumer):
        return asyncio.run(consumer.backlog())
    return consumer.backlog()


async def _drain(consumer: AsyncConsumer, until_empty: bool, seconds: float | None) -> Counts:
    stop = asyncio.Event()
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, stop.set)
    return await consumer.drain(stop, until_empty=until_empty)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What Kafka has for a consumer."""

    behind: dict[str, int] = field(default_factory=dict)
    """Offsets of each topic from its first message that is not handled to its end."""
    sampled: int = 0
    """Number of the newest messages that were read."""
    types: dict[str, int] = field(default_factory=dict)
    """Number of these messages by type."""
    passed_over: list[str] = field(default_factory=list)
    """Types without a handler."""
    unmatched: dict[str, str | None] = field(default_factory=dict)
    """Types with a handler but without messages, each with a similar type that has no handler."""


def inspect(consumer: AnyConsumer) -> Inspection:
    """Ask Kafka.

    Raises:
        SetupError: Kafka cannot be reached, or denies access.
    """
    given = {name: value for name, value in consumer._kafka.items() if name != "group.instance.id"}
    settings = {**given, "enable.partition.eof": True}
    try:
        with closing(confluent_kafka.Consumer(settings, logger=CLIENT_LOG)) as client:
            return _inspected(consumer, client)
    except KafkaException as error:
        brokers = settings["bootstrap.servers"]
        raise SetupError(f"Kafka ({brokers}) is unavailable: {error.args[0].str()}") from None


def _inspected(consumer: AnyConsumer, client: confluent_kafka.Consumer) -> Inspection:
    known = client.list_topics(timeout=_SECONDS).topics
    partitions = [
        TopicPartition(name, partition)
        for name, topic in sorted(known.items())
        if any(re.match(each, name) if each.startswith("^") else each == name for each in consumer._topics)
        for partition in topic.partitions
    ]
    behind: Counter[str] = Counter()
    starts, waiting = [], []
    for at in client.committed(partitions, timeout=_SECONDS) if partitions else []:
        low, high = client.get_watermark_offsets(at, timeout=_SECONDS)
        begin = max(low, at.offset)
        behind[at.topic] += max(0, high - begin)
        if high > begin:
            waiting.append(TopicPartition(at.topic, at.partition, begin))
        if high > low:
            starts.append(
                TopicPartition(at.topic, at.partition, max(low, high - SAMPLE // len(partitions) - 1))
            )
    for topic, offsets in _without_messages(client, waiting):
        behind[topic] -= offsets
    types: Counter[str] = Counter(_types(consumer, client, starts))
    passed_over = [each for each in types if consumer.handler(each) is None]
    unmatched = {
        each: next(iter(difflib.get_close_matches(each, passed_over, 1, _ALIKE)), None)
        for each in consumer.types
        if types and each not in types
    }
    return Inspection(dict(behind), types.total(), dict(types.most_common()), passed_over, unmatched)


def _without_messages(
    client: confluent_kafka.Consumer, waiting: list[TopicPartition]
) -> Iterator[tuple[str, int]]:
    """How many offsets of each partition come before its next message; some seconds at most.

    The end of a transaction takes an offset, and what was aborted or compacted away took some: a consumer
    that has handled everything would seem to be behind.
    """
    begins = {(at.topic, at.partition): at.offset for at in waiting}
    client.assign(waiting)
    deadline = time.monotonic() + _SECONDS
    while begins and time.monotonic() < deadline:
        found: list[Any] = client.consume(1, 0.2)
        for message in found:
            error, partition = message.error(), (message.topic(), message.partition())
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
            if partition in begins:
                # At the end of a partition, this is the end's offset.
                yield partition[0], message.offset() - begins.pop(partition)
                client.incremental_unassign([TopicPartition(*partition)])
    client.unassign()


def _types(
    consumer: AnyConsumer, client: confluent_kafka.Consumer, starts: list[TopicPartition]
) -> Iterator[str]:
    """Those of the messages from there to the ends, for some seconds at most."""
    deadline = time.monotonic() + _SECONDS
    for messages in read_to_ends(client, starts, at_once=SAMPLE, seconds=0.2):
        for message in messages:
            with contextlib.suppress(UnreadableError):
                yield consumer._reader.read(message).type
        if time.monotonic() > deadline:
            return
