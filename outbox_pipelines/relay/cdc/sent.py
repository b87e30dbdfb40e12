"""Which transactions are in their topics already: what a program published after it confirmed its slot last.

Invariants:
- A transaction counts as published only if each of its events was found, by its id.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Final, cast

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from outbox_pipelines.config import parsed
from outbox_pipelines.core.topic_ends import read_to_ends
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.relay.cdc import queries
from outbox_pipelines.relay.kafka.client import LOG, consumer_config
from outbox_pipelines.relay.kafka.message import Router
from outbox_pipelines.settings import Settings

# Clocks of the database and of those who publish differ.
_SLACK_MS: Final = 60_000
_SECONDS: Final = 30.0


def published(
    settings: Settings, connection: Connection, transactions: Collection[int], *, open_from: str
) -> set[int]:
    """Return those of the transactions whose events are all in their topics.

    Raises:
        UnavailableError: Kafka does not answer.
    """
    router = Router(settings)
    wanted: dict[str, set[str]] = defaultdict(set)
    ids: dict[int, set[str]] = defaultdict(set)
    since: float | None = None
    given = {"transactions": "{" + ",".join(map(str, transactions)) + "}", "open_from": open_from}
    for tx, event_id, aggregate_type, event_type, created in connection.execute(queries.IDS, given):
        wanted[router.topic_or_empty(aggregate_type, event_type)].add(event_id)
        ids[tx].add(event_id)
        since = created if since is None else min(since, created)
    found: set[str] = set()
    for topic, here in wanted.items():
        if topic and since is not None:
            found |= found_in(settings, topic, here, since)
    return {tx for tx, events in ids.items() if events <= found}


def found_in(
    settings: Settings,
    topic: str,
    wanted: set[str],
    since: float,
    stay: Callable[[], None] = lambda: None,
) -> set[str]:
    """Return those of the ids that are in a topic, in the messages of a time and later.

    Args:
        since: seconds since 1970; a minute is added for clocks that differ.
        stay: called several times a minute while the topic is read.

    Raises:
        UnavailableError: Kafka does not answer.
    """
    since_ms = int(since * 1000) - _SLACK_MS
    header = parsed.header_names(settings)["id"]
    own = {
        "group.id": uuid.uuid4().hex,
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
    }
    consumer = Consumer({**consumer_config(settings), **own}, logger=LOG)
    found: set[str] = set()
    try:
        metadata = consumer.list_topics(topic, timeout=_SECONDS).topics[topic]
        if metadata.error is not None:
            return found
        starts = [TopicPartition(topic, number, since_ms) for number in metadata.partitions]
        deadline = time.monotonic() + _SECONDS
        for messages in read_to_ends(consumer, consumer.offsets_for_times(starts, timeout=_SECONDS)):
            for message in messages:
                found |= _values(message, header) & wanted
            if len(found) == len(wanted):
                break
            stay()
            if messages:
                deadline = time.monotonic() + _SECONDS
            elif time.monotonic() > deadline:
                raise UnavailableError(f"the topic {topic} could not be read within {_SECONDS:.0f} s")
    except KafkaException as error:
        raise UnavailableError(f"the topic {topic} cannot be read: {error.args[0].str()}") from None
    finally:
        consumer.close()
    return found


def _values(message: Message, header: str) -> set[str]:
    headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
    return {(value or b"").decode(errors="replace") for name, value in headers if name == header}
