"""The record of a shard's position in a transaction, and how a successor uses it.

Invariants:
- The record is written in the transaction that publishes the events, so both become visible together.
- It is used only if the database's row has the same tick id. A database that was restored or has crashed has
  another one, and then only the database counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

from outbox_pipelines.core.position import Position


@dataclass(frozen=True, slots=True)
class Record:
    """The published part of a tick, and the seqs of the parked events published in the same transaction."""

    tick: str
    last_seq: int
    finished: bool
    released: list[int] = field(default_factory=list)

    def encode(self) -> bytes:
        """Return the value of a message."""
        return json.dumps(
            {
                "tick": self.tick,
                "last_seq": self.last_seq,
                "finished": self.finished,
                "released": self.released,
            }
        ).encode()

    @classmethod
    def decode(cls, value: bytes | None) -> Record | None:
        """Read the value of a message; return None if no relay wrote it."""
        try:
            record = cls(**json.loads(value or b""))
        except (ValueError, TypeError, RecursionError):
            return None
        return record if record._is_one() else None

    def _is_one(self) -> bool:
        numbers = [self.last_seq, *self.released] if isinstance(self.released, list) else [None]
        return (
            isinstance(self.tick, str)
            and isinstance(self.finished, bool)
            and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
        )


class TakenShard(Protocol):
    """A shard that this relay has taken over."""

    tick_id: str | None

    @property
    def position(self) -> Position:
        """The position in the database."""

    def settle(self, position: Position) -> Any:
        """Move the position."""

    def released(self, seqs: list[int]) -> None:
        """Record these parked events as published."""


def take_up(shard: TakenShard, last: Record | None) -> None:
    """Move a shard to the position of its predecessor's last transaction.

    Args:
        last: the record of the last committed transaction; no other can be committed any more.
    """
    if last is None or last.tick != shard.tick_id:
        return
    if last.released:
        shard.released(last.released)
    position = shard.position
    moved = position.published_up_to(last.last_seq, finished=last.finished)
    if moved != position:
        shard.settle(moved)
