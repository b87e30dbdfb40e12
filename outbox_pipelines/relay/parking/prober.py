"""Tries suspect events alone, in parallel to the flow of all other events.

Invariants:
- Each event is sent in its own batch, so that a refusal identifies it. At most one event of an aggregate is
  tried at a time, so that no later event overtakes a refused one.
- A verdict is Kafka's answer about that event. Without an answer (an outage, a missing topic) no attempt is
  counted.
- If there is a dead letter topic, the last verdict is given only after the event's copy is in it.
- Slow steps (a producer, a connection, the creation of a topic) can be prepared before an event is marked as
  being tried, because a crash while it is marked counts against it.
- `verdicts` raises a failure of the prober.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from outbox_pipelines.config.rules import Router
from outbox_pipelines.config.topics import IllegalTopicError
from outbox_pipelines.core import log, text
from outbox_pipelines.core.event import Event
from outbox_pipelines.core.log import RepeatedLines
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.relay.core.crash_guard import HARMLESS_SECONDS
from outbox_pipelines.relay.core.outcomes import Cause
from outbox_pipelines.relay.core.parked import Attempt, Tried, Verdict
from outbox_pipelines.relay.kafka import client, client_errors
from outbox_pipelines.relay.kafka.message import Encode, Encoder, Headers, UnregisteredError, Value
from outbox_pipelines.relay.kafka.topic_lookups import TopicLookups
from outbox_pipelines.relay.kafka.topic_state import TopicUnavailableError
from outbox_pipelines.relay.telemetry.observers import Report, observer
from outbox_pipelines.settings import ProcessSettings

if TYPE_CHECKING:
    from outbox_pipelines.relay.kafka.schema_ids import SchemaIds

_LOG = logging.getLogger(__name__)
# How long Kafka may take for a handful of events; longer is an outage.
_PATIENCE_SECONDS: Final = 15.0
# How long an ending prober waits for answers: a published event without a recorded answer is published again.
_LAST_SECONDS: Final = 10.0


class Prober:
    """A thread that tries events, a handful at a time; started by the first.

    Args:
        topics: the lookups of topics.
        transactional_id: in exactly_once: try in transactions that are aborted, so that nothing is published.
        schema_ids: those that the publishing thread frames values with.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        topics: TopicLookups,
        transactional_id: str | None = None,
        *,
        schema_ids: SchemaIds | None = None,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._transactional_id = transactional_id
        self._encode = (
            Encoder(settings, schema_ids.asked, schema_ids.versioned) if schema_ids else Encoder(settings)
        ).encode
        self._router = Router(settings)
        self._observe = observer(settings)
        self._tried: deque[Tried] = deque()
        self._batch: list[Attempt] = []
        self._is_preparing = False
        """Whether the batch has no content, and is only prepared."""
        self._lines = RepeatedLines(_LOG)
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._end_at = math.inf
        self._producer: Producer | None = None
        self._is_open = False
        """Whether a transaction has begun."""
        self._handed: tuple[float, list[int]] | None = None
        """When events were passed to the client, and the seqs of those without an answer."""
        self._answered: deque[int] = deque()
        """The seqs for which there is an answer, while others of the batch are still being tried."""

    @property
    def is_busy(self) -> bool:
        return bool(self._batch or self._tried)

    def submit(self, batch: list[Attempt]) -> None:
        self._start(batch, is_preparing=False)

    def is_ready(self, topic: str) -> bool:
        return not topic or (self._producer is not None and self._topics.is_known(topic))

    def prepare(self, batch: list[Attempt]) -> None:
        self._start(batch, is_preparing=True)

    def _start(self, batch: list[Attempt], *, is_preparing: bool) -> None:
        with self._wake:
            self._batch, self._is_preparing = batch, is_preparing
            self._wake.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=log.inherit(self._run), name="outbox-prober", daemon=True)
            self._thread.start()

    def verdicts(self) -> list[Tried]:
        if self._failure is not None:
            raise self._failure
        return [self._tried.popleft() for _ in range(len(self._tried))]

    def harmless(self) -> list[int]:
        seqs = [self._answered.popleft() for _ in range(len(self._answered))]
        handed = self._handed
        if handed is not None and time.monotonic() - handed[0] >= HARMLESS_SECONDS:
            self._handed = None
            seqs += handed[1]
        return seqs

    def close(self, *, wait_seconds: float = _LAST_SECONDS) -> None:
        """End the thread; `verdicts` has the last ones.

        Args:
            wait_seconds: how long to wait for the answers to what was sent.
        """
        with self._wake:
            self._end_at = time.monotonic() + wait_seconds
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self._producer = None

    @property
    def _is_ending(self) -> bool:
        return self._end_at < math.inf

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._batch or self._is_ending)
                if self._is_ending:
                    return
            try:
                verdicts = self._unready if self._is_preparing else self._verdicts_on
                self._tried.extend(self._copied(one) for one in verdicts(self._batch))
                # The verdicts contain the same information.
                self._answered.clear()
            except BaseException as error:  # noqa: BLE001 - raised by verdicts()
                self._failure = error
                return
            self._batch = []

    def _unready(self, batch: list[Attempt]) -> list[Tried]:
        """Create the producer and look up the topics; return the events that cannot be tried now."""
        topics: dict[str, Exception | None] = {}
        untried: list[Tried] = []
        for attempt in batch:
            try:
                name = self._router.topic(attempt.event.aggregate_type, attempt.event.event_type)
            except IllegalTopicError:
                # The attempt itself reports this.
                continue
            if name not in topics:
                topics[name] = self._problem(name)
            if isinstance(problem := topics[name], TopicUnavailableError):
                untried.append(Tried(attempt, Verdict.UNAVAILABLE, str(problem)))
            elif problem is not None:
                return [Tried(attempt, Verdict.UNKNOWN, str(problem)) for attempt in batch]
        return untried

    def _problem(self, topic: str) -> Exception | None:
        try:
            self._topics.find_for_trial(topic, _PATIENCE_SECONDS)
            if self._producer is None:
                producer = self._new_producer()
                # Connects.
                producer.list_topics(topic, _PATIENCE_SECONDS)
                self._producer = producer
        except (TopicUnavailableError, UnavailableError, KafkaException) as error:
            return error
        return None

    def _verdicts_on(self, batch: list[Attempt]) -> list[Tried]:
        return self._try(batch) if self._transactional_id is None else self._rehearse(batch)

    def _try(self, batch: list[Attempt]) -> list[Tried]:
        """Send all, each in its own batch, and wait for the verdicts."""
        verdicts: dict[int, Tried] = {}
        for attempt in batch:
            if self._is_ending:
                break
            event = attempt.event
            try:
                topic = self._topic(event)
                value, headers = self._encode(event)
                report: Report = partial(self._answer, attempt, verdicts)
                if self._observe is not None:
                    report, headers = self._observe(event, topic, headers, report)
                self._produce(topic, event.aggregate_id, value, headers, report)
            except Exception as error:  # noqa: BLE001 - whatever an event's content makes the encoder raise
                verdicts[event.seq] = _judge(attempt, error)
                self._answered.append(event.seq)
        self._handed = time.monotonic(), [attempt.event.seq for attempt in batch]
        self._flush()
        self._handed = None
        unknown = "Kafka does not answer"
        return [verdicts.get(a.event.seq) or Tried(a, Verdict.UNKNOWN, unknown) for a in batch]

    def _answer(
        self, attempt: Attempt, verdicts: dict[int, Tried], error: KafkaError | None, message: Message
    ) -> None:
        _report(attempt, verdicts, error, message)
        self._answered.append(attempt.event.seq)

    def _rehearse(self, batch: list[Attempt]) -> list[Tried]:
        """Try each in its own transaction, which is aborted: nothing is published."""
        results: list[Tried] = []
        for attempt in batch:
            is_after_refusal = bool(results) and results[-1].verdict is Verdict.REFUSED
            tried = self._rehearse_one(attempt)
            if tried.verdict is Verdict.UNKNOWN and is_after_refusal:
                # The transaction after a refusal often fails because of sequence numbers; the next does not.
                tried = self._rehearse_one(attempt)
            results.append(tried)
        return results

    def _rehearse_one(self, attempt: Attempt) -> Tried:
        (tried,) = self._try([attempt])
        if self._producer is not None and self._is_open:
            self._is_open = False
            try:
                self._producer.abort_transaction(_PATIENCE_SECONDS)
            except KafkaException as error:
                _LOG.debug("prober: %s", error.args[0].str())
                self._producer = None
        return Tried(attempt, Verdict.ACCEPTED) if tried.verdict is Verdict.PUBLISHED else tried

    def _copied(self, tried: Tried) -> Tried:
        """Copy a dead letter to its topic, then return the verdict; the table has the event in any case."""
        attempt, event = tried.attempt, tried.attempt.event
        if not (self._settings.dead_letter_topics and tried.verdict is Verdict.REFUSED and attempt.is_last):
            return tried
        topic = ""
        try:
            topic = self._router.topic(event.aggregate_type, event.event_type)
            copy = dead_letter(event, self._encode, topic, tried.reason, attempt.attempts + 1)
            dead_letter_topic = self._topics.find_for_trial(f"{topic}.dlq", _PATIENCE_SECONDS).name
            verdicts: dict[int, Tried] = {}
            problem = ""
            # A message too large for its topic is also too large here: then send only the headers.
            for value in (copy[0], None):
                self._produce(
                    dead_letter_topic, event.aggregate_id, value, copy[1], partial(_report, attempt, verdicts)
                )
                self._flush()
                is_visible = self._commit()
                copied = verdicts.pop(event.seq, Tried(attempt, Verdict.UNKNOWN))
                if copied.verdict is Verdict.PUBLISHED and is_visible:
                    self._lines.end(topic, "dead letters are copied to %s again", dead_letter_topic)
                    return tried
                if copied.verdict in (Verdict.PUBLISHED, Verdict.UNKNOWN):
                    return Tried(attempt, Verdict.UNKNOWN, "no answer for the copy in the dead letter topic")
                problem = copied.reason
        except (IllegalTopicError, TopicUnavailableError, KafkaException) as error:
            problem = str(error)
        except UnavailableError as error:
            return Tried(attempt, Verdict.UNKNOWN, str(error))
        self._lines.log(topic, "%s could not be copied to a dead letter topic: %s", event, problem)
        return tried

    def _commit(self) -> bool:
        """In exactly_once: make a copy in a dead letter topic visible; return whether it is."""
        if self._producer is None or not self._is_open:
            return self._transactional_id is None
        self._is_open = False
        # A producer that fails here accepts only the same call again; the next one fences its transaction.
        producer, self._producer = self._producer, None
        began = time.monotonic()
        try:
            producer.commit_transaction(_PATIENCE_SECONDS)
        except KafkaException as error:
            reason: KafkaError = error.args[0]
            if not reason.txn_requires_abort():
                raise UnavailableError(f"Kafka did not commit a transaction: {reason.str()}") from None
            return False
        # A second request for it would make visible what is tried next.
        if time.monotonic() - began < client.ASKED_ONCE_SECONDS:
            self._producer = producer
        return True

    def _topic(self, event: Event) -> str:
        topic = self._router.topic(event.aggregate_type, event.event_type)
        # No other thread waits for the prober, so it gives a busy broker time to create a topic.
        return self._topics.find_for_trial(topic, _PATIENCE_SECONDS).name

    def _produce(self, topic: str, key: str, value: Value, headers: Headers, report: Report) -> None:
        if self._producer is None:
            self._producer = self._new_producer()
        if self._transactional_id is not None and not self._is_open:
            self._producer.begin_transaction()
            self._is_open = True
        self._producer.produce(topic, value, key, headers=headers, on_delivery=report)

    def _new_producer(self) -> Producer:
        # Not gapless: a refused event must not fail the others; each is of another aggregate.
        own: dict[str, Any] = {"batch_num_messages": 1, "linger_ms": 0, "enable_gapless_guarantee": False}
        if self._transactional_id is None:
            return client.producer(self._settings, self._on_error, **own)
        own |= {
            **client.TRANSACTIONAL,
            "transactional_id": self._transactional_id,
            "message_timeout_ms": 10_000,
        }
        producer = client.producer(self._settings, self._on_error, transaction_timeout_ms=10_000, **own)
        producer.init_transactions(_PATIENCE_SECONDS)
        return producer

    def _flush(self) -> None:
        """Wait for the reports; if they do not arrive, discard the producer."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._producer is not None and len(self._producer):
            try:
                client.flush(self._producer, 0.2)
            except KafkaException:
                deadline = 0.0
            if time.monotonic() > min(deadline, self._end_at):
                break
        else:
            return
        self._producer.purge()
        client.flush(self._producer, 1.0)
        self._producer, self._is_open = None, False

    def _on_error(self, error: KafkaError) -> None:
        _LOG.debug("prober: %s", error.str())


def dead_letter(
    event: Event, encode: Encode, topic: str, reason: str, attempts: int
) -> tuple[Value, Headers]:
    """Return value and headers of a dead letter's copy: the message, its reason, attempts and origin."""
    try:
        value, headers = encode(event)
    except Exception:  # noqa: BLE001 - that may be why it is a dead letter
        value, headers = event.payload, [("id", event.id), ("event-type", event.event_type)]
    return value, [
        *headers,
        ("dead-letter-reason", reason),
        ("dead-letter-attempts", str(attempts)),
        ("dead-letter-topic", topic),
        ("dead-letter-seq", str(event.seq)),
    ]


def _report(attempt: Attempt, verdicts: dict[int, Tried], error: KafkaError | None, message: Message) -> None:
    if error is None:
        verdicts[attempt.event.seq] = Tried(attempt, Verdict.PUBLISHED)
    else:
        verdicts[attempt.event.seq] = _judge(attempt, KafkaException(error))


def _judge(attempt: Attempt, error: Exception) -> Tried:
    if isinstance(error, UnavailableError):
        return Tried(attempt, Verdict.UNKNOWN, str(error))
    if isinstance(error, TopicUnavailableError | UnregisteredError):
        return Tried(attempt, Verdict.UNAVAILABLE, text.reason(str(error)))
    if isinstance(error, BufferError):
        return Tried(attempt, Verdict.UNKNOWN, str(error))
    if not isinstance(error, KafkaException):
        return Tried(attempt, Verdict.REFUSED, text.reason(error))
    reason: KafkaError = error.args[0]
    verdict = {Cause.EVENT: Verdict.REFUSED, Cause.TOPIC: Verdict.UNAVAILABLE}.get(
        client_errors.cause(reason)
    )
    return Tried(attempt, verdict or Verdict.UNKNOWN, client_errors.describe(reason))
