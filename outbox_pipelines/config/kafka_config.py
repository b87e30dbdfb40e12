"""The settings of Kafka's client that a user gives, and which they may not be, each with the reason.

Invariants:
- No message shows a value: it may be a password.
- A setting is reserved if it changes what is published, in which order, or what the client reports about it.
- What the relay sets itself is reserved: an entry that has no effect is an error, not a silence.
- Aliases are reserved with the names they stand for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from outbox_pipelines.config.tables import as_table, each_checked, is_reference, resolved
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
REASONS: Final = {
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
    "default.topic.config": "it would set other settings; write each by its own name",
    "default_topic_conf": _OBJECT,
    "opaque": _OBJECT,
    "interceptors": _OBJECT,
    "logger": _OBJECT,
    "ssl_key": "write ssl.key.pem or ssl.key.location",
    "ssl_certificate": "write ssl.certificate.pem or ssl.certificate.location",
    "ssl_ca": "write ssl.ca.pem or ssl.ca.location",
    "ssl_engine_callback_data": _OBJECT,
    "oauthbearer_token_refresh_cb": "a table has no callback; use sasl.oauthbearer.method=oidc",
}


def reason(name: str) -> str | None:
    """Return why a setting may not be in the file; None if it may."""
    # librdkafka takes each setting of a topic under two names: `acks` is `topic.acks` too.
    for one in name, name.removeprefix("topic."):
        if one in REASONS:
            return REASONS[one]
    # Of librdkafka, and of its Python client.
    return "a table has no callback" if name.endswith(("_cb", ".cb", "on_commit")) else None


def read_config(given: Any, *, is_resolved: bool = True) -> dict[str, Any]:
    """Return the settings of a table, with the values that stand elsewhere (`{ file = … }`) read now.

    Args:
        given: see `as_table`.
        is_resolved: whether values that stand elsewhere are read; otherwise they are not looked for.

    Raises:
        ValueError: a name is reserved or none, or a value cannot be read.
    """

    def one(name: str, value: Any) -> Any:
        if not _NAME.fullmatch(name):
            raise ValueError("has a name that is none of librdkafka's: write for example security.protocol")
        if (why := reason(name)) is not None:
            raise ValueError(f"has {name}: remove it: {why}")
        try:
            return resolved(value) if is_resolved else value
        except ValueError as error:
            raise ValueError(f"has {name}, which {error}") from None

    found = each_checked(_flat(as_table(given), ""), one)
    register(*(str(value) for name, value in found.items() if SECRET_NAME.search(name)))
    return found


def _flat(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """TOML reads `security.protocol = …` as a table in a table."""
    for name, value in table.items():
        if isinstance(value, dict) and not is_reference(value):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
