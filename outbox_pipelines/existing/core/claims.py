"""Selects the pending rows to claim, and settles claims.

Invariants:
- A claim consists of the lowest pending rows in order of `seq`, without those of blocked aggregates. If
  another session has locked a row, its whole aggregate is left out until the row is free.
- Exactly the acknowledged rows are marked, by their `seq`.
- A row is in one claim at a time, whether the claim still has its locks or not.
- A claim's transaction is open for `most_seconds` at most. If Kafka is slower, the claim continues without
  its locks. Where relays share the table it keeps them: nothing else says which rows are in flight, and Kafka
  may still take what was sent when another relay publishes it.
- A call of a port whose session has ended raises `ShardLostError`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.core.producers import Clock

Name = tuple[str, str]
"""Type and id of an aggregate."""


class TableLockedError(Exception):
    """Another session has locked the table, or waits for its lock."""


class LockedError(Exception):
    """Another session has locked one of the rows."""


class MarkError(SetupError):
    """The table does not allow published rows to be marked: publish nothing more."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which pending rows to claim."""

    not_seqs: list[int]
    """Rows that are in flight, or dead letters that the table cannot record."""
    not_of: frozenset[Name]
    """Aggregates that are blocked, or of which another session has locked a row."""
    upto: Any
    """The last row, as `Sessions.last` names it; None: no limit."""

    def without(self, aggregates: Iterable[Name]) -> Wanted:
        """Return the same without these aggregates."""
        return replace(self, not_of=self.not_of | frozenset(aggregates))


