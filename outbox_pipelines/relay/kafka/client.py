"""The configuration of every Kafka client, and how large a producer's batches may be.

Invariants:
- Idempotence, acks=all, no expiry, Java's partitioner: the guarantees need each of these, so the user's
  settings file may not change them.
- The client has one batch size for all topics: the lowest limit among the topics in use counts. A topic
  without events lately no longer counts: one with a low limit does not slow down others for good.
- A batch is never larger than one that Kafka has refused, until the topic's limit is known to have changed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import MethodType
from typing import Any, Final
from weakref import WeakMethod

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_pipelines.config import parsed
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import OutboxSettings

_FIXED: Final[dict[str, Any]] = {
    "acks": "all",
    "enable.idempotence": True,
    "enable.gapless.guarantee": True,
    # The next message of its key would overtake an expired message.
    "message.timeout.ms": 0,
    # The partitioner of Java's producers and Debezium; librdkafka's default agrees with it on 1 key in 9.
    "partitioner": "murmur2_random",
    # The relay bounds what is in flight, in batches.
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 262_144,
}
_DEFAULTS: Final[dict[str, Any]] = {
    "compression.type": "lz4",
    "linger.ms": 5,
    "batch.num.messages": 10_000,
    # The broker and the topic decide what is too large, not the client.
    "message.max.bytes": 16_000_000,
    "reconnect.backoff.max.ms": 1_000,
    "socket.keepalive.enable": True,
}
# librdkafka asks again for the end of a transaction without a word, after a broken connection or no answer,
# and never sooner than `retry.backoff.ms`, less 20 percent by chance. What took less was asked for once.
TRANSACTIONAL: Final[dict[str, Any]] = {
    # Within a transaction there are no gaps: it is all of it or nothing.
    "enable_gapless_guarantee": False,
    "retry_backoff_ms": 500,
    "retry_backoff_max_ms": 1_000,
}
ASKED_ONCE_SECONDS: Final = 0.4
# What the client raises for settings that it does not accept.
REJECTIONS: Final = (KafkaException, TypeError, ValueError, AttributeError)
_CONNECTION: Final = (
    "security.",
    "sasl.",
    "ssl.",
    "enable.ssl",
    "broker.",
    "client.",
    "socket.",
    "reconnect.",
    # The source of the OAuth token, and the certificates to trust there.
    "https.",
)
# The client's log is shown only on request; important problems are raised as errors.
LOG: Final = logging.getLogger("outbox_pipelines.librdkafka")
LOG.addHandler(logging.NullHandler())


def config(settings: OutboxSettings, **own: Any) -> dict[str, Any]:
    """Return the settings of a client: the user's file, overridden by ours, overridden by `own`.

    Raises:
        SetupError: no brokers are configured, or the file is not valid.
    """
    return {
        **_DEFAULTS,
        **parsed.kafka_config(settings),
        **_FIXED,
        "bootstrap.servers": settings.require_kafka(),
        **own,
    }


def consumer_config(settings: OutboxSettings) -> dict[str, Any]:
    """Return the settings of a consumer: of the user's own, only those that concern the connection."""
    given = parsed.kafka_config(settings).items()
    ours = {name: value for name, value in given if name.startswith(_CONNECTION)}
    return {**ours, "bootstrap.servers": settings.require_kafka()}


def producer(settings: OutboxSettings, on_error: Callable[[KafkaError], None], **own: Any) -> Producer:
    """Return a producer; names in `own` have underscores instead of dots.

    Raises:
        SetupError: the Kafka client rejects the settings.
    """
    dotted = {name.replace("_", "."): value for name, value in own.items()}
    try:
        return Producer(config(settings, **dotted, error_cb=weakly(on_error)), logger=LOG)
    except REJECTIONS as error:
        raise rejected(error) from None


def weakly(on_error: Callable[[KafkaError], None]) -> Callable[[KafkaError], None]:
    """Return a callback that does not keep the method's object alive.

    The object has the client, and the client its callback: as a cycle they would keep threads and connections
    until the garbage collector finds them, which in a relay may be never.
    """
    if not isinstance(on_error, MethodType):
        return on_error
    method = WeakMethod(on_error)

    def report(error: KafkaError) -> None:
        if (alive := method()) is not None:
            alive(error)

    return report


def rejected(error: Exception) -> SetupError:
    """Return the error of settings that the client rejects, without a value: one may be in a wrong line."""
    text = error.args[0].str() if isinstance(error, KafkaException) else first_line(error)
    said = re.sub(r'value "[^"]*"', "value ***", text)
    return SetupError(f"the Kafka client rejects its settings: {said}. Check OUTBOX_KAFKA_CONFIG")


def flush(producer: Producer, seconds: float) -> None:
    """Send what lingers, and serve delivery reports until all are in, for at most so long.

    The client reports a fatal error as an exception and continues to call back while that is pending. Python
    makes a SystemError of it, for each callback again; the callbacks have run.

    Raises:
        KafkaException: the producer has failed for good.
    """
    try:
        producer.flush(seconds)
    except SystemError as error:
        cause: BaseException | None = error
        while isinstance(cause, SystemError):
            cause = cause.__cause__
        if not isinstance(cause, KafkaException):
            raise
        raise cause from None


MOST: Final = 1_000_000
LEAST: Final = 1_000
# A new producer waits until the old one has nothing in flight: not often, and not for a small gain.
_TURN_SECONDS: Final = 10.0
_WORTHWHILE: Final = 2


class BatchSize:
    """The batch size of one producer after another, in bytes.

    Attributes:
        current: of the producer that is in use.
        wanted: of the next one.
    """

    def __init__(self) -> None:
        self.current = self.wanted = MOST
        self._in_use: dict[str, int] = {}
        self._refused: dict[str, tuple[int | None, int]] = {}
        """By topic: its limit as it was known then, and what to try instead."""
        self._turn_at: float | None = None

    @property
    def must_shrink(self) -> bool:
        """Whether the current producer may send batches that a topic refuses."""
        return self.wanted < self.current

    @property
    def is_outdated(self) -> bool:
        """Whether another producer is wanted."""
        return self.wanted != self.current

    def use(self, topic: str, largest: int | None) -> None:
        """Count a topic that is about to be published to.

        Args:
            largest: bytes of the largest batch that it accepts; None if unknown.
        """
        limit = MOST if largest is None else min(MOST, largest)
        if (refused := self._refused.get(topic)) is not None:
            if refused[0] == largest:
                limit = min(limit, refused[1])
            else:
                del self._refused[topic]
        self._in_use[topic] = limit
        self.wanted = min(self.wanted, limit)

    def lower(self, topic: str, largest: int | None) -> bool:
        """Count a topic that has refused a batch; return whether smaller batches are possible.

        Args:
            largest: its limit as it is known now; if that does not explain the refusal, it is approached.
        """
        if largest is None or largest >= self.current:
            self._refused[topic] = largest, max(LEAST, self.current // 4)
        self.use(topic, largest)
        return self.must_shrink

    def turn(self, now: float) -> bool:
        """Return whether the topics in use are to be counted again, which may allow larger batches."""
        if self._turn_at is not None and now < self._turn_at:
            return False
        is_first, self._turn_at = self._turn_at is None, now + _TURN_SECONDS
        if is_first or not self._in_use:
            return False
        limit = min(self._in_use.values())
        if limit >= _WORTHWHILE * self.current:
            self.wanted = limit
        self._in_use = {}
        return True
