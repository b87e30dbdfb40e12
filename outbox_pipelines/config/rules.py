"""The settings as they apply to a type of events: its own rule, its aggregate type's, the general ones.

Invariants:
- A rule replaces single settings. Of a table (names of headers, of members) it replaces single entries.
- What decides about an event knows only its two types: equal types, equal rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, TypeVar

from outbox_pipelines.config import fields
from outbox_pipelines.config.topics import IllegalTopicError, TopicTemplate

_Settings = TypeVar("_Settings", bound=fields.Topics)


def has_rules(settings: fields.Topics) -> bool:
    """Return whether any type has a rule."""
    return bool(settings.event_types or settings.aggregate_types)


def of_types(settings: _Settings, aggregate_type: str, event_type: str) -> _Settings:
    """Return the settings as they apply to events of these types."""
    rules = settings.aggregate_types.get(aggregate_type), settings.event_types.get(event_type)
    return _with(settings, *(rule for rule in rules if rule is not None))


def variants(settings: _Settings) -> Iterator[_Settings]:
    """Yield the settings as they can apply: the general ones, and with each rule or pair of rules."""
    for rules in product((None, *settings.aggregate_types.values()), (None, *settings.event_types.values())):
        yield _with(settings, *(rule for rule in rules if rule is not None))


def own(settings: fields.Topics, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the value of a setting in the rules that have it: by event type, and by aggregate type."""
    return _own(settings.event_types, name), _own(settings.aggregate_types, name)


def _own(rules: dict[str, fields.Rule], name: str) -> dict[str, Any]:
    return {each: value for each, rule in rules.items() if (value := getattr(rule, name)) is not None}


def _with(settings: _Settings, *rules: fields.Rule) -> _Settings:
    update: dict[str, Any] = {}
    for rule in rules:
        for name, value in rule:
            if isinstance(value, dict):
                update[name] = {**(update.get(name) or getattr(settings, name)), **value}
            elif value is not None:
                update[name] = value
    return settings.model_copy(update=update) if update else settings


class Router:
    """Topics: of the event type, or of the aggregate type, or by the template for all others."""

    def __init__(self, settings: fields.Topics) -> None:
        self._default = TopicTemplate(settings.topic)
        self._by_event_type, self._by_aggregate_type = (
            {name: TopicTemplate(topic) for name, topic in rules.items()} for rules in own(settings, "topic")
        )

    def topic(self, aggregate_type: str, event_type: str) -> str:
        """Return the topic; raise `IllegalTopicError` if Kafka would refuse its name."""
        template = (
            self._by_event_type.get(event_type)
            or self._by_aggregate_type.get(aggregate_type)
            or self._default
        )
        return template.topic(aggregate_type, event_type)

    def topic_or_empty(self, aggregate_type: str, event_type: str) -> str:
        """Return the topic; empty if Kafka would refuse its name."""
        try:
            return self.topic(aggregate_type, event_type)
        except IllegalTopicError:
            return ""

    @property
    def patterns(self) -> list[str]:
        """Shell patterns, one of which every topic matches."""
        templates = (self._default, *self._by_event_type.values(), *self._by_aggregate_type.values())
        return sorted({template.pattern for template in templates})
