"""How far a shard has published: arithmetic on PostgreSQL's snapshots, no I/O.

Invariants:
- A tick is what `target` sees and `done` does not; both are real snapshots, taken by the database. A cut
  at some transaction id would not be consistent with the order of commits.
- A saved target is kept until its tick is finished: with another one, rows that committed late with a low
  `seq` would be skipped.

The design follows PgQ, which reads its queue between two snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Snapshot(NamedTuple):
    """A `pg_snapshot`: transactions below `xmin` have ended, none from `xmax` on has, those in `xip` ran."""

    xmin: int
    xmax: int
    xip: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Return the snapshot for PostgreSQL's text form, ``xmin:xmax:xip,xip``."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(map(int, running.split(","))) if running else ())

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.xip))}"

    def sees(self, tx: int) -> bool:
        """Return whether the transaction had ended when the snapshot was taken."""
        return tx < self.xmax and tx not in self.xip

    def covers(self, other: Snapshot) -> bool:
        """Return whether this snapshot sees everything that the other one sees."""
        # Positions from a slot name hundreds of transactions.
        running = set(other.xip)
        return self.xmax >= other.xmax and all(tx >= other.xmax or tx in running for tx in self.xip)

    def late(self, target: Snapshot) -> list[int]:
        """Return the transactions that ran at this snapshot and had ended at `target`."""
        running = set(target.xip)
        return [tx for tx in self.xip if tx < target.xmax and tx not in running]


@dataclass(frozen=True, slots=True)
class Position:
    """All that `done` sees is published and, inside a tick, what `target` sees up to `last_seq`."""

    done: Snapshot
    target: Snapshot | None = None
    last_seq: int | None = None

    def opened_as(self, opened: Position) -> Position:
        """Return `opened`: this position inside the tick that follows it, or that it is in.

        Raises:
            ValueError: `opened` would pass over events, or return to a tick that is over.
        """
        is_next = self.target is None and not opened.last_seq
        goes_on = (opened.target, opened.last_seq or 0) == (self.target, self.last_seq or 0)
        if opened.target is None or opened.done != self.done or not (is_next or goes_on):
            raise ValueError(f"a tick was opened as {opened} at {self}")
        return opened

    def published_up_to(self, last_seq: int, *, finished: bool) -> Position:
        """Return where it is when this much of its tick is published; never behind where it is."""
        if self.target is None:
            return self
        if finished:
            return Position(self.target)
        if last_seq > (self.last_seq or 0):
            return Position(self.done, self.target, last_seq)
        return self
