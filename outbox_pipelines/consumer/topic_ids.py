"""Kafka's own ids of topics: a topic that is deleted and created again has another one.

Invariants:
- No group is joined and nothing is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, Final

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

from outbox_pipelines.errors import SetupError

_OURS: Final = logging.getLogger("outbox_pipelines")
CLIENT_LOG: Final = logging.getLogger("outbox_pipelines.librdkafka")
"""The log of Kafka's client, which repeats errors often: shown only if this package's level is debug."""
_SECONDS: Final = 10.0
# What brokers before 2.8 give.
_NONE: Final = "AAAAAAAAAAAAAAAAAAAAAA"
# The settings of a consumer that other clients accept.
_SHARED: Final = ("bootstrap.servers", "security.protocol", "client.id", "client.rack")
_SHARED_PREFIXES: Final = ("sasl.", "ssl.", "socket.", "broker.", "enable.ssl", "https.")


def _is_wanted(_record: logging.LogRecord) -> bool:
    return _OURS.isEnabledFor(logging.DEBUG)


# Here, for an application that configures logging itself.
CLIENT_LOG.addFilter(_is_wanted)


def shared(kafka: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a consumer that other clients of the same cluster accept."""
    return {
        name: value for name, value in kafka.items() if name in _SHARED or name.startswith(_SHARED_PREFIXES)
    }


def topic_ids(kafka: Mapping[str, Any], topics: Collection[str]) -> dict[str, str]:
    """Return the id of each topic.

    Raises:
        KafkaException: there was no answer, or access is denied.
        SetupError: the brokers have no such ids.
    """
    names = sorted(topics)
    # Kept in a variable: its end would cancel the questions.
    client = AdminClient(shared(kafka), logger=CLIENT_LOG)
    asked = client.describe_topics(TopicCollection(names), request_timeout=_SECONDS)
    ids = {name: str(asked[name].result(_SECONDS).topic_id) for name in names}
    if without := [name for name, topic_id in ids.items() if topic_id in ("", _NONE)]:
        raise SetupError(
            f"the brokers give no id for the topic {without[0]}, so offsets could be those of another topic "
            "of this name: use dedupe='id'"
        )
    return ids
