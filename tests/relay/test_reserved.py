"""Settings in OUTBOX_KAFKA_CONFIG that would break a guarantee, or that Kafka's client refuses."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, cimpl

from outbox_pipelines.config import kafka_config, parsed
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.kafka import client
from outbox_pipelines.relay.kafka.producer import IdempotentProducer
from outbox_pipelines.relay.kafka.topic_admin import TopicAdmin
from outbox_pipelines.relay.kafka.topic_lookups import TopicLookups
from outbox_pipelines.relay.kafka.transactional_producer import begin, kafka_names
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.parking.prober import Prober
from outbox_pipelines.settings import Settings, load_settings

_CHANGES = [
    "acks",
    "request.required.acks",
    "enable.idempotence",
    "enable.gapless.guarantee",
    "message.timeout.ms",
    "delivery.timeout.ms",
    "retries",
    "message.send.max.retries",
    "queuing.strategy",
    "partitioner",
    "partitioner_cb",
    "transactional.id",
    "transaction.timeout.ms",
    "delivery.report.only.error",
    "dr_cb",
    "dr_msg_cb",
    "default.topic.config",
    "on_delivery_cb",
    "error_cb",
    "stats_cb",
    "throttle_cb",
    "log_cb",
    "oauthbearer_token_refresh_cb",
    "socket_cb",
    "connect_cb",
    "rebalance_cb",
    "on_commit",
    "bootstrap.servers",
    "metadata.broker.list",
    "allow.auto.create.topics",
    "test.mock.num.brokers",
    "retry.backoff.ms",
    "retry.backoff.max.ms",
    "batch.size",
    "topic.blacklist",
    # A second name of each setting of a topic.
    "topic.acks",
    "topic.partitioner",
    "topic.message.timeout.ms",
]
# What a user may set, although a relay's producer has it: with each value the same is published, in the same
# order, and reported.
_HARMLESS = [
    "builtin.features",
    "client.id",
    "client.rack",
    "client.dns.lookup",
    "message.max.bytes",
    "message.copy.max.bytes",
    "receive.message.max.bytes",
    "max.in.flight",
    "max.in.flight.requests.per.connection",
    "metadata.recovery.strategy",
    "metadata.recovery.rebootstrap.trigger.ms",
    "metadata.max.age.ms",
    "topic.metadata.refresh.interval.ms",
    "topic.metadata.refresh.fast.interval.ms",
    "topic.metadata.refresh.fast.cnt",
    "topic.metadata.refresh.sparse",
    "topic.metadata.propagation.max.ms",
    "debug",
    "log_level",
    "log.thread.name",
    "log.connection.close",
    "enable.random.seed",
    "statistics.interval.ms",
    "enable.metrics.push",
    "plugin.library.paths",
    "socket.timeout.ms",
    "socket.blocking.max.ms",
    "socket.send.buffer.bytes",
    "socket.receive.buffer.bytes",
    "socket.keepalive.enable",
    "socket.nagle.disable",
    "socket.connection.setup.timeout.ms",
    "broker.address.ttl",
    "broker.address.family",
    "connections.max.idle.ms",
    "reconnect.backoff.jitter.ms",
    "reconnect.backoff.ms",
    "reconnect.backoff.max.ms",
    "api.version.request.timeout.ms",
    "security.protocol",
    "enable.ssl.certificate.verification",
    "enable.sasl.oauthbearer.unsecure.jwt",
    "https.ca.location",
    "https.ca.pem",
    "queue.buffering.max.ms",
    "linger.ms",
    "queue.buffering.backpressure.threshold",
    "batch.num.messages",
    "compression.codec",
    "compression.type",
    "compression.level",
    "sticky.partitioning.linger.ms",
    "request.timeout.ms",
    "produce.offset.report",
]
_CREDENTIALS = ("sasl.", "ssl.")
# Of a consumer alone: a producer ignores them and logs it, so that one file can serve both.
_CONSUMERS = [
    "group.id",
    "group.instance.id",
    "partition.assignment.strategy",
    "session.timeout.ms",
    "heartbeat.interval.ms",
    "group.protocol.type",
    "group.protocol",
    "group.remote.assignor",
    "coordinator.query.interval.ms",
    "max.poll.interval.ms",
    "enable.auto.commit",
    "auto.commit.enable",
    "auto.commit.interval.ms",
    "enable.auto.offset.store",
    "queued.min.messages",
    "queued.max.messages.kbytes",
    "fetch.wait.max.ms",
    "fetch.queue.backoff.ms",
    "fetch.message.max.bytes",
    "max.partition.fetch.bytes",
    "fetch.max.bytes",
    "fetch.min.bytes",
    "fetch.error.backoff.ms",
    "offset.store.method",
    "offset.store.path",
    "offset.store.sync.interval.ms",
    "isolation.level",
    "enable.partition.eof",
    "check.crcs",
    "auto.offset.reset",
    "consume.callback.max.messages",
    "max.poll.records",
    "share.acknowledgement.mode",
]
# What one producer of ours sets for itself although a file may have it: it sends messages one by one.
_OF_TRIALS = {"batch.num.messages", "linger.ms"}


def _settings(text: str) -> Settings:
    return load_settings(kafka="127.0.0.1:1", kafka_config=text)


@pytest.mark.parametrize("name", _CHANGES)
def test_they_are_refused_by_name_with_the_reason(tmp_path: Path, name: str) -> None:
    """Guards against a line that silently changes what is published, or ends in a traceback."""
    with pytest.raises(SetupError, match=rf"OUTBOX_KAFKA_CONFIG has {name}: remove it: \w"):
        _settings(f"{name}=1")


def test_a_password_that_has_changed_since(tmp_path: Path) -> None:
    """Guards against a new password that needs another start, and one that is kept in memory."""
    password = tmp_path / "password"
    password.write_text("first\n")
    settings = load_settings(kafka="127.0.0.1:1", kafka_config={"sasl.password": {"file": str(password)}})
    password.write_text("second\n")
    assert parsed.kafka_config(settings) == {"sasl.password": "second"}
    password.unlink()
    with pytest.raises(SetupError, match=r"OUTBOX_KAFKA_CONFIG has sasl.password, which names .* be read"):
        parsed.kafka_config(settings)


def _names(tmp_path: Path) -> dict[str, set[str]]:
    """Each setting that Kafka's client prints, with the kinds of clients that have it."""
    [path] = (Path(cimpl.__file__).parent.parent / "confluent_kafka.libs").glob("librdkafka*.so*")
    library, c = ctypes.CDLL(str(path)), ctypes.CDLL(None)
    c.fopen.restype, c.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
    c.fclose.argtypes = library.rd_kafka_conf_properties_show.argtypes = [ctypes.c_void_p]
    printed = tmp_path / "settings.md"
    file = c.fopen(str(printed).encode(), b"w")
    library.rd_kafka_conf_properties_show(file)
    c.fclose(file)
    found: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^(\w[\w.]*) +\| +([CP*]) +\|", printed.read_text(), re.MULTILINE):
        found.setdefault(name, set()).add(kind)
    return found


