"""The interfaces through which the core uses a marked table.

Invariants:
- A call whose session has ended raises `ShardLostError`.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.core.parked import Tried

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


class Pending(NamedTuple):
    """A row that was refused before."""

    aggregate: Name
    seq: int
    attempts: int
    due_in: float
    """Seconds until its next attempt; 0 or less if it is due."""


class Refusals(Protocol):
    """Refusals recorded in the rows, in the session that owns the table. Each call is one transaction."""

    remembers_failures: bool
    """Whether a row can record that its event is a dead letter."""

    def tried(self) -> Iterable[Pending]:
        """Return the first row of each aggregate that was refused before."""

    def failed(self) -> Iterable[Name]:
        """Return the aggregates that have dead letters."""

    def still_failed(self, aggregates: Sequence[Name]) -> Collection[Name]:
        """Return those of these aggregates that still have dead letters."""

    def read(self, seqs: Sequence[int]) -> Generator[tuple[int, tuple[Event, int] | str]]:
        """Yield those of these rows that are still pending, with attempts, or why a row cannot be read."""

    def postpone(self, reasons: dict[int, str]) -> None:
        """Write the reason why these wait; count no attempt."""

    def bury(self, reasons: dict[int, str]) -> None:
        """Make dead letters of these, which cannot be read."""

    def rehearse(self, seqs: list[int]) -> None:
        """Mark these, and roll the mark back.

        Raises:
            MarkError: the table does not allow them to be marked.
        """

    def mark_what_can_be(self, seqs: list[int]) -> None:
        """Mark those of these rows that can be marked."""

    def record(self, tried: Sequence[Tried], pauses: Sequence[float], news: Collection[int]) -> None:
        """Write verdicts: marks, refusals, and for the seqs in `news` the reason why they wait.

        Raises:
            MarkError: the table does not allow it to be written.
        """
