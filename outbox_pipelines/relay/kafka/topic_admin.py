"""What the relay asks Kafka about topics: which exist, what they accept; and how it creates missing ones.

Invariants:
- Each request covers any number of topics. Every call waits for its answer, with a time limit.
- A missing topic is created only if its name matches the operator's pattern, and only while fewer topics
  match than the operator allows.
- After a question without an answer, the next one is put by a new client: a client that heard of no broker
  at a bad moment never finds one again (confluentinc/librdkafka#5301). Who asks keeps the client until the
  answer: another thread may replace it, and the future of a client that is gone is never done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    ConfigResource,
    PartitionMetadata,
    TopicDescription,
)
from confluent_kafka.cimpl import NewTopic

from outbox_pipelines.config.rules import Router
from outbox_pipelines.core.outages import is_refused_by_kafka
from outbox_pipelines.core.text import counted
from outbox_pipelines.errors import RefusedError, UnavailableError
from outbox_pipelines.relay.kafka import client, client_errors
from outbox_pipelines.settings import MessageSettings

_ANSWER_SECONDS: Final = 10.0
# How long to wait for the answer about a topic before asking in another way.
_DESCRIBE_SECONDS: Final = 3.0
# The limit only avoids refusals, so the wait for it is short.
_LIMIT_SECONDS: Final = 2.0
# For an answer of brokers that may be unavailable.
_PROBE_SECONDS: Final = 1.0
_NOT_ALLOWED: Final = "cannot be written to (not authorized): grant WRITE and DESCRIBE on it"
_MISSING: Final = (
    "does not exist and the broker does not create it: create it, set OUTBOX_CREATE_TOPICS=true, or "
    "choose other names with OUTBOX_TOPIC"
)
_NOT_YET: Final = "does not exist, and the relay has not been able to create it yet"
# The broker refuses permanently; any other error is a problem of the broker, not of the topic.
_REFUSALS: Final = frozenset(
    {
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.INVALID_PARTITIONS,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
)
# The topic does not exist, or is being created.
_ABSENT: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE})
_COPIES: Final = ".dlq"


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why a topic cannot be published to."""

    reason: str
    is_missing: bool
    """Whether the topic is missing, and so may be created at any moment."""


