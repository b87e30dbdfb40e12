"""PostgreSQL as the relay meets it: transactions that commit late or never, the shard, what is parked.

Invariants:
- A snapshot sees only what committed before it.
- A session without the shard's lock and epoch changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.relay.core.outcomes import ShardLostError
from tests.model.explore import Key

FIRST: Final = 10
"""The first transaction id."""

Parked = Mapping[int, tuple[str, str | None]]


@dataclass
class ParkedRow:
    """An event in `outbox_parked`."""

    state: str
    attempts: int = 0
    due: float = 0.0
    trying: bool = False
    crashes: int = 0

    def key(self, now: float) -> Key:
        return self.state, self.attempts, self.due <= now, self.trying, self.crashes


class Database:
    """One database with one shard.

    Args:
        writers: what each transaction writes: the aggregates of its events.
    """

    def __init__(self, writers: Sequence[Sequence[str]]) -> None:
        self.writers = writers
        self.state = ["new"] * len(writers)
        self.rows: dict[int, tuple[int, Event]] = {}
        """By seq: the writer, and the event."""
        self.xids: dict[int, int] = {}
        """By writer: the id of its transaction."""
        self.done: tuple[Position, str | None] = (Position(Snapshot(FIRST, FIRST, ())), None)
        """The shard's position and tick id."""
        self.epoch = 0
        self.owner = -1
        """The session that has the lock; -1 for none."""
        self.identity = -1
        """The process that had it last and did not give it back; -1 if it was given back."""
        self.ever_dead: set[int] = set()
        self.parked: dict[int, ParkedRow] = {}
        self.published_parked: set[int] = set()
        """Removed from the parked ones, as published."""
        self.discarded: set[int] = set()
        self.revision = 0
        self.wanted = False
        """Whether the number of shards is to change. There is one shard before and after."""
        self.barrier_paused = self.barrier_reached = False
        self.barrier: Snapshot | None = None
        self.crash_guard_seq: int | None = None
        self.crashes = 0
        self.crash_guard_crashes = 0

    # --- writers ------------------------------------------------------------------------------------------

    def may_insert(self, writer: int) -> bool:
        """Whether no other open transaction has a lock on one of its aggregates."""
        if self.state[writer] != "new" or (writer and self.state[writer - 1] == "new"):
            return False
        locked = {a for n, state in enumerate(self.state) if state == "open" for a in self.writers[n]}
        return not locked & set(self.writers[writer])

    def insert(self, writer: int) -> None:
        self.state[writer] = "open"
        self.xids[writer] = FIRST + len(self.xids)
        for aggregate in self.writers[writer]:
            seq = len(self.rows) + 1
            self.rows[seq] = writer, Event(seq, str(seq), "order", aggregate, "placed", "{}", None)

    def finish(self, writer: int, state: str) -> None:
        self.state[writer] = state

    def snapshot(self) -> Snapshot:
        end = FIRST + len(self.xids)
        running = tuple(sorted(self.xids[n] for n, state in enumerate(self.state) if state == "open"))
        return Snapshot(running[0] if running else end, end, running)

    @property
    def committed(self) -> list[int]:
        return [seq for seq, (writer, _) in self.rows.items() if self.state[writer] == "committed"]

    def visible(self, target: Snapshot, done: Snapshot) -> list[Event]:
        """What `target` sees of committed events and `done` does not, in order."""
        return [
            event
            for _, (writer, event) in sorted(self.rows.items())
            if self.state[writer] == "committed"
            and target.sees(self.xids[writer])
            and not done.sees(self.xids[writer])
        ]

    def covers(self, position: Position, seq: int) -> bool:
        """Whether a position says that the event is dealt with."""
        tx = self.xids[self.rows[seq][0]]
        if position.done.sees(tx):
            return True
        return position.target is not None and position.target.sees(tx) and seq <= (position.last_seq or 0)

    # --- the shard ----------------------------------------------------------------------------------------

    def take(self, who: int, identity: int) -> bool:
        """Return whether it was taken from a process that crashed."""
        crashed = self.identity not in (-1, identity)
        if self.identity == -1:
            self.crashes, self.crash_guard_seq, self.crash_guard_crashes = 0, None, 0
        elif crashed:
            self.crashes += 1
            self.crash_guard_crashes += self.crash_guard_seq is not None
        self.owner, self.identity = who, identity
        self.epoch += 1
        self.barrier_paused = self.barrier_reached = False
        return crashed

    # --- another number of shards -------------------------------------------------------------------------

    def want(self) -> None:
        self.wanted = True

    def give_up(self) -> None:
        self.wanted = self.barrier_paused = self.barrier_reached = False
        self.barrier = None

    def set_barrier(self) -> None:
        self.barrier = self.snapshot()

    def meet_again(self) -> None:
        self.barrier, self.barrier_reached = None, False

    def begin_anew(self) -> None:
        """The new shards begin: the owner of an old one cannot write any more."""
        self.give_up()
        self.epoch += 1
        self.identity = -1

    def key(self, now: float) -> Key:
        position, tick = self.done
        return (
            tuple(self.state),
            tuple(self.xids.items()),
            tuple(seq for seq in self.rows),
            position_key(position),
            tick,
            (self.owner == -1, self.identity == -1),
            tuple((seq, row.key(now)) for seq, row in sorted(self.parked.items())),
            tuple(sorted(self.published_parked)),
            tuple(sorted(self.discarded)),
            self.revision,
            (
                self.wanted,
                self.barrier_paused,
                self.barrier_reached,
                None if self.barrier is None else tuple(self.barrier),
            ),
            (self.crash_guard_seq, min(self.crashes, 2), self.crash_guard_crashes),
        )


