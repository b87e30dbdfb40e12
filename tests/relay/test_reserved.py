"""Lines of OUTBOX_KAFKA_CONFIG_FILE that would break a guarantee, or that Kafka's client refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.kafka import client, reserved
from outbox_pipelines.relay.kafka.brokers import Brokers
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
]


def _settings(tmp_path: Path, line: str) -> Settings:
    file = tmp_path / "kafka.properties"
    file.write_text(line)
    return load_settings(kafka="127.0.0.1:1", kafka_config_file=file)


@pytest.mark.parametrize("name", _CHANGES)
def test_they_are_refused_by_name_with_the_reason(tmp_path: Path, name: str) -> None:
    """Guards against a line that silently changes what is published, or ends in a traceback."""
    with pytest.raises(SetupError, match=rf"OUTBOX_KAFKA_CONFIG_FILE: remove {name} from .*: \w"):
        client.config(_settings(tmp_path, f"{name}=1"))


def test_what_the_relay_sets_is_reserved() -> None:
    """Guards against a setting of ours that a line of the file replaces."""
    assert {name for name in client._FIXED if reserved.reason(name) is None} == set()


@pytest.mark.parametrize(
    "line", ["linger.ms=1", "compression.type=zstd", "client.id=relay", "ssl.ca.location=/x"]
)
def test_others_are_taken(tmp_path: Path, line: str) -> None:
    """Guards against a list that refuses what users need."""
    name, value = line.split("=")
    assert client.config(_settings(tmp_path, line))[name] == value


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
    monkeypatch.setattr("outbox_pipelines.relay.kafka.brokers.AdminClient", refuse)
    settings = _settings(tmp_path, "linger.ms=1")
    for make in (lambda: client.producer(settings, print), lambda: Brokers(settings)):
        with pytest.raises(SetupError, match=r"rejects its settings: .*Check OUTBOX_KAFKA_CONFIG_FILE"):
            make()
