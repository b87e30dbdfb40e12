"""The thread that reads, a batch or two ahead of the one that publishes.

Invariants:
- It owns its connection, which must see the lock of the shard's session: another server (a standby) would
  treat running transactions as finished.
- While the number of shards changes, it reads only up to the barrier, and continues when everything is
  settled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

import psycopg

from outbox_pipelines.core import sequence
from outbox_pipelines.core.log import RepeatedLines
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.database import Connection
from outbox_pipelines.days.partitions.ahead import top_up
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.core.barrier import Barrier, BarrierPause, Step
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.core.crash_guard import CrashGuard
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.core.settler import CHANGE_POLL, MANY_EVENTS
from outbox_pipelines.relay.kafka.message import needs_time
from outbox_pipelines.relay.lease.resharding import OperatorChange
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.memory import EndingError, LargeEvent
from outbox_pipelines.relay.read.contents import Guard
from outbox_pipelines.relay.read.slot.slot_source import CdcSource
from outbox_pipelines.relay.read.slot.stream import SlotLostError, Stream
from outbox_pipelines.relay.read.snapshots import SnapshotSource
from outbox_pipelines.relay.read.switch import Source, Sources
from outbox_pipelines.relay.run import Host, Turn
from outbox_pipelines.relay.shared import SharedBatchQueue
from outbox_pipelines.settings import ProcessSettings

_LOG: Final = logging.getLogger(__name__)
# Polling: fast for a second after the last event, then slower and slower. A tick of many events is followed
# by the next at once; few at a time would cost more in queries than they gain in latency.
_FAST_POLL: Final = 0.002
_FAST_FOR: Final = 1.0
_SLOW_POLL: Final = 0.025
# In exactly_once nothing is read until a transaction can begin, for so long at most.
_DEMAND_SECONDS: Final = 0.02
# A relay that runs for months keeps days ahead of itself, where it may.
_PARTITIONS_EVERY: Final = 3600.0
_PARTITIONS_AGAIN: Final = 60.0
# How often a relay looks whether the number of shards is to change, or the source of events.
_CHANGE_EVERY: Final = 0.5


class Reader:
    """Reads an owned shard into `batches`.

    Args:
        ending: whether to stop reading.
        end: set when no more batches are taken.
        has_passed: set when a batch that had to be settled alone is settled.
        prepare: prepares what this number of shards needs.
        until_empty: read only events that are committed at the start.
        host: the process, which may know when there is something to read.
        turn: needed while the crash guard is.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        shard: Shard,
        crash_guard: CrashGuard,
        pause: BarrierPause,
        large: threading.Lock,
        *,
        ending: Callable[[], bool],
        end: threading.Event,
        has_passed: threading.Event,
        prepare: Callable[[int], None],
        until_empty: bool,
        host: Host,
        turn: Turn,
    ) -> None:
        self._turn = turn
        self._host = host
        self._settings = settings
        self._shard = shard
        self._crash_guard = crash_guard
        self._ending = ending
        self._large = LargeEvent(large, ending)
        self._end = end
        self._prepare = prepare
        self._until_empty = until_empty
        self._pause = pause
        self._has_passed = has_passed
        self._confirm: Callable[[], None] = lambda: None
        self._lines = RepeatedLines(_LOG)
        self._is_demanded = settings.delivery == "exactly_once"
        self.batches = SharedBatchQueue(host.patience)

    def run(self) -> None:
        """Read until the end, or until nothing is left; raise any error."""
        try:
            self._read()
        except EndingError:
            pass
        except psycopg.OperationalError:
            # Nothing more may be read; published events must still be settled.
            if not self._ending():
                raise
        self._put(None)

    def _read(self) -> None:
        with self._shard.connect("reader") as connection, ExitStack() as ends:
            guard = _InTurn(self._crash_guard, self._turn, self._ending)
            snapshots = self._snapshots(connection, guard, self._shard.position)
            source: Source = snapshots
            sources = Sources(
                self._shard,
                connection,
                snapshots=partial(self._snapshots, connection, guard),
                slot=partial(self._slot, connection, guard),
            )
            ends.callback(sources.close)
            change = OperatorChange(connection, self._shard.key, self._shard.row_address)
            watch = self._host.watch(self._shard, connection, ending=self._ending, end=self._end)
            now = snapshots.now()
            del snapshots
            self._crash_guard.until(now)
            upto: Snapshot | None = now if self._until_empty else None
            pause = _Pause()
            partitions = _PartitionsAhead(connection, self._shard, self._settings.partitions_ahead)
            change_due, drawn = 0.0, 0
            is_more = True
            while True:
                # Before the wait: after it, news would wait for them.
                if time.monotonic() >= change_due:
                    change_due = time.monotonic() + _CHANGE_EVERY
                    drawn = _require_not_less(connection, drawn)
                    if (change.look() or change.is_over) and not self._until_empty:
                        self._take_part(change, source)
                source = sources.choose(source, change)
                self._confirm = source.confirm
                partitions.look(time.monotonic())
                if not is_more:
                    if self._is_demanded and self.batches.await_demand(_DEMAND_SECONDS):
                        pass
                    elif isinstance(source, SnapshotSource):
                        watch.wait(source.done, pause.next())
                    else:
                        source.wait(self._end)
                if self._ending():
                    return
                if isinstance(source, SnapshotSource):
                    batch = source.read(upto)
                else:
                    try:
                        batch = source.read()
                    except SlotLostError as error:
                        source = sources.lost(source, error, change)
                        is_more = True
                        continue
                is_more = False
                if batch is not None:
                    self._put(batch)
                    if batch.events:
                        pause.reset()
                    is_more = len(batch.events) >= MANY_EVENTS or not batch.ends_tick
                    # A variable would keep its content in memory until the next is read.
                    del batch
                elif self._until_empty and source.has_caught_up:
                    return

    def _snapshots(self, connection: Connection, guard: Guard, position: Position) -> SnapshotSource:
        return SnapshotSource(
            connection,
            position,
            batch_events=self._settings.batch_events,
            batch_bytes=self._settings.batch_bytes,
            with_time=needs_time(self._settings),
            shard=self._shard.shard,
            shards=self._shard.shards,
            guard=guard,
            may_take_large=self._large.take,
        )

    def _slot(self, connection: Connection, guard: Guard, stream: Stream, done: Snapshot) -> CdcSource:
        return CdcSource(
            connection,
            stream,
            done,
            lambda: self._shard.position.done,
            batch_events=self._settings.batch_events,
            batch_bytes=self._settings.batch_bytes,
            with_time=needs_time(self._settings),
            guard=guard,
            may_take_large=self._large.take,
        )

    def _take_part(self, change: OperatorChange, source: Source) -> None:
        """Take part in a change of the number of shards: settle what was read, and reach the barrier."""
        if not isinstance(source, SnapshotSource):
            if change.is_over:
                raise ShardLostError("another relay has taken the shard")
            # The database refuses a change while a slot is used.
            return
        barrier = Barrier(self._pause)
        while not self._ending():
            step = barrier.step(change)
            if step is Step.END:
                raise ShardLostError("the number of shards has changed")
            if step is Step.GO_ON:
                return
            if step is Step.PREPARE:
                barrier.prepared(self._is_prepared(change))
                if not barrier.is_taking_part:
                    return
            elif step is Step.READ_REST:
                while (rest := source.rest()) is not None:
                    self._put(rest)
                barrier.read_rest()
            elif step is Step.READ:
                while not self._ending() and (batch := source.read(change.barrier)) is not None:
                    self._put(batch)
                barrier.read_all()
            elif step is Step.PAUSE:
                change.pause(source.done)
            elif step is Step.ARRIVE:
                change.arrive()
            if step in (Step.PAUSE, Step.ARRIVE, Step.WAIT):
                self._end.wait(CHANGE_POLL)
            change.look()

    def _is_prepared(self, change: OperatorChange) -> bool:
        """Prepare the new shards; return whether it worked. Later the change cannot be cancelled."""
        try:
            self._prepare(change.wanted)
        except UnavailableError as error:
            self._lines.log("change", "the change to %d shards waits: %s", change.wanted, error)
            return False
        except SetupError as error:
            _LOG.error("the change to %d shards is abandoned: %s", change.wanted, error)
            change.give_up()
            return False
        self._lines.end("change", "the change to %d shards continues", change.wanted)
        return True

    def _put(self, batch: Batch | None) -> None:
        is_awaited = batch is not None and (self._crash_guard.is_needed or batch.is_large)
        if batch is not None and not batch.is_large:
            self._large.give_back()
        while not self._end.is_set() and not self.batches.put(batch, 0.1):
            self._confirm()
        # Nothing else is read until then: the cause of a crash would be unknown, or the memory is full.
        while is_awaited and not self._end.is_set() and not self._has_passed.wait(0.1):
            self._confirm()
        if is_awaited:
            self._has_passed.clear()
        self._large.give_back()


