"""The relay of one shard: source → encode → publish → settle, in three threads.

Invariants:
- A reader stays a piece or two ahead; the calling thread publishes; a settler moves the position when a piece
  and all before it are acknowledged. Each owns its connection.
- The position never covers an event that is not acknowledged.
- The first failure anywhere ends all three, and is raised to the caller; what was on its way is read again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, Full, Queue

import psycopg

from outbox_pipelines.database import connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.event import Piece
from outbox_pipelines.relay.encoding import needs_time
from outbox_pipelines.relay.position import Position, Snapshot
from outbox_pipelines.relay.publisher import Publisher, RejectedError
from outbox_pipelines.relay.shards import Settled, Shard, ShardLostError
from outbox_pipelines.relay.source import SnapshotSource
from outbox_pipelines.schema import ensure_partitions
from outbox_pipelines.settings import Settings

_READ_AHEAD = 2
# How long a graceful stop waits for acknowledgements: an outage must not hold it up for ever.
_STOP_SECONDS = 10.0

# Polling: fast for a second after the last event, then slower and slower. A tick of many events is followed
# by the next at once; few at a time would cost more in queries than they gain in latency.
_FAST_POLL = 0.002
_MANY_EVENTS = 200
# While acknowledgements are awaited, new pieces are looked for this often.
_REPORT_POLL = 0.001
# A relay that runs for months keeps days ahead of itself, where it may.
_PARTITIONS_EVERY = 3600.0
# Between two settles: each is a commit, and duplicates after a crash are bounded by it.
_SETTLE_PAUSE = 0.01
_FAST_FOR = 1.0
_SLOW_POLL = 0.025


@dataclass(slots=True)
class Totals:
    """What a worker has done."""

    events: int = 0
    seconds: float = 0.0


class Worker:
    """Relays a shard that has been taken, until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        shard: Shard,
        publisher: Publisher,
        *,
        stop: threading.Event,
        until_empty: bool = False,
        hand_over_after: float | None = None,
        on_progress: Callable[[Settled], None] | None = None,
    ) -> None:
        self._settings = settings
        self._shard = shard
        self._publisher = publisher
        self._stop = stop
        self._until_empty = until_empty
        self._hand_over_after = hand_over_after
        self._on_progress = on_progress or (lambda settled: None)
        self._heartbeat = settings.lease_seconds / 5
        self._started = time.monotonic()
        self._end = threading.Event()
        self._failure: BaseException | None = None
        self._pieces: Queue[Piece | None] = Queue(_READ_AHEAD)
        self._settled: deque[Settled] = deque()
        self._outcome = threading.Condition()
        self._published: list[tuple[Position, int, int | None]] = []
        self._finished = False
        self.totals = Totals()

    def run(self) -> Totals:
        """Relays; returns once all that was read is published and settled.

        Raises:
            RejectedError: Kafka refuses an event; all before it is settled.
            ShardLostError: the shard or the database is gone.
            SetupError: Kafka is not as it must be.
        """
        reader = self._thread(self._read, "outbox-reader")
        settler = self._thread(self._settle, "outbox-settler")
        try:
            self._publish()
        except (RejectedError, SetupError) as error:
            self._fail(error)
            self._settle_before_rejection()
        except BaseException as error:  # noqa: BLE001 - raised below, when the threads have ended
            self._fail(error)
        finally:
            self._end.set()
            reader.join()
            with self._outcome:
                self._finished = True
                self._outcome.notify()
            settler.join()
            self._publisher.discard()
        self._report()
        self.totals.seconds = time.monotonic() - self._started
        if self._failure is not None:
            raise self._failure
        return self.totals

    def _read(self) -> None:
        with connect(self._settings, name="outbox relay: reader") as connection:
            source = SnapshotSource(
                connection,
                self._shard.position,
                piece_events=self._settings.piece_events,
                piece_bytes=self._settings.piece_bytes,
                with_time=needs_time(self._settings),
            )
            upto: Snapshot | None = source.now() if self._until_empty else None
            pause = _Pause()
            partitions_due = time.monotonic()
            while not self._ending():
                if time.monotonic() >= partitions_due:
                    ensure_partitions(connection)
                    partitions_due += _PARTITIONS_EVERY
                piece = source.read(upto)
                if piece is not None:
                    self._put(piece)
                    if piece.events:
                        pause.reset()
                    if len(piece.events) >= _MANY_EVENTS or not piece.ends_tick:
                        continue
                elif self._until_empty:
                    break
                self._end.wait(pause.next())
        self._put(None)

    def _publish(self) -> None:
        stop_by = float("inf")
        reading = True
        while reading or self._publisher.pending:
            if self._failure is not None:
                return
            if not reading and time.monotonic() > stop_by:
                return
            try:
                room = self._publisher.has_room
                if not (reading and room):
                    raise Empty
                piece = self._pieces.get(timeout=0.0 if self._publisher.pending else 0.2)
            except Empty:
                if self._publisher.pending:
                    self._publisher.poll(_REPORT_POLL if reading and room else 0.05, linger=not room)
                else:
                    self._publisher.poll(0)
            else:
                if piece is None:
                    reading, stop_by = False, time.monotonic() + _STOP_SECONDS
                    continue
                self._publisher.publish(piece)
            self._hand_to_settler(self._publisher.acknowledged())
            self._report()

    def _settle(self) -> None:
        position = self._shard.position
        while True:
            with self._outcome:
                self._outcome.wait_for(self._has_events, timeout=self._heartbeat)
                published, self._published = self._published, []
                finished = self._finished
            events = sum(count for _, count, _ in published)
            newest = max((seq for _, _, seq in published if seq is not None), default=None)
            if published:
                position = published[-1][0]
            settled = self._shard.settle(position, events, newest, last=finished)
            self.totals.events += events
            if settled is not None:
                self._settled.append(settled)
            if finished:
                return
            if self._is_time_to_hand_over():
                self._stop.set()
            if events < _MANY_EVENTS:
                self._end.wait(_SETTLE_PAUSE)

    def _has_events(self) -> bool:
        # A position without events can wait for the heartbeat: settling it takes a transaction id, which
        # would make the next snapshot differ, and so on for ever.
        return self._finished or any(count for _, count, _ in self._published)

    def _hand_to_settler(self, pieces: list[Piece]) -> None:
        if pieces:
            with self._outcome:
                self._published += [
                    (piece.position, len(piece.events), piece.events[-1].seq if piece.events else None)
                    for piece in pieces
                ]
                self._outcome.notify()

    def _settle_before_rejection(self) -> None:
        """What stands before the refused event is published: say so, or a restart would send it again."""
        self._publisher.flush(_STOP_SECONDS)
        self._hand_to_settler(self._publisher.acknowledged())
        partly = self._publisher.acknowledged_in_part()
        if partly is not None:
            position, events, newest = partly
            with self._outcome:
                self._published.append((position, events, newest))

    def _is_time_to_hand_over(self) -> bool:
        return (
            self._hand_over_after is not None
            and time.monotonic() - self._started >= self._hand_over_after
            # Without a successor it goes on: whoever starts them may be dead.
            and self._shard.is_awaited()
        )

    def _report(self) -> None:
        while self._settled:
            self._on_progress(self._settled.popleft())

    def _ending(self) -> bool:
        return self._stop.is_set() or self._end.is_set()

    def _put(self, piece: Piece | None) -> None:
        while not self._end.is_set():
            try:
                return self._pieces.put(piece, timeout=0.1)
            except Full:
                continue
        return None

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._end.set()

    def _thread(self, body: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                body()
            except psycopg.OperationalError as error:
                self._fail(ShardLostError(f"the database has gone: {error}"))
            except BaseException as error:  # noqa: BLE001 - raised by run()
                self._fail(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread


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
