"""Send events to Kafka, as many as are allowed, and know up to which `seq` all are acknowledged.

Invariants:
- The position passes an event only when it and all before it are acknowledged.
- A refused message ends the replay: none behind it of its partition is sent.
- What is in flight is bounded, in events and in bytes: memory does not grow while Kafka is unavailable.
- Messages are encoded by the relay's encoder.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from outbox_pipelines.config.message_names import REPLAY_ID, REPLAYED_AT
from outbox_pipelines.core.event import Event
from outbox_pipelines.core.text import reason
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.core.outcomes import Kind
from outbox_pipelines.relay.kafka import client, client_errors
from outbox_pipelines.relay.kafka.message import Encoder, is_framed
from outbox_pipelines.replay.replay_topics import Kind as Types
from outbox_pipelines.settings import MessageSettings

QUEUE: Final = {"queue_buffering_max_messages": 10_000, "queue_buffering_max_kbytes": 32_768}
_LAST_SECONDS: Final = 10.0
_EXPLAIN_SECONDS: Final = 5.0
# How long events are sent without a pause at a limited rate: live events wait behind them.
_BURST_SECONDS: Final = 0.02


@dataclass(slots=True)
class _Batch:
    last_seq: int
    events: int
    left: int


class StoppedError(Exception):
    """The replay was stopped before all events were sent."""


class AgainError(Exception):
    """What is behind the position must be read and sent again, after `restart`."""


class Sender:
    """Sends the events of one replay; must be used by one thread.

    Args:
        routes: the topic of each kind of event; events of other kinds are passed over.
        rate: events a second at most.
        is_stopped: asked while Kafka is waited for.
        position: everything up to this `seq` was acknowledged before, `sent` events.
    """

    def __init__(
        self,
        settings: MessageSettings,
        replay: UUID,
        routes: Mapping[Types, str],
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
        self._rate = rate
        self._is_stopped = is_stopped
        self._refused = ""
        self._batches: deque[_Batch] = deque()
        self._due = 0.0
        """When the next events may be sent. After an outage, the rate is not exceeded to catch up."""
        self._marks = {REPLAY_ID: str(replay)}
        self._encode = Encoder(settings, _ids(settings), self._marks).encode
        self._producer = self._new()

    def _new(self) -> Producer:
        return client.producer(self._settings, self._on_error, **QUEUE)

    def send(self, events: list[Event]) -> None:
        """Send events; wait while the rate or Kafka asks for it.

        Raises:
            SetupError: Kafka refuses an event, or one cannot be encoded.
            StoppedError, AgainError: see there.
        """
        self._marks[REPLAYED_AT] = datetime.now(UTC).isoformat(timespec="milliseconds")
        most = max(1, int(min(self._rate * _BURST_SECONDS, len(events))))
        for start in range(0, len(events), most):
            some = events[start : start + most]
            passed = self._send(some)
            self.settle()
            self._due = max(self._due, time.monotonic() - _BURST_SECONDS) + passed / self._rate
            while (ahead := self._due - time.monotonic()) > 0:
                if self._is_stopped():
                    raise StoppedError
                self._poll(min(ahead, 0.1))
                self.settle()

    def _send(self, events: list[Event]) -> int:
        """Pass events to the client, as a batch; return how many have a topic."""
        # More than can be reported, until it is known how many are sent.
        batch = _Batch(events[-1].seq, 0, len(events) + 1)
        self._batches.append(batch)

        def report(error: KafkaError | None, message: Message) -> None:
            if error is None:
                batch.left -= 1
            else:
                self._refuse(error, message)

        batch.events = self._hand_over(events, report)
        batch.left -= len(events) + 1 - batch.events
        return batch.events

    def _hand_over(self, events: list[Event], report: Callable[..., None]) -> int:
        """Pass events to the client; return how many have a topic."""
        # The hot loop.
        produce, encode, routes = self._producer.produce, self._encode, self._routes
        passed = 0
        for event in events:
            topic = routes.get((event.aggregate_type, event.event_type))
            if topic is None:
                continue
            try:
                value, headers = encode(event)
            except ValueError as error:
                raise SetupError(f"{event} cannot be sent: {reason(str(error))}") from None
            while True:
                try:
                    produce(topic, value, event.aggregate_id, on_delivery=report, headers=headers)
                    break
                except BufferError:
                    self._wait()
                except KafkaException as error:
                    self._require_refusal(error.args[0])
                    raise SetupError(f"{event} is refused by topic {topic}: {error.args[0].str()}") from None
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
        """
        self._poll(0)
        while self._batches and self._batches[0].left == 0:
            done = self._batches.popleft()
            self.position, self.sent = done.last_seq, self.sent + done.events
            self.trouble = ""
        if self._refused:
            raise SetupError(f"Kafka refuses an event behind seq {self.position}: {self._refused}")

    def finish(self) -> bool:
        """Wait until all is acknowledged; return False if the replay was stopped before."""
        deadline = 0.0
        while self._batches and len(self._producer):
            if self._is_stopped():
                deadline = deadline or time.monotonic() + _LAST_SECONDS
                if time.monotonic() > deadline:
                    break
            try:
                client.flush(self._producer, 0.1)
            except KafkaException:
                self._explain()
            self.settle()
        self.settle()
        return not self._batches

    def restart(self) -> None:
        """Take a new client, and the position from which to go on."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up what is not acknowledged, and end the client."""
        self._producer.purge()
        del self._producer

    def _poll(self, seconds: float) -> None:
        try:
            self._producer.poll(seconds)
        except KafkaException:
            self._explain()

    def _explain(self) -> None:
        """Wait for the report of the message that made the client fail; without one, raise the failure."""
        deadline = time.monotonic() + _EXPLAIN_SECONDS
        while not self._refused:
            try:
                self._producer.poll(0.1)
            except KafkaException:
                if time.monotonic() > deadline:
                    raise

    def _require_refusal(self, error: KafkaError) -> None:
        """Raise another error if neither the event nor its topic is the reason."""
        if client_errors.refusal(error).kind is Kind.CONSEQUENCE:
            self._explain()
            self.settle()

    def _refuse(self, error: KafkaError, message: Message) -> None:
        if client_errors.refusal(error).kind is not Kind.CONSEQUENCE:
            self._refused = self._refused or f"topic {message.topic()}: {error.str()}"

    def _on_error(self, error: KafkaError) -> None:
        self.trouble = error.str()


def _ids(settings: MessageSettings) -> Any:
    if not is_framed(settings):
        return None
    # It needs packages that an outbox without a schema registry does not have.
    from outbox_pipelines.relay.kafka.schema_ids import SchemaIds

    ids = SchemaIds(settings)
    ids.connect()
    return ids.known
