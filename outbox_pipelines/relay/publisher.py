"""Publishes pieces to Kafka, and says what became of their events: acknowledged, or to be parked.

Invariants:
- One idempotent producer, acks=all, gapless, no expiry: what is acknowledged of an aggregate is a prefix of
  what was sent of it.
- A refusal names a batch, not an event, and ends the producer. Its events are suspects: their aggregates are
  blocked, everything else is sent again by a new producer, in order.
- A batch that is too large is no event's fault: its events are sent again in smaller ones.
- A piece is complete when every event of it is acknowledged or held back; nothing is said of it before.
- Everything here runs in one thread: delivery reports are served by `poll`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from outbox_pipelines.errors import AwayError
from outbox_pipelines.event import Event, Piece, Released
from outbox_pipelines.relay import client, failures
from outbox_pipelines.relay.batch_size import BatchSize
from outbox_pipelines.relay.breaker import Breaker, State
from outbox_pipelines.relay.delivery import Complete, Delivery
from outbox_pipelines.relay.encoding import Encoder, Headers
from outbox_pipelines.relay.failures import Kind
from outbox_pipelines.relay.observe import Report, observer
from outbox_pipelines.relay.parking import ParkingLot
from outbox_pipelines.relay.routing import IllegalTopicError, Router
from outbox_pipelines.relay.shards import ShardLostError
from outbox_pipelines.relay.topics import Topics, TopicUnavailableError
from outbox_pipelines.settings import Settings

_MOST_CHARACTERS: Final = 32_000_000
# Until the last reports of a producer that has failed are in.
_LAST_REPORTS_SECONDS: Final = 5.0
# Reports are served after so many messages: often enough to keep memory flat, seldom enough to be free.
_POLL_EVERY: Final = 1000
# Of a batch with one record, beside key, value and headers.
_RECORD_OVERHEAD: Final = 100
# Payloads up to a topic's limit, less this, and by four for UTF-8, are not looked at twice.
_USUAL_HEADERS: Final = 2048
_UNLIMITED: Final = 1 << 60
# So many producers in a row may fail without a reason, before Kafka is unavailable.
_MOST_UNEXPLAINED: Final = 3
_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})

Refused = tuple[Delivery, Event, KafkaError]


class Publisher:
    """A producer that publishes pieces in order.

    Args:
        lot: the blocked aggregates, which it asks and adds to.
    """

    # On their way at once: enough that the broker never waits, few enough that memory stays small.
    most_events = 30_000
    # Whether released events may be larger than their topic takes, by what is known of it.
    doubts_released = True

    def __init__(self, settings: Settings, lot: ParkingLot) -> None:
        self._settings = settings
        self._lot = lot
        self._encode = Encoder(settings).encode
        self._router = Router(settings)
        self._observe = observer(settings)
        self._topics = Topics(settings)
        self._routes: dict[tuple[str, str], tuple[str, int]] = {}
        self._deliveries: deque[Delivery] = deque()
        self._pending_events = 0
        self._pending_size = 0
        self._completed = 0
        self._progress = (0, 0)
        self._trouble = ""
        self._failed = False
        self._unexplained = 0
        self._batches = BatchSize()
        self._producer = self._new_producer()
        self.breaker = Breaker(settings.breaker_seconds)

    def connect(self) -> None:
        """Waits until a broker answers.

        Raises:
            SetupError: none does, or the credentials are wrong.
        """
        self._topics.connect()

    def prepare(self, shards: int) -> None:
        """Makes ready what so many shards need; may be called in another thread."""

    def idle(self) -> None:
        """Serve the clients while nothing is published: what they report would pile up."""
        self._serve(0.0)
        self._topics.idle()

    @property
    def lookups(self) -> Topics:
        """What is known of the topics, for all who publish to them."""
        return self._topics

    @property
    def topics(self) -> frozenset[str]:
        """Where events have gone; each is looked up before its first."""
        return self._topics.known

    @property
    def pending(self) -> int:
        """How many pieces are not complete."""
        return len(self._deliveries)

    @property
    def has_room(self) -> bool:
        """Whether Kafka takes events, and little enough is on its way for another piece."""
        return (
            self._pending_events < self.most_events
            and self._pending_size < _MOST_CHARACTERS
            and self.breaker.state is State.CLOSED
        )

    def takes(self, piece: Piece | Released) -> bool:
        """Whether this piece can be published now; else `poll` brings it about."""
        return True

    def publish(self, piece: Piece | Released) -> None:
        """Hands a piece to the producer; returns before it is acknowledged.

        Raises:
            ShardLostError: another relay has taken over, or what became of events cannot be known.
        """
        delivery = Delivery(piece)
        if isinstance(piece, Piece) and (piece.unreadable or piece.suspects):
            self._hold_back(delivery, piece)
        self._deliveries.append(delivery)
        self._pending_events += len(piece.events)
        self._pending_size += piece.size
        # With those before it: something of them may not have been sent yet, and must not be overtaken.
        self._pump(self._deliveries)

    def _hold_back(self, delivery: Delivery, piece: Piece) -> None:
        """Takes the events that were not read for dead letters, or parks them to be tried alone."""
        for event in piece.events:
            if event.seq in piece.unreadable:
                self._lot.park(event, suspect=True)
                delivery.dead[event.seq] = (event, piece.unreadable[event.seq])
            elif event.seq in piece.suspects:
                self._suspect(delivery, event, piece.suspects[event.seq])
        delivery.unsent = [
            event
            for event in piece.events
            if event.seq not in delivery.dead and event.seq not in delivery.suspects
        ]

    def poll(self, seconds: float, *, linger: bool = True) -> None:
        """Serves delivery reports, waiting up to `seconds` for the first; probes a Kafka that is away.

        Args:
            linger: False where nothing else is about to be published: then the client sends at once what it
                would hold back for a fuller batch.

        Raises:
            ShardLostError: another relay has taken over, or what became of events cannot be known.
        """
        if self._topics.refresh() | self._batches.turn(time.monotonic()):
            self._routes.clear()
        self._serve(seconds, linger=linger)
        if self._failed or any(delivery.failed for delivery in self._deliveries):
            self._recover()
        self._watch(time.monotonic())
        if self.breaker.state is not State.OPEN and any(delivery.unsent for delivery in self._deliveries):
            self._pump(self._deliveries)

    def acknowledged(self) -> list[Complete]:
        """Return the batches that became complete since the last call, in order."""
        complete = []
        while self._deliveries and self._deliveries[0].is_complete:
            complete.append(self._deliveries.popleft().complete())
            self._count_out(complete[-1])
        return complete

    def _count_out(self, complete: Complete) -> None:
        self._pending_events -= len(complete.piece.events)
        self._pending_size -= complete.piece.size
        self._completed += 1
        self._unexplained = 0

    def flush(self, seconds: float) -> None:
        """Waits until nothing is on its way, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while len(self._producer) and time.monotonic() < deadline:
            self._serve(0.05)

    def discard(self) -> None:
        """Drops what is not acknowledged: no position covers it, so it is read again."""
        self._topics.close()
        self._producer.purge()
        self.flush(1.0)
        self._deliveries.clear()
        self._pending_events = self._pending_size = 0

    def _pump(self, deliveries: Iterable[Delivery]) -> None:
        """Hands over what is not sent yet, piece by piece."""
        if self._batches.is_outdated and not self._renew():
            return
        for delivery in deliveries:
            while delivery.unsent:
                some, delivery.unsent = delivery.unsent[:_POLL_EVERY], delivery.unsent[_POLL_EVERY:]
                rest = self._send(delivery, some)
                if rest:
                    delivery.unsent = rest + delivery.unsent
                    return
                self._serve(0)

    def _send(self, delivery: Delivery, events: list[Event]) -> list[Event]:
        """Hands some events to the producer; returns those that it did not take, because it has failed."""
        # The hot loop: what is looked up here is looked up 200,000 times a second.
        report: Report
        produce, report, routes, encode = self._producer.produce, delivery.report, self._routes, self._encode
        flying, observe = delivery.flying.append, self._observe
        tick = isinstance(delivery.piece, Piece)
        held = self._lot.blocked if tick else delivery.halted
        for n, event in enumerate(events):
            if (
                held
                and (event.aggregate_type, event.aggregate_id) in held
                and (not tick or self._lot.park(event))
            ):
                delivery.parked.append(event)
                continue
            try:
                route = routes.get((event.aggregate_type, event.event_type))
                if route is None:
                    route = self._route(event, delivery)
                    if self._batches.must_shrink:
                        return events[n:]
                topic, usual = route
                value, headers = encode(event)
                if (
                    len(event.payload) > usual
                    and (tick or self.doubts_released)
                    and self._is_too_large(topic, event, value, headers)
                ):
                    self._suspect(delivery, event, "larger than its topic takes, unless it compresses well")
                    continue
                if observe is not None:
                    report, headers = observe(event, topic, headers, delivery.report)
                while True:
                    try:
                        produce(topic, value, event.aggregate_id, on_delivery=report, headers=headers)
                        break
                    except BufferError:
                        self._serve(0.05)
                        if self._failed:
                            return events[n:]
                flying(event)
            except AwayError as error:
                self.breaker.trip(time.monotonic(), str(error))
                return events[n:]
            except TopicUnavailableError as error:
                self._suspect(delivery, event, str(error))
            except KafkaException as error:
                reason: KafkaError = error.args[0]
                if reason.fatal() or failures.kind(reason) not in (Kind.EVENT, Kind.TOPIC):
                    self._failed, self._trouble = True, reason.str()
                    return events[n:]
                self._refused(delivery, event, reason)
            except Exception as error:  # noqa: BLE001 - whatever an event's content makes the encoder raise
                self._suspect(delivery, event, f"{type(error).__name__}: {error}")
        return []

    def _suspect(self, delivery: Delivery, event: Event, reason: str) -> None:
        """Holds an event back, and its aggregate: it will be tried alone."""
        if isinstance(delivery.piece, Piece):
            self._lot.park(event, suspect=True)
        else:
            delivery.halted.add((event.aggregate_type, event.aggregate_id))
        delivery.suspects[event.seq] = (event, reason)

    def _refused(self, delivery: Delivery, event: Event, error: KafkaError) -> None:
        """Holds back an event that Kafka refused; if its topic is to blame, all events of the topic."""
        if failures.kind(error) is Kind.TOPIC:
            self._topics.refuse(self._router.topic(event.aggregate_type, event.event_type), error)
            self._routes.clear()
        self._suspect(delivery, event, failures.describe(error))

    def _route(self, event: Event, delivery: Delivery) -> tuple[str, int]:
        """Where an event goes, and how long a payload is beyond doubt there."""
        name = self._router.topic(event.aggregate_type, event.event_type)
        if not self._topics.is_asked(name):
            # One question for all topics that are new here.
            types = {(other.aggregate_type, other.event_type) for other in delivery.piece.events}
            self._topics.ask(self._names(types - self._routes.keys()))
        topic = self._topics.find(name)
        usual = _UNLIMITED if topic.largest is None else max(0, (topic.largest - _USUAL_HEADERS) // 4)
        route = self._routes[event.aggregate_type, event.event_type] = (topic.name, usual)
        self._batches.use(name, topic.largest)
        return route

    def _names(self, types: Iterable[tuple[str, str]]) -> Iterator[str]:
        for some in types:
            with suppress(IllegalTopicError):
                yield self._router.topic(*some)

    def _renew(self) -> bool:
        """Take a new producer with batches of another size; False while the old one has something."""
        # Two producers at once would not keep the order: what the old one has comes first.
        if len(self._producer):
            return False
        self._producer = self._new_producer()
        return True

    def _new_producer(self) -> Producer:
        self._batches.current = self._batches.wanted
        return client.producer(self._settings, self._on_error, batch_size=self._batches.current)

    def _is_too_large(self, topic: str, event: Event, value: str | None, headers: Headers) -> bool:
        largest = self._topics.find(topic).largest
        return largest is not None and _size(event, value, headers) > largest

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

    def _recover(self) -> None:
        """After a refusal: blocks the aggregates of the refused batch, and sends the rest by a new producer.

        The reports come first: a producer that has failed goes on reporting.
        """
        self._await_reports()
        self._producer.purge()
        self.flush(1.0)
        reclaimed = [(delivery, delivery.reclaim(self._identify)) for delivery in self._deliveries]
        self._failed = False
        if any(failed is None for _, failed in reclaimed):
            raise ShardLostError("Kafka's client did not say what became of each event: starting over")
        # All suspects first: what stands before one of them, of its aggregate, is parked as well.
        explained = self._blame([(one, *what) for one, failed in reclaimed for what in failed or ()])
        self._producer = self._new_producer()
        for delivery, failed in reclaimed:
            again = [event for event, _ in failed or () if event.seq not in delivery.suspects]
            delivery.unsent = sorted(again + delivery.unsent)
        is_outage = any(
            failures.kind(error) is Kind.OUTAGE for _, failed in reclaimed for _, error in failed or ()
        )
        self._conclude(explained, f"Kafka's client gave up: {self._trouble}", patience=not is_outage)

    def _await_reports(self) -> None:
        """Wait for what Kafka says of the messages in flight."""
        deadline = time.monotonic() + _LAST_REPORTS_SECONDS
        while len(self._producer) and time.monotonic() < deadline:
            # A producer that has failed keeps its queue, and adds to it what failed as a consequence.
            self._producer.purge(in_flight=False, blocking=False)
            self._serve(0.05)

    def _conclude(self, explained: bool, reason: str, *, patience: bool = True) -> None:
        """Close the breaker after a refusal, which is an answer; open it after failures without a reason."""
        if explained:
            self._unexplained, self._trouble = 0, ""
            self.breaker.acknowledged()
            return
        # With patience: the report of the refusal may be missing, and comes with the next try.
        self._unexplained += 1
        if not patience or self._unexplained >= _MOST_UNEXPLAINED:
            self.breaker.trip(time.monotonic(), reason)

    def _blame(self, failed: Iterable[Refused]) -> bool:
        """Hold back the events that were refused; return whether Kafka has refused any, for whatever size."""
        too_large: dict[str, list[Refused]] = {}
        blamed = False
        for delivery, event, error in failed:
            kind = failures.kind(error)
            if kind is Kind.OWNER:
                raise ShardLostError(f"another relay has taken the shard: {error.str()}")
            if kind in (Kind.EVENT, Kind.TOPIC):
                blamed = True
                if error.code() in _TOO_LARGE:
                    topic = self._router.topic(event.aggregate_type, event.event_type)
                    too_large.setdefault(topic, []).append((delivery, event, error))
                else:
                    self._refused(delivery, event, error)
        for topic, refused in too_large.items():
            self._blame_too_large(topic, refused)
        return blamed

    def _blame_too_large(self, topic: str, refused: list[Refused]) -> None:
        """Hold back the events that were alone in their batch; send the others again in smaller batches."""
        together: list[Refused] = []
        for one in refused:
            if _size(one[1], *self._encode(one[1])) > self._batches.current:
                self._refused(*one)
            else:
                together.append(one)
        if not together:
            return
        # Not larger than a batch may be, and refused: what is known of the topic's limit is wrong.
        self._topics.doubt(topic)
        self._routes.clear()
        largest = None
        with suppress(AwayError, TopicUnavailableError):
            largest = self._topics.find(topic).largest
        can_shrink = self._batches.lower(topic, largest)
        if len(together) == 1 or not can_shrink:
            for one in together:
                self._refused(*one)

    def _identify(
        self, flying: list[Event], failed: list[tuple[Message, KafkaError]]
    ) -> list[tuple[Event, KafkaError]]:
        """The events of failed messages, which carry topic, key and value only.

        Of equal ones the last are meant: what is acknowledged of a partition is a prefix.
        """
        if not failed:
            return []
        same: dict[tuple[str | None, bytes, bytes], list[Event]] = {}
        for event in flying:
            value, _ = self._encode(event)
            topic = self._router.topic(event.aggregate_type, event.event_type)
            content = (topic, event.aggregate_id.encode(), (value or "").encode())
            same.setdefault(content, []).append(event)
        return [
            (same[message.topic(), message.key() or b"", message.value() or b""].pop(), error)
            for message, error in reversed(failed)
        ]

    def _watch(self, now: float) -> None:
        """Tells the breaker what came back, and asks Kafka for a sign of life where it wants one."""
        if not self._deliveries:
            if self.breaker.state is State.HALF_OPEN:
                self.breaker.acknowledged()
            self.breaker.idle()
        elif (progress := (self._completed, self._deliveries[0].acknowledged)) != self._progress:
            self._progress, self._trouble = progress, ""
            self.breaker.acknowledged()
        else:
            self.breaker.quiet(now, self._trouble or "Kafka acknowledges nothing")
        if self.breaker.wants_probe(now):
            self.breaker.probed(now, self._topics.answers())

    def _on_error(self, error: KafkaError) -> None:
        # That all brokers are down follows a reason, and says less.
        if not (self._trouble and error.code() == KafkaError._ALL_BROKERS_DOWN):
            self._trouble = error.str()


def _size(event: Event, value: str | None, headers: Headers) -> int:
    """Bytes of a batch with this event alone, before compression."""
    size = _RECORD_OVERHEAD + len(event.aggregate_id.encode()) + len((value or "").encode())
    return size + sum(len(name.encode()) + len(content or b"") + 2 for name, content in _encoded(headers))


def _encoded(headers: Headers) -> Iterator[tuple[str, bytes | None]]:
    for name, content in headers:
        yield name, content.encode() if isinstance(content, str) else content
