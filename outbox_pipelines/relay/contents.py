"""The content of events that were listed without it: of large ones, and of those a crash guard protects from.

Invariants:
- A row that cannot be read does not stop the relay: it is reported.
- After a crash, `guard` records each event before its content is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from operator import attrgetter
from typing import Any, Final, LiteralString, NamedTuple, Protocol

import psycopg

from outbox_pipelines.core import sequence
from outbox_pipelines.core.event import Event, weigh
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import bodies, queries

# How old the knowledge of closed days may be: one that is thought open costs planning, nothing else.
_DAYS_SECONDS: Final = 60.0
_payload = attrgetter("payload")


class Guard(Protocol):
    """Protection against events that crash the relay."""

    def step(self) -> int | None:
        """Return how many events may be read at once; None: any number."""

    def approach(self) -> None:
        """Wait until the content of events may be read at all; asked if `step` limits them."""

    def before(self, seq: int) -> str | None:
        """Record an event before it is read alone; return a reason if it must not be read (a crash)."""


class Unguarded:
    """No crash to protect from."""

    def step(self) -> int | None:
        return None

    def approach(self) -> None:
        pass

    def before(self, seq: int) -> str | None:
        return None


class Found(NamedTuple):
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
        row = self._connection.execute(queries.DAYS, given).fetchone()
        assert row is not None
        return {"start": row[0], "stop": row[1]}

    def first_open_day(self) -> str:
        """Return the day before which nothing is left to read."""
        if time.monotonic() > self._days_read + _DAYS_SECONDS:
            row = self._connection.execute(queries.OPEN_FROM).fetchone()
            assert row is not None
            self._open_from, self._days_read = row[0], time.monotonic()
        return self._open_from

    def read(self, rows: list[Event], *, is_all: bool, alone: bool = False) -> Found:
        """Return rows with the content of those that were listed without, as many as fit into a batch."""
        unread = [row.seq for row in rows if is_listed(row)]
        if not unread:
            return Found(rows, 0, is_all, {}, {})
        if alone and (deadly := self._guard.before(unread[0])):
            event = _without_content(rows[0])
            return Found([event], weigh([event]), is_all, {}, {event.seq: deadly})
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
                size += weigh([event])
                if size > self._batch_bytes:
                    break
        require_cut_between(rows, len(events))
        return Found(events, size, is_all and len(events) == len(rows), unreadable, {})

    def _bodies(self, seqs: list[int]) -> Generator[tuple[int, tuple[Any, ...] | str]]:
        """The content of rows in this order; the order of a slot is not that of the numbers."""
        while seqs:
            run = next((n for n in range(1, len(seqs)) if seqs[n] < seqs[n - 1]), len(seqs))
            part, seqs = seqs[:run], seqs[run:]
            days = self.days(part[0], part[-1])
            yield from bodies.read(self._connection, self._query, days, part, self._may_take_large)


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