class TopicAdmin:
    """The brokers, through a separate client. Any thread may use it."""

    def __init__(self, settings: MessageSettings) -> None:
        self._brokers = settings.require_kafka()
        self._creates = settings.create_topics
        self._patterns = settings.create_topics_pattern.split() or Router(settings).patterns
        self._most = settings.create_topics_max
        self._partitions = settings.topic_partitions
        self._replication = settings.topic_replication
        self._missing = Unavailable(_NOT_YET if self._creates else _MISSING, is_missing=True)
        self._is_refused = False
        """Whether the trouble is that the credentials are refused."""
        self._trouble = ""
        self._settings = settings
        try:
            self._admin = self._new_client()
        except client.REJECTIONS as error:
            raise client.rejected(error) from None

    def connect(self) -> None:
        """Wait until a broker answers.

        Raises:
            RefusedError: the credentials are wrong.
            UnavailableError: no broker answers.
        """
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            try:
                # Any answer is sufficient: no topic has an empty name, so the answer is small.
                self._admin.list_topics("", timeout=1.0)
            except KafkaException as error:
                self._admin.poll(0)
                # If the client knows a reason, waiting longer does not change it.
                if time.monotonic() > deadline - (_ANSWER_SECONDS - 3 if self._trouble else 0):
                    raise self._no_answer(self._trouble or _text(error)) from None
            else:
                self._trouble = ""
                return

    def answers(self) -> bool:
        """Return whether a broker answers within a second."""
        try:
            self._admin.list_topics("", timeout=_PROBE_SECONDS)
        except KafkaException:
            self._admin = self._new_client()
            return False
        return True

    def poll(self) -> None:
        """Fetch the client's error reports, which would accumulate otherwise."""
        self._admin.poll(0)

    def close(self) -> None:
        """End the client; nothing may be asked afterwards."""
        del self._admin

    def describe(self, names: Iterable[str]) -> dict[str, int | Unavailable]:
        """Return for each topic its number of partitions, or why it is unavailable. Create none.

        Raises:
            UnavailableError: no broker answers.
        """
        admin = self._admin
        asked = admin.describe_topics(
            TopicCollection(list(names)),
            # Without WRITE on one topic, a whole transaction fails, and the error does not name the topic.
            include_authorized_operations=True,
            request_timeout=_DESCRIBE_SECONDS,
        )
        found: dict[str, int | Unavailable] = {}
        for name, answer in asked.items():
            error = answer.exception()
            if error is not None and _code(error) == KafkaError._TIMED_OUT:
                # This request goes to the controller, which can be unavailable while brokers accept messages.
                return self._list(admin, asked)
            found[name] = _partitions(answer.result()) if error is None else self._explain(error)
        self._trouble = ""
        return found

    def _list(self, admin: AdminClient, names: Iterable[str]) -> dict[str, int | Unavailable]:
        """Like `describe`, from any broker: its answer has all topics of the cluster, but no permissions."""
        try:
            listed = admin.list_topics(timeout=_DESCRIBE_SECONDS).topics
        except KafkaException as error:
            raise self._no_answer(self._trouble or _text(error)) from None
        self._trouble = ""
        return {
            name: len(listed[name].partitions)
            if name in listed and listed[name].error is None
            else self._missing
            for name in names
        }

    def provoke(self, name: str) -> None:
        """Ask for the topic in a way that makes a broker create it, if it creates topics automatically."""
        try:
            self._admin.list_topics(name, timeout=1.0)
        except KafkaException as error:
            raise self._no_answer(self._trouble or _text(error)) from None

    @property
    def creates(self) -> bool:
        """Whether the operator allows the relay to create topics."""
        return self._creates

    def create(self, names: list[str]) -> dict[str, str]:
        """Create topics; return for each that was not created the reason.

        Raises:
            UnavailableError: no broker answers.
        """
        refused = {name: self._forbidden() for name in names if not self._matches(name.removesuffix(_COPIES))}
        chosen = [name for name in names if name not in refused]
        room = self._most - self._count() if chosen else 0
        counted = [name for name in chosen if not name.endswith(_COPIES)]
        for name in counted[max(0, room) :]:
            refused[name] = self._too_many()
        new = [NewTopic(name, self._partitions, self._replication) for name in chosen if name not in refused]
        if not new:
            return refused
        admin = self._admin
        for name, answer in admin.create_topics(new, request_timeout=_ANSWER_SECONDS).items():
            error = answer.exception()
            if error is None or _code(error) == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            if _code(error) not in _REFUSALS or client_errors.says_fenced(error.args[0]):
                raise self._no_answer(_text(error))
            refused[name] = (
                f"does not exist and could not be created ({_text(error).rstrip('.')}): create it, or change "
                "OUTBOX_TOPIC_PARTITIONS, OUTBOX_TOPIC_REPLICATION or the CREATE permission"
            )
        return refused

    def limits(self, names: Iterable[str]) -> dict[str, int | None]:
        """Return for each topic the bytes of the largest batch; None (no limit known) without an answer."""
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
        admin = self._admin
        asked = admin.describe_configs(resources, request_timeout=_LIMIT_SECONDS) if resources else {}
        return {resource.name: _limit(answer) for resource, answer in asked.items()}

    def halted(self, names: Iterable[str]) -> dict[str, str]:
        """Return for each topic why a partition of it accepts nothing now.

        The reason is empty if all partitions accept messages, or the topic does not exist. Any broker can
        answer, because the controller may be unavailable too. Nothing is returned if no broker answers.
        """
        admin = self._admin
        try:
            listed = admin.list_topics(timeout=_PROBE_SECONDS).topics
        except KafkaException:
            return {}
        partitions = {name: listed[name].partitions.values() if name in listed else () for name in names}
        resources = [
            ConfigResource(ConfigResource.Type.TOPIC, name)
            for name, some in partitions.items()
            if any(len(each.isrs) < len(each.replicas) for each in some)
        ]
        asked = admin.describe_configs(resources, request_timeout=_PROBE_SECONDS) if resources else {}
        least = {resource.name: _least_in_sync(answer) for resource, answer in asked.items()}
        return {name: _halted(some, least.get(name, 1)) for name, some in partitions.items()}

    def _matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def _count(self) -> int:
        """Return how many existing topics match the pattern for topics that the relay creates."""
        try:
            names = self._admin.list_topics(timeout=_ANSWER_SECONDS).topics
        except KafkaException as error:
            raise self._no_answer(self._trouble or _text(error)) from None
        return sum(1 for name in names if self._matches(name))

    def _forbidden(self) -> str:
        return (
            "does not exist and its name does not match "
            f"OUTBOX_CREATE_TOPICS_PATTERN={' '.join(self._patterns)}: create it, or extend the pattern"
        )

    def _too_many(self) -> str:
        return (
            f"does not exist and OUTBOX_CREATE_TOPICS_MAX={self._most} is reached by the topics that match "
            f"{' '.join(self._patterns)}: create it, or raise the limit"
        )

    def _explain(self, error: BaseException) -> Unavailable:
        code = _code(error)
        if code in _ABSENT:
            return self._missing
        if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return Unavailable(_NOT_ALLOWED, is_missing=False)
        if code in _REFUSALS:
            return Unavailable(f"is rejected by the broker: {_text(error)}", is_missing=False)
        raise self._no_answer(self._trouble or _text(error))

    def _new_client(self) -> AdminClient:
        on_error = client.weakly(self._on_error)
        return AdminClient(client.config(self._settings, error_cb=on_error), logger=client.LOG)

    def _no_answer(self, reason: str) -> UnavailableError:
        self._admin = self._new_client()
        kind = RefusedError if self._trouble and self._is_refused else UnavailableError
        return kind(f"no broker answers at {self._brokers} (OUTBOX_KAFKA): {reason}")

    def _on_error(self, error: KafkaError) -> None:
        # "All brokers are down" follows the actual reason and says less.
        if not (self._trouble and error.code() == KafkaError._ALL_BROKERS_DOWN):
            self._trouble, self._is_refused = error.str(), is_refused_by_kafka(error)


