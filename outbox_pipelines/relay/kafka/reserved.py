"""Settings of Kafka's client that a user's file may not have, each with the reason.

Invariants:
- A setting is reserved if it changes what is published, in which order, or what the client reports about it.
- Aliases are reserved with the names they stand for.
"""

from __future__ import annotations

from typing import Final

_ADDRESS: Final = "OUTBOX_KAFKA names the brokers"
_EXPIRY: Final = "a message that expires would be overtaken by the next one of its key"
_RETRIES: Final = "a message that the client abandons is sent again by another producer, and duplicated"
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
    "queuing.strategy": "messages would be sent in another order",
    "partitioner": "all producers of a topic must choose the same partition for a key, as Java's do",
    "transactional.id": "OUTBOX_DELIVERY decides whether there are transactions, and the shard names them; "
    "messages of a transaction that does not end are invisible to read_committed consumers",
    "transaction.timeout.ms": "OUTBOX_TRANSACTION_SECONDS decides it",
    "delivery.report.only.error": "an event counts as published only when the client reports it",
    "allow.auto.create.topics": "OUTBOX_CREATE_TOPICS decides it",
    "queue.buffering.max.messages": "the relay bounds what is in flight",
    "queue.buffering.max.kbytes": "the relay bounds what is in flight",
    "test.mock.num.brokers": "events would be published to brokers that exist only in the client",
    "default.topic.config": "it would set other settings; write each as its own line",
    "opaque": "it is an object of a program",
    "interceptors": "it is an object of a program",
    "logger": "it is an object of a program",
    "ssl_engine_callback_data": "it is an object of a program",
    "oauthbearer_token_refresh_cb": "a file has no callback; use sasl.oauthbearer.method=oidc",
}


def reason(name: str) -> str | None:
    """Return why a setting may not be in the file; None if it may."""
    if name in _REASONS:
        return _REASONS[name]
    # Of librdkafka, and of its Python client.
    return "a file has no callback" if name.endswith(("_cb", ".cb", "on_commit")) else None