def test_each_setting_of_the_client_is_decided(tmp_path: Path) -> None:
    """Guards against a setting that nothing was decided about, such as one of a new client."""
    names = _names(tmp_path)
    assert len(names) > 150
    reserved_ones = {name for name in names if kafka_config.reason(name) is not None}
    consumers = {name for name, kinds in names.items() if kinds == {"C"}} - reserved_ones
    ours = names.keys() - reserved_ones - consumers
    harmless = {name for name in ours if name in _HARMLESS or name.startswith(_CREDENTIALS)}
    assert ours - harmless == set(), "refuse each in kafka_config.py, or add it to _HARMLESS"
    assert consumers - set(_CONSUMERS) == set(), "does a producer's file mean anything by it?"
    # No entry of the lists is left over from an older client.
    assert set(_HARMLESS) | set(_CONSUMERS) <= names.keys() - reserved_ones


def test_what_the_relay_sets_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a setting of ours that a line of the file replaces, or that replaces it in silence."""
    found = set(client._FIXED)
    config = client.config

    def watched(settings: Settings, **own: Any) -> dict[str, Any]:
        found.update(own)
        return config(settings, **own)

    class Producer:
        def __init__(self, *_: object, **__: object) -> None: ...

        def init_transactions(self, *_: object) -> None: ...

    monkeypatch.setattr(client, "config", watched)
    monkeypatch.setattr(client, "Producer", Producer)
    settings = load_settings(kafka="127.0.0.1:1")
    shard = cast("Shard", SimpleNamespace(identity="x", shard=0))
    IdempotentProducer(settings)._new()
    begin(settings, kafka_names(shard), print)
    trials = {
        name: Prober(settings, TopicLookups(settings), name)._new_producer()
        for name in (None, "transactional")
    }
    assert trials.keys() == {None, "transactional"}
    assert {"retry.backoff.ms", "transactional.id", "batch.size"} < found
    assert {name for name in found - _OF_TRIALS if kafka_config.reason(name) is None} == set()


@pytest.mark.parametrize(
    "line", ["linger.ms=1", "compression.type=zstd", "client.id=relay", "ssl.ca.location=/x"]
)
def test_others_are_taken(tmp_path: Path, line: str) -> None:
    """Guards against a list that refuses what users need."""
    name, value = line.split("=")
    assert client.config(_settings(line))[name] == value


@pytest.mark.parametrize(
    "error",
    [
        TypeError("expected a callable"),
        ValueError("x"),
        AttributeError("x"),
        KafkaException(KafkaError(-186)),
    ],
)
def test_what_the_client_raises_is_a_plain_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Guards against a traceback for a line of the file."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(client, "Producer", refuse)
    monkeypatch.setattr("outbox_pipelines.relay.kafka.topic_admin.AdminClient", refuse)
    settings = _settings("linger.ms=1")
    for make in (lambda: client.producer(settings, print), lambda: TopicAdmin(settings)):
        with pytest.raises(SetupError, match=r"rejects its settings: .*Check OUTBOX_KAFKA_CONFIG"):
            make()
