"""What another program that reads a slot has not published, as a position: to continue where it has stopped.

Invariants:
- The slot is only read. Nothing is confirmed, so the other program can continue as well.
- The position covers what is committed, but for the transactions that the slot would deliver again and that
  are not in their topics: Debezium leaves its last transaction unconfirmed, and more if it was killed.
- A transaction counts as published only if each of its events was found in its topic, by its id.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, Final, cast

import psycopg
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from outbox_pipelines.config import parsed
from outbox_pipelines.config.rules import Router
from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.topic_ends import read_to_ends
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.kafka.client import LOG, consumer_config
from outbox_pipelines.relay.read.slot import pgoutput, slot_sql
from outbox_pipelines.relay.read.slot.stream import InUseError, SlotLostError, Stream, borrowed
from outbox_pipelines.settings import MessageSettings, OutboxSettings

_WAIT_SECONDS: Final = 1.0
# Clocks of the database and of those who publish differ.
_SLACK_MS: Final = 60_000
_SECONDS: Final = 30.0


def position_behind(
    settings: MessageSettings,
    connection: Connection,
    slot: str,
    *,
    seconds: float,
) -> Snapshot:
    """Return the snapshot that sees everything committed now, except what the program has not published.

    Args:
        seconds: how long to wait for the end of a session that reads the slot.

    Raises:
        UnavailableError: Kafka does not answer.
        SetupError: the slot cannot be read: it is missing, in use, or has no publication of the outbox.
    """
    now = connection.execute(relay_sql.SNAPSHOT).fetchone()
    open_from = connection.execute(relay_sql.OPEN_FROM).fetchone()
    assert now is not None
    assert open_from is not None
    snapshot = Snapshot.parse(now[0])
    found = connection.execute(slot_sql.EXISTING_SLOT, {"slot": slot}).fetchone()
    behind = {tx for tx in _delivered(settings, connection, slot, found, seconds) if snapshot.sees(tx)}
    if behind:
        behind -= published(settings, connection, behind, open_from=open_from[0])
    missing = tuple(sorted({*snapshot.xip, *behind}))
    return Snapshot(missing[0] if missing else snapshot.xmax, snapshot.xmax, missing)


def _delivered(
    settings: OutboxSettings,
    connection: Connection,
    slot: str,
    found: tuple[Any, ...] | None,
    seconds: float,
) -> set[int]:
    """The transactions with events that the slot delivers up to now."""
    if found is None or found[0] != connection.info.dbname:
        raise SetupError(f"this database has no slot {slot!r}: see SELECT * FROM pg_replication_slots")
    if found[1] != "pgoutput":
        raise SetupError(f"the slot {slot} is read by the plugin {found[1]}: only pgoutput can be continued")
    publication = connection.execute(slot_sql.OLDEST_PUBLICATION).fetchone()
    if publication is None:
        raise SetupError("no publication has the table outbox: which program reads the slot?")
    end = connection.execute(slot_sql.END_OF_LOG).fetchone()
    assert end is not None
    name = "outbox relay: start"
    try:
        with borrowed(settings, connection, slot, publication[0], name=name, seconds=seconds) as (stream, _):
            return _read(stream, end[0])
    except InUseError as error:
        raise SetupError(
            f"{error} still reads the slot {slot}: stop the program that reads it first"
        ) from None
    except (psycopg.Error, SlotLostError) as error:
        raise SetupError(f"the slot {slot} cannot be read: {first_line(error)}") from None


def _read(stream: Stream, end: int) -> set[int]:
    """The transactions with events that the slot delivers up to a position in the log."""
    decoder = pgoutput.Decoder(with_time=False)
    found: set[int] = set()
    position = 0
    while max(position, stream.position) < end:
        message = stream.receive()
        if message is None:
            # From the begin: only a sign of life.
            stream.confirm(0)
            stream.wait(_WAIT_SECONDS)
        elif message[0] == pgoutput.RELATION:
            decoder.relation(message, is_strict=False)
        elif message[0] == pgoutput.INSERT and decoder.knows(message):
            found.add(int(decoder.row(message, 0)[1]))
        elif message[0] == pgoutput.COMMIT:
            position = pgoutput.end_of_commit(message)
    return found


def published(
    settings: MessageSettings, connection: Connection, transactions: Collection[int], *, open_from: str
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
    for tx, event_id, aggregate_type, event_type, created in connection.execute(slot_sql.IDS, given):
        wanted[router.topic_or_empty(aggregate_type, event_type)].add(event_id)
        ids[tx].add(event_id)
        since = created if since is None else min(since, created)
    found: set[str] = set()
    for topic, here in wanted.items():
        if topic and since is not None:
            found |= found_in(settings, topic, here, since)
    return {tx for tx, events in ids.items() if events <= found}


def found_in(
    settings: MessageSettings,
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
