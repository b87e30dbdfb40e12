"""Reads the outbox from a slot, transaction by transaction in the order of commits, batch by batch.

Invariants:
- `read` returns every committed event that the position does not cover once, in ticks. A tick is a number of
  whole transactions in one batch, or one large transaction in several.
- A position is the same as with snapshots (`Delivered`). So a restart skips what is published, whatever the
  slot delivers again, and another source can continue from it.
- The server may forget only what is settled: `confirm`.
- A transaction is returned when other sessions see it. The slot delivers it before, also while its commit
  waits for a synchronous standby, when a failover undoes it. Those behind it wait as well: for the order.
- What the slot skips is noticed, and ends the source: a transaction that was not delivered, and was
  committed, with rows here, before a position in the log that the slot has reached.
- A row that is large is dropped and read from the table, as a reader of snapshots would. So is every row
  after a crash, once `guard` has recorded it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import psycopg

from outbox_pipelines.core.event import Event, weigh
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.core.text import counted
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.read.contents import Contents, Guard, any_listed
from outbox_pipelines.relay.read.slot import pgoutput, slot_sql
from outbox_pipelines.relay.read.slot.delivered import Delivered
from outbox_pipelines.relay.read.slot.stream import SlotLostError, Stream
from outbox_pipelines.relay.relay_sql import EVENTS, EVENTS_WITH_TIME, PLAN_EACH, SNAPSHOT

_LOG: Final = logging.getLogger(__name__)
# Bytes of the longest message whose row is taken from it: what all limits of a row's size allow.
_LONGEST: Final = 500_000
# Transactions of which it is not known whether they concern the outbox: a position names each of them.
_MOST_UNKNOWN: Final = 500
_WAIT_SECONDS: Final = 0.1
# A transaction that is not visible yet is looked for again after a fourth of the time that it has waited.
_SHORTEST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.025
# A hidden transaction is reported after this time.
_REPORT_SECONDS: Final = 5.0
# Seconds between two checks that the slot has skipped nothing.
_LOOK_SECONDS: Final = 10.0


class CdcSource:
    """The events that a slot delivers, and a position does not cover.

    Args:
        connection: in autocommit mode, for the content of some rows; the reader's own.
        done: the position; not within a tick.
        settled: how far the shard is settled.
        with_time: each event's metadata has its time, as `created-at`.
        may_take_large: asked before a large row is read; waits until it may be.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        stream: Stream,
        done: Snapshot,
        settled: Callable[[], Snapshot],
        *,
        batch_events: int,
        batch_bytes: int,
        with_time: bool,
        guard: Guard,
        may_take_large: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._settled = settled
        rows = EVENTS_WITH_TIME if with_time else EVENTS
        # A batch is never cut: its size is known before its content is read.
        self._contents = Contents(
            *(connection, rows.bodies),
            batch_bytes=sys.maxsize,
            guard=guard,
            may_take_large=may_take_large,
        )
        self._batch_events = batch_events
        self._most_events = batch_events
        self._longest = _LONGEST
        self._batch_bytes = batch_bytes
        self._decoder = pgoutput.Decoder(with_time=with_time)
        self._guard = guard
        self._delivered = Delivered(done)
        self._skipped = Skipped(connection, self._delivered, self._ask)
        self.position = Position(done)
        """What has been read."""
        self._whole: list[Event] = []
        """Of transactions that were received to their end."""
        self._whole_size = 0
        self._transactions: list[int] = []
        self._part: list[Event] = []
        """Of the transaction that is being received."""
        self._part_size = 0
        self._tx: int | None = None
        self._is_published = False
        """Whether the transaction that is being received is skipped: the position covers it."""
        self._large: Snapshot | None = None
        """The target of the transaction that is being received, if it has a tick of its own."""
        self._made = done
        """What the ticks cover that were made, read or not."""
        self._ready: deque[tuple[Batch, list[int]]] = deque()
        """Batches, each with its transactions."""
        self._visible = done
        """A snapshot of this session, which sees everything that was returned."""
        self._hidden_since: float | None = None
        """Since when the next batch has a transaction that other sessions do not see."""
        self._is_reported = False
        self._end = 0
        """The position in the log behind the last transaction that was received to its end."""
        self._unsettled: deque[tuple[Snapshot, int]] = deque()
        connection.execute(PLAN_EACH)
        self._catch_up_to = self._ask_end()

    @property
    def done(self) -> Snapshot:
        """What has been read, except the rest of the current tick."""
        return self.position.done

    def read(self) -> Batch | None:
        """Return the next batch; None if nothing more is delivered now.

        Raises:
            SlotLostError: the slot's connection has ended, or it does not deliver all events.
        """
        self.confirm()
        step = self._guard.step()
        self._most_events = step or self._batch_events
        self._longest = _LONGEST if step is None else 0
        ready, receive, row = self._ready, self._stream.receive, self._row
        while not ready:
            message = receive()
            if message is None:
                self._at_end()
                break
            if message[0] != pgoutput.INSERT:
                self._take(message)
            elif not self._is_published:
                row(message)
        return self._read_content(ready.popleft()[0]) if ready and self._are_visible(ready[0][1]) else None

    @property
    def has_caught_up(self) -> bool:
        """Whether everything was read that was committed when this source was made, and nothing skipped."""
        return self._has_received and self._skipped.is_checked and not self._ready

    def wait(self, end: threading.Event) -> None:
        """Wait until there may be something to read, or the reader may have to end."""
        if self._hidden_since is not None:
            pause = (time.monotonic() - self._hidden_since) / 4
            end.wait(min(max(pause, _SHORTEST_PAUSE), _LONGEST_PAUSE))
        elif not end.is_set():
            self._stream.wait(_WAIT_SECONDS)

    def confirm(self) -> None:
        """Tell the server what it may forget; also a sign of life, needed while nothing is read.

        Raises:
            SlotLostError: the slot's connection has ended.
        """
        position, settled = 0, self._settled()
        while self._unsettled and settled.covers(self._unsettled[0][0]):
            position = self._unsettled.popleft()[1]
        if not (self._unsettled or self._ready or self._whole or self._part or self._large):
            # Nothing of the outbox is left before it. So a database without events keeps no log, either.
            position = max(position, self._received)
        self._stream.confirm(position)

    def close(self) -> None:
        """End the connection; another relay may read the slot then."""
        self._stream.close()

    # ------------------------------------------------------------------------------------------------------

    @property
    def _received(self) -> int:
        """The position in the log up to which everything was received."""
        return max(self._end, self._stream.position)

    @property
    def _has_received(self) -> bool:
        return self._received >= self._catch_up_to and not (self._part or self._large)

    def _take(self, message: bytes) -> None:
        kind = message[0]
        if kind == pgoutput.COMMIT:
            self._commit(message)
        elif kind == pgoutput.BEGIN:
            self._tx, self._is_published = None, False
        elif kind == pgoutput.RELATION:
            try:
                self._decoder.relation(message)
                # Sent again after each change of the publication, before the next row.
                require_publication(self._connection, self._stream.slot)
            except SetupError as error:
                raise SlotLostError(str(error)) from None
        else:
            pgoutput.refuse_unknown(kind)

    def _row(self, message: bytes) -> None:
        event, tx = self._decoder.row(message, self._longest)
        if self._tx is None:
            self._tx = int(tx)
            self._is_published = self._delivered.sees(self._tx)
            if self._is_published:
                return
        self._part.append(event)
        self._part_size += len(message)
        if (
            len(self._part) >= self._most_events - len(self._whole)
            or self._part_size + self._whole_size > self._batch_bytes
        ):
            if self._whole:
                self._end_tick()
            else:
                self._begin_large()

    def _commit(self, message: bytes) -> None:
        self._end = pgoutput.end_of_commit(message)
        if self._large is not None:
            self._add(self._part, self._part_size, self._large, ends_tick=True)
            self._large = None
        elif self._part:
            assert self._tx is not None
            self._whole += self._part
            self._whole_size += self._part_size
            self._transactions.append(self._tx)
            if len(self._whole) >= self._most_events or self._whole_size > self._batch_bytes:
                self._end_tick()
        self._part, self._part_size = [], 0

    def _at_end(self) -> None:
        """Nothing more is delivered now."""
        if self._transactions:
            self._end_tick()
        elif self._guard.step() is not None and self.has_caught_up:
            self._show_end()
        if self._has_received:
            self._skipped.look(self._received, self._contents.first_open_day())

    def _end_tick(self) -> None:
        """Make a tick of the whole transactions."""
        target = self._with(self._transactions)
        self._add(self._whole, self._whole_size, target, ends_tick=True)
        self._whole, self._whole_size, self._transactions = [], 0, []

    def _begin_large(self) -> None:
        """Make a batch of a part of a transaction, which has a tick of its own."""
        assert self._tx is not None
        target = self._large or self._with([self._tx])
        self._add(self._part, self._part_size, target, ends_tick=False)
        self._large, self._part, self._part_size = target, [], 0

    def _now(self) -> Snapshot:
        row = self._connection.execute(SNAPSHOT, prepare=True).fetchone()
        assert row is not None
        return Snapshot.parse(row[0])

    def _are_visible(self, transactions: list[int]) -> bool:
        """Return whether other sessions see these transactions."""
        if not all(map(self._visible.sees, transactions)):
            self._visible = self._now()
        if all(map(self._visible.sees, transactions)):
            if self._is_reported:
                _LOG.warning("the transactions of the slot %s are visible again", self._stream.slot)
            self._hidden_since, self._is_reported = None, False
            return True
        now = time.monotonic()
        self._hidden_since = self._hidden_since or now
        if now - self._hidden_since >= _REPORT_SECONDS and not self._is_reported:
            self._is_reported = True
            _LOG.warning(
                "the slot %s has delivered a transaction whose commit waits for a synchronous standby: its "
                "events and those behind it are published when the standby has answered",
                self._stream.slot,
            )
        return False

    def _show_end(self) -> None:
        """Make a tick without events up to now, for a crash guard that is needed until then."""
        self._delivered.extend(self._now().xmax)
        self._ask()
        target = self._delivered.snapshot()
        if target != self._made:
            self._add([], 0, target, ends_tick=True)

    def _with(self, transactions: list[int]) -> Snapshot:
        """What is published when these transactions are."""
        for tx in transactions:
            self._delivered.add(tx)
        if self._delivered.unknown > _MOST_UNKNOWN:
            self._ask()
        return self._delivered.snapshot()

    def _ask(self) -> None:
        question = self._delivered.question._asdict()
        given = {name: str(value) for name, value in question.items()}
        given["others"] = "{" + ",".join(map(str, question["others"])) + "}"
        row = self._connection.execute(
            slot_sql.WITH_ROWS, given | {"open_from": self._contents.first_open_day()}
        ).fetchone()
        assert row is not None
        self._delivered.answer(Snapshot.parse(row[0]), row[1])

    def _add(self, events: list[Event], size: int, target: Snapshot, *, ends_tick: bool) -> None:
        batch = Batch(
            *(events, size, self._made, target, ends_tick),
            starts_tick=self._large is None,
            in_commit_order=True,
        )
        transactions = self._transactions or ([] if self._tx is None else [self._tx])
        self._ready.append((batch, transactions))
        if ends_tick:
            self._made = target
            self._unsettled.append((target, self._end))

    def _read_content(self, batch: Batch) -> Batch:
        """The batch, with the content of rows that were dropped."""
        self.position = batch.position
        if not any_listed(batch.events):
            return replace(batch, size=weigh(batch.events))
        step = self._guard.step()
        if step is not None:
            self._guard.approach()
        found = self._contents.read(batch.events, is_all=True, alone=step == 1)
        return replace(
            batch,
            events=found.events,
            size=found.size,
            unreadable=found.unreadable,
            suspects=found.suspects,
        )

    def _ask_end(self) -> int:
        row = self._connection.execute(slot_sql.END_OF_LOG).fetchone()
        assert row is not None
        return int(row[0])


