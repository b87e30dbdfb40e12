"""The independent consumer: reads the topics from beginning to end, and has each message ticked off.

Invariants:
- Each partition is read in order, up to where it ends now; nothing is committed, no group is joined.
- Transactions that were aborted are not seen, as by any consumer that relies on exactly-once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from examples.airline.ledger import Ledger, Told, Verdict
from examples.airline.place import AGGREGATES, kafka_client, topics
from outbox_pipelines.database import connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

_AT_ONCE: Final = 5000
_SILENCE_SECONDS: Final = 30.0


def verify(settings: Settings) -> Verdict:
    """Judges what the topics hold by what the airline's tables say.

    Raises:
        SetupError: the database or the topics cannot be read.
    """
    kinds = dict(zip(topics(settings), AGGREGATES, strict=True))
    with connect(settings, name="outbox demo: verification") as connection:
        ledger = Ledger(connection)
    for message in _messages(settings):
        try:
            told = _told(kinds[message.topic()], message)
        except (KeyError, TypeError, ValueError, AttributeError):
            place = f"{message.topic()} [{message.partition()}] at offset {message.offset()}"
            ledger.not_ours(f"the message in {place} is no event of the airline")
        else:
            ledger.tick_off(told)
    return ledger.close()


def _told(kind: str, message: Any) -> Told:
    """Any, because each part of a message may be absent: then it is not ours."""
    headers = dict(message.headers())
    body = json.loads(message.value())
    return Told(
        aggregate=(kind, message.key().decode()),
        event_type=headers["event-type"].decode(),
        event_id=UUID(headers["id"].decode()).bytes,
        movement=int(body["movement"]),
        flight=int(body["flight"]),
        at=datetime.fromisoformat(body["at"]),
    )


def _messages(settings: Settings) -> Iterator[Any]:
    consumer = Consumer(
        kafka_client(
            settings,
            **{
                "group.id": "outbox-demo",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                "allow.auto.create.topics": False,
                "queued.max.messages.kbytes": 16_384,
            },
        )
    )
    try:
        unfinished = {
            (topic, partition)
            for topic in topics(settings)
            for partition in consumer.list_topics(topic, timeout=_SILENCE_SECONDS).topics[topic].partitions
        }
        consumer.assign([TopicPartition(*place, 0) for place in unfinished])
        deadline = time.monotonic() + _SILENCE_SECONDS
        while unfinished:
            for message in consumer.consume(_AT_ONCE, timeout=0.1):
                deadline = time.monotonic() + _SILENCE_SECONDS
                error = message.error()
                if error is None:
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:
                    unfinished.discard((message.topic(), message.partition()))
                else:
                    raise KafkaException(error)
            if time.monotonic() > deadline:
                raise SetupError(f"Kafka has sent nothing for {_SILENCE_SECONDS:.0f} s: see its log")
    except KafkaException as error:
        raise SetupError(f"the topics cannot be read: {error.args[0].str()}") from None
    finally:
        consumer.close()
