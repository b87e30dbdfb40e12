"""A parked event that is tried alone, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outbox_pipelines.event import Event


class Verdict(Enum):
    """What came of an attempt."""

    PUBLISHED = "Kafka has it"
    ACCEPTED = "Kafka would take it: tried in a transaction that was aborted"
    REFUSED = "refused alone: counts"
    UNAVAILABLE = "its topic is not as it must be: does not count"
    UNKNOWN = "no answer: does not count"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A parked event that is to be tried."""

    event: Event
    attempts: int
    """How often it was refused before."""
    is_last: bool
    """Whether a refusal makes it a dead letter."""
    is_replay: bool


@dataclass(frozen=True, slots=True)
class Tried:
    """An attempt, and what came of it."""

    attempt: Attempt
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that was given up."""

    event: Event
    attempts: int
    error: str
