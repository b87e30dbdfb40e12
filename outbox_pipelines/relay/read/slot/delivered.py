"""Which transactions a slot has delivered, as a snapshot: arithmetic, no I/O.

Invariants:
- `snapshot` sees exactly the transactions of the outbox that the first position saw, and those that were
  added. As a set it is complete in the order of commits: a reader of snapshots can continue from it.
- An id that the slot has not delivered stays out until it is known that the slot never will: its transaction
  has ended, and the outbox has no row of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from typing import NamedTuple

from outbox_pipelines.core.position import Snapshot


class Question(NamedTuple):
    """Which ids of a range, and of a few others, have rows in the outbox, and which of them still run?"""

    first: int
    end: int
    others: list[int]


class Delivered:
    """What `done` sees, and the transactions that are added."""

    def __init__(self, done: Snapshot) -> None:
        self._gaps = [(tx, tx + 1) for tx in sorted(done.xip)]
        self._xmax = done.xmax
        self._asked_up_to = done.xmax
        """Gaps below it: `_running`, and transactions that have rows here, which the slot will deliver."""
        self._running = set(done.xip)

    def sees(self, tx: int) -> bool:
        """Return whether the transaction is published."""
        return tx < self._xmax and self._gap(tx) is None

    def add(self, tx: int) -> None:
        """Record a transaction that the slot has delivered."""
        if tx >= self._xmax:
            if tx > self._xmax:
                self._gaps.append((self._xmax, tx))
            self._xmax = tx + 1
            return
        at = self._gap(tx)
        if at is not None:
            first, end = self._gaps[at]
            self._gaps[at : at + 1] = [part for part in ((first, tx), (tx + 1, end)) if part[0] < part[1]]
        self._running.discard(tx)

    def extend(self, xmax: int) -> None:
        """Let ids below `xmax` be asked about, whether or not the slot delivers anything of them."""
        if xmax > self._xmax:
            self._gaps.append((self._xmax, xmax))
            self._xmax = xmax

    @property
    def end(self) -> int:
        """The id behind all that were delivered or extended to."""
        return self._xmax

    @property
    def awaited(self) -> set[int]:
        """Ids of which the outbox had rows when it was asked last, and which the slot has not delivered."""
        at = bisect_right(self._gaps, (self._asked_up_to,))
        return {tx for first, end in self._gaps[:at] for tx in range(first, end) if tx not in self._running}

    @property
    def unknown(self) -> int:
        """How many ids were never asked about."""
        at = bisect_right(self._gaps, (self._asked_up_to,))
        return sum(end - first for first, end in self._gaps[at:])

    @property
    def question(self) -> Question:
        """What is to be asked, for `answer`."""
        return Question(self._asked_up_to, self._xmax, sorted(self._running))

    def answer(self, now: Snapshot, found: Collection[int]) -> None:
        """Drop the ids that the slot will never deliver.

        Args:
            now: the snapshot in which the question was answered.
            found: the ids of which the outbox has rows.
        """
        at = bisect_right(self._gaps, (self._asked_up_to,))
        new = self._gaps[at:]
        older = [
            (tx, tx + 1)
            for first, end in self._gaps[:at]
            for tx in range(first, end)
            if tx not in self._running or tx in found or not now.sees(tx)
        ]
        rows = set(found)
        running = {tx for tx in now.xip if _is_in(new, tx)}
        late = {tx for first, end in new for tx in range(max(first, now.xmax), end)}
        committed = {tx for tx in rows if _is_in(new, tx)}
        self._gaps = older + [(tx, tx + 1) for tx in sorted(running | late | committed)]
        self._running = {tx for tx in self._running if tx not in rows and not now.sees(tx)}
        self._running |= (running | late) - rows
        self._asked_up_to = self._xmax

    def snapshot(self) -> Snapshot:
        """Return what is published."""
        missing = tuple(tx for first, end in self._gaps for tx in range(first, end))
        return Snapshot(missing[0] if missing else self._xmax, self._xmax, missing)

    def _gap(self, tx: int) -> int | None:
        at = bisect_right(self._gaps, (tx, float("inf"))) - 1
        return at if at >= 0 and tx < self._gaps[at][1] else None


def _is_in(gaps: list[tuple[int, int]], tx: int) -> bool:
    at = bisect_right(gaps, (tx, float("inf"))) - 1
    return at >= 0 and tx < gaps[at][1]
