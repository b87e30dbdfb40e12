"""The file of settings of Kafka's client, and which it may not have, each with the reason.

Invariants:
- No message shows a line: it may contain a password.
- A setting is reserved if it changes what is published, in which order, or what the client reports about it.
- What the relay sets itself is reserved: a line that has no effect is an error, not a silence.
- Aliases are reserved with the names they stand for.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from outbox_pipelines.core.secret import SECRET_NAME, register

# The form of librdkafka's setting names.
_NAME: Final = re.compile(r"[A-Za-z0-9._]+")
_ADDRESS: Final = "OUTBOX_KAFKA names the brokers"
_EXPIRY: Final = "a message that expires would be overtaken by the next one of its key"
_RETRIES: Final = "a message that the client abandons is sent again by another producer, and duplicated"
_ORDER: Final = "messages would be sent in another order"
_VERSION: Final = "the client must learn from the broker itself whether it has idempotence and transactions"
_BACKOFF: Final = "the relay tells by it whether the end of a transaction was asked for more than once"
_BOUND: Final = "the relay bounds what is in flight"
_OBJECT: Final = "it is an object of a program"
_REASONS: Final = {
    "bootstrap.servers": _ADDRESS,
    "metadata.broker.list": _ADDRESS,
    "acks": "an event counts as published when all replicas in sync have it",
    "request.required.acks": "an event counts as published when all replicas in sync have it",
    "enable.idempotence": "without it a retry duplicates and reorders messages",
    "enable.gapless.guarantee": "a message that fails would be overtaken by the next one of its key",
    "message.timeout.ms": _EXPIRY,
    "delivery.timeout.ms": _EXPIRY,
    "retries": _RETRIES,
    "message.send.max.retries": _RETRIES,
    "retry.backoff.ms": _BACKOFF,
    "retry.backoff.max.ms": _BACKOFF,
    "queuing.strategy": _ORDER,
    "msg_order_cmp": _ORDER,
    "partitioner": "all producers of a topic must choose the same partition for a key, as Java's do",
    "transactional.id": "OUTBOX_DELIVERY decides whether there are transactions, and the shard names them; "
    "messages of a transaction that does not end are invisible to read_committed consumers",
    "transaction.timeout.ms": "OUTBOX_TRANSACTION_SECONDS decides it",
    "delivery.report.only.error": "an event counts as published only when the client reports it",
    "allow.auto.create.topics": "OUTBOX_CREATE_TOPICS decides it",
    "topic.blacklist": "events for these topics would never be published",
    "batch.size": "the relay sets it to the lowest limit of the topics in use",
    "queue.buffering.max.messages": _BOUND,
    "queue.buffering.max.kbytes": _BOUND,
    "api.version.request": _VERSION,
    "api.version.fallback.ms": _VERSION,
    "broker.version.fallback": _VERSION,
    "socket.max.fails": "a connection on which a request was not answered in time must end",
    "enabled_events": "the client would not report which events it has published",
    "log.queue": "the relay reads the client's log between its own steps",
    "internal.termination.signal": "the relay has its own handlers of signals",
    "test.mock.num.brokers": "events would be published to brokers that exist only in the client",
    "default.topic.config": "it would set other settings; write each as its own line",
    "default_topic_conf": _OBJECT,
    "opaque": _OBJECT,
    "interceptors": _OBJECT,
    "logger": _OBJECT,
    "ssl_key": "write ssl.key.pem or ssl.key.location",
    "ssl_certificate": "write ssl.certificate.pem or ssl.certificate.location",
    "ssl_ca": "write ssl.ca.pem or ssl.ca.location",
    "ssl_engine_callback_data": _OBJECT,
    "oauthbearer_token_refresh_cb": "a file has no callback; use sasl.oauthbearer.method=oidc",
}


def reason(name: str) -> str | None:
    """Return why a setting may not be in the file; None if it may."""
    # librdkafka takes each setting of a topic under two names: `acks` is `topic.acks` too.
    for one in name, name.removeprefix("topic."):
        if one in _REASONS:
            return _REASONS[one]
    # Of librdkafka, and of its Python client.
    return "a file has no callback" if name.endswith(("_cb", ".cb", "on_commit")) else None


def read_config(path: Path) -> dict[str, Any]:
    """Return the lines ``name=value``; skip blank lines and comments.

    Raises:
        ValueError: the file cannot be read, a line is not valid, or has a reserved setting.
    """
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text: name a file of lines name=value") from None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}): name a file of lines name=value") from None
    found: dict[str, Any] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not _NAME.fullmatch(name):
            raise ValueError(f"has a line that is not name=value: correct line {number}")
        if (why := reason(name)) is not None:
            raise ValueError(f"has {name}: remove it: {why}")
        found[name] = value
    register(*(value for name, value in found.items() if SECRET_NAME.search(name)))
    return found
