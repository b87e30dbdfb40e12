"""PostgreSQL as far as a consumer sees it: its statements by what their documentation says they do.

Invariants:
- A statement sees what was committed before it began, and what its own transaction wrote. A statement that
  waits goes on with what it saw when it began.
- A transaction waits for the end of another one that has inserted the same row or updated it.
- A transaction that ends without a commit leaves nothing.
- tests/model/consumer/test_database.py compares it with the real one, statement by statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

OPEN: Final = ("waiting", "failed")


class Blocked(Exception):  # noqa: N818 - no error: it waits
    """A statement waits for another transaction."""

    def __init__(self, what: tuple[str, int], rest: Any = None) -> None:
        super().__init__(what)
        self.what = what
        self.rest = rest
        """What it goes on with."""


class Session:
    """One connection and its open transaction."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        """Events that it has recorded."""
        self.rows: list[tuple[int, int, str, int]] = []
        """Its new rows of the inbox: seq, event, state, attempts."""
        self.finished: list[int] = []
        """Rows of the inbox that it has settled."""
        self.waits: tuple[tuple[str, int], Any] | None = None
        """What its statement waits for, and what it goes on with."""

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def key(self) -> tuple[Any, ...]:
        return tuple(self.ids), tuple(self.rows), tuple(self.finished), self.waits


class Database:
    """What is committed, and the sessions.

    Args:
        keys: of each event.
        blocks: whether a dead letter holds up those behind it.
    """

    def __init__(self, keys: Sequence[str], *, blocks: bool) -> None:
        self.keys = keys
        self.blocks = blocks
        self.processed: set[int] = set()
        # By seq: event, state, attempts, whether it is due.
        self.inbox: dict[int, list[Any]] = {}
        self.owners: dict[int, int] = {}
        # Of the owners of a partition, if there were any.
        self.crashes: dict[int, int] = {}
        self.sessions: list[Session] = []

    def run(self, session: Session, owner: int, name: str, *given: Any) -> Any:
        """Execute a statement, or go on with it, and return what comes back. Raises Blocked."""
        rest, session.waits = session.waits and session.waits[1], None
        try:
            return getattr(self, f"_{name.lower()}")(session, owner, rest, *given)
        except Blocked as blocked:
            session.waits = blocked.what, blocked.rest
            raise

    def is_blocked(self, session: Session) -> bool:
        """Whether what its statement waits for has not ended."""
        return session.waits is not None and self._is_locked(session, *session.waits[0])

    def commit(self, session: Session) -> None:
        """End a transaction; what it wrote is there."""
        self.processed.update(session.ids)
        for seq, nth, state, begun in session.rows:
            self.inbox[seq] = [nth, state, begun, begun == 0]
        for seq in session.finished:
            self.inbox[seq][1] = "processed"
        session.clear()

    def key(self) -> tuple[Any, ...]:
        # What is settled is never looked at again, but for the order of numbers.
        rows = tuple(
            (seq, *(row if row[1] in OPEN else (row[0], row[1], 0, False)))
            for seq, row in sorted(self.inbox.items())
        )
        return tuple(sorted(self.processed)), rows, tuple(sorted(self.owners.items()))

    def _is_locked(self, session: Session, what: str, which: int) -> bool:
        others = (each for each in self.sessions if each is not session)
        if what == "id":
            return any(which in each.ids for each in others)
        return any(which in each.finished for each in others)

    def _is_taken(self, key: str, before: int | None = None) -> bool:
        """Whether a message of this key has to be handled first."""
        return any(
            self.keys[nth] == key
            and (state == "waiting" or (state == "failed" and self.blocks))
            and (before is None or seq < before)
            for seq, (nth, state, _, _) in self.inbox.items()
        )

    def _insert(self, session: Session, rest: tuple[Any, ...] | None, ids: Sequence[int]) -> list[int]:
        """The ids that are new, in their order; each that another transaction has inserted is waited for."""
        new, left = rest if rest else ((), tuple(sorted(set(ids))))
        for at, nth in enumerate(left):
            if self._is_locked(session, "id", nth):
                raise Blocked(("id", nth), (new, left[at:]))
            if nth not in self.processed and nth not in session.ids:
                session.ids.append(nth)
                new = (*new, nth)
        return list(new)

    def _record(self, session: Session, _: int, rest: Any, nth: int) -> bool:
        if rest is None and self._is_taken(self.keys[nth]):
            return False
        return bool(self._insert(session, rest, [nth]))

    def _record_many(self, session: Session, _: int, rest: Any, ids: Sequence[int]) -> tuple[int, ...]:
        free = [] if rest else [nth for nth in ids if not self._is_taken(self.keys[nth])]
        return tuple(self._insert(session, rest, free))

    def _known(self, session: Session, _: int, rest: Any, ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(nth for nth in ids if nth in self.processed or nth in session.ids)

    def _taken(self, session: Session, _: int, rest: Any, keys: Sequence[str]) -> bool:
        return any(self._is_taken(key) for key in keys)

    def _receive(
        self, session: Session, _: int, rest: Any, ids: Sequence[int], state: str, begun: int
    ) -> tuple[tuple[int, int], ...]:
        new = self._insert(session, rest, ids)
        seqs = [*self.inbox, *(seq for each in self.sessions for seq, *_ in each.rows)]
        rows = []
        for nth in dict.fromkeys(ids):
            if nth in new:
                seqs.append(max(seqs, default=0) + 1)
                session.rows.append((seqs[-1], nth, state, begun))
                rows.append((seqs[-1], nth))
        return tuple(rows)

    def _heads(
        self, session: Session, _: int, rest: Any, held: Sequence[str]
    ) -> tuple[tuple[int, int, int], ...]:
        first: dict[str, int] = {}
        for seq, (nth, state, _begun, _is_due) in sorted(self.inbox.items()):
            if state == "waiting" or (state == "failed" and self.blocks):
                first.setdefault(self.keys[nth], seq)
        rows = ((seq, *self.inbox[seq]) for seq in sorted(first.values()))
        return tuple(
            (seq, begun, nth)
            for seq, nth, state, begun, is_due in rows
            if state == "waiting" and is_due and not held
        )

    def _next(self, session: Session, _: int, rest: Any, seq: int) -> tuple[tuple[int, int, int], ...]:
        key = self.keys[self.inbox[seq][0]]
        for later, (nth, state, begun, is_due) in sorted(self.inbox.items()):
            if self.keys[nth] == key and state == "waiting":
                return ((later, begun, nth),) if is_due else ()
        return ()

    def _claim(self, session: Session, _: int, rest: Any, seq: int, begun: int) -> int | None:
        row = self.inbox[seq]
        nth, state, so_far, is_due = row
        if state != "waiting" or not is_due or so_far != begun:
            return None
        if self._is_taken(self.keys[nth], before=seq) or self._is_locked(session, "row", seq):
            return None
        row[2:] = [begun + 1, False]
        return int(nth)

    def _read(self, session: Session, _: int, rest: Any, seq: int, begun: int) -> int | None:
        nth, state, so_far, is_due = self.inbox[seq]
        if state != "waiting" or not is_due or so_far != begun or self._is_locked(session, "row", seq):
            return None
        return int(nth)

    def _is_our_attempt(self, session: Session, seq: int, begun: int) -> bool:
        _, state, so_far, _ = self.inbox[seq]
        return state in OPEN and so_far == begun and not self._is_locked(session, "row", seq)

    def _finish(self, session: Session, _: int, rest: Any, seq: int, begun: int) -> bool:
        _, state, so_far, _ = self.inbox[seq]
        if state != "waiting" and (state != "failed" or so_far != begun):
            return False
        if self._is_locked(session, "row", seq):
            return False
        session.finished.append(seq)
        return True

    def _missed(
        self, session: Session, _: int, rest: Any, seq: int, begun: int, state: str, back: int
    ) -> None:
        if self._is_our_attempt(session, seq, begun):
            self.inbox[seq][1:] = [state, begun - back, False]

    def _take_back(self, session: Session, _: int, rest: Any, seqs: Sequence[int]) -> None:
        for row in self._updated(session, seqs):
            row[2] = max(row[2] - 1, 0)

    def _hurry(self, session: Session, _: int, rest: Any, seqs: Sequence[int]) -> None:
        for row in self._updated(session, seqs):
            row[3] = True

    def _updated(self, session: Session, seqs: Sequence[int]) -> list[list[Any]]:
        """Those that wait; one that another transaction has settled is waited for."""
        waiting = [seq for seq in seqs if self.inbox[seq][1] == "waiting"]
        for seq in waiting:
            if self._is_locked(session, "row", seq):
                raise Blocked(("row", seq))
        return [self.inbox[seq] for seq in waiting]

    def _own_free(
        self, session: Session, owner: int, rest: Any, places: Sequence[int], most: int
    ) -> tuple[tuple[int, bool], ...]:
        left = []
        for each in places:
            its, crashes = self.owners.setdefault(each, owner), self.crashes.get(each, 0)
            if its != owner or crashes:
                left.append((each, its == owner or crashes < most))
            if its != owner and crashes < most:
                self.owners[each], self.crashes[each] = owner, crashes + 1
        return tuple(left)

    def _own(self, session: Session, owner: int, rest: Any, places: Sequence[int]) -> None:
        self.owners.update(dict.fromkeys(places, owner))
        for each in places:
            self.crashes.pop(each, None)

    def _disown(self, session: Session, owner: int, rest: Any, places: Sequence[int]) -> None:
        for each in places:
            if self.owners.get(each) == owner:
                del self.owners[each]
                self.crashes.pop(each, None)

    # What operators and time do.

    def replay(self, seq: int) -> None:
        """`outbox consumer dead-letters replay`."""
        self.inbox[seq][1:] = ["waiting", 0, True]

    def discard(self, seq: int) -> None:
        """`outbox consumer dead-letters discard`."""
        self.inbox[seq][1] = "discarded"

    def become_due(self, seq: int) -> None:
        """The time of the next attempt has come."""
        self.inbox[seq][3] = True
