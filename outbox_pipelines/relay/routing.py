"""Which topic an event goes to.

Invariants:
- The topic depends on the event's aggregate type and event type alone, so that one aggregate's events of one
  type never change their topic between two deliveries.
"""

from __future__ import annotations

import re
import string

# Kafka's own rule for topic names.
_LEGAL = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")
_FIELDS = frozenset({"aggregate_type", "event_type"})


class IllegalTopicError(ValueError):
    """The template makes a name of these types that Kafka does not accept."""


class TopicTemplate:
    """A template such as ``{aggregate_type}-events``; `ValueError` where it is none."""

    def __init__(self, template: str) -> None:
        try:
            fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
        except ValueError as error:
            raise ValueError(f"not a topic template ({error}): write {{{{ for a brace") from None
        if unknown := fields - _FIELDS:
            raise ValueError(f"unknown field {{{min(unknown)}}}: use {{aggregate_type}} or {{event_type}}")
        if not _LEGAL.match(template.format(aggregate_type="a", event_type="a")):
            raise ValueError("a topic's name has 1 to 249 of the characters a-z A-Z 0-9 . _ -")
        self._template = template

    def topic(self, aggregate_type: str, event_type: str) -> str:
        """The topic; `IllegalTopicError` where Kafka would refuse its name."""
        topic = self._template.format(aggregate_type=aggregate_type, event_type=event_type)
        if not _LEGAL.match(topic):
            raise IllegalTopicError(f"{topic!r} is not a topic name that Kafka accepts")
        return topic
