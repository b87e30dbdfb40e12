"""Chooses the topic of an event."""

from __future__ import annotations

from outbox_pipelines.config import parsed
from outbox_pipelines.config.topics import IllegalTopicError, TopicTemplate
from outbox_pipelines.settings import Settings


class Router:
    """Topics by the map of event types, and by the template for all that it does not name."""

    def __init__(self, settings: Settings) -> None:
        self._default = TopicTemplate(settings.topic)
        self._map = parsed.topic_map(settings)

    def topic(self, aggregate_type: str, event_type: str) -> str:
        """Return the topic; raise `IllegalTopicError` if Kafka would refuse its name."""
        return self._map.get(event_type, self._default).topic(aggregate_type, event_type)

    def topic_or_empty(self, aggregate_type: str, event_type: str) -> str:
        """Return the topic; empty if Kafka would refuse its name."""
        try:
            return self.topic(aggregate_type, event_type)
        except IllegalTopicError:
            return ""


def patterns(settings: Settings) -> list[str]:
    """Shell patterns, one of which every topic of these settings matches."""
    return sorted(
        {
            template.pattern
            for template in (TopicTemplate(settings.topic), *parsed.topic_map(settings).values())
        }
    )
