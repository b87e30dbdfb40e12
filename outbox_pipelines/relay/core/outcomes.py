"""Outcomes of events that are not published now, causes of failures, and the loss of a shard.

Invariants:
- An event of a batch is in progress, acknowledged, or parked with one of these outcomes; never two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple


@dataclass(frozen=True, slots=True)
class Waiting:
    """Parked behind another event of its aggregate."""

    state: ClassVar[str] = "waiting"
    reason: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class Suspect:
    """Parked, to be tried alone: Kafka or the encoder may have refused it."""

    reason: str
    state: ClassVar[str] = "retrying"


@dataclass(frozen=True, slots=True)
class Dead:
    """A dead letter: it is not tried."""

    reason: str
    state: ClassVar[str] = "failed"


Outcome = Waiting | Suspect | Dead
ParkedStates = Mapping[int, tuple[str, str | None]]
"""Events to park, by seq: the state and the reason."""
WAITING = Waiting()


class Cause(Enum):
    """The cause of a failure."""

    EVENT = "the event's, or that of one in its batch: parked, tried alone, counted"
    TOPIC = "the topic's: parked until the topic is available, not counted"
    OUTAGE = "an outage: sent again when it is over"
    CONSEQUENCE = "another event's: sent again"
    OWNER = "another relay owns the shard: start over"


class Refusal(NamedTuple):
    """The Kafka client's error for a message that was not published."""

    cause: Cause
    reason: str
    """For messages."""
    is_size: bool = False
    """The batch was larger than the topic accepts."""
    code: int = 0
    """The client's error code, for the driver."""


class ShardLostError(Exception):
    """Another relay owns the shard, or the result of publishing is unknown: stop, and start over."""
