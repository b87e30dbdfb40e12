"""What the relay knows of one topic: found, looked for, or taking no messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic that can be published to."""

    name: str
    partitions: int
    largest: int | None
    """Bytes of the largest batch that it accepts; None if the relay may not read the topic's settings."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a topic's number of partitions, which moves its keys."""

    topic: str
    before: int
    after: int


class TopicUnavailableError(Exception):
    """Nothing can be published to this topic now; other topics are not affected."""

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(f"topic {topic} {reason}")
        self.topic = topic
        self.reason = reason


@dataclass(slots=True)
class Search:
    """A topic that is not known to exist."""

    final_at: float
    due: float = 0.0
    reason: str = ""
    """Why it is unavailable; empty until a broker has answered."""
    is_final: bool = False
    create_at: float = 0.0
    """When the relay creates it, or gives the broker the opportunity to."""
    is_waited_for: bool = False
    """Whether the flow has waited for its creation once."""


@dataclass(slots=True)
class TopicRefusal:
    """A topic that exists and takes no messages."""

    reason: str
    trial_at: float
    """When it is tried with a message; infinite if the brokers say themselves when it takes some."""
