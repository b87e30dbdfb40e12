"""A progress topic whose records Kafka may delete: an error at the start of exactly_once."""

from __future__ import annotations

import uuid

import pytest
from confluent_kafka.cimpl import NewTopic

from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.kafka.progress_topic import create_topic
from tests.conftest import Outbox
from tests.kafka_clients import AdminClient


@pytest.mark.parametrize(
    ("config", "is_kept"),
    [
        ({"cleanup.policy": "delete"}, False),
        ({"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}, False),
        ({"cleanup.policy": "compact,delete"}, False),
        ({"cleanup.policy": "compact,delete", "retention.ms": "-1", "retention.bytes": "1000000"}, False),
        ({"cleanup.policy": "compact,delete", "retention.ms": "-1", "retention.bytes": "-1"}, True),
        ({"cleanup.policy": "compact"}, True),
    ],
)
def test_a_topic_that_exists(outbox: Outbox, config: dict[str, str], is_kept: bool) -> None:
    """Guards against a record that is deleted while its shard is quiet, after which events come twice."""
    name = f"outbox-progress-{uuid.uuid4().hex}"
    admin = AdminClient({"bootstrap.servers": outbox.settings.kafka})
    admin.create_topics([NewTopic(name, 1, 1, config=config)])[name].result(60)
    try:
        if is_kept:
            create_topic(outbox.settings, name, 1)
        else:
            with pytest.raises(SetupError, match="does not keep the last record"):
                create_topic(outbox.settings, name, 1)
    finally:
        admin.delete_topics([name])[name].result(60)


def test_a_topic_that_is_made(outbox: Outbox) -> None:
    """Guards against a topic of the relay's own that it refuses at its next start."""
    name = f"outbox-progress-{uuid.uuid4().hex}"
    admin = AdminClient({"bootstrap.servers": outbox.settings.kafka})
    try:
        for _ in range(2):
            create_topic(outbox.settings, name, 1)
    finally:
        admin.delete_topics([name])[name].result(60)