def _partitions(topic: TopicDescription) -> int | Unavailable:
    # A broker that does not report permissions reports their absence when it refuses a message.
    if topic.authorized_operations and AclOperation.WRITE not in topic.authorized_operations:
        return Unavailable(_NOT_ALLOWED, is_missing=False)
    return len(topic.partitions)


def _halted(partitions: Iterable[PartitionMetadata], least: int) -> str:
    """Why one of a topic's partitions accepts nothing; empty if all do."""
    for each in partitions:
        if each.leader < 0:
            return f"accepts nothing: partition {each.id} has no leader"
        # As the broker counts: a topic of one replica can never have two in sync.
        if len(each.isrs) < min(least, len(each.replicas)):
            return (
                f"accepts nothing: partition {each.id} has {counted(len(each.isrs), 'replica')} in sync, and "
                f"min.insync.replicas is {least}"
            )
    return ""


def _least_in_sync(answer: Future[Any]) -> int:
    """Its `min.insync.replicas`; 1 if the relay may not read the topic's settings."""
    return int(answer.result()["min.insync.replicas"].value) if answer.exception() is None else 1


def _limit(answer: Future[Any]) -> int | None:
    if answer.exception() is not None:
        return None
    found = answer.result()
    # A batch must also fit into a segment.
    return min(int(found["max.message.bytes"].value), int(found["segment.bytes"].value))


def _code(error: BaseException) -> int | None:
    return error.args[0].code() if isinstance(error, KafkaException) else None


def _text(error: BaseException) -> str:
    return str(error.args[0].str()) if isinstance(error, KafkaException) else str(error)
