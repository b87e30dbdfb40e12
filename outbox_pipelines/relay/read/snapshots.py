"""Reads the append-only outbox between two snapshots, batch by batch.

Invariants:
- `read` returns every committed event once, in ticks; inside a tick in `seq` order.
- No statement stays open between two reads, so that nothing holds vacuum back while Kafka is slow.
- A batch holds at most `batch_events` events and, but for its last event, `batch_bytes` of text; a chunk that
  is fetched at once holds rows of at most `contents.FEW` bytes. Larger rows are fetched one by one.
- Every statement is read to its end (`contents`). It asks for as many rows as fit, by the last one's sizes.
- A row that cannot be read does not stop the relay: its batch reports it.
- After a crash, `guard` records each event before its content is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from outbox_pipelines.core.event import Event, weigh
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.read import contents
from outbox_pipelines.relay.read.contents import (
    Contents,
    Guard,
    ReadEvents,
    Unguarded,
    is_listed,
    require_cut_between,
)

# Rows that libpq hands over at once: bounds memory where payloads are large. Older libpq knows 1 only.
_CHUNK = 500 if psycopg.pq.version() >= 170000 else 1
# Of a window that is listed without content.
_LISTED = 500
# A tick of at most so many events is read with a prepared plan, and as one chunk.
_FEW_EVENTS: Final = 500
# After so many looks in a row that found events, the next one looks and reads by one statement. It is slower
# than a look where nothing is found.
_STEADY: Final = 2
# Reads that list rows first, once many were large: of those, the texts would be made only to leave them out.
_CAREFUL_READS: Final = 20
# More than one row of so many must be large: all rows of a listed batch are read one by one, which is slow.
_LARGE_AMONG: Final = 10


class SnapshotSource:
    """The events after a position, from a connection in autocommit mode that has no other user."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        position: Position,
        *,
        batch_events: int,
        batch_bytes: int,
        with_time: bool = False,
        shard: int = 0,
        shards: int = 1,
        guard: Guard | None = None,
        may_take_large: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            with_time: each event's metadata has its time, as `created-at`.
            shard: events of this shard, of so many.
            may_take_large: asked before a large row is read; waits until it may be.
        """
        self._connection = connection
        self._done = position.done
        self._batch_events = batch_events
        self._batch_bytes = batch_bytes
        self._width = batch_events
        """How many rows a statement may return: at most `batch_events`, fewer while they are long."""
        if shards == 1:
            self._queries = relay_sql.EVENTS_WITH_TIME if with_time else relay_sql.EVENTS
        else:
            self._queries = relay_sql.SHARD_EVENTS_WITH_TIME if with_time else relay_sql.SHARD_EVENTS
        self._shards = shards
        self._mine = relay_sql.lanes_of(shard, shards)
        self._guard = guard or Unguarded()
        self._contents = Contents(
            connection,
            self._queries.bodies,
            batch_bytes=batch_bytes,
            guard=self._guard,
            may_take_large=may_take_large,
        )
        self._tick: Iterator[Batch] = iter(())
        self.is_between_ticks = position.target is None
        """Whether everything was returned that belongs to a tick."""
        self.has_caught_up = True
        """Whether everything was returned, if `read` returns None."""
        self._careful = 0
        self._expects_few = True
        """Whether the last tick had few events."""
        self._plans_once = False
        self._prepared: dict[str, tuple[str, bytes]] = {}
        """By query: the first open day, and the query with it."""
        self._successes = 0
        """How many looks in a row have found events."""
        connection.execute(relay_sql.PLAN_EACH)
        connection.execute(relay_sql.BY_INDEX)
        if position.target is not None:
            # It was opened with this target: no other tick may be joined to it.
            self._tick = self._batches(position.target, position.last_seq or 0, starts=False)

    @property
    def done(self) -> Snapshot:
        """What has been read, except the rest of the current tick."""
        return self._done

    def now(self) -> Snapshot:
        """Return the current snapshot."""
        row = self._connection.execute(relay_sql.SNAPSHOT, prepare=True).fetchone()
        assert row is not None
        return Snapshot.parse(row[0])

    def read(self, upto: Snapshot | None = None) -> Batch | None:
        """Return the next batch; None when everything is read that is committed, or that `upto` sees.

        A batch without events only moves the position: other transactions have ended.
        """
        batch = next(self._tick, None)
        if batch is None:
            target, few = (upto, None) if upto else self._look()
            # A server that took over by a failover may lack what the position covers.
            if target == self._done or not target.covers(self._done):
                self._successes = 0
                return None
            self._tick = self._batches(target, 0, starts=True, few=few)
            batch = next(self._tick)
            self._successes = self._successes + 1 if batch.events else 0
        return self._returned(batch)

    def _look(self) -> tuple[Snapshot, ReadEvents | None]:
        """Return the current snapshot; while events come one after the other, with those that it sees."""
        if self._successes < _STEADY:
            return self.now(), None
        query = self._queries.news_with_late if self._done.xip else self._queries.news
        given = {**self._mine, "first": str(self._done.xmax), "late": _array(self._done.xip), "last_seq": 0}
        rows = self._few(query, given)
        if rows is None:
            return self.now(), None
        return Snapshot.parse(rows[0].id), self._found(rows[1:])

    def confirm(self) -> None:
        """Do nothing: the server keeps nothing for this source."""

    def rest(self) -> Batch | None:
        """Return the next batch of the current tick; None at its end."""
        batch = next(self._tick, None)
        return None if batch is None else self._returned(batch)

    def _returned(self, batch: Batch) -> Batch:
        self.is_between_ticks = batch.ends_tick
        if batch.ends_tick:
            self._done = batch.target
        return batch

    def _batches(
        self, target: Snapshot, last_seq: int, *, starts: bool, few: ReadEvents | None = None
    ) -> Iterator[Batch]:
        """One tick, after `last_seq`.

        Args:
            starts: whether the position is not yet in it.
            few: its events, if they are read already.
        """
        late = self._done.late(target)
        query = self._queries.small_tick_with_late if late else self._queries.small_tick
        tick = {
            **self._mine,
            "open_from": self._contents.first_open_day(),
            "first": str(self._done.xmax),
            "end": str(target.xmax),
            "target": str(target),
            "done": str(self._done),
            "late": _array(late),
        }
        few = few or self._found(self._few(query, tick | {"last_seq": last_seq}))
        while True:
            found = few or self._fetch(query, tick | {"last_seq": last_seq, "limit": self._width})
            is_big = bool(found.events) and found.events[0].seq < 0
            self._expects_few = not is_big and len(found.events) <= _FEW_EVENTS
            few = None
            if is_big:
                yield from self._windows(tick, target, last_seq, starts=starts)
                return
            last_seq = found.events[-1].seq if found.events else last_seq
            is_all = found.is_all
            yield Batch(
                *(found.events, found.size, self._done, target, is_all, starts),
                *(found.unreadable, found.suspects),
            )
            starts = False
            if is_all:
                return
            # One batch less in memory while the next is read.
            del found

    def _windows(
        self, tick: dict[str, Any], target: Snapshot, last_seq: int, *, starts: bool
    ) -> Iterator[Batch]:
        """A big tick: by windows of `seq` over the spans in which it has rows."""
        self._plan(once=False)
        given = tick | {"last_seq": last_seq}
        ((lowest, highest),) = self._connection.execute(self._queries.edges, given)
        given |= {"lowest": lowest, "highest": highest}
        spans = self._connection.execute(self._queries.spans, given).fetchall()
        for first, end in _merge(spans):
            last_seq = max(last_seq, first - 1)
            window = tick | self._contents.days(first, end)
            while last_seq < end:
                width = self._width if self._guard.step() is None else _LISTED
                # About one row in so many is of this shard.
                to = min(last_seq + width * self._shards, end)
                found = self._fetch(
                    self._queries.window, window | {"last_seq": last_seq, "to": to, "width": width}
                )
                is_all = found.is_all and len(found.events) < width
                last_seq = to if is_all else found.events[-1].seq
                if found.events:
                    yield Batch(
                        *(found.events, found.size, self._done, target),
                        ends_tick=False,
                        starts_tick=starts,
                        unreadable=found.unreadable,
                        suspects=found.suspects,
                    )
                    starts = False
                else:
                    last_seq = self._before_next(window, last_seq, end)
                del found
        yield Batch([], 0, self._done, target, ends_tick=True, starts_tick=starts)

    def _before_next(self, window: dict[str, Any], last_seq: int, end: int) -> int:
        """The seq to go on from, where a window was empty."""
        row = self._connection.execute(
            relay_sql.NEXT_SEQ, window | {"last_seq": last_seq, "to": end}
        ).fetchone()
        return end if row is None or row[0] is None else row[0] - 1

    def _few(self, query: LiteralString, parameters: Mapping[str, Any]) -> list[Event] | None:
        """Return the rows of a tick that has few; None if it must be read in another way."""
        if not self._expects_few or self._careful or self._guard.step() is not None:
            return None
        self._plan(once=True)
        limits = {"limit": min(_FEW_EVENTS, self._batch_events), "most": contents.FEW}
        try:
            with self._connection.cursor(binary=True) as cursor:
                rows = cursor.execute(self._of_open_days(query), {**parameters, **limits}, prepare=True)
                return list(map(Event._make, rows.fetchall()))
        except psycopg.Error as error:
            if not contents.is_about_a_row(error):
                raise
            return None

    def _of_open_days(self, query: str) -> bytes:
        """Return a query with the first open day as a constant: its plan is of the open days alone."""
        open_from = self._contents.first_open_day()
        if query not in self._prepared or self._prepared[query][0] != open_from:
            literal = sql.Literal(open_from).as_bytes(self._connection)
            self._prepared[query] = open_from, query.encode().replace(b"%(open_from)s", literal)
        return self._prepared[query][1]

    def _found(self, rows: list[Event] | None) -> ReadEvents | None:
        """Return a tick, whole unless it has large events; None if it must be read in another way."""
        if rows is None or (rows and rows[0].seq < 0):
            return None
        if contents.any_listed(rows):
            return self._with_content(rows, is_all=True)
        size = weigh(rows)
        return ReadEvents(rows, size, True, {}, {}) if size <= self._batch_bytes else None

    def _plan(self, *, once: bool) -> None:
        """Have statements planned once, or each time."""
        if once != self._plans_once:
            self._connection.execute(relay_sql.PLAN_ONCE if once else relay_sql.PLAN_EACH)
            self._plans_once = once

    def _fetch(self, query: LiteralString, parameters: Mapping[str, Any]) -> ReadEvents:
        """Return the events of a query; fewer if some are large, or after a crash."""
        self._plan(once=False)
        step = self._guard.step()
        if step is not None:
            rows, _, is_all = self._list(query, parameters, contents.NOTHING)
            if rows:
                self._guard.approach()
            require_cut_between(rows, step)
            return self._contents.read(rows[:step], is_all=is_all and len(rows) <= step, alone=step == 1)
        if self._careful:
            rows, size, is_all = self._list(query, parameters, contents.NOTHING)
        else:
            try:
                rows, size, is_all = self._list(query, parameters, contents.FEW)
            except psycopg.Error as error:
                if not contents.is_about_a_row(error):
                    raise
                rows, size, is_all = self._list(query, parameters, contents.NOTHING)
        return (
            self._with_content(rows, is_all=is_all)
            if size is None
            else ReadEvents(rows, size, is_all, {}, {})
        )

    def _with_content(self, rows: list[Event], *, is_all: bool) -> ReadEvents:
        """Return rows with the content of those that were listed without, as many as fit into a batch."""
        if self._careful:
            self._careful -= 1
        elif sum(map(is_listed, rows)) * _LARGE_AMONG > len(rows):
            self._careful = _CAREFUL_READS
        found = self._contents.read(rows, is_all=is_all)
        if len(found.events) < len(rows):
            self._width = min(self._width, 1 + len(found.events) * self._batch_bytes // found.size)
        return found

    def _list(
        self, query: LiteralString, parameters: Mapping[str, Any], most: int
    ) -> tuple[list[Event], int | None, bool]:
        """The events of a query, their size, and whether they are all.

        Those of more than `most` bytes have None as payload; there is no size then.
        """
        events: list[Event] = []
        size, is_whole = 0, True
        with self._connection.cursor() as cursor:
            rows = cursor.stream(query, {**parameters, "most": most}, binary=True, size=_CHUNK)
            while size <= self._batch_bytes and (chunk := list(map(Event._make, islice(rows, _CHUNK)))):
                events += chunk
                try:
                    size += weigh(chunk)
                except TypeError:
                    size += weigh([event for event in chunk if not is_listed(event)])
                    is_whole = False
            rest = [Event._make(row) for row in islice(rows, 1)]
            contents.drop(rows)
            require_cut_between(events[-1:] + rest, 1)
        if size and most == contents.FEW:
            fitting = 1 + len(events) * self._batch_bytes // size
            self._width = min(self._batch_events, 2 * self._width, fitting)
        return events, size if is_whole else None, not rest


def _array(numbers: Iterable[int]) -> str:
    return "{" + ",".join(map(str, numbers)) + "}"


def _merge(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that overlap made one."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((first, end))
    return merged
