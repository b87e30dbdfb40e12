"""The settings with which Kafka's client runs, as the client reports them: each carries a guarantee."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast
from uuid import uuid4

import pytest
from confluent_kafka import Producer

from outbox_pipelines.relay.kafka import client
from outbox_pipelines.relay.kafka.producer import IdempotentProducer
from outbox_pipelines.relay.kafka.topic_lookups import TopicLookups
from outbox_pipelines.relay.kafka.transactional_producer import begin, kafka_names
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.parking.prober import Prober
from outbox_pipelines.settings import Settings
from tests.conftest import Outbox, wait_until

# By the names that librdkafka prints; -1 is acks=all.
_EVERY_PRODUCER: Final = {
    # A leader that fails would take acknowledged events with it.
    "request.required.acks": "-1",
    # The client's own retries would duplicate and reorder.
    "enable.idempotence": "true",
    # An aggregate's events would be in the partitions of another producer's key.
    "partitioner": "murmur2_random",
    # A firewall that drops a silent connection would be noticed by the next event only.
    "socket.keepalive.enable": "true",
    # The broker and the topic decide what is too large.
    "message.max.bytes": "16000000",
    # What the relay has in flight fits in.
    "queue.buffering.max.messages": "200000",
    "queue.buffering.max.kbytes": "262144",
    "compression.codec": "lz4",
    # An outage is over when it is over.
    "reconnect.backoff.max.ms": "1000",
}
# Waits for a full batch this long, by its older name: each event would be a request.
_FULL_BATCHES: Final = {"queue.buffering.max.ms": "5", "batch.num.messages": "10000"}
# One event at a time, without a wait. A refused one is no gap: nothing is in flight behind it.
_ONE_BY_ONE: Final = {
    "queue.buffering.max.ms": "0",
    "batch.num.messages": "1",
    "enable.gapless.guarantee": "false",
}
# In at_least_once: behind an event that expires, or that was refused, the next of its key would overtake it.
_NO_GAPS: Final = {"message.timeout.ms": "0", "enable.gapless.guarantee": "true"}


def _publisher(settings: Settings, shard: Shard) -> Producer:
    producer = IdempotentProducer(settings)
    producer.connect()
    return producer._producer


def _transactional(settings: Settings, shard: Shard) -> Producer:
    return begin(settings, kafka_names(shard), lambda error: None)


def _trials(settings: Settings, shard: Shard, transactional_id: str | None = None) -> Producer:
    return Prober(settings, TopicLookups(settings), transactional_id)._new_producer()


def _transactional_trials(settings: Settings, shard: Shard) -> Producer:
    return _trials(settings, shard, uuid4().hex)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (_publisher, _EVERY_PRODUCER | _FULL_BATCHES | _NO_GAPS),
        # All of a transaction or nothing of it; it expires with the transaction.
        (
            _transactional,
            _EVERY_PRODUCER
            | _FULL_BATCHES
            | {"message.timeout.ms": "4000", "transaction.timeout.ms": "4000"},
        ),
        (_trials, _EVERY_PRODUCER | _ONE_BY_ONE | {"message.timeout.ms": "0"}),
        (
            _transactional_trials,
            _EVERY_PRODUCER
            | _ONE_BY_ONE
            | {"message.timeout.ms": "10000", "transaction.timeout.ms": "10000"},
        ),
    ],
)
def test_a_client_has_them(
    outbox: Outbox,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[Settings, Shard], Producer],
    expected: dict[str, str],
) -> None:
    """Guards against a setting that is lost, or that another one overrides: no event would show it for a
    long time."""
    update = {"kafka_config": {"debug": "conf"}, "transaction_seconds": 4.0}
    settings = outbox.settings.model_copy(update=update)
    shard = cast("Shard", SimpleNamespace(identity=uuid4().hex, shard=0))
    lines = _Lines()
    # One of its own: what else ran in this process may have changed the client's.
    log = logging.Logger("client", logging.DEBUG)
    log.addHandler(lines)
    monkeypatch.setattr(client, "LOG", log)
    producer = use(settings, shard)

    def found() -> dict[str, str]:
        # The client's log is shown by a call of the client.
        producer.poll(0.1)
        return dict(re.findall(r"\]:\s+([\w.]+) = (\S+)", "\n".join(lines.read)))

    # What is printed last.
    wait_until(lambda: "partitioner" in found(), what="the client's settings in its log")
    assert expected == {name: found().get(name) for name in expected}


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.read.append(record.getMessage())