def _require_not_less(connection: Connection, drawn: int) -> int:
    """Return where the sequence is; raise `SequenceError` if it was beyond that before."""
    row = connection.execute(relay_sql.DRAWN).fetchone()
    assert row is not None
    if problem := sequence.behind(row[0], drawn):
        raise sequence.SequenceError(problem)
    return int(row[0])


class _PartitionsAhead:
    """Makes the partitions of the next days, and records why it cannot."""

    def __init__(self, connection: Connection, shard: Shard, days: int) -> None:
        self._connection = connection
        self._shard = shard
        self._days = days
        self._due = 0.0

    def look(self, now: float) -> None:
        if now < self._due:
            return
        error = top_up(self._connection, self._days)
        self._connection.execute(relay_sql.TOP_UP_ERROR, {**self._shard.key, "error": error})
        self._due = now + (_PARTITIONS_AGAIN if error else _PARTITIONS_EVERY)


class _InTurn:
    """The crash guard, whose events are read when it is this relay's turn."""

    def __init__(self, guard: CrashGuard, turn: Turn, ending: Callable[[], bool]) -> None:
        self.step = guard.step
        self.before = guard.before
        self._turn = turn
        self._ending = ending

    def approach(self) -> None:
        self._turn.wait(self._ending)


class _Pause:
    """How long to wait before the next poll."""

    def __init__(self) -> None:
        self._active_at = 0.0
        self._seconds = _SLOW_POLL

    def reset(self) -> None:
        self._active_at = time.monotonic()
        self._seconds = _FAST_POLL

    def next(self) -> float:
        if time.monotonic() - self._active_at >= _FAST_FOR:
            self._seconds = min(self._seconds * 1.5, _SLOW_POLL)
        return self._seconds