class Skipped:
    """What a slot should deliver, compared with what it has delivered.

    Args:
        connection: in autocommit mode.
        ask: brings `delivered` up to date with the table.
    """

    def __init__(
        self, connection: psycopg.Connection[Any], delivered: Delivered, ask: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._delivered = delivered
        self._ask = ask
        self._awaited: set[int] = set()
        self._until: int | None = None
        """The position in the log before which the awaited transactions end; None: none are awaited."""
        self._look_at = 0.0
        self._looked_at_position = -1
        self.is_checked = False
        """Whether nothing was skipped before the reader caught up."""

    def look(self, position: int, open_from: Any) -> None:
        """Compare; all that was received before `position` must be in `delivered`.

        Raises:
            SlotLostError: the slot has skipped events.
        """
        if self._until is None:
            if time.monotonic() >= self._look_at and position != self._looked_at_position:
                self._begin(open_from)
                self._looked_at_position = position
        elif position >= self._until:
            skipped = sum(not self._delivered.sees(tx) for tx in self._awaited)
            self._until, self.is_checked = None, True
            if skipped:
                raise SlotLostError(
                    f"it has skipped the events of {counted(skipped, 'transaction')}, which follow out of "
                    "order: another program has moved, read or replaced the slot, or changed its "
                    "publication; find out which, and stop it"
                )

    def _begin(self, open_from: Any) -> None:
        self._look_at = time.monotonic() + _LOOK_SECONDS
        self._ask()
        given = {"first": str(self._delivered.end), "open_from": open_from}
        rows = self._connection.execute(slot_sql.NOT_DELIVERED, given).fetchall()
        self._awaited = self._delivered.awaited | {tx for (tx,) in rows}
        # Afterwards: each of them ends before it. The first look must end also if nothing is written.
        query = slot_sql.INSERTED_TO if self.is_checked else slot_sql.END_OF_LOG
        row = self._connection.execute(query).fetchone()
        assert row is not None
        self._until = row[0]


def require_publication(connection: psycopg.Connection[Any], slot: str) -> None:
    """Raise SetupError if the slot's publication does not publish all of the outbox.

    Since PostgreSQL 18 a slot without a publication is read without an error, and without events.
    """
    if connection.execute(slot_sql.PUBLICATION, {"slot": slot}).fetchone() != (True, True, True):
        raise SetupError(
            f"the publication {slot} is missing or does not publish the outbox as it must: "
            "run `outbox cdc setup`"
        )
