"""Compute when each event of a day was published, to the second, from the relay's progress.

Invariants:
- Positions only grow: an event was published with the first row of its shard's progress that covers it.
- There are no lookups per row, only binary searches in arrays.

A position covers the events visible in its `done`, and those visible in its `target` up to its `last_seq`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from outbox_pipelines.core.position import Snapshot

_NEVER = np.iinfo(np.int64).max
Ints = NDArray[np.int64]


class _Sight:
    """Finds the first of a series of snapshots in which a transaction is visible."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._ends = np.array([snapshot.xmax for snapshot in snapshots], np.int64)
        last_seen_running: dict[int, int] = {}
        for number, snapshot in enumerate(snapshots):
            for tx in snapshot.xip:
                last_seen_running[tx] = number
        late = sorted(last_seen_running.items())
        self._late = np.array([tx for tx, _ in late], np.int64)
        self._late_first = np.array([number + 1 for _, number in late], np.int64)

    def first(self, tx: Ints) -> Ints:
        """Return that snapshot's number for each transaction; the length of the series if there is none."""
        found = np.searchsorted(self._ends, tx, side="right").astype(np.int64)
        if len(self._late):
            place = np.minimum(np.searchsorted(self._late, tx), len(self._late) - 1)
            found = np.where(self._late[place] == tx, self._late_first[place], found)
        return found


class Published:
    """The publishing times of one shard, from its progress in order of time."""

    def __init__(self, rows: Sequence[tuple[datetime, str, str | None, int | None]]) -> None:
        """
        Args:
            rows: time, done, target and last_seq of each row of progress.
        """
        self._at = np.array([int(at.timestamp() * 1_000_000) for at, *_ in rows] + [_NEVER], np.int64)
        self._done = _Sight([Snapshot.parse(done) for _, done, _, _ in rows])
        # Rows inside a tick that took longer than a second.
        within = [(number, row) for number, row in enumerate(rows) if row[2] is not None]
        self._within = np.array([number for number, _ in within], np.int64)
        self._within_seq = np.array([row[3] for _, row in within], np.int64)
        self._target = _Sight([Snapshot.parse(row[2] or "") for _, row in within])

    def at(self, tx: Ints, seq: Ints) -> Ints:
        """Return µs since 1970 for each event; the largest number if no row covers it."""
        found = self._done.first(tx)
        first = self._target.first(tx)
        for start in np.unique(first[first < len(self._within_seq)]):
            of_tick = np.flatnonzero(first == start)
            numbers, seqs = self._tick(int(start), int(found[of_tick].max()))
            place = np.searchsorted(seqs, seq[of_tick])
            found[of_tick] = np.minimum(found[of_tick], numbers[place])
        return self._at[found]

    def _tick(self, start: int, end: int) -> tuple[Ints, Ints]:
        """Return the numbers of the rows inside the tick that row `end` finishes, and the seq of each."""
        stop = int(np.searchsorted(self._within, end))
        return np.append(self._within[start:stop], len(self._at) - 1), self._within_seq[start:stop]


def earliest(times: Sequence[Ints]) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the earliest of several series (one per number of shards), and where no series has a time."""
    best = times[0]
    for other in times[1:]:
        best = np.minimum(best, other)
    return best, best == _NEVER
