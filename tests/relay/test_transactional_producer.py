"""exactly_once's Kafka client by itself: one transaction after the other."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outbox_pipelines.relay.core.producers import CommitAnswer
from outbox_pipelines.relay.kafka import transactional_producer
from outbox_pipelines.relay.kafka.client import LOG
from outbox_pipelines.relay.kafka.transactional_producer import FencingProducer, begin, kafka_names
from outbox_pipelines.relay.lease.shard import Shard
from tests.conftest import Outbox
from tests.relay.topic import create_topic

# The more there are, the longer Kafka needs to end a transaction.
PARTITIONS = 50
REFUSED = "another concurrent operation"


@pytest.fixture
def producer(outbox: Outbox, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[FencingProducer]:
    """One that logs its transactions, and a topic with many partitions."""
    settings = outbox.settings.model_copy(update={"kafka_config": {"debug": "eos"}})
    shard = cast("Shard", SimpleNamespace(identity=uuid.uuid4().hex, shard=0))
    errors: list[Any] = []
    create_topic(outbox, PARTITIONS)
    with caplog.at_level(logging.DEBUG, LOG.name):
        made = FencingProducer(settings, shard, begin(settings, kafka_names(shard), errors.append))
        made.prepare(1)
        yield made
        made.close()


def _publish(producer: FencingProducer, topic: str, transactions: int) -> None:
    for n in range(transactions):
        producer.begin()
        for partition in range(PARTITIONS):
            producer._producer.produce(topic, b"", partition=partition)
        # As the relay does, whose record says how far the events are.
        producer.serve(30, linger=False)
        assert producer.record("tick", n, finished=True, released=[]) is None
        assert producer.commit() is CommitAnswer.DONE


def _count(caplog: pytest.LogCaptureFixture, what: str) -> int:
    return sum(what in each for each in caplog.messages)


@pytest.mark.parametrize(
    ("lasted", "took", "waits"),
    [(0.0, 0.0002, 0.001), (0.0, 0.01, 0.005), (0.0, 0.3, 0.015), (0.03, 0.01, 0.01), (0.3, 0.01, 0.005)],
)
def test_a_transaction_begins_when_kafka_has_ended_the_last_one(
    outbox: Outbox,
    producer: FencingProducer,
    monkeypatch: pytest.MonkeyPatch,
    lasted: float,
    took: float,
    waits: float,
) -> None:
    """Guards against 20 ms for each transaction that Kafka refuses because the last one has not ended.

    And against ever more transactions of few events where each takes long. How many Kafka refuses depends on
    the machine; so here by a clock of our own.
    """
    ended = 100.0 + lasted + took
    moments = iter([100.0, 100.0 + lasted, ended, ended])
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: next(moments), sleep=pauses.append)
    monkeypatch.setattr(transactional_producer, "time", clock)
    producer.begin()
    producer._producer.produce(outbox.topic(), b"")
    assert producer.commit() is CommitAnswer.DONE
    producer.begin()
    assert pauses == [0.0, pytest.approx(waits)]


def test_the_record_joins_a_transaction_with_its_events(
    outbox: Outbox, producer: FencingProducer, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a second round trip for the record's partition, at the commit."""
    # A broker that has just started refuses for more reasons.
    _publish(producer, outbox.topic(), 10)
    caplog.clear()
    _publish(producer, outbox.topic(), 10)
    assert _count(caplog, "Registering partitions with transaction") - _count(caplog, REFUSED) < 15
