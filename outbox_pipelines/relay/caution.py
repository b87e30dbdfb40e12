"""How a relay goes on where others have died: an event may be what kills the process.

Invariants:
- Needed only after an unclean death, and only over what may have been on its way then: an ordinary event
  never costs a commit of its own.
- After the first death: a hundred events at a time. After the next: one at a time, each marked in the
  database before it is touched. Three deaths at one marked event make it a dead letter. A kill from outside
  hits the few milliseconds of one event's mark three times in a row only by malice.
- The mark is taken away from an event that Kafka merely does not answer for: an outage blames nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outbox_pipelines.database import Connection
from outbox_pipelines.event import Piece
from outbox_pipelines.relay import queries
from outbox_pipelines.relay.position import Snapshot
from outbox_pipelines.relay.shards import Shard

# More than can be on its way: 30,000 events, the next piece, and what waits for the settler.
_WINDOW: Final = 150_000
_FEW: Final = 100
# Twice what one death leaves in doubt.
_SINGLES: Final = 200
_DEATHS: Final = 3


class Caution:
    """For the publishing thread: how much to hand over at once, and which event not at all."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._left = _WINDOW
        self._singles = _SINGLES if shard.deaths > 1 else 0
        self._until: Snapshot | None = None
        self._connection: Connection | None = None
        self.is_needed = shard.deaths > 0
        self.is_over = False
        """Set when the danger is past, for the settler to write down."""

    def until(self, now: Snapshot) -> None:
        """What had committed when the relay started: nothing later was on its way."""
        self._until = now

    def parts(self, piece: Piece) -> Iterator[Piece]:
        """A piece in parts, each to be settled before the next is asked for."""
        rest: Piece | None = piece
        while rest is not None:
            part, rest = rest.cut(1 if self._singles else _FEW)
            if self._singles and part.events:
                self._write(part.events[0].seq)
            yield part

    def deadly(self, part: Piece) -> str | None:
        """Why a part must not be published: relays die of it; None for all others."""
        deaths = self._shard.suspect_deaths
        if deaths < _DEATHS or [event.seq for event in part.events] != [self._shard.suspect]:
            return None
        return f"the relay died {deaths} times while it published this event alone"

    def waits(self) -> None:
        """The event is with Kafka's client and has not killed the process: it is innocent, whatever comes."""
        if self._singles:
            self._write(None)

    def passed(self, part: Piece) -> None:
        """A part is settled."""
        self._left -= len(part.events)
        self._singles = max(0, self._singles - len(part.events))
        caught_up = part.ends_tick and self._until is not None and part.target.xmax >= self._until.xmax
        if self.is_needed and (self._left <= 0 or caught_up):
            self.is_needed, self.is_over = False, True

    def close(self) -> None:
        """Closes the connection, if there was a need for one."""
        if self._connection is not None:
            self._connection.close()

    def _write(self, seq: int | None) -> None:
        if self._connection is None:
            self._connection = self._shard.connect("caution")
        self._connection.execute(queries.SUSPECT, {**self._shard.key, "seq": seq})
