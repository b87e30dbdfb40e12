"""Why Kafka did not take a message, as far as the relay decides by it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


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
