"""A member of a consumer group: it reads messages, and commits their offsets once they are handled.

Invariants:
- An offset is stored when its message is handled. Stored offsets are committed every second without waiting,
  and with waiting when partitions are revoked and at the end.
- Partitions are assigned and revoked only within `poll` and `wait`. Current messages of a revoked partition
  no longer belong to this member.
- A client that stands still for good is replaced, and ends in a thread of its own, where it reports nothing.
  It is lost only if a new one, with the same settings, finds three times in a row what it does not: every
  ten seconds, and while messages arrive only from what the client itself remembers. In an outage none is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from outbox_pipelines.consumer import limits
from outbox_pipelines.consumer.errors import ConsumerError
from outbox_pipelines.consumer.kafka_clients import CLIENT_LOG
from outbox_pipelines.consumer.kafka_messages import Partition, partition_of
from outbox_pipelines.core.log import RepeatedLines
from outbox_pipelines.core.outages import is_refused_by_kafka
from outbox_pipelines.errors import RefusedError, SetupError

_LOG: Final = logging.getLogger(__name__)
_POLL_SECONDS: Final = 0.2
_COMMIT_SECONDS: Final = 1.0
_LAG_SECONDS: Final = 1.0
_LEAVE_SECONDS: Final = 20.0

_DENIED: Final = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)
# The group has rebalanced without this member: the partition's new owner sees the event as a duplicate.
_NOT_OURS: Final = (
    KafkaError._STATE,
    KafkaError._NO_OFFSET,
    KafkaError._ASSIGNMENT_LOST,
    KafkaError.UNKNOWN_MEMBER_ID,
)
# The group is rebalancing, or moves to another broker, and accepts no offsets for a moment.
_IN_BETWEEN: Final = (
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)
_IN_BETWEEN_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.02
# Kinds of repeated lines, beside the codes of errors.
_OUTAGE: Final = "outage"
_COMMIT: Final = "commit"
_EVERY_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 1.0
# A client that is about to connect again, or to read, has done so the second time.
_MOST_FOUND: Final = 3


class Member:
    """One member of the group; to be used by one thread.

    Raises:
        SetupError: Kafka's client rejects the settings.
    """

    def __init__(self, settings: Mapping[str, Any], topics: Sequence[str]) -> None:
        self._settings = settings
        self._topics = list(topics)
        self._lines = RepeatedLines(_LOG)
        self._client = self._subscribed()
        self._lost_clients = LostClients(self._new_client, self._topics[0])
        self._stored = False
        self._commit_at = 0.0
        self._patience = limits.silence(settings)
        self._polled_at = time.monotonic()
        self._kept: list[Message] = []
        self._gone: set[Partition] = set()
        self._new: set[Partition] = set()
        self._left: set[Partition] = set()
        self._is_known = False
        """Whether the group has accepted this member."""
        self._refusal = ""
        self._lag_at = 0.0
        self.lag: dict[Partition, int] = {}
        """How many messages of each partition are to come, as far as the client knows."""

    def _subscribed(self) -> confluent_kafka.Consumer:
        client = self._new_client()
        client.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        return client

    def _new_client(self) -> confluent_kafka.Consumer:
        callbacks = {"on_commit": self._committed, "error_cb": self._trouble}
        try:
            return confluent_kafka.Consumer({**self._settings, **callbacks}, logger=CLIENT_LOG)
        except KafkaException as error:
            raise SetupError(f"Kafka's client rejects its settings: {error.args[0].str()}") from None

    @property
    def is_silent(self) -> bool:
        """Whether the group should hear of us before another handler is called; see `limits`."""
        return time.monotonic() - self._polled_at > self._patience

    def poll(self, at_once: int = 1, seconds: float = _POLL_SECONDS) -> list[Message]:
        """Return up to `at_once` available messages; none if there is none within `seconds`.

        Raises:
            SetupError: Kafka denies access, or at the start refuses the credentials.
            ConsumerError: the client cannot go on.
        """
        if self._stored and time.monotonic() >= self._commit_at:
            self._stored = False
            self._commit_at = time.monotonic() + _COMMIT_SECONDS
            self._client.commit(asynchronous=True)
        messages, self._kept = [each for each in self._kept if self.has(each)], []
        self._gone.clear()
        if not messages:
            message = self._client.poll(seconds)
            messages = [] if message is None else [message]
        if messages and at_once > len(messages):
            # Only what is here: it would wait for the full number.
            messages += self._client.consume(at_once - len(messages), 0)
        if self._refusal:
            raise RefusedError(f"Kafka refuses the credentials: {self._refusal}. Correct them in kafka=…")
        if self._lost_clients.are_lost(self._client, is_idle=not messages):
            self._replace()
        if _OUTAGE in self._lines and self._lost_clients.has_answered:
            self._lines.end(_OUTAGE, "Kafka is available again")
        self._polled_at = time.monotonic()
        if self._polled_at >= self._lag_at:
            self._lag_at = self._polled_at + _LAG_SECONDS
            self.lag = self._measured()
        return [each for each in messages if self._is_message(each) and self.has(each)]

    def _measured(self) -> dict[Partition, int]:
        """From what the client remembers; nothing is asked of a broker."""
        lag = {}
        try:
            for at in self._client.position(self._client.assignment()):
                _, end = self._client.get_watermark_offsets(at, cached=True)
                if at.offset >= 0 and end >= 0:
                    lag[at.topic, at.partition] = max(0, end - at.offset)
        except KafkaException as error:
            # Of a partition that is just going. A measurement ends no consumer.
            _LOG.debug("the lag is unknown: %s", error.args[0].str())
        return lag

    @property
    def has_left(self) -> bool:
        """Whether partitions of current messages no longer belong to this member."""
        return bool(self._gone)

    def has(self, message: Message) -> bool:
        """Return whether this member still has the partition of a message."""
        return not self._gone or partition_of(message) not in self._gone

    def changes(self) -> tuple[set[Partition], set[Partition]]:
        """The partitions that have gone since the last call, and those that have come; some did both."""
        if not self._left and not self._new:
            return self._left, self._new
        left, self._left = self._left, set()
        new, self._new = self._new, set()
        return left, new

    def wait(self, seconds: float) -> None:
        """Stay in the group for `seconds`, and take no messages."""
        paused = self._client.assignment()
        self._client.pause(paused)
        try:
            message = self._client.poll(seconds)
        finally:
            # Also those that have gone: the client would still have them paused when they come back.
            self._client.resume(paused)
        if message is not None:
            # Of a partition that has just come.
            self._kept.append(message)
        self._polled_at = time.monotonic()

    def done(self, messages: Sequence[Message]) -> None:
        """The messages are handled, and the database has them: their offsets may be committed."""
        # The offset of a partition's last one stands for those before it.
        for message in {partition_of(each): each for each in messages}.values():
            try:
                self._client.store_offsets(message=message)
                self._stored = True
            except KafkaException as error:
                if error.args[0].code() not in _NOT_OURS:
                    raise

    def close(self) -> None:
        """Commit the stored offsets and leave the group, so that other members take over immediately.

        If the client cannot reach the group's coordinator, it is given up after some seconds: other members
        take over when its session times out.
        """
        failures: list[BaseException] = []

        def leave() -> None:
            try:
                try:
                    self._commit()
                finally:
                    self._client.close()
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        # A client that has lost its coordinator may wait for ever.
        leaving = threading.Thread(target=leave, name="outbox-leaving", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_SECONDS)
        if leaving.is_alive():
            _LOG.warning(
                "Kafka's client could not leave the group: others take over when its session times out"
            )
        for failure in failures:
            raise failure

    def _replace(self) -> None:
        """Join the group with a new client; its partitions are lost until they are assigned again."""
        _LOG.warning("Kafka answers, but not this client: joining the group again with a new one")
        lost, self._client = self._client, self._subscribed()
        self._lost_clients.renewed()
        self._leave(lost.assignment())
        self._stored = False
        # Its end waits for a broker, as long as its session would last.
        threading.Thread(target=lost.close, name="outbox-lost-client", daemon=True).start()

    def _assigned(self, _client: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        self._is_known = True
        come = {(each.topic, each.partition) for each in partitions}
        self._new |= come
        # A partition can be revoked and assigned again within a poll: the messages of that poll are ours.
        # Earlier messages of it are handled as well, and arrive again as duplicates.
        self._gone -= come

    def _revoked(self, client: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        if client is not self._client:
            return
        self._leave(partitions)
        self._commit()
        _LOG.info("partitions revoked: %s", _named(partitions))

    def _lost(self, client: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        if client is not self._client:
            return
        self._leave(partitions)
        _LOG.warning(
            "partitions lost: %s; their new owner sees events handled since the last commit as duplicates",
            _named(partitions),
        )

    def _leave(self, partitions: list[TopicPartition]) -> None:
        gone = {(each.topic, each.partition) for each in partitions}
        self._gone |= gone
        self._left |= gone
        self._new -= gone

    def _commit(self) -> None:
        """Waits for it. What cannot be committed comes again, as a duplicate."""
        deadline = time.monotonic() + _IN_BETWEEN_SECONDS
        while True:
            errors = self._refused()
            if not any(error.code() in _IN_BETWEEN for error in errors) or time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_SECONDS)
        self._report(errors)

    def _refused(self) -> list[KafkaError]:
        """Commits what is stored; the errors."""
        try:
            return [each.error for each in self._client.commit(asynchronous=False) if each.error]
        except KafkaException as error:
            return [error.args[0]]

    def _committed(self, error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
        """Report the result of a commit; between two generations of the group, the next one tries again."""
        errors = [each for each in (error, *(at.error for at in partitions)) if each is not None]
        if not any(each.code() in _IN_BETWEEN for each in errors):
            self._report(errors)

    def _report(self, errors: Sequence[KafkaError]) -> None:
        """Log why a commit failed, or that commits succeed again."""
        reasons = sorted({error.str() for error in errors if error.code() not in _NOT_OURS})
        if reasons:
            self._lines.log(_COMMIT, "offsets were not committed: %s", ", ".join(reasons))
        elif not errors:
            self._lines.end(_COMMIT, "offsets are committed again")

    def _trouble(self, error: KafkaError) -> None:
        """Log an error of the client; it repeats that of a broker many times a second."""
        if not self._is_known and is_refused_by_kafka(error):
            self._refusal = error.str()
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._lost_clients.failed()
            self._lines.log(_OUTAGE, "Kafka is unavailable: %s", error.str())
        else:
            self._lines.log(error.code(), "Kafka: %s", error.str())

    def _is_message(self, message: Message) -> bool:
        """Return whether it is a message; log an error that the client returns as one, or raise it."""
        if (error := message.error()) is None:
            return True
        if error.code() in _DENIED:
            raise _denied(error)
        if error.fatal():
            raise ConsumerError(f"Kafka's client cannot continue: {error.str()}")
        self._trouble(error)
        return False


def _denied(error: KafkaError) -> SetupError:
    return SetupError(f"Kafka denies access: {error.str()}: grant READ on the topics and the group")


def _named(partitions: Sequence[TopicPartition]) -> str:
    return ", ".join(f"{each.topic} {each.partition}" for each in partitions)


class LostClients:
    """Notices a client that stands still for good, while others do not.

    Such a client reports nothing. Each was seen with librdkafka after a broker had stood still for seconds:

    - it has asked for brokers when the cluster knew of none, and never finds one again
      (confluentinc/librdkafka#5301);
    - its question for committed offsets was lost, so that it has partitions and never reads them (#5586);
    - it waits for metadata, and never joins the group.

    Args:
        new_client: makes a client with the same settings, to ask whether others find a broker.
        topic: one that the group reads.
    """

    def __init__(self, new_client: Callable[[], confluent_kafka.Consumer], topic: str) -> None:
        self._new_client = new_client
        self._any_partition = TopicPartition(topic, 0)
        self._found = 0
        self._ask_at = 0.0
        self.renewed()
        self.has_answered = False
        """Whether a broker has answered the client since it reported the last outage."""

    def failed(self) -> None:
        """Record that the client has no connection to any broker."""
        self.has_answered = False

    def renewed(self) -> None:
        """There is another client."""
        self._found = 0
        self._ask_at = time.monotonic() + _EVERY_SECONDS

    def are_lost(self, client: confluent_kafka.Consumer, *, is_idle: bool) -> bool:
        """Return whether the client has stood still three times in a row, and new ones have not.

        Args:
            is_idle: no message has arrived in the last poll.
        """
        if not is_idle:
            self.has_answered = True
        if time.monotonic() < self._ask_at:
            return False
        if is_idle and not _answers(client):
            is_lost = self._other_finds(_answers)
        else:
            self.has_answered = True
            is_lost = self._stands_still(client, is_idle)
        self._found = self._found + 1 if is_lost else 0
        self._ask_at = time.monotonic() + _EVERY_SECONDS
        return self._found >= _MOST_FOUND

    def _stands_still(self, client: confluent_kafka.Consumer, is_idle: bool) -> bool:
        if not client.memberid():
            # Any answer of the group's coordinator is sufficient.
            return self._other_finds(lambda other: _committed(other, self._any_partition) is not None)
        # It has received nothing of these, not even that there is nothing.
        unread = [at for at in client.assignment() if client.get_watermark_offsets(at, cached=True)[1] < 0]
        if unread:
            return self._other_finds(lambda other: _end(other, unread[0]) is not None)
        if not is_idle:
            return False
        # Without a message since they were assigned. They may have been known from an earlier assignment.
        fresh = [at for at in client.position(client.assignment()) if at.offset < 0]
        return bool(fresh) and self._other_finds(lambda other: any(_is_behind(other, at) for at in fresh))

    def _other_finds(self, finds: Callable[[confluent_kafka.Consumer], bool]) -> bool:
        try:
            with closing(self._new_client()) as other:
                return finds(other)
        # Also that there is no client: its token is not available.
        except (KafkaException, SetupError):
            return False


def _answers(client: confluent_kafka.Consumer) -> bool:
    try:
        # Any answer is sufficient: no topic has an empty name, so the answer is small.
        client.list_topics("", timeout=_ANSWER_SECONDS)
    except KafkaException:
        return False
    return True


def _committed(other: confluent_kafka.Consumer, at: TopicPartition) -> int | None:
    """Return the offset that the group has committed, negative where it has none; None: no answer."""
    [found] = other.committed([TopicPartition(at.topic, at.partition)], timeout=_ANSWER_SECONDS)
    return None if found.error else found.offset


def _end(other: confluent_kafka.Consumer, at: TopicPartition) -> int | None:
    _, end = other.get_watermark_offsets(at, timeout=_ANSWER_SECONDS)
    return end


def _is_behind(other: confluent_kafka.Consumer, at: TopicPartition) -> bool:
    """Return whether the partition has messages that the group has not handled."""
    start, end = other.get_watermark_offsets(at, timeout=_ANSWER_SECONDS)
    done = _committed(other, at)
    return done is not None and max(start, done) < end
