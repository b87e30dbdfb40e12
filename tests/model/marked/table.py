"""A marked table as its relay sees it: rows, their locks, the sessions that claim and the one that owns it.

Invariants:
- What the statements of `claims.queries` say, is said here again; tests with PostgreSQL show that they do.
- A claim, or a mark without its locks, begins only for the owner of the table. No session becomes owner
  while a claim of another one is open.
- A shared table has several owners, which skip locked rows.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outbox_pipelines.core.event import Event
from outbox_pipelines.existing.core.claims import LockedError, MarkError, Name, Rows, Wanted
from outbox_pipelines.existing.core.row_retries import Pending
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.core.parked import Tried, Verdict
from tests.model.explore import Key
from tests.model.relay.database import Database

OTHER = (-1, 0)
"""Who has locked a row that no claim has."""


@dataclass
class Row:
    """What a row contains in addition to its event."""

    state: str = "pending"
    attempts: int = 0
    due: float = 0.0
    lock: tuple[int, int] | None = None
    """A relay and the number of its session."""

    def key(self, now: float) -> Key:
        return self.state, self.attempts, self.due <= now, self.lock == OTHER


class Table(Database):
    """The table, and the lock of its ownership (`owner`).

    Args:
        unreadable: seqs of rows whose content cannot be read.
        unmarkable: seqs of rows that a trigger does not let be marked.
        remembers: whether there are columns for attempts and failures.
        is_shared: whether relays share it (`order = "none"`).
    """

    def __init__(
        self,
        writers: Sequence[Sequence[str]],
        *,
        unreadable: Collection[int],
        unmarkable: Collection[int],
        remembers: bool,
        is_shared: bool = False,
    ) -> None:
        super().__init__(writers)
        self.is_shared = is_shared
        self.owners: set[int] = set()
        self.unreadable = set(unreadable)
        self.unmarkable = set(unmarkable)
        self.remembers = remembers
        self.content: dict[int, Row] = {}
        self.deleted: set[int] = set()
        self.told: set[int] = set()
        """Dead letters that were reported."""

    def insert(self, writer: int) -> None:
        super().insert(writer)
        for seq in self.rows:
            self.content.setdefault(seq, Row())

    def there(self, *states: str) -> list[tuple[int, Row]]:
        """The committed rows in one of these states, in order."""
        return [
            (seq, self.content[seq])
            for seq in sorted(self.committed)
            if seq not in self.deleted and self.content[seq].state in states
        ]

    def event(self, seq: int) -> Event:
        return self.rows[seq][1]

    @property
    def may_be_taken(self) -> bool:
        return self.is_shared or not (self.owners or self.is_claimed)

    def take(self, who: int, identity: int) -> bool:
        self.owners.add(who)
        return super().take(who, identity)

    def claimed_by(self, who: int) -> bool:
        """Whether a claim of this relay is open."""
        return any(row.lock is not None and row.lock[0] == who for row in self.content.values())

    def key_of(self, who: int) -> Key:
        """Whether a relay owns the table, and which rows its sessions have locked."""
        locks = ((seq, row.lock) for seq, row in self.content.items())
        claims = tuple((seq, lock[1]) for seq, lock in locks if lock is not None and lock[0] == who)
        return who in self.owners, claims

    @property
    def is_claimed(self) -> bool:
        return any(row.lock not in (None, OTHER) for row in self.content.values())

    def unlock(self, who: int, session: int | None = None) -> None:
        """The transactions of a relay end, or one of them."""
        for row in self.content.values():
            if row.lock is not None and row.lock[0] == who and session in (None, row.lock[1]):
                row.lock = None

    def mark(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            if seq not in self.deleted and self.content[seq].state == "pending":
                self.content[seq].state = "published"

    def release(self, who: int) -> None:
        """All sessions of a relay end."""
        self.unlock(who)
        self.owners.discard(who)

    def delete(self, seq: int) -> None:
        self.deleted.add(seq)
        self.unreadable.discard(seq)
        self.unmarkable.discard(seq)

    def fail(self, seq: int) -> None:
        """An event becomes a dead letter."""
        self.ever_dead.add(seq)
        if self.remembers:
            self.content[seq].state = "failed"

    def key(self, now: float) -> Key:
        return (
            tuple(self.state),
            tuple(self.rows),
            tuple((seq, row.key(now)) for seq, row in sorted(self.content.items())),
            tuple(sorted(self.deleted)),
            tuple(sorted(self.ever_dead)),
            tuple(sorted(self.told)),
            (tuple(sorted(self.unreadable)), tuple(sorted(self.unmarkable))),
        )


class _Part:
    def __init__(self, process: Any, table: Table) -> None:
        self._process = process
        self._table = table
        self._who: int = process.who

    def _require(self) -> None:
        if self._who not in self._table.owners:
            raise ShardLostError("the session that held the table has ended")

    def _check(self, seqs: Iterable[int]) -> None:
        there = {seq for seq, _ in self._table.there("pending")}
        if self._table.unmarkable & there & set(seqs):
            raise MarkError("a trigger does not let rows be marked")


class ModelSessions(_Part):
    """Implements `claims.core.ports.Sessions`."""

    def __init__(self, process: Any, table: Table, *, batch_events: int) -> None:
        super().__init__(process, table)
        self._batch_events = batch_events
        self._free = [0, 1, 2]

    def last(self) -> int:
        return max((seq for seq, _ in self._table.there("pending")), default=0)

    def _wanted(self, wanted: Wanted) -> list[int]:
        return [
            seq
            for seq, _ in self._table.there("pending")
            if seq not in wanted.not_seqs
            and ("order", self._table.event(seq).aggregate_id) not in wanted.not_of
            and (wanted.upto is None or seq <= wanted.upto)
        ]

    def any(self, wanted: Wanted) -> bool:
        return bool(self._wanted(wanted))

    def claim(self, wanted: Wanted) -> Rows:
        with self._process.call("claim"):
            self._require()
            seqs = self._wanted(wanted)
            if self._table.is_shared:
                seqs = [seq for seq in seqs if self._table.content[seq].lock is None]
            seqs = seqs[: self._batch_events]
            if any(self._table.content[seq].lock is not None for seq in seqs):
                raise LockedError
            session = self._free.pop(0)
            for seq in seqs:
                self._table.content[seq].lock = self._who, session
            events = [self._table.event(seq) for seq in seqs]
            unreadable = dict.fromkeys(sorted(self._table.unreadable & set(seqs)), "cannot be read")
        return Rows(events, len(events), len(events) == self._batch_events, session, unreadable)

    def locked(self, wanted: Wanted) -> Collection[Name]:
        with self._process.call("locked"):
            self._require()
            seqs = self._wanted(wanted)[: self._batch_events]
            locked = [seq for seq in seqs if self._table.content[seq].lock is not None]
            return [("order", self._table.event(seq).aggregate_id) for seq in locked]

    def rehearse(self, rows: Rows) -> None:
        self._check(event.seq for event in rows.events)

    def mark(self, rows: Rows, seqs: list[int], *, is_locked: bool) -> None:
        with self._process.call("mark"):
            if not is_locked:
                self._require()
            self._table.unlock(self._who, rows.session)
            self._check(seqs)
            self._table.mark(seqs)

    def mark_what_can_be(self, rows: Rows, seqs: list[int]) -> None:
        with self._process.call("mark the rest"):
            self._require()
            self._table.mark(seq for seq in seqs if seq not in self._table.unmarkable)

    def unlock(self, rows: Rows) -> None:
        with self._process.call("unlock"):
            self._table.unlock(self._who, rows.session)

    def give_back(self, rows: Rows) -> None:
        self._free.append(rows.session)

    def key(self) -> Key:
        return tuple(self._free)


class ModelRefusals(_Part):
    """Implements `claims.core.ports.Refusals`."""

    def __init__(self, process: Any, table: Table) -> None:
        super().__init__(process, table)
        self.remembers_failures = table.remembers

    def _name(self, seq: int) -> Name:
        return "order", self._table.event(seq).aggregate_id

    def tried(self) -> Iterable[Pending]:
        with self._process.call("tried"):
            self._require()
            now = self._process.clock()
            found: dict[Name, Pending] = {}
            for seq, row in self._table.there("pending"):
                if row.attempts:
                    pending = Pending(self._name(seq), seq, row.attempts, row.due - now)
                    found.setdefault(pending.aggregate, pending)
            return list(found.values())

    def failed(self) -> Iterable[Name]:
        return dict.fromkeys(self._name(seq) for seq, _ in self._table.there("failed"))

    def still_failed(self, aggregates: Sequence[Name]) -> Collection[Name]:
        with self._process.call("still failed"):
            self._require()
            return [name for name in self.failed() if name in aggregates]

    def read(self, seqs: Sequence[int]) -> Generator[tuple[int, tuple[Event, int] | str]]:
        with self._process.call("read"):
            self._require()
            found = [(seq, row.attempts) for seq, row in self._table.there("pending") if seq in seqs]
        for seq, attempts in found:
            is_readable = seq not in self._table.unreadable
            yield seq, (self._table.event(seq), attempts) if is_readable else "cannot be read"

    def postpone(self, reasons: dict[int, str]) -> None: ...

    def bury(self, reasons: dict[int, str]) -> None:
        with self._process.call("bury"):
            self._require()
            for seq in reasons:
                self._table.fail(seq)

    def rehearse(self, seqs: list[int]) -> None:
        with self._process.call("rehearse"):
            self._require()
            self._check(seqs)

    def mark_what_can_be(self, seqs: list[int]) -> None:
        self._require()
        self._table.mark(seq for seq in seqs if seq not in self._table.unmarkable)

    def record(self, tried: Sequence[Tried], pauses: Sequence[float], news: Collection[int]) -> None:
        with self._process.call("record"):
            self._require()
            published = [one.attempt.event.seq for one in tried if one.verdict is Verdict.PUBLISHED]
            self._check(published)
            self._table.mark(published)
            for one, pause in zip(tried, pauses, strict=True):
                seq = one.attempt.event.seq
                row = self._table.content[seq]
                barrier_reached = seq not in self._table.deleted and row.state == "pending"
                if one.verdict is Verdict.REFUSED and barrier_reached:
                    if self._table.remembers:
                        row.attempts, row.due = row.attempts + 1, self._process.clock() + pause
                    if one.attempt.is_last:
                        self._table.fail(seq)
