"""Where a replay sends events: to the topics of their originals, or to others with as many partitions.

Invariants:
- All topics are checked before the first event is sent; after the last one, that they are still the same.
- A key is in the same partition as in the original topic.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, TopicDescription
from confluent_kafka.cimpl import NewTopic

from outbox_pipelines.config.rules import Router
from outbox_pipelines.config.topics import is_topic
from outbox_pipelines.core.text import counted
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.relay.kafka import client
from outbox_pipelines.settings import MessageSettings

SAME: Final = "{topic}"
_SECONDS: Final = 15.0
EventTypeNames = tuple[str, str]
"""Aggregate type and event type."""


class ReplacedError(SetupError):
    """A topic is not the one that the replay began with."""


def check(target: str) -> None:
    """Raise `SetupError` unless this is a template of a topic."""
    try:
        fields = {name for _, name, spec, conversion in string.Formatter().parse(target) if name is not None}
        is_right = fields <= {"topic"} and is_topic(target.format(topic="a"))
    except (ValueError, IndexError, KeyError, AttributeError):
        is_right = False
    if not is_right:
        raise SetupError(
            f"--to-topic {target} is no topic: write a name, or a template such as '{{topic}}.replay'"
        )


def routes(
    settings: MessageSettings, kinds: Iterable[EventTypeNames], topics: Iterable[str], target: str
) -> dict[EventTypeNames, tuple[str, str]]:
    """Return original and target topic of each kind of event; only of these topics, if any is given."""
    router, wanted = Router(settings), set(topics)
    found = {kind: router.topic_or_empty(*kind) for kind in kinds}
    return {
        kind: (topic, target.format(topic=topic))
        for kind, topic in found.items()
        if topic and (not wanted or topic in wanted)
    }


def require(
    settings: MessageSettings, pairs: Iterable[tuple[str, str]], *, creates: bool
) -> tuple[dict[str, int], dict[str, str]]:
    """Check that each target has as many partitions as its original topic; create missing ones if allowed.

    Returns:
        How many partitions each target has, and the ids that Kafka gave those that existed.

    Raises:
        SetupError: a topic is missing, or has another number of partitions.
        UnavailableError: no broker answers.
    """
    pairs = set(pairs)
    admin = _admin(settings)
    for _, target in pairs:
        if not is_topic(target):
            raise SetupError(f"topic {target} has a name that Kafka does not accept: use another --to-topic")
    found = _describe(settings, admin, {topic for pair in pairs for topic in pair})
    sizes = {topic: len(description.partitions) for topic, description in found.items()}
    missing: dict[str, int] = {}
    for original, target in sorted(pairs):
        if original not in sizes:
            raise SetupError(
                f"topic {original} of the original events does not exist: its partitions are not known"
            )
        if target not in sizes and not creates:
            raise SetupError(
                f"topic {target} does not exist: create it with {counted(sizes[original], 'partition')}, "
                "or use --create"
            )
        partitions = sizes[target] if target in sizes else missing.setdefault(target, sizes[original])
        if partitions != sizes[original]:
            raise SetupError(
                f"topic {target} {'has' if target in sizes else 'would have'} "
                f"{counted(partitions, 'partition')}, and {original} has {sizes[original]}: "
                "keys would change their partition; choose another topic"
            )
    for target, partitions in missing.items():
        _create(settings, admin, target, partitions)
    targets = {target: sizes[original] for original, target in pairs}
    ids = {topic: str(found[topic].topic_id) for topic in targets if topic in found}
    return targets, ids


def require_same(settings: MessageSettings, before: Mapping[str, str]) -> None:
    """Raise `ReplacedError` unless the topics have these ids: a broker may make a deleted one again."""
    if not before:
        return
    found = _describe(settings, _admin(settings), set(before))
    now = {topic: str(description.topic_id) for topic, description in found.items()}
    if replaced := sorted(topic for topic, topic_id in before.items() if now.get(topic) != topic_id):
        raise ReplacedError(
            f"topic {replaced[0]} was deleted during the replay, with events of it: begin another replay"
        )


def _admin(settings: MessageSettings) -> AdminClient:
    try:
        return AdminClient(client.consumer_config(settings), logger=client.LOG)
    except client.REJECTIONS as error:
        raise client.rejected(error) from None


def _describe(settings: MessageSettings, admin: AdminClient, topics: set[str]) -> dict[str, TopicDescription]:
    """Return the descriptions of the topics that exist."""
    # Metadata of single topics would let a broker create them.
    asked: dict[str, Any] = admin.describe_topics(TopicCollection(sorted(topics)), request_timeout=_SECONDS)
    found = {}
    for topic, future in asked.items():
        try:
            found[topic] = future.result(_SECONDS + 5)
        except (KafkaException, TimeoutError) as error:
            reason = error.args[0] if isinstance(error, KafkaException) else None
            if reason is not None and reason.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                continue
            if reason is not None and reason.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise SetupError(f"topic {topic} cannot be described: grant DESCRIBE on it") from None
            why = "timeout" if reason is None else reason.str()
            raise UnavailableError(f"no broker answers at {settings.kafka} (OUTBOX_KAFKA): {why}") from None
    return found


def _create(settings: MessageSettings, admin: AdminClient, topic: str, partitions: int) -> None:
    new = NewTopic(topic, num_partitions=partitions, replication_factor=settings.topic_replication)
    try:
        admin.create_topics([new], request_timeout=_SECONDS)[topic].result(_SECONDS + 5)
    except (KafkaException, TimeoutError) as error:
        why = error.args[0].str() if isinstance(error, KafkaException) else "timeout"
        raise SetupError(f"topic {topic} cannot be created: {why}") from None