@dataclass(frozen=True, slots=True)
class Rows:
    """The first rows that match, locked in a transaction that stays open."""

    events: list[Event]
    size: int
    is_more: bool
    """Whether there may be more rows."""
    session: Any
    """The session in which they are locked; for the driver."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """By seq: rows whose content cannot be read, and why."""


class Sessions(Protocol):
    """Claims, each in a transaction of its own session."""

    def last(self) -> Any:
        """Return the last pending row, in a form for `Wanted.upto`."""

    def any(self, wanted: Wanted) -> bool:
        """Return whether a matching row exists.

        Raises:
            TableLockedError: it cannot be read now.
        """

    def claim(self, wanted: Wanted) -> Rows:
        """Lock the next rows; the transaction stays open.

        Raises:
            LockedError: one of them is locked; nothing is claimed.
        """

    def locked(self, wanted: Wanted) -> Collection[Name]:
        """Return the aggregates of which another session has locked a row.

        Raises:
            TableLockedError: another session has locked all of them.
        """

    def rehearse(self, rows: Rows) -> None:
        """Mark these, and roll the mark back.

        Raises:
            MarkError: the table does not allow them to be marked.
        """

    def mark(self, rows: Rows, seqs: list[int], *, is_locked: bool) -> None:
        """Mark rows of a claim, and end its transaction (a new one if `is_locked` is False).

        Raises:
            MarkError: some of the rows cannot be marked; none is marked.
        """

    def mark_what_can_be(self, rows: Rows, seqs: list[int]) -> None:
        """Mark those rows of a claim that can be marked, in a new transaction."""

    def unlock(self, rows: Rows) -> None:
        """Roll the transaction back: rows that are not marked are pending again."""

    def give_back(self, rows: Rows) -> None:
        """Return the session: another claim may use it."""


MOST_CLAIMS: Final = 3
"""One is being claimed or marked while Kafka works on the other two."""
# Text of the claims that are not settled, in bytes, up to which another may be made.
_MOST_BYTES: Final = 16_000_000
# Other sessions take and release locks between two statements.
_TRIES: Final = 5
# A claim has no position: each of its rows is marked.
_NOWHERE: Final = Snapshot(0, 0, ())


@dataclass(slots=True)
class Claim:
    """Rows that no other claim has."""

    number: int
    batch: Batch
    rows: Rows
    at: float
    is_locked: bool = True


class Claims:
    """The claims of an owned table. For one thread.

    Args:
        is_shared: whether other relays claim rows of the table at the same time.

    Attributes:
        in_flight: the claims that are not settled, the oldest first.
        claimed: the number of the last claim.
        passed_over: the `seq` of dead letters, if the table has no column that records them.
        upto: the last row to claim, as `Sessions.last` names it; None: no limit.
        was_locked_out: whether the last claim left out rows that another session has locked, or the table.
    """

    def __init__(self, sessions: Sessions, *, clock: Clock, most_seconds: float, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._sessions = sessions
        self._clock = clock
        self._most_seconds = most_seconds
        self._is_more = False
        self._is_rehearsed = False
        self._marked: deque[set[str]] = deque(maxlen=MOST_CLAIMS)
        self.in_flight: deque[Claim] = deque()
        self.claimed = 0
        self.passed_over: set[int] = set()
        self.upto: Any = None
        self.was_locked_out = False

    def stop_at_now(self) -> None:
        """Claim no row that is inserted after this call."""
        self.upto = self._sessions.last()

    @property
    def may_claim(self) -> bool:
        """Whether few enough claims are in flight."""
        size = sum(claim.batch.size for claim in self.in_flight)
        return len(self.in_flight) < MOST_CLAIMS and size < _MOST_BYTES

    def claim(self, blocked: Collection[Name]) -> Claim | None:
        """Claim the next rows, without those of blocked aggregates; return None if there are none now.

        Raises:
            MarkError: the table does not allow the first rows to be marked.
        """
        busy = [event.seq for claim in self.in_flight for event in claim.batch.events]
        wanted = Wanted([*busy, *self.passed_over], frozenset(blocked), self.upto)
        self.was_locked_out = False
        try:
            return self._claim(wanted)
        except TableLockedError:
            # That session may wait for the claims in flight: they are settled first.
            self.was_locked_out = True
            return None

    def _claim(self, wanted: Wanted) -> Claim | None:
        if not self._is_more and not self._sessions.any(wanted):
            return None
        for _ in range(_TRIES):
            try:
                rows = self._sessions.claim(wanted)
            except LockedError:
                wanted = wanted.without(self._sessions.locked(wanted))
                self.was_locked_out = True
            else:
                return self._begun(rows)
        return None

    def _begun(self, rows: Rows) -> Claim | None:
        self._is_more = rows.is_more
        if not rows.events:
            self._sessions.unlock(rows)
            self._sessions.give_back(rows)
            return None
        # A mark that a trigger undoes counts as written: such a row is claimed again.
        if not self._is_rehearsed or self._has_marked(rows.events):
            self._sessions.rehearse(rows)
            self._is_rehearsed = True
        self.claimed += 1
        batch = Batch(rows.events, rows.size, _NOWHERE, _NOWHERE, ends_tick=False, unreadable=rows.unreadable)
        claim = Claim(self.claimed, batch, rows, self._clock())
        self.in_flight.append(claim)
        return claim

    def _has_marked(self, events: list[Event]) -> bool:
        ids = [event.id for event in events]
        return any(not marked.isdisjoint(ids) for marked in self._marked)

    def settle(self, claim: Claim, published: list[Event]) -> None:
        """Mark the published rows of a claim; its other rows become pending again.

        Raises:
            MarkError: some of the rows cannot be marked; the others are marked.
        """
        seqs = [event.seq for event in published]
        self._marked.append({event.id for event in published})
        try:
            if seqs:
                self._sessions.mark(claim.rows, seqs, is_locked=claim.is_locked)
            elif claim.is_locked:
                self._sessions.unlock(claim.rows)
        except MarkError:
            self._sessions.mark_what_can_be(claim.rows, seqs)
            raise
        finally:
            self.in_flight.remove(claim)
            self._sessions.give_back(claim.rows)

    def let_go(self) -> None:
        """End the transactions that have been open for too long: they delay vacuum."""
        if self._is_shared:
            return
        for claim in self.in_flight:
            if claim.is_locked and self._clock() - claim.at > self._most_seconds:
                self._sessions.unlock(claim.rows)
                claim.is_locked = False