def position_key(position: Position) -> Key:
    target = position.target
    return tuple(position.done), None if target is None else tuple(target), position.last_seq


class Source:
    """What `SnapshotSource` promises: every committed event once, tick by tick, in batches."""

    def __init__(self, position: Position) -> None:
        self.done = position.done
        self.target = position.target
        self.last_seq = position.last_seq or 0


class Change:
    """What the reader's connection sees of a change: implements `core.barrier.ShardChange`."""

    def __init__(self, database: Database, epoch: int) -> None:
        self.is_over = database.epoch != epoch
        self.is_wanted = database.wanted and not self.is_over
        self.barrier_paused, self.barrier_reached = database.barrier_paused, database.barrier_reached
        self.barrier = database.barrier


class Session:
    """A relay's session with the shard: implements the core's `Shard`.

    Args:
        reach: called before each statement with its name; afterwards too. May raise.
    """

    def __init__(self, process: Any, database: Database, who: int) -> None:
        self._process = process
        self._database = database
        self._who = who
        self.epoch = database.epoch
        self.position, self.tick_id = database.done

    def barrier_paused(self) -> bool:
        database = self._database
        return database.owner == self._who and database.epoch == self.epoch

    def require(self) -> None:
        if not self.barrier_paused():
            raise ShardLostError("the session has ended")

    def settle(
        self,
        position: Position,
        events: int = 0,
        newest: int | None = None,
        *,
        parked: Sequence[Parked] = (),
        tick_id: str | None = None,
        last: bool = False,
    ) -> None:
        with self._process.call("settle"):
            self.require()
            tick = tick_id or self._database.done[1]
            self._database.done = position, tick
            for some in parked:
                self._park(some)
        self.position, self.tick_id = position, tick

    def park(self, parked: Sequence[Parked]) -> None:
        with self._process.call("park"):
            self.require()
            for some in parked:
                self._park(some)

    def _park(self, some: Parked) -> None:
        for seq, (state, _) in some.items():
            row = self._database.parked.setdefault(seq, ParkedRow(state))
            if state == "failed":
                self._database.ever_dead.add(seq)
            if (
                seq == self._database.crash_guard_seq
                and self._database.crash_guard_crashes
                and row.state == "retrying"
            ):
                row.crashes, row.due = 1, self._process.clock() + 3.0

    def released(self, seqs: Sequence[int]) -> None:
        with self._process.call("remove released"):
            self.require()
            self.remove(seqs)

    def mark(self, seq: int | None) -> None:
        self.require()
        if seq != self._database.crash_guard_seq:
            self._database.crash_guard_seq, self._database.crash_guard_crashes = seq, 0

    def calm(self) -> None:
        self.require()
        self._database.crashes, self._database.crash_guard_seq, self._database.crash_guard_crashes = (
            0,
            None,
            0,
        )

    def release(self) -> None:
        if self.barrier_paused():
            self._database.identity = -1
        if self._database.owner == self._who:
            self._database.owner = -1

    def remove(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            if self._database.parked.pop(seq, None) is not None:
                self._database.published_parked.add(seq)
