"""What may become of an event that is not published now, and of a relay that cannot continue.

Invariants:
- An event of a batch is in progress, acknowledged, or parked with one of these outcomes; never two of them.
"""

from __future__ import annotations

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
    """Parked, to be tried alone: it may be what Kafka or the encoder refused."""

    reason: str
    state: ClassVar[str] = "retrying"


@dataclass(frozen=True, slots=True)
class Dead:
    """A dead letter: not to be tried at all."""

    reason: str
    state: ClassVar[str] = "failed"


Parked = Waiting | Suspect | Dead
WAITING = Waiting()


class Kind(Enum):
    """The cause of a failure."""

    EVENT = "the event's, or that of one in its batch: parked, tried alone, counted"
    TOPIC = "the topic's: parked until the topic is available, not counted"
    OUTAGE = "an outage: sent again when it is over"
    CONSEQUENCE = "another event's: sent again"
    OWNER = "another relay has taken over: start over"


class Refusal(NamedTuple):
    """The Kafka client's error for a message that was not published."""

    kind: Kind
    reason: str
    """For people."""
    is_size: bool = False
    """The batch was larger than the topic takes."""
    code: int = 0
    """The client's own, for the driver."""


class ShardLostError(Exception):
    """Another relay owns the shard, or the result of publishing is unknown: stop, and start over."""
