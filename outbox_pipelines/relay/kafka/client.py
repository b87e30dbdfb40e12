"""Kafka's client, configured in one way.

Invariants:
- Idempotent, acks=all, no expiry, Java's partitioner: without any of these the guarantees do not hold, and a
  file of settings may not change them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_pipelines.errors import SetupError
from outbox_pipelines.secret import SECRET_NAME, register
from outbox_pipelines.settings import Settings

_FIXED: Final[dict[str, Any]] = {
    "acks": "all",
    "enable.idempotence": True,
    "enable.gapless.guarantee": True,
    # An expired message would be overtaken by the next one of its key.
    "message.timeout.ms": 0,
    # As Java's producers and Debezium place keys; librdkafka's own way agrees on 1 key in 9.
    "partitioner": "murmur2_random",
    # What is on its way is bounded by the relay, in batches.
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
_CONNECTION: Final = (
    "security.",
    "sasl.",
    "ssl.",
    "enable.ssl",
    "broker.",
    "client.",
    "socket.",
    "reconnect.",
    # Where the token of OAuth comes from, and whom to trust there.
    "https.",
)
# As librdkafka's are called.
_NAME: Final = re.compile(r"[A-Za-z0-9._]+")
# What the client logs is for people who ask for it; what they must know is raised.
LOG: Final = logging.getLogger("outbox_pipelines.librdkafka")
LOG.addHandler(logging.NullHandler())


def config(settings: Settings, **own: Any) -> dict[str, Any]:
    """What every client here is made with: the user's file, ours over it, `own` over both.

    Raises:
        SetupError: no brokers are named, or the file is not as it must be.
    """
    return {
        **_DEFAULTS,
        **read_config(settings.kafka_config_file),
        **_FIXED,
        "bootstrap.servers": settings.require_kafka(),
        **own,
    }


def consumer_config(settings: Settings) -> dict[str, Any]:
    """What a consumer is made with: of the user's file that which leads to the brokers."""
    given = read_config(settings.kafka_config_file)
    ours = {name: value for name, value in given.items() if name.startswith(_CONNECTION)}
    return {**ours, "bootstrap.servers": settings.require_kafka()}


def producer(settings: Settings, on_error: Callable[[KafkaError], None], **own: Any) -> Producer:
    """A producer; `own` settings carry underscores for dots.

    Raises:
        SetupError: the client refuses the settings.
    """
    dotted = {name.replace("_", "."): value for name, value in own.items()}
    try:
        return Producer(config(settings, **dotted, error_cb=on_error), logger=LOG)
    except KafkaException as error:
        raise SetupError(f"Kafka's client refuses its settings: {error.args[0].str()}") from None


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


def read_config(path: Path | None) -> dict[str, Any]:
    """The lines ``name=value`` of the user's librdkafka settings; blank lines and # are passed over."""
    if path is None:
        return {}
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        raise SetupError(
            f"OUTBOX_KAFKA_CONFIG_FILE: {path} is not UTF-8: name a file of name=value"
        ) from None
    except OSError as error:
        raise SetupError(f"OUTBOX_KAFKA_CONFIG_FILE: {error}: name a file of lines name=value") from None
    found: dict[str, Any] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not _NAME.fullmatch(name):
            # Never the line: it may have a password in it.
            raise SetupError(
                f"OUTBOX_KAFKA_CONFIG_FILE: line {number} of {path} is not name=value: correct it"
            )
        if name in _FIXED:
            raise SetupError(f"OUTBOX_KAFKA_CONFIG_FILE: the relay sets {name} itself: remove it from {path}")
        found[name] = value
    register(*(value for name, value in found.items() if SECRET_NAME.search(name)))
    return found
