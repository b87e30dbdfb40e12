"""The topics that are published to: whether they are there, what they accept, and when they grow.

Invariants:
- A topic is looked up before the first message to it: the client would report a missing one half a minute
  later, and for each message.
- `find` may wait; `refresh` never does.
- Everything here runs in one thread. The client is kept as long as an answer is awaited.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from outbox_pipelines.errors import AwayError, SetupError
from outbox_pipelines.relay import client
from outbox_pipelines.settings import Settings

_LOG = logging.getLogger(__name__)
_ANSWER_SECONDS = 10.0
# It spares trouble, no more: the flow of all events does not wait long for it.
_LIMIT_SECONDS = 2.0
# A broker that creates topics itself needs a moment for it.
_CREATION_SECONDS = 3.0
# A topic that was not there is not asked for again at each of its events.
_UNAVAILABLE_SECONDS = 2.0
_REFRESH_SECONDS = 60.0
_NOT_ALLOWED = "may not be written to: grant WRITE and DESCRIBE on it"
# The broker refuses for good; anything else is its trouble, not the topic's.
_REFUSALS = frozenset(
    {
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.INVALID_PARTITIONS,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
)


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic that can be published to."""

    name: str
    partitions: int
    largest: int | None
    """Bytes of the largest batch that it takes; None where the relay may not ask."""


@dataclass(frozen=True, slots=True)
class Change:
    """A topic's number of partitions is another one: its keys have moved."""

    topic: str
    before: int
    after: int


class TopicUnavailableError(Exception):
    """Nothing can be published to this topic until a person mends it; other topics are fine."""

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(f"topic {topic} {reason}")
        self.topic = topic
        self.reason = reason


