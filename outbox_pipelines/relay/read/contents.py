"""The content of events that were listed without it: of large ones, and of those a crash guard protects from.

Invariants:
- One row at a time is in memory, and no row of more than `MOST`; one of more than `USUAL` only with the right
  to read it, which one thread has at a time.
- A row that cannot be read does not stop the relay: it is found by bisection and reported; the rows beside it
  are read as usual. An error that is not about a row (a lost session, a missing right) is raised.
- Every statement is read to its end. psycopg cancels one that is half read, each on a new connection, and
  waits for it. So a statement returns few rows more than are needed.
- After a crash, `guard` records each event before its content is read.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from operator import attrgetter
from typing import Any, Final, LiteralString, NamedTuple, Protocol

import psycopg

from outbox_pipelines.core import sequence
from outbox_pipelines.core.event import LARGE, Event, weigh_one
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.text import reason
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import relay_sql

# How old the knowledge of closed days may be: one that is thought open costs planning, nothing else.
_DAYS_SECONDS: Final = 60.0
_payload = attrgetter("payload")
FEW: Final = 8_000
"""Bytes of the largest row that is fetched together with hundreds of others."""
NOTHING: Final = -1
"""No content at all: rows are listed."""
MOST: Final = 8_000_000
"""Bytes of the largest row that is read at all. One wide character makes Python take four times as many."""
USUAL: Final = LARGE // 4
"""Bytes of the largest row that never takes more than `LARGE` of memory."""

_TOO_LARGE: Final = (
    f"its text has more than {MOST:,} bytes, or its headers more than {relay_sql.MOST_METADATA:,}, "
    "the most that the relay reads"
)
# Text that one statement returns, about: what may be read in vain. Fewer, larger rows are one statement each.
_AT_ONCE: Final = 1_000_000
# The fields of `Event`.
_SEQ: Final = 0
_PAYLOAD: Final = 5
_METADATA: Final = 6

# Data exceptions, limits such as 1 GB for one text, and what only damaged or oversized values cause.
_CLASSES: Final = ("22", "54")
_STATES: Final = frozenset({"XX000", "XX001", "XX002"})


class Guard(Protocol):
    """The crash guard, as the reader sees it."""

    def step(self) -> int | None:
        """Return how many events may be read at once; None: any number."""

    def approach(self) -> None:
        """Wait until the content of events may be read at all; asked if `step` limits them."""

    def before(self, seq: int) -> str | None:
        """Record an event before it is read alone; return a reason if it must not be read (a crash)."""


class Unguarded:
    """A crash guard that is not needed."""

    def step(self) -> int | None:
        return None

    def approach(self) -> None:
        pass

    def before(self, seq: int) -> str | None:
        return None


class ReadEvents(NamedTuple):
    """Events in order."""

    events: list[Event]
    size: int
    """Bytes of text in them, as `weigh` counts."""
    is_all: bool
    """Whether these are all that were asked for."""
    unreadable: Mapping[int, str]
    suspects: Mapping[int, str]


class Contents:
    """Reads content, in the days that are open.

    Args:
        query: the bodies of rows.
        may_take_large: asked before a large row is read; waits until it may be.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        query: LiteralString,
        *,
        batch_bytes: int,
        guard: Guard,
        may_take_large: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._query = query
        self._batch_bytes = batch_bytes
        self._guard = guard
        self._may_take_large = may_take_large
        self._open_from = ""
        self._days_read = -math.inf

    def days(self, first: int, end: int) -> dict[str, Any]:
        """Return the first and the last day that have a seq in a span."""
        given = {"from": first, "to": end, "open_from": self.first_open_day()}
        row = self._connection.execute(relay_sql.DAYS, given).fetchone()
        assert row is not None
        return {"start": row[0], "stop": row[1]}

    def first_open_day(self) -> str:
        """Return the day before which nothing is left to read."""
        if time.monotonic() > self._days_read + _DAYS_SECONDS:
            row = self._connection.execute(relay_sql.OPEN_FROM).fetchone()
            assert row is not None
            self._open_from, self._days_read = row[0], time.monotonic()
        return self._open_from

    def read(self, rows: list[Event], *, is_all: bool, alone: bool = False) -> ReadEvents:
        """Return rows with the content of those that were listed without, as many as fit into a batch."""
        unread = [row.seq for row in rows if is_listed(row)]
        if not unread:
            return ReadEvents(rows, 0, is_all, {}, {})
        if alone and (reason := self._guard.before(unread[0])):
            event = _without_content(rows[0])
            return ReadEvents([event], weigh_one(event), is_all, {}, {event.seq: reason})
        events: list[Event] = []
        unreadable: dict[int, str] = {}
        size = 0
        with closing(self._bodies(unread)) as found:
            for row in rows:
                event = row
                if is_listed(row):
                    seq, content = next(found, (0, ""))
                    if seq != row.seq:
                        raise SetupError(f"the row with seq {row.seq} was deleted while the relay read it")
                    if isinstance(content, str):
                        unreadable[row.seq] = content
                        event = _without_content(row)
                    else:
                        event = Event._make(content)
                        if event.id != row.id:
                            raise sequence.twice(row.seq)
                events.append(event)
                size += weigh_one(event)
                if size > self._batch_bytes:
                    break
        require_cut_between(rows, len(events))
        return ReadEvents(events, size, is_all and len(events) == len(rows), unreadable, {})

    def _bodies(self, seqs: list[int]) -> Generator[tuple[int, tuple[Any, ...] | str]]:
        """The content of rows in this order; the order of a slot is not that of the numbers."""
        while seqs:
            run = next((n for n in range(1, len(seqs)) if seqs[n] < seqs[n - 1]), len(seqs))
            part, seqs = seqs[:run], seqs[run:]
            days = self.days(part[0], part[-1])
            yield from read(self._connection, self._query, days, part, self._may_take_large)


