"""What the relay of a marked table asks of it.

Invariants:
- A call whose session has ended raises `ShardLostError`.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from outbox_pipelines.errors import SetupError
from outbox_pipelines.event import Event
from outbox_pipelines.relay.core.attempts import Tried

Name = tuple[str, str]
"""Type and id of an aggregate."""


class LockedError(Exception):
    """Another session has locked one of the rows."""


class MarkError(SetupError):
    """The table does not let published rows be marked: publish nothing more."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which pending rows to claim."""

    not_seqs: list[int]
    """Rows that are in flight, or given up where the table cannot say so."""
    not_of: frozenset[Name]
    """Aggregates that are blocked, or of which another session has locked a row."""
    upto: int | None
    """The last `seq`; None: there is none."""

    def without(self, aggregates: Iterable[Name]) -> Wanted:
        """Return the same without these aggregates."""
        return replace(self, not_of=self.not_of | frozenset(aggregates))


@dataclass(frozen=True, slots=True)
class Rows:
    """The lowest rows that are wanted, locked in a transaction that stays open."""

    events: list[Event]
    size: int
    is_more: bool
    """Whether there may be further ones."""
    session: Any
    """Where they are locked; for the driver."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """By seq: rows whose content cannot be read, and why."""


class Sessions(Protocol):
    """Claims, each in a transaction of a session of its own."""

    def last(self) -> int:
        """Return the highest pending `seq`."""

    def any(self, wanted: Wanted) -> bool:
        """Return whether there is such a row."""

    def claim(self, wanted: Wanted) -> Rows:
        """Lock the next rows; the transaction stays open.

        Raises:
            LockedError: one of them is locked; nothing is claimed.
        """

    def locked(self, wanted: Wanted) -> Collection[Name]:
        """Return the aggregates of which another session has locked a row."""

    def rehearse(self, rows: Rows) -> None:
        """Mark these, and take it back.

        Raises:
            MarkError: the table does not let them be marked.
        """

    def mark(self, rows: Rows, seqs: list[int], *, is_locked: bool) -> None:
        """Mark some of a claim, and end its transaction (a new one if `is_locked` is False).

        Raises:
            MarkError: the table does not let all of them be marked; none is.
        """

    def mark_what_can_be(self, rows: Rows, seqs: list[int]) -> None:
        """Mark those of a claim that can be marked, in a transaction of its own."""

    def unlock(self, rows: Rows) -> None:
        """Roll the transaction back: what is not marked is pending for everybody."""

    def give_back(self, rows: Rows) -> None:
        """The session may serve another claim."""


class Pending(NamedTuple):
    """A row that was refused before."""

    aggregate: Name
    seq: int
    attempts: int
    due_in: float
    """Seconds until its next attempt; 0 or less if that is due."""


class Refusals(Protocol):
    """What the rows say of refusals, in the session that holds the table. Each call is one transaction."""

    remembers_failures: bool
    """Whether a row can say that its event was given up."""

    def tried(self) -> Iterable[Pending]:
        """Return of each aggregate the first row that was refused before."""

    def failed(self) -> Iterable[Name]:
        """Return the aggregates with events that were given up."""

    def still_failed(self, aggregates: Sequence[Name]) -> Collection[Name]:
        """Return those of these that still have one."""

    def read(self, seqs: Sequence[int]) -> Generator[tuple[int, tuple[Event, int] | str]]:
        """Yield what is still pending of these with its attempts, or why it cannot be read."""

    def postpone(self, reasons: dict[int, str]) -> None:
        """Write why these wait; no attempt is counted."""

    def bury(self, reasons: dict[int, str]) -> None:
        """Give up these, which cannot be read."""

    def rehearse(self, seqs: list[int]) -> None:
        """Mark these, and take it back.

        Raises:
            MarkError: the table does not let them be marked.
        """

    def mark_what_can_be(self, seqs: list[int]) -> None:
        """Mark those of these that can be marked."""

    def record(self, tried: Sequence[Tried], pauses: Sequence[float], news: Collection[int]) -> None:
        """Write verdicts: marks, refusals, and of the seqs in `news` why they wait.

        Raises:
            MarkError: the table does not let it be written.
        """