class Topics:
    """What is known of the topics, from a client of its own.

    Args:
        patience: how long the first look waits for a topic that the broker may be creating, in seconds.

    Attributes:
        changed: every change of a number of partitions that was noticed, in order.
    """

    def __init__(self, settings: Settings, *, patience: float = _CREATION_SECONDS) -> None:
        self._patience = patience
        self.changed: list[Change] = []
        self._brokers = settings.require_kafka()
        self._creates = settings.create_topics
        self._partitions = settings.topic_partitions
        self._replication = settings.topic_replication
        self._topics: dict[str, Topic] = {}
        self._unavailable: dict[str, tuple[float, str]] = {}
        self._trouble = ""
        self._refresh_due = time.monotonic() + _REFRESH_SECONDS
        self._awaited: list[tuple[Topic, Future[Any], Future[Any]]] = []
        try:
            config = client.config(settings, error_cb=self._on_error)
            self._admin = AdminClient(config, logger=client.LOG)
        except KafkaException as error:
            raise SetupError(f"Kafka's client refuses its settings: {error.args[0].str()}") from None

    def connect(self) -> None:
        """Waits until a broker answers.

        Raises:
            AwayError: none does, or the credentials are wrong.
        """
        # Any answer will do: no topic has an empty name, so it is small.
        self._metadata("")

    def answers(self) -> bool:
        """Whether a broker answers within a second."""
        try:
            self._admin.list_topics("", timeout=1.0)
        except KafkaException:
            return False
        return True

    @property
    def known(self) -> frozenset[str]:
        """Those that were found, and are still there."""
        return frozenset(self._topics)

    def find(self, name: str) -> Topic:
        """The topic; made where it is missing and the operator allows it.

        Raises:
            TopicUnavailableError: it is not there, or not for this relay.
            AwayError: no broker answers.
        """
        topic = self._topics.get(name)
        if topic is None:
            until, reason = self._unavailable.get(name, (0.0, ""))
            if time.monotonic() < until:
                raise TopicUnavailableError(name, reason)
            try:
                if self._creates:
                    self._create(name)
                partitions = self._look_up(name, patience=0 if reason else self._patience)
            except TopicUnavailableError as error:
                self._unavailable[name] = (time.monotonic() + _UNAVAILABLE_SECONDS, error.reason)
                raise
            self._unavailable.pop(name, None)
            limit = self._ask_limit(name)
            topic = Topic(name, partitions, _limit(limit, None))
            self._topics[name] = topic
        return topic

    def knows_limit(self, name: str) -> bool:
        """Whether the size that a topic takes is known."""
        return name in self._topics and self._topics[name].largest is not None

    def refresh(self) -> bool:
        """Asks about all known topics again, once a minute; whether an answer has brought news."""
        if self._awaited:
            if all(about.done() and limit.done() for _, about, limit in self._awaited):
                before = dict(self._topics)
                self._take_in()
                return before != self._topics
        elif time.monotonic() >= self._refresh_due:
            self._refresh_due = time.monotonic() + _REFRESH_SECONDS
            # Its reports of errors would pile up.
            self._admin.poll(0)
            self._awaited = [
                (topic, self._ask_about(topic.name), self._ask_limit(topic.name))
                for topic in self._topics.values()
            ]
        return False

    def _take_in(self) -> None:
        for topic, about, limit in self._awaited:
            error = about.exception()
            if error is not None:
                if _code(error) == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    _LOG.warning("topic %s is gone", topic.name)
                    self._topics.pop(topic.name, None)
                continue
            partitions = len(about.result().partitions)
            if partitions != topic.partitions:
                self.changed.append(Change(topic.name, topic.partitions, partitions))
                _LOG.warning(
                    "topic %s has %d partitions instead of %d: keys move to other partitions, so an "
                    "aggregate's order holds among its messages from before and among those from now on only",
                    *(topic.name, partitions, topic.partitions),
                )
            self._topics[topic.name] = Topic(topic.name, partitions, _limit(limit, topic.largest))
        self._awaited = []

    def _create(self, name: str) -> None:
        """Makes the topic if it is missing. Asked so that no broker makes it by its own defaults."""
        error = self._ask_about(name).exception()
        if error is None:
            return
        if _code(error) == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            raise TopicUnavailableError(name, _NOT_ALLOWED)
        if _code(error) != KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise self._no_answer(_text(error))
        new = NewTopic(name, self._partitions, self._replication)
        error = self._admin.create_topics([new], request_timeout=_ANSWER_SECONDS)[name].exception()
        if error is None or _code(error) == KafkaError.TOPIC_ALREADY_EXISTS:
            return
        if _code(error) not in _REFUSALS:
            raise self._no_answer(_text(error))
        raise TopicUnavailableError(
            name,
            f"does not exist and could not be created ({_text(error).rstrip('.')}): create it, or mend "
            "OUTBOX_TOPIC_PARTITIONS, OUTBOX_TOPIC_REPLICATION or the right to CREATE",
        )

    def _look_up(self, name: str, patience: float) -> int:
        """How many partitions the topic has; waits for one that the broker may be creating."""
        deadline = time.monotonic() + patience
        while True:
            found = self._metadata(name).topics[name]
            if found.error is None:
                return len(found.partitions)
            code = found.error.code()
            if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise TopicUnavailableError(name, _NOT_ALLOWED)
            if time.monotonic() >= deadline:
                if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise TopicUnavailableError(
                        name,
                        "does not exist and the broker does not create it: create it, or set "
                        "OUTBOX_CREATE_TOPICS=true, or choose other names with OUTBOX_TOPIC",
                    )
                if code in _REFUSALS:
                    raise TopicUnavailableError(name, f"is refused by the broker: {found.error.str()}")
                raise self._no_answer(found.error.str())
            self._admin.poll(0.1)

    def _metadata(self, name: str) -> Any:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            try:
                found = self._admin.list_topics(name, timeout=1.0)
            except KafkaException as error:
                self._admin.poll(0)
                # A reason that the client has found will not change by waiting longer.
                if time.monotonic() > deadline - (_ANSWER_SECONDS - 3 if self._trouble else 0):
                    raise self._no_answer(self._trouble or _text(error)) from None
            else:
                self._trouble = ""
                return found

    def _no_answer(self, reason: str) -> AwayError:
        return AwayError(f"no broker answers at {self._brokers} (OUTBOX_KAFKA): {reason}")

    def _ask_about(self, name: str) -> Future[Any]:
        asked = self._admin.describe_topics(TopicCollection([name]), request_timeout=_ANSWER_SECONDS)
        return asked[name]

    def _ask_limit(self, name: str) -> Future[Any]:
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        return self._admin.describe_configs([resource], request_timeout=_LIMIT_SECONDS)[resource]

    def _on_error(self, error: KafkaError) -> None:
        # That all brokers are down follows a reason, and says less.
        if not (self._trouble and error.code() == KafkaError._ALL_BROKERS_DOWN):
            self._trouble = error.str()


def _limit(answer: Future[Any], otherwise: int | None) -> int | None:
    """The topic's `max.message.bytes`; without an answer the relay goes on."""
    if answer.exception() is not None:
        return otherwise
    return int(answer.result()["max.message.bytes"].value)


def _code(error: BaseException) -> int | None:
    return error.args[0].code() if isinstance(error, KafkaException) else None


def _text(error: BaseException) -> str:
    return str(error.args[0].str()) if isinstance(error, KafkaException) else str(error)
