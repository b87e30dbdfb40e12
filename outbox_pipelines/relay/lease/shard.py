"""A shard that this relay owns: its position and its parked events.

Invariants:
- One statement moves the position forward, with a synchronous commit. If the commit were lost, the database
  would assign the same transaction ids again, and their events would count as published.
- Parked events are committed together with the position that covers them, or before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg

from outbox_pipelines.core import sequence
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.core.outcomes import ParkedStates, ShardLostError
from outbox_pipelines.relay.core.parked import CRASH_PAUSE, LONGEST_PAUSE
from outbox_pipelines.relay.lease.shard_ownership import ShardOwnership
from outbox_pipelines.relay.parking import parking_sql
from outbox_pipelines.relay.read import contents
from outbox_pipelines.settings import RelaySettings

_ROWS_POLL: Final = 0.01


@dataclass(slots=True)
class Settled:
    """The result of a settle."""

    events: int
    latency: float | None
    """Age of the newest of these events when they were settled, in seconds; None without a progress row."""
    topics: frozenset[str] = frozenset()
    """Topics published to since the relay took the shard, if they still exist."""


class Shard(ShardOwnership):
    """The session that owns a shard, for the thread that settles it."""

    def __init__(self, settings: RelaySettings, shard: int | None, owner: str) -> None:
        self.tick_id: str | None = None
        """Of the current tick, or the last one, in exactly_once."""
        self.breaker = State.CLOSED
        self.breaker_reason = ""
        """Why Kafka is unavailable, as the row of the shard has it; first the previous owner's reason."""
        self._ctid = ""
        self._position: Position | None = None
        self._progress_at = 0.0
        self._events = 0
        self._newest: int | None = None
        self._has_command = bool(settings.dead_letter_command)
        self._open_from = "-infinity"
        super().__init__(settings, shard, owner)

    def _adopt(self, row: list[Any]) -> None:
        self._ctid, done, target, last_seq, self.tick_id, self._open_from, breaker, reason = row
        self.breaker, self.breaker_reason = State(breaker), reason or ""
        self._position = Position(Snapshot.parse(done), Snapshot.parse(target) if target else None, last_seq)

    @property
    def _known(self) -> Mapping[str, Any]:
        return {**self.key, "open_from": self._open_from, "command": self._has_command}

    def row_address(self) -> str:
        """Return the row's `ctid` when the shard was taken, or settled last; for any thread."""
        return self._ctid

    @property
    def position(self) -> Position:
        """The position when the shard was taken, or settled last."""
        assert self._position is not None, "take the shard first"
        return self._position

    def settle(
        self,
        position: Position,
        events: int = 0,
        newest: int | None = None,
        *,
        parked: Sequence[ParkedStates] = (),
        tick_id: str | None = None,
        last: bool = False,
    ) -> Settled | None:
        """Move the position over `events` events, of which `newest` is the last `seq`; also a heartbeat.

        Args:
            parked: events to park in the same transaction.
            tick_id: of the tick that is opened with this position, in exactly_once.

        Returns the written progress, at most once a second and at the last settle; otherwise None.

        Raises:
            ShardLostError: the shard has another owner, or the session has ended.
        """
        self._events += events
        self._newest = newest or self._newest
        progress = self._events > 0 and (last or time.monotonic() - self._progress_at >= 1.0)
        query = relay_sql.SETTLE_WITH_PROGRESS if progress else relay_sql.SETTLE
        parameters = {
            "done": str(position.done),
            "target": str(position.target) if position.target else None,
            "last_seq": position.last_seq,
            "events": self._events,
            "newest": self._newest,
            "tick": tick_id,
        }
        if parked:
            with self.transaction():
                row = self._move(query, parameters)
                for states in parked:
                    self._park(states)
        else:
            row = self._move(query, parameters)
        self._ctid, self._position = row[0], position
        self.tick_id = tick_id or self.tick_id
        if not progress:
            return None
        settled = Settled(self._events, row[1])
        self._open_from = row[2]
        self._progress_at, self._events = time.monotonic(), 0
        return settled

    def calm(self) -> None:
        """Clear the crash state: no in-flight event caused the last crash."""
        self.execute(relay_sql.CALM, {})
        self.crashes, self.crash_guard_seq, self.crash_guard_crashes = 0, None, 0

    def show_breaker(self, state: State, reason: str | None) -> None:
        """Record in the database whether Kafka is available."""
        self.execute(relay_sql.BREAKER, {"state": state.value, "reason": reason})
        self.breaker, self.breaker_reason = state, reason or ""

    def read_parked(
        self, seqs: Sequence[int], may_take_large: Callable[[], bool]
    ) -> Generator[tuple[int, tuple[Any, ...] | str]]:
        """Yield the content of parked events, one after the other, or why it cannot be read."""
        try:
            read = contents.read(self._connection, parking_sql.BODIES, {}, seqs, may_take_large)
            with closing(read) as rows:
                yield from rows
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    def count(self, events: int) -> None:
        """Count events published without moving the position; the next progress includes them."""
        self._events += events

    def _move(self, query: LiteralString, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        ctid = self._ctid
        while not (rows := self.execute(query, {**parameters, "ctid": ctid})):
            # Moved by VACUUM FULL, or by a change of the number of shards.
            moved = self.execute(relay_sql.FIND_AGAIN, {})
            if not moved:
                raise ShardLostError(f"another relay has taken shard {self.shard}")
            ctid = moved[0][0]
        return rows[0]

    def park(self, parked: Sequence[ParkedStates]) -> None:
        """Park events ahead of the position, before the Kafka transaction that covers them."""
        with self.transaction():
            if not self.execute(relay_sql.FIND_AGAIN, {}):
                raise ShardLostError(f"another relay has taken shard {self.shard}")
            for states in parked:
                self._park(states)

    def released(self, seqs: list[int]) -> None:
        """Record these parked events as published."""
        self.execute(parking_sql.RELEASED, {"seqs": seqs})

    def forget_tick(self) -> None:
        """Forget the tick: from now on only the database's position is valid."""
        self.execute(relay_sql.FORGET_TICK, {})
        self.tick_id = None

    def _park(self, parked: ParkedStates) -> None:
        """Park events when their rows are visible: the position covers no row that is not.

        Raises:
            ShardLostError: they do not become visible; they are read again.
            SequenceError: a seq does not name one row.
        """
        tried = {seq: given for seq, given in parked.items() if given[0] != "waiting"}
        seqs = [*tried, *(seq for seq in parked if seq not in tried)]
        given = {
            # As text: psycopg takes five times as long for a list.
            "seqs": f"{{{','.join(map(str, seqs))}}}",
            "states": [state for state, _ in tried.values()],
            "errors": [error for _, error in tried.values()],
            **{"from": min(parked), "to": max(parked)},
        }
        deadline = time.monotonic() + self._settings.lease_seconds / 2
        while True:
            ((start, stop),) = self.execute(relay_sql.DAYS, given)
            ((present, twice),) = self.execute(parking_sql.PARK, {**given, "start": start, "stop": stop})
            if twice is not None:
                raise sequence.twice(twice)
            if present == len(seqs):
                break
            if time.monotonic() > deadline:
                raise ShardLostError("the rows of rejected events are not visible to this session yet")
            time.sleep(_ROWS_POLL)
        if self.crash_guard_crashes and self.crash_guard_seq in parked:
            pause = min(LONGEST_PAUSE, CRASH_PAUSE * self._settings.retry_seconds)
            self.execute(parking_sql.CRASHED_ALONE, {"seq": self.crash_guard_seq, "pause": pause})
        dead = [seq for seq, (state, _) in parked.items() if state == "failed"]
        if dead and self._has_command:
            self.execute(parking_sql.COMMANDS_DUE, {"seqs": dead})
