"""Publishes pieces to Kafka and reports which are acknowledged.

Invariants:
- One idempotent producer, acks=all, gapless, no expiry: what is acknowledged of an aggregate is a prefix of
  what was sent of it.
- A piece is complete when every event of it is acknowledged; nothing is said of it before.
- Everything here runs in one thread: delivery reports are served by `poll`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from outbox_pipelines.errors import SetupError
from outbox_pipelines.event import Event, Piece
from outbox_pipelines.relay.encoding import Encode, Encoder, EncodingError
from outbox_pipelines.relay.position import Position
from outbox_pipelines.relay.routing import IllegalTopicError, Router
from outbox_pipelines.relay.topics import Topics
from outbox_pipelines.settings import Settings

# Without any of these the guarantees do not hold; a file of settings may not change them.
_FIXED: dict[str, Any] = {
    "acks": "all",
    "enable.idempotence": True,
    "enable.gapless.guarantee": True,
    # An expired message would be overtaken by the next one of its key.
    "message.timeout.ms": 0,
    # As Java's producers and Debezium place keys; librdkafka's own way agrees on 1 key in 9.
    "partitioner": "murmur2_random",
}
_DEFAULTS: dict[str, Any] = {
    "compression.type": "lz4",
    "linger.ms": 5,
    "batch.num.messages": 10_000,
    "queue.buffering.max.messages": 100_000,
    "queue.buffering.max.kbytes": 65_536,
    # The broker and the topic decide what is too large, not the client.
    "message.max.bytes": 16_000_000,
    "reconnect.backoff.max.ms": 1_000,
    "socket.keepalive.enable": True,
}
# What happens to the messages around a refused one.
_CONSEQUENCES = frozenset(
    {
        KafkaError._PURGE_QUEUE,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._GAPLESS_GUARANTEE,
        KafkaError._FATAL,
    }
)
# What the client logs is for people who ask for it; what they must know is raised.
_LOG = logging.getLogger(__name__)
_LOG.addHandler(logging.NullHandler())
# On their way at once: enough that the broker never waits, few enough that memory stays small.
_MOST_EVENTS = 30_000
_MOST_CHARACTERS = 32_000_000
_LAST_REPORTS_SECONDS = 5.0
# Reports are served after so many messages: often enough to keep memory flat, seldom enough to be free.
_POLL_EVERY = 1000


class RejectedError(Exception):
    """Kafka refused an event, now and for ever; the message names the event and the reason."""


class Publisher:
    """A producer that publishes pieces in order."""

    def __init__(self, settings: Settings) -> None:
        self._brokers = settings.require_kafka()
        self._router = Router(settings)
        self._encoder = Encoder(settings)
        self._trouble = ""
        self._failed = False
        # The topic of each kind of event that was published already.
        self._names: dict[tuple[str, str], str] = {}
        self._unacknowledged: deque[_Delivery] = deque()
        self._pending_events = 0
        self._pending_size = 0
        given = read_config(settings.kafka_config)
        self._topics = Topics(settings, given)
        try:
            self._producer = Producer(
                _DEFAULTS | given | _FIXED | {"bootstrap.servers": self._brokers, "error_cb": self._on_error},
                logger=_LOG,
            )
        except KafkaException as error:
            raise SetupError(f"Kafka's client refuses its settings: {error.args[0].str()}") from None

    def connect(self) -> None:
        """Waits until a broker answers.

        Raises:
            SetupError: none does, or the credentials are wrong.
        """
        self._topics.connect()

    @property
    def pending(self) -> int:
        """How many pieces are not acknowledged."""
        return len(self._unacknowledged)

    @property
    def has_room(self) -> bool:
        """Whether little enough is on its way for another piece."""
        return self._pending_events < _MOST_EVENTS and self._pending_size < _MOST_CHARACTERS

    def publish(self, piece: Piece) -> None:
        """Hands a piece to the producer; returns before it is acknowledged.

        Raises:
            RejectedError: an event can never be published; those before it have been handed over.
            SetupError: a topic is not available, or no broker answers.
        """
        delivery = _Delivery(piece, self._encoder.encode)
        self._unacknowledged.append(delivery)
        self._pending_events += len(piece.events)
        self._pending_size += piece.size
        for start in range(0, len(piece.events), _POLL_EVERY):
            self._send(piece.events[start : start + _POLL_EVERY], delivery)
            self.poll(0)

    def _send(self, events: list[Event], delivery: _Delivery) -> None:
        # The hot loop: what is looked up here is looked up 200,000 times a second.
        produce, report, names = self._producer.produce, delivery.report, self._names
        encode = self._encoder.encode
        for event in events:
            try:
                topic = names.get((event.aggregate_type, event.event_type)) or self._topic(event)
                value, headers = encode(event)
                while True:
                    try:
                        produce(topic, value, event.aggregate_id, on_delivery=report, headers=headers)
                        break
                    except BufferError:
                        self.poll(0.05)
            except (SetupError, RejectedError):
                delivery.cut(event)
                raise
            except (IllegalTopicError, EncodingError, KafkaException) as error:
                delivery.cut(event)
                self._raise_refusals((event, error))

    def poll(self, seconds: float, *, linger: bool = True) -> None:
        """Serves delivery reports, waiting up to `seconds` for the first.

        Args:
            linger: False where nothing else is about to be published: then the client sends at once what it
                would hold back for a fuller batch.

        Raises:
            RejectedError: Kafka refused an event.
            SetupError: Kafka's client cannot go on.
        """
        self._topics.refresh()
        self._serve(seconds, linger=linger)
        if self._failed or any(delivery.refused for delivery in self._unacknowledged):
            self._raise_refusals()

    def acknowledged(self) -> list[Piece]:
        """The pieces that became complete since the last call, in order."""
        complete = []
        while self._unacknowledged and not self._unacknowledged[0].left:
            piece = self._unacknowledged.popleft().piece
            self._pending_events -= len(piece.events)
            self._pending_size -= piece.size
            complete.append(piece)
        return complete

    def acknowledged_in_part(self) -> tuple[Position, int, int | None] | None:
        """After a rejection: how far the first incomplete piece is published, with the number of its
        events until there and the last one's seq; None where that is not known."""
        return self._unacknowledged[0].published() if self._unacknowledged else None

    def flush(self, seconds: float) -> None:
        """Waits until nothing is on its way, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while len(self._producer) and time.monotonic() < deadline:
            self._serve(0.05)

    def discard(self) -> None:
        """Drops what is not acknowledged: no position covers it, so it is read again."""
        self._producer.purge()
        self.flush(1.0)
        self._unacknowledged.clear()
        self._pending_events = self._pending_size = 0

    def _serve(self, seconds: float, *, linger: bool = True) -> None:
        """`poll` of a producer that may have failed for good: it raises then, yet goes on reporting."""
        try:
            if linger:
                self._producer.poll(seconds)
            else:
                self._producer.flush(seconds)
        except KafkaException as error:
            self._failed = True
            self._trouble = error.args[0].str()

    def _on_error(self, error: KafkaError) -> None:
        self._trouble = error.str()

    def _topic(self, event: Event) -> str:
        """Where the first event of its kind goes."""
        topic = self._topics.find(self._router.topic(event.aggregate_type, event.event_type)).name
        self._names[event.aggregate_type, event.event_type] = topic
        return topic

    def _raise_refusals(self, local: tuple[Event, Exception] | None = None) -> NoReturn:
        """Waits for the last reports, then says which event was refused, and why.

        A refusal by the broker ends the producer, and `produce` then raises for the next event, an innocent
        one: so the reports come first.
        """
        self.flush(_LAST_REPORTS_SECONDS)
        refused = [refusal for delivery in self._unacknowledged for refusal in delivery.refused]
        causes = [refusal for refusal in refused if refusal[1].code() not in _CONSEQUENCES]
        if causes:
            too_large = [r for r in causes if r[1].code() == KafkaError.MSG_SIZE_TOO_LARGE]
            # The broker refuses a batch, not an event: of one that is too large, the largest is to blame.
            event, error = max(too_large, key=lambda r: len(r[0].payload)) if too_large else causes[0]
            mates = f" (its batch held {len(causes) - 1} more)" if len(causes) > 1 else ""
            raise RejectedError(f"{event} was refused: {error.str()}{mates}; nothing after it was sent")
        if local is not None and not self._failed:
            event, reason = local
            raise RejectedError(f"{event} was refused: {_reason(reason)}; nothing after it was sent")
        raise SetupError(f"Kafka's client gave up: {self._trouble}")


def _reason(error: Exception) -> str:
    return str(error.args[0].str()) if isinstance(error, KafkaException) else str(error)


class _Delivery:
    """A piece on its way: how many of its events are not acknowledged, and which were refused."""

    __slots__ = ("_encode", "_indices", "left", "piece", "refused", "unsent")

    def __init__(self, piece: Piece, encode: Encode) -> None:
        self.piece = piece
        self._encode = encode
        self.left = len(piece.events)
        self.unsent: list[Event] = []
        self.refused: list[tuple[Event, KafkaError]] = []
        self._indices: dict[tuple[bytes | None, bytes | None], deque[Event]] = {}

    def cut(self, event: Event) -> None:
        """This event, or at least all behind it, were not handed over."""
        self.unsent = self.piece.events[self.piece.events.index(event) :]

    def published(self) -> tuple[Position, int, int | None] | None:
        """How far the piece is published, where something of it never will be."""
        lost = {event.seq for event in self.unsent} | {event.seq for event, _ in self.refused}
        if not lost or self.left > len(lost):
            return None
        first = min(lost)
        before = [event.seq for event in self.piece.events if event.seq < first]
        return self.piece.before(first), len(before), before[-1] if before else None

    def report(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.left -= 1
        else:
            self.refused.append((self._find(message), error))

    def _find(self, message: Message) -> Event:
        """The event of a report, which carries key and value only. Equal ones are reported in order."""
        if not self._indices:
            for event in self.piece.events:
                with suppress(EncodingError):  # never sent
                    value, _ = self._encode(event)
                    content = (event.aggregate_id.encode(), None if value is None else value.encode())
                    self._indices.setdefault(content, deque()).append(event)
        same = self._indices[message.key(), message.value()]
        return same.popleft() if len(same) > 1 else same[0]


def read_config(path: Path | None) -> dict[str, Any]:
    """The lines ``name=value`` of the user's librdkafka settings; blank lines and # are passed over."""
    if path is None:
        return {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise SetupError(f"OUTBOX_KAFKA_CONFIG: {error}: name a file of lines name=value") from None
    config: dict[str, Any] = {}
    for line in filter(None, (line.strip() for line in lines)):
        if line.startswith("#"):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not name:
            raise SetupError(f"OUTBOX_KAFKA_CONFIG: {path} has the line {line!r}: write name=value")
        if name in _FIXED:
            raise SetupError(f"OUTBOX_KAFKA_CONFIG: the relay sets {name} itself: remove it from {path}")
        config[name] = value
    return config
