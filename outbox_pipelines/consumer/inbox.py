"""The inbox: messages that wait in the database, in order for each key.

Invariants:
- A message is recorded as processed and put here in one transaction: it comes once.
- The first message of a key is handled, those behind it wait; other keys do not.
- An attempt is committed before it begins, so that one that ends the process counts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer.consumer_database import Database
from outbox_pipelines.consumer.errors import readable
from outbox_pipelines.consumer.event_reading import Event
from outbox_pipelines.consumer.kafka_messages import headers_of, sent_at

LONGEST_SECONDS: Final = 300.0
HEADS_AT_ONCE: Final = 100


@dataclass(frozen=True, slots=True)
class Paused:
    """An event type whose handler is paused, as far as the attempts at waiting messages tell."""

    event_type: str
    seconds: float
    """For how long."""
    next_seconds: float
    """Until the next try, at the latest."""
    error: str | None
    """Of the last try that has ended."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """The backlog of the inbox of a source."""

    source: str
    waiting: int
    """Messages that wait to be handled; counting stops at 100,000."""
    dead_letters: int
    """Counting stops at 100,000."""
    oldest_seconds: float | None
    """The age of the oldest waiting message."""
    paused: tuple[Paused, ...] = ()
    """The handler that has been paused longest comes first."""

    @staticmethod
    def of(source: str, waiting: int, dead_letters: int, seconds: Any, paused: str) -> Backlog:
        age = None if seconds is None else float(seconds)
        handlers = tuple(Paused(*each) for each in json.loads(paused))
        return Backlog(source, waiting, dead_letters, age, handlers)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A due message, the first of its key."""

    seq: int
    attempts: int
    """Attempts begun so far."""
    event_type: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A message of the inbox, with the interface of Kafka's client."""

    _topic: str
    _partition: int
    _offset: int
    _key: bytes | None
    _value: bytes | None
    _headers: str
    _sent_at: datetime
    message_id: str = ""
    """The id of its row, as text; only that of a claimed message is known."""

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[tuple[str, bytes | None]]:
        pairs = json.loads(self._headers)
        return [(name, None if text is None else _bytes(text)) for name, text in pairs]

    def timestamp(self) -> tuple[int, int]:
        return (1, round(self._sent_at.timestamp() * 1000))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message to be written to the inbox."""

    message_id: UUID
    key: str
    event_type: str
    message: Any
    sent_at: datetime
    content: UUID | None = None
    kept_id: UUID | None = None
    """The id of its row, if it is not the one to be recorded."""

    @staticmethod
    def of(event: Event, message_id: UUID, message: Any, content: UUID | None = None) -> Arrival:
        return Arrival(
            message_id, key_of(event, str(message_id)), event.type, message, event.timestamp, content
        )

    @staticmethod
    def of_no_event(message_id: UUID, message: Any, *, kept_id: UUID | None = None) -> Arrival:
        """Return an arrival with its own key: it neither blocks nor waits for other messages."""
        return Arrival(message_id, str(message_id), "", message, sent_at(message), kept_id=kept_id)


class Inbox:
    """The inbox of one source.

    Args:
        blocks: whether a dead letter blocks the later messages of its key.
        retry_seconds: seconds until the second attempt, doubled for each later one, at most 5 minutes.
    """

    def __init__(self, database: Database, source: str, *, blocks: bool, retry_seconds: float) -> None:
        self._database = database
        self._same = {"source": source, "block": blocks}
        self._retry_seconds = retry_seconds

    async def receive(
        self,
        arrivals: Sequence[Arrival],
        *,
        attempts: int = 0,
        error: str | None = None,
        dead: bool = False,
        pause: float | None = None,
    ) -> dict[UUID, int]:
        """Put in what is new, in one transaction; return where the new messages are.

        Args:
            pause: seconds until their paused handler is tried again; None: it is not paused.
        """
        messages = [arrival.message for arrival in arrivals]
        parameters = {
            **self._same,
            "ids": [str(arrival.message_id) for arrival in arrivals],
            "topics": [str(message.topic()) for message in messages],
            "partitions": [message.partition() for message in messages],
            "offsets": [message.offset() for message in messages],
            "keys": [arrival.key for arrival in arrivals],
            "types": [readable(arrival.event_type) for arrival in arrivals],
            "message_keys": [_raw(message.key()) for message in messages],
            "payloads": [_raw(message.value()) for message in messages],
            "headers": [_headers(message) for message in messages],
            "sent_at": [arrival.sent_at for arrival in arrivals],
            "contents": [text_of(arrival.content) for arrival in arrivals],
            "kept_ids": [str(arrival.kept_id or arrival.message_id) for arrival in arrivals],
            "state": "failed" if dead else "waiting",
            "attempts": attempts,
            "seconds": self.seconds(attempts) if attempts else pause or 0.0,
            "error": error,
            "paused": pause is not None,
        }
        async with self._database.transaction() as transaction:
            rows = await self._database.rows(transaction, queries.RECEIVE, parameters)
        return {UUID(message_id): seq for seq, message_id in rows}

    async def heads(
        self, held: Sequence[str] = (), named: Sequence[str] = (), *, other_held: bool = False
    ) -> list[Waiting]:
        """Return due messages, one of each key; what has been due longest comes first.

        Args:
            held: not of these types.
            named: types that have a handler of their own.
            other_held: none of all other types either.
        """
        given = {**self._same, "limit": HEADS_AT_ONCE, "other_held": other_held}
        given |= {"held": [readable(each) for each in held], "named": [readable(each) for each in named]}
        return [Waiting(*row) for row in await self._read(queries.HEADS, given)]

    async def backlog(self) -> Backlog:
        """Return the backlog."""
        [row] = await self._read(queries.STATUS, {"source": self._same["source"]})
        return Backlog.of(*row)

    async def next(self, after: int) -> Waiting | None:
        """Return the due message behind a settled one."""
        rows = await self._read(queries.NEXT, {"seq": after})
        return Waiting(*rows[0]) if rows else None

    async def claim(self, waiting: Waiting) -> Stored | None:
        """Begin an attempt; return None if another process has the message or an earlier one is waiting."""
        given = {
            **self._same,
            "seq": waiting.seq,
            "attempts": waiting.attempts,
            "seconds": self.seconds(waiting.attempts + 1),
        }
        rows = await self._read(queries.CLAIM, given)
        if not rows:
            return None
        return _stored(rows[0])

    async def read(self, waiting: Waiting) -> tuple[Stored, str] | None:
        """Return a message and its last error; None if it must not become a dead letter."""
        rows = await self._read(queries.READ, {"seq": waiting.seq, "attempts": waiting.attempts})
        if not rows:
            return None
        error, *row = rows[0]
        return _stored(row), error

    async def finish(self, transaction: Any, seq: int, attempts: int) -> str:
        """Settle a message in the transaction in which its handler then runs.

        Args:
            attempts: attempts begun so far, including this one.

        Returns:
            When the transaction began; empty if this process must not handle the message.
        """
        rows = await self._database.rows(transaction, queries.FINISH, {"seq": seq, "attempts": attempts})
        return str(rows[0][0]) if rows else ""

    async def spoilt(self, seq: int, message_id: str, error: str) -> None:
        """Make a dead letter of a message that was settled although its handler failed.

        Args:
            message_id: the id that was recorded.
        """
        await self._read(queries.SPOILT, {"seq": seq, "id": message_id, "error": error})

    async def take_back(self, seqs: Sequence[int], pause: float) -> None:
        """Take back attempts that were counted before an outage was detected.

        Args:
            pause: seconds until the handler is tried again.
        """
        await self._read(queries.TAKE_BACK, {"seqs": list(seqs), "seconds": pause})

    async def hurry(self, seqs: Sequence[int]) -> None:
        """Make messages due immediately."""
        await self._read(queries.HURRY, {"seqs": list(seqs)})

    async def missed(
        self, seq: int, attempts: int, error: str, *, dead: bool, pause: float | None = None
    ) -> None:
        """Record a failed attempt; schedule another, or make the message a dead letter.

        Args:
            pause: seconds until the paused handler is tried again; the attempt does not count then.
        """
        given = {
            "back": 0 if pause is None else 1,
            "seq": seq,
            "attempts": attempts,
            "state": "failed" if dead else "waiting",
            "error": error,
            "seconds": self.seconds(attempts) if pause is None else pause,
        }
        await self._read(queries.MISSED, given)

    def seconds(self, attempts: int) -> float:
        """Return the pause between the starts of two attempts."""
        # Random, so that events that failed together are not retried together.
        jitter = 0.8 + 0.4 * random.random()
        return min(LONGEST_SECONDS, self._retry_seconds * 2.0 ** min(attempts - 1, 20)) * jitter

    async def _read(self, query: str, given: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        async with self._database.transaction() as transaction:
            return await self._database.rows(transaction, query, given)


def _stored(row: Sequence[Any]) -> Stored:
    topic, partition, offset, key, value, *others = row
    return Stored(topic, partition, offset, _raw(key), _raw(value), *others)


def key_of(event: Event, message_id: str) -> str:
    """Return the ordering key: the aggregate within the topic, or the message alone if it has none."""
    return message_id if event.aggregate_id is None else readable(event.aggregate_id)


def text_of(content: UUID | None) -> str:
    """Encode a value for a list of texts, because not every driver supports NULL there."""
    return "" if content is None else str(content)


def array(texts: Sequence[str]) -> str:
    """Return PostgreSQL's text of an array: drivers take much longer to convert a list."""
    text = '","'.join(texts)
    # Quotes other than those between two texts.
    if "\\" in text or text.count('"') > 2 * (len(texts) - 1):
        text = '","'.join(each.replace("\\", "\\\\").replace('"', '\\"') for each in texts)
    return '{"' + text + '"}' if texts else "{}"


def _headers(message: Any) -> str:
    pairs = [(name, None if raw is None else _text(raw)) for name, raw in headers_of(message)]
    return json.dumps(pairs)


def _text(raw: str | bytes) -> str:
    return raw.decode(errors="surrogateescape") if isinstance(raw, bytes) else raw


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _raw(value: str | bytes | memoryview | None) -> bytes | None:
    return None if value is None else _bytes(value) if isinstance(value, str) else bytes(value)
