"""Topics on a real broker: found, made, refused, and noticed when they change."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AclOperation, AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions

from outbox_pipelines.config.rules import Router
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.relay import service
from outbox_pipelines.relay.kafka import topic_lookups
from outbox_pipelines.relay.kafka.producer import IdempotentProducer
from outbox_pipelines.relay.kafka.topic_admin import TopicAdmin, Unavailable
from outbox_pipelines.relay.kafka.topic_lookups import TopicLookups
from outbox_pipelines.relay.kafka.topic_state import PartitionChange, Topic, TopicUnavailableError
from outbox_pipelines.settings import load_settings
from tests.conftest import Outbox, patience, run_prefix, topic_prefix, wait_until
from tests.kafka_clients import AdminClient
from tests.relay.topic import create, deny

# What a broker accepts if its configuration does not say otherwise.
USUAL = 1_048_588


@pytest.fixture
def name() -> str:
    return topic_prefix()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known and missing topics are asked about again and again."""
    monkeypatch.setattr(topic_lookups, "_REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(topic_lookups, "_AGAIN_SECONDS", 0.05)


_made: list[TopicLookups] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Ends the threads of this file's topics: others count theirs."""
    yield
    while _made:
        _made.pop().close()


def _topics(broker: Kafka | SimpleNamespace, **settings: object) -> TopicLookups:
    given = {"kafka": broker.bootstrap, "create_topics_pattern": f"{run_prefix()}*"} | settings
    # A broker of a slow machine takes long to create one.
    patient = {"creation_seconds": 60.0} if "create_topics" in settings else {}
    _made.append(TopicLookups(load_settings(**given), **patient))
    return _made[-1]


def _admin(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap})


def _make(bootstrap: str, name: str, partitions: int = 2) -> None:
    create(bootstrap, name, partitions)


