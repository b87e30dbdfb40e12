"""Topic names: the templates of OUTBOX_TOPIC and of types with a topic of their own.

Invariants:
- The topic depends only on the event's aggregate type and event type. So events of one aggregate and type
  always have the same topic.
"""

from __future__ import annotations

import re
import string

# Kafka's own rule for topic names.
_LEGAL = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,249}\Z")
_FIELDS = frozenset({"aggregate_type", "event_type"})


def is_topic(name: str) -> bool:
    """Return whether Kafka accepts this name."""
    return _LEGAL.match(name) is not None


class IllegalTopicError(ValueError):
    """The template makes a topic name from these types that Kafka does not accept."""


class TopicTemplate:
    """A template such as ``{aggregate_type}-events``; raises `ValueError` if it is not valid.

    ``{aggregate_type:lower}`` is the type in lower case, the only supported format.
    """

    def __init__(self, template: str) -> None:
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError as error:
            raise ValueError(f"not a topic template ({error}): write {{{{ for a brace") from None
        for _, field, spec, conversion in parts:
            if field is None:
                continue
            if field not in _FIELDS:
                raise ValueError(f"unknown field {{{field}}}: use {{aggregate_type}} or {{event_type}}")
            if conversion or spec not in ("", "lower"):
                raise ValueError(f"unknown format of {{{field}}}: use {{{field}}} or {{{field}:lower}}")
        self._parts = [(literal, field, bool(spec)) for literal, field, spec, _ in parts]
        if not is_topic(self._name("a", "a")):
            raise ValueError("a topic name consists of 1 to 249 of the characters a-z A-Z 0-9 . _ -")

    def topic(self, aggregate_type: str, event_type: str) -> str:
        """Return the topic; raise `IllegalTopicError` if Kafka would refuse its name."""
        topic = self._name(aggregate_type, event_type)
        if not is_topic(topic):
            raise IllegalTopicError(f"{topic!r} is not a topic name that Kafka accepts")
        return topic

    @property
    def pattern(self) -> str:
        """A shell pattern that every topic of this template matches."""
        return "".join(literal + ("*" if field else "") for literal, field, _ in self._parts)

    def _name(self, aggregate_type: str, event_type: str) -> str:
        types = {"aggregate_type": aggregate_type, "event_type": event_type}
        name = ""
        for literal, field, lower in self._parts:
            value = types[field] if field else ""
            name += literal + (value.lower() if lower else value)
        return name
