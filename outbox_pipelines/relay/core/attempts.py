"""Attempts at single parked events, and their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.core.blocked import LONGEST_PAUSE

# Seconds after which a missing topic, or an unavailable Kafka, is tried again.
_TOPIC_SECONDS: Final = 10.0
_OUTAGE_SECONDS: Final = 1.0


class Verdict(Enum):
    """The result of an attempt."""

    PUBLISHED = "Kafka has it"
    ACCEPTED = "Kafka would take it: tried in a transaction that was aborted"
    REFUSED = "refused alone: counts"
    UNAVAILABLE = "its topic is not as it must be: does not count"
    UNKNOWN = "no answer: does not count"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A parked event to be tried."""

    event: Event
    attempts: int
    """How many times it was refused before."""
    is_last: bool
    """Whether a refusal makes it a dead letter."""
    is_replay: bool


@dataclass(frozen=True, slots=True)
class Tried:
    """An attempt and its result."""

    attempt: Attempt
    verdict: Verdict
    reason: str = ""

    def pause(self, retry_seconds: float, jitter: Callable[[], float]) -> float:
        """Return the seconds until the next attempt.

        Args:
            retry_seconds: the pause after the first refusal.
            jitter: returns a factor, so that events refused together are not retried together.
        """
        if self.verdict is Verdict.UNKNOWN:
            return _OUTAGE_SECONDS
        if self.verdict is Verdict.UNAVAILABLE:
            return _TOPIC_SECONDS
        return min(LONGEST_PAUSE, retry_seconds * 2.0**self.attempt.attempts) * jitter()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that is no longer tried."""

    event: Event
    attempts: int
    error: str
