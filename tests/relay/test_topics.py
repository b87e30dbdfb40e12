"""Topics on a real broker: found, made, refused, and noticed when they change."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.kafka import Kafka, running
from outbox_pipelines.relay import service, topics
from outbox_pipelines.relay.topics import Change, Topic, Topics, TopicUnavailableError
from outbox_pipelines.settings import load_settings
from tests.conftest import Outbox, topic_prefix, wait_until

# What a broker takes where nobody said otherwise.
USUAL = 1_048_588


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A broker that creates no topics itself and has access rules; what none speaks of is allowed."""
    settings = {
        "auto.create.topics.enable": "false",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with running(tmp_path_factory.mktemp("strict"), settings) as broker:
        yield broker


@pytest.fixture
def name() -> str:
    return topic_prefix()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refresh asks, and an unavailable topic is asked for each time."""
    monkeypatch.setattr(topics, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(topics, "_UNAVAILABLE_SECONDS", 0.0)


def _topics(broker: Kafka, **settings: object) -> Topics:
    return Topics(load_settings(kafka=broker.bootstrap, **settings))


def _admin(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap})


def _make(bootstrap: str, name: str, partitions: int = 2) -> None:
    # Dropped before the answer, a client takes the answer with it.
    admin = _admin(bootstrap)
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(10)


def _deny(broker: Kafka, name: str, operation: AclOperation) -> None:
    rule = AclBinding(
        ResourceType.TOPIC,
        name,
        ResourcePatternType.LITERAL,
        "User:ANONYMOUS",
        "*",
        operation,
        AclPermissionType.DENY,
    )
    everything_else = AclBinding(
        ResourceType.TOPIC,
        name,
        ResourcePatternType.LITERAL,
        "User:ANONYMOUS",
        "*",
        AclOperation.ALL,
        AclPermissionType.ALLOW,
    )
    admin = _admin(broker.bootstrap)
    for answer in admin.create_acls([rule, everything_else]).values():
        answer.result(10)


def test_a_topic_is_found_with_its_partitions_and_its_limit(strict: Kafka, name: str) -> None:
    """Guards against events that are sent to a topic too small for them."""
    _make(strict.bootstrap, name, 3)
    known = _topics(strict)
    known.connect()
    assert known.find(name) == Topic(name, 3, USUAL)


def test_a_missing_topic_is_unavailable(strict: Kafka, name: str) -> None:
    """Guards against a relay that waits for ever, or says no more than 'unknown'."""
    known = _topics(strict)
    with pytest.raises(TopicUnavailableError) as refused:
        known.find(name)
    assert refused.value.topic == name
    assert str(refused.value).startswith(f"topic {name} does not exist and the broker does not create it: ")
    assert "create it, or set OUTBOX_CREATE_TOPICS=true" in refused.value.reason


@pytest.mark.usefixtures("often")
def test_a_missing_topic_is_found_when_somebody_has_made_it(strict: Kafka, name: str) -> None:
    """Guards against a relay that must be restarted for a new topic."""
    known = _topics(strict)
    with pytest.raises(TopicUnavailableError):
        known.find(name)
    _make(strict.bootstrap, name)
    wait_until(lambda: name in _admin(strict.bootstrap).list_topics(timeout=5).topics)
    assert known.find(name).partitions == 2


def test_a_missing_topic_is_made_where_the_operator_allows_it(strict: Kafka, name: str) -> None:
    """Guards against a topic with other partitions than asked for, and against making it a second time."""
    for _ in range(2):
        found = _topics(strict, create_topics=True, topic_partitions=5).find(name)
        assert found == Topic(name, 5, USUAL)
    assert _topics(strict, create_topics=True, topic_partitions=7).find(name).partitions == 5


def test_a_topic_that_cannot_be_made_is_unavailable(strict: Kafka, name: str) -> None:
    """Guards against a broker's refusal that stops the relay, or is taken for an outage."""
    with pytest.raises(TopicUnavailableError) as refused:
        _topics(strict, create_topics=True, topic_replication=3).find(name)
    assert f"topic {name} does not exist and could not be created (Unable to replicate" in str(refused.value)
    assert "create it, or mend OUTBOX_TOPIC_PARTITIONS, OUTBOX_TOPIC_REPLICATION" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("create_topics", [False, True])
def test_a_topic_without_permission_is_unavailable(strict: Kafka, name: str, create_topics: bool) -> None:
    """Guards against a missing grant that looks like a missing topic."""
    _make(strict.bootstrap, name)
    _deny(strict, name, AclOperation.WRITE)
    _deny(strict, name, AclOperation.DESCRIBE)
    admin = _admin(strict.bootstrap)
    wait_until(lambda: admin.list_topics(name, timeout=5).topics[name].error is not None)
    says = f"^topic {name} may not be written to: grant WRITE and DESCRIBE on it$"
    with pytest.raises(TopicUnavailableError, match=says):
        _topics(strict, create_topics=create_topics).find(name)


def test_a_limit_that_may_not_be_asked_is_unknown(strict: Kafka, name: str) -> None:
    """Guards against a relay that needs a grant more than publishing does."""
    _make(strict.bootstrap, name)
    _deny(strict, name, AclOperation.DESCRIBE_CONFIGS)
    resource = ConfigResource(ConfigResource.Type.TOPIC, name)
    admin = _admin(strict.bootstrap)
    wait_until(lambda: admin.describe_configs([resource])[resource].exception(10) is not None)
    assert _topics(strict).find(name) == Topic(name, 2, None)


@pytest.mark.usefixtures("often")
def test_a_topic_that_grows_is_noticed(strict: Kafka, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an order that is lost in silence, and against a limit of old."""
    _make(strict.bootstrap, name)
    known = _topics(strict)
    known.find(name)
    admin = _admin(strict.bootstrap)
    resource = ConfigResource(
        ConfigResource.Type.TOPIC,
        name,
        incremental_configs=[
            ConfigEntry("max.message.bytes", "2000", incremental_operation=AlterConfigOpType.SET)
        ],
    )
    admin.incremental_alter_configs([resource])[resource].result(10)
    admin.create_partitions([NewPartitions(name, 4)])[name].result(10)

    def refreshed() -> Topic:
        known.refresh()
        return known.find(name)

    wait_until(lambda: refreshed() == Topic(name, 4, 2000))
    assert known.changed == [Change(name, 2, 4)]
    (record,) = [record for record in caplog.records if record.name == topics.__name__]
    assert record.levelno == logging.WARNING
    assert f"topic {name} has 4 partitions instead of 2: keys move" in record.getMessage()


@pytest.mark.usefixtures("often")
def test_a_topic_that_is_deleted_is_noticed(strict: Kafka, name: str) -> None:
    """Guards against a topic that is believed to exist for as long as the relay runs."""
    _make(strict.bootstrap, name)
    known = _topics(strict)
    known.find(name)
    admin = _admin(strict.bootstrap)
    admin.delete_topics([name])[name].result(10)

    def is_gone() -> bool:
        known.refresh()
        try:
            known.find(name)
        except TopicUnavailableError:
            return True
        return False

    wait_until(is_gone)
    assert known.changed == []


def test_nothing_waits_for_a_broker_that_is_away(
    strict: Kafka, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a publisher that stands still in an outage because it asks about its topics."""
    monkeypatch.setattr(topics, "_REFRESH_SECONDS", 0.0)
    _make(strict.bootstrap, name)
    known = _topics(strict)
    topic = known.find(name)
    missing = f"{name}-missing"
    with pytest.raises(TopicUnavailableError):
        known.find(missing)
    strict.kill()
    try:
        start = time.monotonic()
        for _ in range(100):
            known.refresh()
            assert known.find(name) == topic
            with pytest.raises(TopicUnavailableError, match=f"topic {missing} does not exist"):
                known.find(missing)
        assert time.monotonic() - start < 5
    finally:
        strict.start()
    assert known.changed == []


@pytest.mark.usefixtures("often")
def test_a_relay_makes_its_topic_and_watches_it(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a broker whose own defaults are faster, and a relay that never looks again."""
    making = replace(
        outbox, settings=outbox.settings.model_copy(update={"create_topics": True, "topic_partitions": 3})
    )
    admin, name = _admin(outbox.settings.kafka), outbox.topic()
    outbox.write(1)
    service.relay(making.settings, until_empty=True)
    assert len(admin.list_topics(name, timeout=5).topics[name].partitions) == 3
    outbox.write(2)
    stop = threading.Event()
    relay = threading.Thread(target=lambda: service.relay(making.settings, stop=stop))
    relay.start()
    try:
        wait_until(lambda: len(outbox.messages()) == 2, what="the second event in the topic")
        admin.create_partitions([NewPartitions(name, 4)])[name].result(10)
        wait_until(lambda: f"topic {name} has 4 partitions instead of 3" in caplog.text)
    finally:
        stop.set()
        relay.join(20)


def test_settings_that_cannot_work_are_refused() -> None:
    """Guards against a broker's error at the first event."""
    with pytest.raises(SetupError, match=r"^OUTBOX_TOPIC_PARTITIONS=0: Input should be greater"):
        load_settings(topic_partitions=0)
    with pytest.raises(SetupError, match=r"^OUTBOX_TOPIC_REPLICATION=0: write the number of replicas, or -1"):
        load_settings(topic_replication=0)
