"""A topic is read to the ends of all its partitions, in one place for all who do so."""

from __future__ import annotations

from contextlib import closing

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewTopic

from outbox_pipelines.core.topic_ends import read_to_ends
from outbox_pipelines.local import Stack
from tests import kafka_clients
from tests.conftest import topic_prefix

_SETTINGS = {"group.id": "reader", "enable.auto.commit": False, "enable.partition.eof": True}


@pytest.mark.extended
def test_an_empty_partition_ends_no_other(stack: Stack) -> None:
    """Guards against messages that are not seen because another partition has ended, and one read twice."""
    brokers, topic = {"bootstrap.servers": stack.kafka}, f"{topic_prefix()}-ends"
    admin = kafka_clients.AdminClient(brokers)
    admin.create_topics([NewTopic(topic, 3, 1)])[topic].result(60)
    producer = kafka_clients.Producer(brokers)
    for n in range(300):
        # The second partition has none.
        producer.produce(topic, str(n), partition=n % 2 * 2)
    assert producer.flush(60) == 0
    starts = [TopicPartition(topic, 0, 10), TopicPartition(topic, 1, 0), TopicPartition(topic, 2, 0)]
    for at_once in (1, 50, 10_000):
        with closing(kafka_clients.Consumer(brokers | _SETTINGS)) as client:
            batches = [*read_to_ends(client, starts, at_once=at_once)]
        assert max(map(len, batches)) <= at_once
        values = [int(message.value()) for messages in batches for message in messages]
        assert sorted(values) == sorted([*range(1, 300, 2), *range(20, 300, 2)])
