"""exactly_once's Kafka client by itself: one transaction after the other."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outbox_pipelines.relay.core.ports import CommitAnswer
from outbox_pipelines.relay.kafka.client import LOG
from outbox_pipelines.relay.shard import Shard
from outbox_pipelines.relay.transactional_producer import FencingProducer, begin, place
from tests.conftest import Outbox
from tests.relay.topic import create_topic

TRANSACTIONS = 40
# The more there are, the longer Kafka needs to end a transaction.
PARTITIONS = 50


def test_a_transaction_begins_when_kafka_has_ended_the_last_one(
    outbox: Outbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against 20 ms for each transaction that Kafka refuses because the last one has not ended."""
    config = tmp_path / "kafka.properties"
    config.write_text("debug=eos\n")
    settings = outbox.settings.model_copy(update={"kafka_config_file": config})
    shard = cast("Shard", SimpleNamespace(identity=uuid.uuid4().hex, shard=0))
    errors: list[Any] = []
    create_topic(outbox, PARTITIONS)
    with caplog.at_level(logging.DEBUG, LOG.name):
        producer = FencingProducer(settings, shard, begin(settings, place(shard), errors.append))
        try:
            producer.prepare(1)
            for n in range(TRANSACTIONS):
                producer.begin()
                for partition in range(PARTITIONS):
                    producer._producer.produce(outbox.topic(), b"", partition=partition)
                assert producer.record("tick", n, finished=True, released=[]) is None
                assert producer.commit() is CommitAnswer.DONE
        finally:
            producer.close()
    refused = [each for each in caplog.messages if "another concurrent operation" in each]
    committed = [each for each in caplog.messages if "Transaction successfully committed" in each]
    # The log of the last one may come later.
    assert len(committed) >= TRANSACTIONS - 1
    assert len(refused) < TRANSACTIONS / 5
