"""Why Kafka did not take a message, as far as the relay decides by it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """Whose fault a failure is."""

    EVENT = "the event's, or that of one in its batch: parked, tried alone, counted"
    TOPIC = "its topic's: parked until the topic is mended, not counted"
    OUTAGE = "nobody's: sent again when it is over"
    CONSEQUENCE = "another event's: sent again"
    OWNER = "another relay has taken over: start over"


class Refusal(NamedTuple):
    """What Kafka's client said of a message that was not published."""

    kind: Kind
    reason: str
    """For people."""
    is_size: bool = False
    """The batch was larger than the topic takes."""
    code: int = 0
    """The client's own, for the driver."""
