"""Send events to Kafka, as many as are allowed, and know up to which `seq` all are acknowledged.

Invariants:
- The position passes an event only when it and all before it are acknowledged.
- A refused event ends the replay right behind the event before it; none behind it of its partition is sent.
- Kafka refuses whole batches. What it has not acknowledged is sent again alone, in order, to find the event.
- What is in flight is bounded, in events and in bytes: memory does not grow while Kafka is unavailable.
- Messages are encoded by the relay's encoder.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NoReturn
from uuid import UUID

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from outbox_pipelines.config.message_names import REPLAY_ID, REPLAYED_AT
from outbox_pipelines.core.event import Event
from outbox_pipelines.core.text import counted, reason
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.core.outcomes import Cause
from outbox_pipelines.relay.core.producers import FirstAcknowledgments
from outbox_pipelines.relay.kafka import client, client_errors
from outbox_pipelines.relay.kafka.message import Encoder, is_framed
from outbox_pipelines.replay.replay_topics import EventTypeNames as Types
from outbox_pipelines.settings import MessageSettings

QUEUE: Final = {"queue_buffering_max_messages": 10_000, "queue_buffering_max_kbytes": 32_768}
_LAST_SECONDS: Final = 10.0
_EXPLAIN_SECONDS: Final = 5.0
# How long events are sent without a pause at a limited rate: live events wait behind them.
_BURST_SECONDS: Final = 0.02


@dataclass(slots=True)
class _Batch:
    last_seq: int
    events: int | None
    """None until it is known how many are sent."""
    acknowledged: list[int]
    """Their seq."""


class StoppedError(Exception):
    """The replay was stopped before all events were sent."""


class AgainError(Exception):
    """What is behind the position must be read and sent again, after `restart`."""


class Sender:
    """Sends the events of one replay; must be used by one thread.

    Args:
        routes: the topic of each kind of event; events of other kinds are passed over.
        partitions: how many each of these topics has.
        rate: events a second at most.
        is_stopped: asked while Kafka is waited for.
        position: everything up to this `seq` was acknowledged before, `sent` events.
    """

    def __init__(
        self,
        settings: MessageSettings,
        replay: UUID,
        routes: Mapping[Types, str],
        partitions: Mapping[str, int],
        *,
        rate: float,
        is_stopped: Callable[[], bool],
        position: int,
        sent: int,
    ) -> None:
        self.position, self.sent = position, sent
        """Up to which `seq` all is acknowledged, and how many events."""
        self.trouble = ""
        """What the client says of its connection."""
        self._settings = settings
        self._routes = routes
        self._partitions = partitions
        self._rate = rate
        self._is_stopped = is_stopped
        self._refused: tuple[Cause, str] | None = None
        """The first refusal of this client: its cause, and the topic and the reason."""
        self._failure: tuple[float, KafkaException] | None = None
        """A failure of this client that names no event, and until when its reason is waited for."""
        self._batches: deque[_Batch] = deque()
        self._passed_seq = self._alone_until = 0
        """Up to which seq events were passed to a client, and up to which each is sent alone."""
        self._alone: Event | None = None
        """The one that is being sent alone."""
        self._ahead: set[int] = set()
        """Those behind the position that were acknowledged when Kafka refused another one."""
        self._begun: set[str] = set()
        """Topics that need no `FirstAcknowledgments`: each partition has acknowledged something."""
        self._due = 0.0
        """When the next events may be sent. After an outage, the rate is not exceeded to catch up."""
        self._marks = {REPLAY_ID: str(replay)}
        self._encode = Encoder(settings, marks=self._marks, **_schemas(settings)).encode
        self._producer = self._new()

    def _new(self) -> Producer:
        self._first, self._begun = FirstAcknowledgments(), set()
        return client.producer(self._settings, self._on_error, **QUEUE)

    def send(self, events: list[Event]) -> None:
        """Send events; wait while the rate or Kafka asks for it.

        Raises:
            SetupError: Kafka refuses an event, or one cannot be encoded.
            StoppedError, AgainError: see there.
        """
        self._marks[REPLAYED_AT] = datetime.now(UTC).isoformat(timespec="milliseconds")
        most = max(1, int(min(self._rate * _BURST_SECONDS, len(events))))
        start = 0
        while start < len(events):
            is_alone = events[start].seq <= self._alone_until
            some = events[start : start + (1 if is_alone else most)]
            start += len(some)
            self._passed_seq = some[-1].seq
            passed = self._send_alone(some[0]) if is_alone else self._send(some)
            self.settle()
            self._due = max(self._due, time.monotonic() - _BURST_SECONDS) + passed / self._rate
            while (ahead := self._due - time.monotonic()) > 0:
                if self._is_stopped():
                    raise StoppedError
                self._poll(min(ahead, 0.1))
                self.settle()

    def _send(self, events: list[Event]) -> int:
        """Pass events to the client, as a batch; return how many have a topic."""
        first, begun, partitions = self._first, self._begun, self._partitions
        batch = _Batch(events[-1].seq, None, [])
        self._batches.append(batch)

        def report(event: Event, error: KafkaError | None, message: Message) -> None:
            if error is None:
                batch.acknowledged.append(event.seq)
                if len(begun) < len(partitions):
                    topic = str(message.topic())
                    first.acknowledge(topic, event.aggregate_id, message.partition() or 0)
                    if first.are_complete(topic, partitions[topic]):
                        begun.add(topic)
            else:
                self._refuse(error, message)

        batch.events = self._hand_over(events, report)
        return batch.events

    def _send_alone(self, event: Event) -> int:
        """Send an event, unless it was acknowledged, and wait for its report; return whether it was sent."""
        if event.seq in self._ahead:
            self.position, self.sent = event.seq, self.sent + 1
            return 0
        self._alone = event
        passed = self._send([event])
        while len(self._producer) or self._failure is not None:
            if self._is_stopped():
                raise StoppedError
            self._flush()
        self.settle()
        self._alone = None
        return passed

    def _hand_over(self, events: list[Event], report: Callable[..., None]) -> int:
        """Pass events to the client; return how many have a topic."""
        # The hot loop.
        produce, encode, routes = self._producer.produce, self._encode, self._routes
        passed, begun = 0, self._begun
        for event in events:
            _, _, aggregate_type, key, event_type, _, _ = event
            topic = routes.get((aggregate_type, event_type))
            if topic is None:
                continue
            try:
                value, headers = encode(event)
            except ValueError as error:
                self._end(Cause.EVENT, f"it cannot be encoded: {reason(str(error))}")
            if topic not in begun:
                # Once its topic is complete, the acknowledgment of a key is noted no more.
                while topic not in begun and self._first.is_awaited(topic, key):
                    self._wait()
                self._first.sent(topic, key)
            reported = partial(report, event)
            while True:
                try:
                    produce(topic, value, key, on_delivery=reported, headers=headers)
                    break
                except BufferError:
                    self._wait()
                except KafkaException as error:
                    self._require_refusal(error.args[0])
                    refusal = client_errors.refusal(error.args[0])
                    self._end(refusal.cause, f"topic {topic}: {refusal.reason}")
            passed += 1
        return passed

    def _wait(self) -> None:
        """Wait for room in the client's queue."""
        if self._is_stopped():
            raise StoppedError
        self._poll(0.1)
        self.settle()

    def settle(self) -> None:
        """Serve reports, and move the position over what is acknowledged.

        Raises:
            SetupError: Kafka has refused a message.
            KafkaException: the client has failed, for another reason.
        """
        self._poll(0)
        self._advance()
        if self._refused is not None:
            self._end(*self._refused)
        if self._failure is not None and time.monotonic() > self._failure[0]:
            raise self._failure[1]

    def _advance(self) -> None:
        while self._batches and self._batches[0].events == len(self._batches[0].acknowledged):
            done = self._batches.popleft()
            self.position, self.sent = done.last_seq, self.sent + len(done.acknowledged)
            self.trouble = ""

    def _end(self, cause: Cause, why: str) -> NoReturn:
        """Raise the error of a refusal, or `AgainError` until it is known which event it is about."""
        if cause is not Cause.EVENT:
            self._drain()
            raise SetupError(f"{why}{_repeated(sum(len(each.acknowledged) for each in self._batches))}")
        event = self._alone
        if event is None:
            self._drain()
            self._alone_until = self._passed_seq
            raise AgainError
        raise SetupError(
            f"{event}, {counted(len(event.payload.encode()), 'byte')}, is refused: {why}"
            f"{_repeated(sum(seq > event.seq for seq in self._ahead))}. Another replay leaves it out with "
            f"--where \"seq > {self.position} AND id <> '{event.id}'\""
        )

    def _drain(self) -> None:
        """Wait for the last reports, and note what is acknowledged."""
        deadline = time.monotonic() + _LAST_SECONDS
        while len(self._producer) and time.monotonic() < deadline and not self._is_stopped():
            with suppress(KafkaException):
                client.flush(self._producer, 0.1)
        self._advance()
        self._ahead = {seq for each in self._batches for seq in each.acknowledged}

    def finish(self) -> bool:
        """Wait until all is acknowledged; return False if the replay was stopped before."""
        deadline = 0.0
        while self._batches and (len(self._producer) or self._failure is not None):
            if self._is_stopped():
                deadline = deadline or time.monotonic() + _LAST_SECONDS
                if time.monotonic() > deadline:
                    break
            self._flush()
        self.settle()
        return not self._batches

    @property
    def is_waiting(self) -> bool:
        """Whether something is in flight."""
        return len(self._producer) > 0

    def restart(self) -> None:
        """Take a new client; what is behind the position is passed to it again."""
        self._producer.purge()
        self._batches.clear()
        self._refused = self._failure = self._alone = None
        self._producer = self._new()

    def close(self) -> None:
        """Give up what is not acknowledged, and end the client."""
        self._producer.purge()
        del self._producer

    def _flush(self) -> None:
        if self._failure is None:
            try:
                client.flush(self._producer, 0.1)
            except KafkaException as error:
                self._fail(error)
        else:
            # With nothing in flight, a flush would return at once.
            self._poll(0.1)
        self.settle()

    def _poll(self, seconds: float) -> None:
        try:
            self._producer.poll(seconds)
        except KafkaException as error:
            self._fail(error)

    def _fail(self, error: KafkaException) -> None:
        """Note a failure of the client: the report of the message that is its cause comes later, or never."""
        self._failure = self._failure or (time.monotonic() + _EXPLAIN_SECONDS, error)

    def _require_refusal(self, error: KafkaError) -> None:
        """Raise another error if neither the event nor its topic is the reason."""
        if client_errors.refusal(error).cause is Cause.CONSEQUENCE:
            self._fail(KafkaException(error))
            while True:
                self._wait()

    def _refuse(self, error: KafkaError, message: Message) -> None:
        refusal = client_errors.refusal(error)
        if refusal.cause is Cause.CONSEQUENCE:
            self._fail(KafkaException(error))
        elif self._refused is None:
            self._refused = refusal.cause, f"topic {message.topic()}: {refusal.reason}"

    def _on_error(self, error: KafkaError) -> None:
        self.trouble = error.str()


def _repeated(events: int) -> str:
    return f"; {counted(events, 'later event')} sent as well: a resume repeats them" if events else ""


def _schemas(settings: MessageSettings) -> dict[str, Any]:
    """Return what an encoder must know of schemas."""
    if not is_framed(settings):
        return {}
    # It needs packages that an outbox without a schema registry does not have.
    from outbox_pipelines.relay.kafka.schema_ids import SchemaIds

    ids = SchemaIds(settings)
    ids.connect()
    return {"schema_of": ids.known, "versioned": ids.versioned}
