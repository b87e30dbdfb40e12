"""Topics with settings of their own, and what they refuse."""

from __future__ import annotations

from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from outbox_pipelines.local.kafka import Kafka
from tests.conftest import Outbox, wait_until
from tests.kafka_clients import administrator, lent

# 140 kB that hardly compress.
NOISE: Final = [f"{n * 7919 % 100_003:05d}" for n in range(20_000)]
# No controller was found; a broker that has just started, or is late with its heartbeat, takes no topics.
_FLEETING: Final = (KafkaError._TIMED_OUT, KafkaError.INVALID_REPLICATION_FACTOR)


def create_topic(outbox: Outbox, partitions: int = 1, /, *, of: str = "order", **config: str) -> None:
    """The topic of an aggregate type, with these settings."""
    create(outbox.settings.kafka, outbox.topic(of), partitions, **config)


def create(kafka: str, name: str, partitions: int, **config: str) -> None:
    """A topic, with these settings, that brokers know."""
    topic = NewTopic(name, partitions, 1, config=config)

    def is_created() -> bool:
        # A client whose first answer names no controller may never find one: another client does.
        try:
            with lent(administrator, kafka) as admin:
                admin.create_topics([topic], request_timeout=30)[name].result(600)
        except KafkaException as error:
            if error.args[0].code() not in _FLEETING:
                raise
            return False
        return True

    def is_known() -> bool:
        # The controller answers before a broker has read its log.
        with lent(administrator, kafka) as admin:
            answer = admin.describe_topics(TopicCollection([name]), request_timeout=30)[name]
            return answer.exception(600) is None

    wait_until(is_created, seconds=120, what="the topic")
    wait_until(is_known, seconds=120, what="the topic in metadata")


def change_topic(outbox: Outbox, *, of: str = "order", **config: str) -> None:
    """Other settings of the topic of an aggregate type; the broker applies them later than it says."""
    change(outbox.settings.kafka, outbox.topic(of), **config)


def change(kafka: str, name: str, **config: str) -> None:
    """The same of any topic."""
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in config.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=entries)
    asked = ConfigResource(ConfigResource.Type.TOPIC, name)

    with lent(administrator, kafka) as admin:
        admin.incremental_alter_configs([resource])[resource].result(600)

        def is_applied() -> bool:
            now = admin.describe_configs([asked])[asked].result(30)
            return all(now[name].value == value for name, value in config.items())

        wait_until(is_applied, what=f"{config} of {name}")


def deny(broker: Kafka, name: str, operation: AclOperation) -> None:
    """Forbids one operation on a topic to everybody."""
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
    admin = administrator(broker.bootstrap)
    for answer in admin.create_acls([rule, everything_else]).values():
        answer.result(600)


def allow(broker: Kafka, name: str) -> None:
    """Takes every rule of a topic back."""
    # The client takes None for any, and its types say text.
    anybody: Any = None
    rules = AclBindingFilter(
        ResourceType.TOPIC,
        name,
        ResourcePatternType.LITERAL,
        anybody,
        anybody,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    admin = administrator(broker.bootstrap)
    for answer in admin.delete_acls([rules]).values():
        answer.result(600)
