"""A group whose coordinator moves to another broker: offsets are committed all the same."""

from __future__ import annotations

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, TopicPartition

from outbox_pipelines.consumer import membership
from outbox_pipelines.consumer.kafka_clients import settings
from tests import kafka_clients
from tests.conftest import either, wait_until
from tests.history import mock


@pytest.mark.parametrize(
    ("code", "times"),
    either(
        (KafkaError.NOT_COORDINATOR, 1),
        # The client itself repeats this, and the member commits when its partitions are revoked too.
        (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, 9),
        (KafkaError.REBALANCE_IN_PROGRESS, 1),
    ),
)
def test_the_last_commit_is_repeated(code: int, times: int) -> None:
    """Guards against events that come twice after each move of a group.

    And against a client that gives up each new coordinator by the change of its own connection: it would ask
    for it about ten times, for seconds.
    """
    with mock.running() as cluster:
        cluster.create({"order": "events"}, 1)
        producer = kafka_clients.Producer({"bootstrap.servers": cluster.bootstrap})
        producer.produce("events", "{}", key="1")
        assert producer.flush(60) == 0
        member = membership.Member(settings({"bootstrap.servers": cluster.bootstrap}, "billing"), ["events"])
        messages: list[confluent_kafka.Message] = []

        def has_come() -> bool:
            messages.extend(member.poll())
            return bool(messages)

        wait_until(has_come, what="the message")
        member.done(messages)
        cluster.count()
        cluster.answer(*[code] * times, request=mock.OFFSET_COMMIT_REQUEST)
        member.close()
        asked = cluster.counted(mock.FIND_COORDINATOR_REQUEST)
        observer = kafka_clients.Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "billing"})
        [at] = observer.committed([TopicPartition("events", 0)], timeout=60)
        observer.close()
    assert at.offset == 1
    assert asked <= 3
