"""Send events to Kafka, as many as are allowed, and know up to which `seq` all are acknowledged.

Invariants:
- The position passes an event only when it and all before it are acknowledged.
- A refused message ends the replay: none behind it of its partition is sent.
- What is in flight is bounded: memory does not grow while Kafka is unavailable.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from confluent_kafka import KafkaError, KafkaException, Message

from outbox_pipelines.config.message_names import REPLAY_ID, REPLAYED_AT
from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.kafka import client
from outbox_pipelines.relay.kafka.message import Encoder, is_framed
from outbox_pipelines.replay.replay_reading import Rows
from outbox_pipelines.replay.replay_topics import Kind
from outbox_pipelines.settings import MessageSettings

_QUEUE: Final = {"queue_buffering_max_messages": 20_000, "queue_buffering_max_kbytes": 65_536}
_LAST_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Batch:
    last_seq: int
    events: int
    left: int


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
        routes: Mapping[Kind, str],
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
        self._replay = replay
        self._routes = routes
        self._rate = rate
        self._is_stopped = is_stopped
        self._refused = ""
        self._batches: deque[_Batch] = deque()
        self._began, self._passed = time.monotonic(), 0
        self._encode = Encoder(settings, _ids(settings)).encode
        self._producer = client.producer(settings, self._on_error, **_QUEUE)

    def send(self, rows: Rows) -> None:
        """Send events; wait while the rate or Kafka asks for it.

        Raises:
            SetupError: Kafka refuses an event, or one cannot be encoded.
        """
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        mark = f'"{REPLAY_ID}": "{self._replay}", "{REPLAYED_AT}": "{at}"'
        batch = _Batch(rows[-1][0], 0, 1)
        self._batches.append(batch)

        def report(error: KafkaError | None, message: Message) -> None:
            if error is None:
                batch.left -= 1
            else:
                self._refused = self._refused or f"topic {message.topic()}: {error.str()}"

        for *columns, payload, metadata in rows:
            seq, event_id, aggregate_type, aggregate_id, event_type = columns
            topic = self._routes.get((aggregate_type, event_type))
            if topic is None:
                continue
            whole = f"{{{metadata}, {mark}}}" if metadata else f"{{{mark}}}"
            event = Event(seq, event_id, aggregate_type, aggregate_id, event_type, payload, whole)
            if not self._produce(event, topic, report):
                return
            batch.events += 1
            batch.left += 1
        # Complete: nothing is added any more.
        batch.left -= 1
        self.settle()
        self._passed += batch.events
        while (ahead := self._began + self._passed / self._rate - time.monotonic()) > 0:
            if self._is_stopped():
                return
            self._producer.poll(min(ahead, 0.1))
            self.settle()

    def _produce(self, event: Event, topic: str, report: Callable[..., None]) -> bool:
        """Pass one event to the client; return False if the replay was stopped before."""
        try:
            value, headers = self._encode(event)
        except ValueError as error:
            raise SetupError(f"{event} cannot be sent: {error}") from None
        while True:
            try:
                self._producer.produce(topic, value, event.aggregate_id, on_delivery=report, headers=headers)
            except BufferError:
                if self._is_stopped():
                    return False
                self._producer.poll(0.1)
                self.settle()
            except KafkaException as error:
                raise SetupError(f"{event} is refused by topic {topic}: {error.args[0].str()}") from None
            else:
                return True

    def settle(self) -> None:
        """Serve reports, and move the position over what is acknowledged.

        Raises:
            SetupError: Kafka has refused a message.
        """
        self._producer.poll(0)
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
            client.flush(self._producer, 0.1)
            self.settle()
        self.settle()
        return not self._batches

    def close(self) -> None:
        """Give up what is not acknowledged, and end the client."""
        self._producer.purge()
        del self._producer

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