def require_cut_between(rows: list[Event], count: int) -> None:
    """Raise `SequenceError` if a batch of the first `count` rows ends between two with the same seq.

    The position is a seq: the second one would count as published.
    """
    if 0 < count < len(rows) and rows[count].seq == rows[count - 1].seq:
        raise sequence.twice(rows[count].seq)


def is_listed(event: Event) -> bool:
    """Return whether an event was read without its content."""
    payload: str | None = event.payload
    return payload is None


def any_listed(events: Iterable[Event]) -> bool:
    """Return whether any of these events was read without its content."""
    return None in map(_payload, events)


def _without_content(event: Event) -> Event:
    return event._replace(payload="", metadata=None)


def is_about_a_row(error: psycopg.Error) -> bool:
    """Return whether a statement failed because of a row's content."""
    state = error.sqlstate or ""
    return state.startswith(_CLASSES) or state in _STATES


def read(
    connection: Connection,
    query: LiteralString | bytes,
    parameters: Mapping[str, Any],
    seqs: Sequence[int],
    may_take_large: Callable[[], bool] = lambda: True,
) -> Generator[tuple[int, tuple[Any, ...] | str]]:
    """Yield each seq with its row, or with the reason why it cannot be read; nothing for a row that is gone.

    Args:
        connection: nothing else may use it until the iterator is exhausted or closed.
        query: takes `seqs` and `most`, returns the columns of `Event` first, in order of seq.
        seqs: in ascending order.
        may_take_large: asked before a row of more than `USUAL` bytes is read; without it, the rows end here.

    Raises:
        SequenceError: two rows have the same seq.
    """
    parts = [(list(seqs), USUAL)]
    count = 1
    while parts:
        part, most = parts.pop()
        if not part:
            continue
        if len(part) > count:
            parts.append((part[count:], most))
            part = part[:count]
        large: int | None = None
        rows_read, size = 0, 0
        try:
            with closing(_stream(connection, query, {**parameters, "seqs": part, "most": most})) as rows:
                for row in rows:
                    seq, is_left_out = row[_SEQ], row[_PAYLOAD] is None
                    if not part or seq < part[0]:
                        raise sequence.twice(seq)
                    part = [other for other in part if other > seq] if part[0] != seq else part[1:]
                    rows_read += 1
                    size += len(row[_PAYLOAD] or "") + len(row[_METADATA] or "")
                    if is_left_out and most < MOST:
                        large = seq
                        break
                    yield seq, _TOO_LARGE if is_left_out else row
        except psycopg.Error as error:
            if not is_about_a_row(error):
                raise
            if len(part) == 1:
                yield part[0], reason(f"the database cannot read it: {first_line(error)}")
            elif len(part) > 1:
                # Rows come in order, so it is mostly the first of those that are left.
                half = len(part) // 2 + 1
                parts += [(part[half:], most), (part[1:half], most), (part[:1], most)]
        if large is not None:
            if not may_take_large():
                return
            parts += [(part, USUAL), ([large], MOST)]
        if size:
            count = max(1, min(2 * count, rows_read * _AT_ONCE // size))


def drop(rows: Iterable[tuple[Any, ...]]) -> bool:
    """Read the rows of a statement to its end; return whether there were any."""
    return bool(deque(rows, maxlen=1))


def _stream(
    connection: Connection, query: LiteralString | bytes, parameters: Mapping[str, Any]
) -> Generator[tuple[Any, ...]]:
    in_transaction = connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
    # A savepoint: what the transaction has locked stays locked.
    with connection.transaction() if in_transaction else nullcontext(), connection.cursor() as cursor:
        rows = cursor.stream(query, parameters, binary=True, size=1)
        try:
            # `yield from` would end the statement together with this generator.
            for row in rows:  # noqa: UP028
                yield row
        finally:
            try:
                drop(rows)
            except psycopg.Error as error:
                # About a row that was not needed: its own read finds it.
                if not is_about_a_row(error):
                    raise
