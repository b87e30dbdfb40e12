"""The outcomes of an event that is not published now.

Invariants:
- An event of a batch is in progress, acknowledged, or parked with one of these outcomes; never two of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


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