def test_a_broker_that_does_not_answer_about_the_first_topic(name: str) -> None:
    """Guards against an outage right after the start that is noticed after OUTBOX_BREAKER_SECONDS."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        producer = IdempotentProducer(load_settings(kafka=address, breaker_seconds=0.5))
        with pytest.raises(UnavailableError, match=r"no broker has answered within 0\.5 s about topic"):
            producer.lookups.find(name)
        producer.close()


def test_a_topic_is_found_with_its_partitions_and_its_limit(strict: Kafka, name: str) -> None:
    """Guards against events that are sent to a topic too small for them."""
    _make(strict.bootstrap, name, 3)
    known = _topics(strict)
    known.connect()
    assert known.find(name) == Topic(name, 3, USUAL)


def test_a_missing_topic_is_unavailable(strict: Kafka, name: str) -> None:
    """Guards against a relay that waits without end, or reports no more than 'unknown'."""
    known = _topics(strict)
    with pytest.raises(TopicUnavailableError) as refused:
        known.find(name)
    assert refused.value.topic == name
    assert str(refused.value).startswith(f"topic {name} does not exist and the broker does not create it: ")
    assert "create it, set OUTBOX_CREATE_TOPICS=true" in refused.value.reason


@pytest.mark.usefixtures("often")
def test_a_missing_topic_is_found_once_it_is_created(strict: Kafka, name: str) -> None:
    """Guards against a relay that must be restarted for a new topic."""
    known = _topics(strict)
    with pytest.raises(TopicUnavailableError):
        known.find(name)
    _make(strict.bootstrap, name)
    wait_until(lambda: known.unavailable(name) is None)
    assert known.find(name).partitions == 2


def test_a_missing_topic_is_made_where_the_operator_allows_it(strict: Kafka, name: str) -> None:
    """Guards against a topic with other partitions than asked for, and against making it a second time."""
    for _ in range(2):
        found = _topics(strict, create_topics=True, topic_partitions=5).find_for_trial(name, 120)
        assert found == Topic(name, 5, USUAL)
    assert _topics(strict, create_topics=True, topic_partitions=7).find(name).partitions == 5


def test_a_topic_that_cannot_be_made_is_unavailable(strict: Kafka, name: str) -> None:
    """Guards against a broker's refusal that stops the relay, or is taken for an outage."""
    with pytest.raises(TopicUnavailableError) as refused:
        _topics(strict, create_topics=True, topic_replication=3).find_for_trial(name, 120)
    assert f"topic {name} does not exist and could not be created (Unable to replicate" in str(refused.value)
    assert "create it, or change OUTBOX_TOPIC_PARTITIONS, OUTBOX_TOPIC_REPLICATION" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_refused_topic_is_created_once_it_may_be(
    strict: Kafka, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a relay that must be restarted after CREATE is granted, or a limit is free again."""
    monkeypatch.setattr(topic_lookups, "_CREATE_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(topic_lookups, "_AGAIN_SECONDS", 0.05)
    settings = {"create_topics_pattern": f"{name}-*", "create_topics_max": 1}
    known = _topics(strict, create_topics=True, **settings)
    known.find_for_trial(f"{name}-0", 120)
    with pytest.raises(TopicUnavailableError, match="OUTBOX_CREATE_TOPICS_MAX=1 is reached"):
        known.find_for_trial(f"{name}-1", 120)
    admin = _admin(strict.bootstrap)
    admin.delete_topics([f"{name}-0"])[f"{name}-0"].result(600)
    wait_until(lambda: known.unavailable(f"{name}-1") is None, what="the second topic")


@pytest.mark.parametrize(
    ("says", "is_outage"),
    [
        ("All brokers are currently fenced.", True),
        ("The target replication factor of 3 cannot be reached: 1 broker(s) are registered.", False),
    ],
    ids=["brokers that start", "too few brokers"],
)
def test_brokers_that_cannot_replicate(
    strict: Kafka, name: str, monkeypatch: pytest.MonkeyPatch, says: str, is_outage: bool
) -> None:
    """Guards against advice about a topic's settings while the brokers start."""
    brokers = TopicAdmin(load_settings(kafka=strict.bootstrap, create_topics=True, create_topics_pattern="*"))
    answer: Future[None] = Future()
    answer.set_exception(KafkaException(KafkaError(KafkaError.INVALID_REPLICATION_FACTOR, says)))
    none = SimpleNamespace(topics={})
    admin = SimpleNamespace(create_topics=lambda *_, **__: {name: answer}, list_topics=lambda **_: none)
    monkeypatch.setattr(brokers, "_admin", admin)
    if is_outage:
        with pytest.raises(UnavailableError, match="fenced"):
            brokers.create([name])
    else:
        assert "OUTBOX_TOPIC_REPLICATION" in brokers.create([name])[name]


@pytest.mark.parametrize("create_topics", [False, True])
def test_a_topic_without_permission_is_unavailable(strict: Kafka, name: str, create_topics: bool) -> None:
    """Guards against a missing grant that looks like a missing topic."""
    _make(strict.bootstrap, name)
    deny(strict, name, AclOperation.WRITE)
    deny(strict, name, AclOperation.DESCRIBE)
    admin = _admin(strict.bootstrap)
    wait_until(lambda: admin.list_topics(name, timeout=60).topics[name].error is not None)
    says = rf"^topic {name} cannot be written to \(not authorized\): grant WRITE and DESCRIBE on it$"
    with pytest.raises(TopicUnavailableError, match=says):
        _topics(strict, create_topics=create_topics).find(name)


def test_a_limit_that_may_not_be_asked_is_unknown(strict: Kafka, name: str) -> None:
    """Guards against a relay that needs a grant more than publishing does."""
    _make(strict.bootstrap, name)
    deny(strict, name, AclOperation.DESCRIBE_CONFIGS)
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
    admin.incremental_alter_configs([resource])[resource].result(600)
    admin.create_partitions([NewPartitions(name, 4)])[name].result(600)

    def refreshed() -> Topic:
        known.refresh()
        return known.find(name)

    wait_until(lambda: refreshed() == Topic(name, 4, 2000))
    assert known.changed == [PartitionChange(name, 2, 4)]
    (record,) = [record for record in caplog.records if record.name == topic_lookups.__name__]
    assert record.levelno == logging.WARNING
    assert f"topic {name} has 4 partitions instead of 2: keys move" in record.getMessage()


@pytest.mark.usefixtures("often")
def test_a_topic_that_is_deleted_is_noticed(strict: Kafka, name: str) -> None:
    """Guards against a topic that is believed to exist for as long as the relay runs."""
    _make(strict.bootstrap, name)
    known = _topics(strict)
    known.find(name)
    admin = _admin(strict.bootstrap)
    admin.delete_topics([name])[name].result(600)

    def is_gone() -> bool:
        known.refresh()
        try:
            known.find(name)
        except TopicUnavailableError:
            return True
        return False

    wait_until(is_gone)
    assert known.changed == []


@pytest.mark.extended
def test_nothing_waits_for_an_unavailable_broker(
    strict: Kafka, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a publisher that stands still in an outage because it asks about its topics."""
    monkeypatch.setattr(topic_lookups, "_REFRESH_SECONDS", 0.05)
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
        assert time.monotonic() - start < patience(5)
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
    assert len(admin.list_topics(name, timeout=60).topics[name].partitions) == 3
    outbox.write(2)
    stop = threading.Event()
    relay = threading.Thread(target=lambda: service.relay(making.settings, stop=stop))
    relay.start()
    try:
        wait_until(lambda: len(outbox.messages()) == 2, what="the second event in the topic")
        admin.create_partitions([NewPartitions(name, 4)])[name].result(600)
        wait_until(lambda: f"topic {name} has 4 partitions instead of 3" in caplog.text)
    finally:
        stop.set()
        relay.join(600)


def test_look_ups_that_have_failed_end_the_relay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against events that become dead letters because a mistake has ended the look-ups."""
    known = _topics(SimpleNamespace(bootstrap="nowhere:1"))

    def fails(names: object) -> None:
        raise KeyError("segment.bytes")

    monkeypatch.setattr(known._admin, "describe", fails)
    with pytest.raises(UnavailableError, match=r"^topics are not looked up any more: 'segment\.bytes'$"):
        known.find(name)
    with pytest.raises(KeyError):
        known.refresh()


def test_a_topic_may_not_be_found_while_no_broker_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a run until empty that waits for ever for a topic, while nothing of it is in flight."""
    monkeypatch.setattr(topic_lookups, "OUTAGE_SECONDS", 0.0)
    known = _topics(SimpleNamespace(bootstrap="nowhere:1"))
    is_outage = True

    def describe(names: list[str]) -> dict[str, Unavailable]:
        if is_outage:
            raise UnavailableError("no broker answers")
        return dict.fromkeys(names, Unavailable("is missing", is_missing=True))

    monkeypatch.setattr(known._admin, "describe", describe)
    assert known.may_be_found(name)
    wait_until(lambda: known.unavailable(name) == "" and not known.may_be_found(name), what="the outage")
    is_outage = False
    wait_until(lambda: known.unavailable(name) == "is missing", what="an answer")
    assert known.may_be_found(name)


def test_settings_that_cannot_work_are_refused() -> None:
    """Guards against a broker's error at the first event."""
    with pytest.raises(SetupError, match=r"^OUTBOX_TOPIC_PARTITIONS=0: Input should be greater"):
        load_settings(topic_partitions=0)
    with pytest.raises(SetupError, match=r"^OUTBOX_TOPIC_REPLICATION=0: write the number of replicas, or -1"):
        load_settings(topic_replication=0)


def test_the_operator_says_which_topics_may_be_created(strict: Kafka, name: str) -> None:
    """Guards against a writer whose made-up aggregate types fill the cluster with partitions."""
    settings = {"create_topics": True, "topic_partitions": 1, "create_topics_max": 3}
    known = _topics(strict, create_topics_pattern=f"{name}-*", **settings)
    for n in range(3):
        assert known.find_for_trial(f"{name}-{n}", 120).partitions == 1
    with pytest.raises(TopicUnavailableError, match=r"OUTBOX_CREATE_TOPICS_MAX=3 is reached"):
        known.find_for_trial(f"{name}-3", 120)
    assert known.find_for_trial(f"{name}-0.dlq", 120).partitions == 1
    with pytest.raises(TopicUnavailableError, match="does not match OUTBOX_CREATE_TOPICS_PATTERN"):
        known.find_for_trial(f"other-{name}", 120)
    assert {f"{name}-{n}" for n in (0, 1, 2)} == {
        topic for topic in _admin(strict.bootstrap).list_topics(timeout=60).topics if name in topic
    } - {f"{name}-0.dlq"}


def test_by_default_the_template_says_which_topics_may_be_created() -> None:
    """Guards against a default that refuses the outbox's own topics, or counts everybody's."""
    topics = "order.paid=payments,order.refunded=refunds-{aggregate_type:lower}"
    settings = load_settings(kafka="nowhere:1", topic="shop-{aggregate_type}-events", event_types=topics)
    assert Router(settings).patterns == ["payments", "refunds-*", "shop-*-events"]


def test_patterns_that_cannot_match_are_refused() -> None:
    """Guards against a pattern that a typing error makes useless."""
    with pytest.raises(SetupError, match=r"^OUTBOX_CREATE_TOPICS_PATTERN=a,b: 'a,b' matches no topic"):
        load_settings(create_topics_pattern="a,b")
    with pytest.raises(SetupError, match=r"^OUTBOX_CREATE_TOPICS_MAX=0"):
        load_settings(create_topics_max=0)
