"""Kafka's client as the core uses it: encode, route, produce, report.

Invariants:
- Decides of an event where it goes and what it looks like there; what becomes of it, the core says.
- A new producer begins each partition with one event of a key at a time: `core.first_acknowledgments`.
- Everything here runs in one thread: delivery reports are served by `serve` and `flush`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message

from outbox_pipelines.config.rules import Router
from outbox_pipelines.config.topics import IllegalTopicError
from outbox_pipelines.core import text
from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.core.delivery import Delivery
from outbox_pipelines.relay.core.outcomes import Cause, Refusal, ShardLostError
from outbox_pipelines.relay.core.producers import FirstAcknowledgments, Gate
from outbox_pipelines.relay.kafka import client, client_errors
from outbox_pipelines.relay.kafka.client import BatchSize
from outbox_pipelines.relay.kafka.message import Encoder, Headers, UnregisteredError, Value, is_framed
from outbox_pipelines.relay.kafka.topic_lookups import TopicLookups
from outbox_pipelines.relay.kafka.topic_state import TopicUnavailableError
from outbox_pipelines.relay.telemetry.observers import Report, observer
from outbox_pipelines.settings import ProcessSettings

if TYPE_CHECKING:
    from outbox_pipelines.relay.kafka.schema_ids import SchemaIds

# Until the last reports of a producer that has failed are in.
_LAST_REPORTS_SECONDS: Final = 5.0
# Of a batch with one record, beside key, value and headers.
_RECORD_OVERHEAD: Final = 100
# Payloads up to a topic's limit, less this, and by four for UTF-8, are not looked at twice.
_USUAL_HEADERS: Final = 2048
_UNLIMITED: Final = 1 << 60
# A client that is about to connect again answers the second time.
_MOST_UNANSWERED: Final = 3
# A broker forgets who has sent a partition nothing for producer.id.expiration.ms, a day by default.
_RENEW_SECONDS: Final = 3600.0


class IdempotentProducer:
    """One idempotent, gapless producer after another: implements `core.producers.Producer`."""

    # Whether released events may be larger than the known limit of their topic.
    doubts_released = True
    # An event that overtakes a refused one stays published: see `first_acknowledgments`.
    begins_one_by_one = True
    _renew_at = math.inf

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings
        self.schema_ids = _schema_ids(settings)
        """None if no type has a format with a schema."""
        self._encode = (
            Encoder(settings, self.schema_ids.known, self.schema_ids.versioned)
            if self.schema_ids
            else Encoder(settings)
        ).encode
        self._router = Router(settings)
        self._observe = observer(settings)
        # No event is in flight during the first look-up, so the breaker's own clock does not run.
        self._topics = TopicLookups(settings, answer_seconds=settings.breaker_seconds)
        self._routes: dict[tuple[str, str], tuple[str, int, bool]] = {}
        """By aggregate type and event type: what `_route` returns."""
        self._begun = FirstAcknowledgments()
        self._unanswered = 0
        """Probes in a row that Kafka answered, but not to this producer."""
        self._batches = BatchSize()
        self.has_failed = False
        self.trouble = ""
        self._producer = self._new()

    def connect(self) -> None:
        """Wait until a broker answers, and the schema registry if there is one.

        Raises:
            UnavailableError: one does not, or the credentials are wrong.
            SetupError: what answers is no registry.
        """
        self._topics.connect()
        if self.schema_ids is not None:
            self.schema_ids.connect()

    def prepare(self, shards: int) -> None:
        """Prepare what this number of shards needs; may be called in another thread."""

    def idle(self) -> None:
        """Serve the clients while nothing is published: their reports would accumulate."""
        self.serve(0.0, linger=True)
        self._topics.idle()

    @property
    def lookups(self) -> TopicLookups:
        """The lookups of topics, shared by everything that publishes."""
        return self._topics

    @property
    def topics(self) -> frozenset[str]:
        """Topics published to so far; each is resolved before its first event."""
        return self._topics.known

    @property
    def is_outdated(self) -> bool:
        return self._batches.is_outdated or time.monotonic() > self._renew_at

    @property
    def must_shrink(self) -> bool:
        return self._batches.must_shrink

    @property
    def in_flight(self) -> int:
        return len(self._producer)

    def refresh(self) -> None:
        if self._topics.refresh() | self._batches.turn(time.monotonic()):
            self._routes.clear()

    def send(self, delivery: Delivery, events: list[Event], gate: Gate) -> list[Event]:
        # The hot loop: 200,000 events per second.
        callback: Report
        produce, report, routes, encode = self._producer.produce, delivery.report, self._routes, self._encode
        in_flight, observe = delivery.in_flight.append, self._observe
        doubts = isinstance(delivery.batch, Batch) or self.doubts_released
        blocked = gate.blocked(delivery)
        later: list[Event] = []
        waiting: set[tuple[str, str]] = set()
        for n, event in enumerate(events):
            if (
                blocked
                and (event.aggregate_type, event.aggregate_id) in blocked
                and gate.park_behind(delivery, event)
            ):
                continue
            try:
                route = routes.get((event.aggregate_type, event.event_type))
                if route is None:
                    route = self._route(event, delivery)
                    if self._batches.must_shrink:
                        return later + events[n:]
                topic, usual, is_begun = route
                if waiting or not is_begun:
                    key = topic, event.aggregate_id
                    # The acknowledgment may come during this call: later events of the key must wait, too.
                    if key in waiting or (not is_begun and self._begun.is_awaited(*key)):
                        waiting.add(key)
                        later.append(event)
                        continue
                value, headers = encode(event)
                if len(event.payload) > usual and doubts and self._is_too_large(topic, event, value, headers):
                    gate.suspect(delivery, event, "larger than its topic accepts (before compression)")
                    continue
                callback = report if is_begun else self._begin(topic, event.aggregate_id, report)
                if observe is not None:
                    callback, headers = observe(event, topic, headers, callback)
                while True:
                    try:
                        produce(topic, value, event.aggregate_id, on_delivery=callback, headers=headers)
                        break
                    except BufferError:
                        self.serve(0.05, linger=True)
                        if self.has_failed:
                            return later + events[n:]
                in_flight(event)
                if not is_begun:
                    self._begun.sent(topic, event.aggregate_id)
            except UnavailableError as error:
                gate.unavailable(str(error))
                return later + events[n:]
            except (TopicUnavailableError, UnregisteredError) as error:
                gate.suspect(delivery, event, text.reason(str(error)))
            except KafkaException as error:
                reason: KafkaError = error.args[0]
                refusal = client_errors.refusal(reason)
                if reason.fatal() or refusal.cause not in (Cause.EVENT, Cause.TOPIC):
                    self.has_failed, self.trouble = True, reason.str()
                    return later + events[n:]
                gate.refused(delivery, event, refusal)
            except Exception as error:  # noqa: BLE001 - whatever an event's content makes the encoder raise
                gate.suspect(delivery, event, text.reason(error))
        return later

    def _begin(self, topic: str, key: str, report: Report) -> Report:
        """Return the callback of a message to a partition that may not have acknowledged anything yet."""
        begun = self._begun

        def reported(error: KafkaError | None, message: Message) -> None:
            report(error, message)
            if error is None and begun.acknowledge(topic, key, message.partition() or 0):
                self._routes.clear()

        return reported

    def serve(self, seconds: float, *, linger: bool) -> None:
        # A producer that has failed permanently raises here, and still reports.
        try:
            # With nothing in flight, a flush returns immediately: a waiting loop would use a whole core.
            if linger or not len(self._producer):
                self._producer.poll(seconds)
            else:
                client.flush(self._producer, seconds)
        except KafkaException as error:
            self.has_failed = True
            self.trouble = error.args[0].str()

    def await_reports(self) -> None:
        deadline = time.monotonic() + _LAST_REPORTS_SECONDS
        while len(self._producer) and time.monotonic() < deadline:
            # A producer that has failed keeps its queue, and adds to it what failed as a consequence.
            self._producer.purge(in_flight=False, blocking=False)
            self.serve(0.05, linger=True)

    def purge(self) -> None:
        self._producer.purge()

    def flush(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._producer) and time.monotonic() < deadline:
            self.serve(0.05, linger=True)

    def replace(self) -> None:
        self._producer = self._new()
        self.has_failed = False

    def identify(
        self, in_flight: list[Event], failed: list[tuple[Message, KafkaError]]
    ) -> list[tuple[Event, Refusal]]:
        # A failed message has a topic, a key and a value only. Of equal events the last ones failed: the
        # acknowledged messages of a partition are a prefix.
        if not failed:
            return []
        same: dict[tuple[str | None, bytes, bytes], list[Event]] = {}
        for event in in_flight:
            value, _ = self._encode(event)
            content = (self._topic(event), event.aggregate_id.encode(), _as_bytes(value))
            same.setdefault(content, []).append(event)
        return [
            (
                same[message.topic(), message.key() or b"", message.value() or b""].pop(),
                client_errors.refusal(error),
            )
            for message, error in reversed(failed)
        ]

    def shrink(self, refused: list[Event]) -> set[int]:
        # No smaller batch helps an event that was alone in its batch.
        hopeless: set[int] = set()
        together: dict[str, list[int]] = {}
        for event in refused:
            if _size(event, *self._encode(event)) > self._batches.current:
                hopeless.add(event.seq)
            else:
                together.setdefault(self._topic(event), []).append(event.seq)
        for topic, seqs in together.items():
            if not self._shrink(topic) or len(seqs) == 1:
                hopeless.update(seqs)
        return hopeless

    def _shrink(self, topic: str) -> bool:
        # Refused although the batch was within the known limit of its topic: that limit is wrong.
        self._topics.doubt(topic)
        self._routes.clear()
        largest = None
        with suppress(UnavailableError, TopicUnavailableError):
            largest = self._topics.find(topic).largest
        return self._batches.lower(topic, largest)

    def refuse_topic(self, event: Event, refusal: Refusal) -> None:
        self._topics.refuse(self._topic(event), refusal)
        self._routes.clear()

    def refuse_halted(self, waiting: Iterable[Event]) -> bool:
        self._topics.ask(self._names({(event.aggregate_type, event.event_type) for event in waiting}))
        is_any = self._topics.refuse_halted()
        self._routes.clear()
        return is_any

    def answers(self) -> bool:
        if not self._topics.answers():
            self._unanswered = 0
            return False
        try:
            self._producer.list_topics("", timeout=1.0)
        except KafkaException as error:
            # A client that knew no broker at a critical moment never finds one again and reports no error
            # (confluentinc/librdkafka#5301).
            self._unanswered += 1
            if self._unanswered == _MOST_UNANSWERED:
                raise ShardLostError(
                    f"Kafka answers, but not this producer ({error.args[0].str()})"
                ) from None
        else:
            self._unanswered = 0
        return self.schema_ids is None or self.schema_ids.answers()

    def close(self) -> None:
        self._topics.close()
        del self._producer

    def _new(self) -> confluent_kafka.Producer:
        self._begun = FirstAcknowledgments()
        self._unanswered = 0
        self._routes.clear()
        self._renew_at = time.monotonic() + _RENEW_SECONDS
        self._batches.current = self._batches.wanted
        return client.producer(self._settings, self._on_error, batch_size=self._batches.current)

    def _topic(self, event: Event) -> str:
        return self._router.topic(event.aggregate_type, event.event_type)

    def _route(self, event: Event, delivery: Delivery) -> tuple[str, int, bool]:
        """Return a topic, the payload size always accepted there, whether all partitions are begun."""
        name = self._topic(event)
        if not self._topics.is_asked(name):
            # One request for all topics of this batch that are not known.
            types = {(other.aggregate_type, other.event_type) for other in delivery.batch.events}
            self._topics.ask(self._names(types - self._routes.keys()))
        topic = self._topics.find(name)
        usual = _UNLIMITED if topic.largest is None else max(0, (topic.largest - _USUAL_HEADERS) // 4)
        is_begun = not self.begins_one_by_one or self._begun.are_complete(topic.name, topic.partitions)
        route = self._routes[event.aggregate_type, event.event_type] = (topic.name, usual, is_begun)
        self._batches.use(name, topic.largest)
        return route

    def _names(self, types: Iterable[tuple[str, str]]) -> Iterator[str]:
        for aggregate_type, event_type in types:
            with suppress(IllegalTopicError):
                yield self._router.topic(aggregate_type, event_type)

    def _is_too_large(self, topic: str, event: Event, value: Value, headers: Headers) -> bool:
        largest = self._topics.find(topic).largest
        return largest is not None and _size(event, value, headers) > largest

    def _on_error(self, error: KafkaError) -> None:
        # "All brokers down" follows an error that is more precise.
        if not (self.trouble and error.code() == KafkaError._ALL_BROKERS_DOWN):
            self.trouble = error.str()


def _schema_ids(settings: ProcessSettings) -> SchemaIds | None:
    if not is_framed(settings):
        return None
    # It needs packages that a relay without a schema registry does not have.
    from outbox_pipelines.relay.kafka.schema_ids import SchemaIds

    return SchemaIds(settings)


def _as_bytes(value: Value) -> bytes:
    return value.encode() if isinstance(value, str) else value or b""


def _size(event: Event, value: Value, headers: Headers) -> int:
    """Bytes of a batch with this event alone, before compression."""
    size = _RECORD_OVERHEAD + len(event.aggregate_id.encode()) + len(_as_bytes(value))
    return size + sum(len(name.encode()) + len(content or b"") + 2 for name, content in _encoded(headers))


def _encoded(headers: Headers) -> Iterator[tuple[str, bytes | None]]:
    for name, content in headers:
        yield name, content.encode() if isinstance(content, str) else content
