"""Moves the position over complete batches, parks events that were not published, and retries parked events.

Invariants:
- The position moves over a `Complete` only, and only from where it is: `Complete.moves`.
- Released events are deleted from the table before the next tick is opened: from then on Kafka's record of
  them is ignored.
- A request is done when everything that was complete before it is settled, and the request itself is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Position
from outbox_pipelines.relay.core.barrier import BarrierPause
from outbox_pipelines.relay.core.batch import Batch, ReleasedBatch
from outbox_pipelines.relay.core.blocked import BlockedAggregates
from outbox_pipelines.relay.core.breaker import Breaker, State
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.core.ledger import Ledger, SettleRequest
from outbox_pipelines.relay.core.outcomes import ParkedStates
from outbox_pipelines.relay.core.producers import Clock

MANY_EVENTS: Final = 200
"""After a settle of at least this many events, the next follows immediately."""
CHANGE_POLL: Final = 0.02
"""While the number of shards changes: seconds between two checks that all work has stopped."""


class SettleShard(Protocol):
    """The owned shard."""

    @property
    def position(self) -> Position:
        """The position: every event that it covers is published, parked or a dead letter."""

    def settle(
        self,
        position: Position,
        events: int = 0,
        newest: int | None = None,
        *,
        parked: Sequence[ParkedStates],
        tick_id: str | None = None,
        last: bool = False,
    ) -> Any:
        """Move the position and park events, in one transaction; also a heartbeat.

        Raises:
            ShardLostError: the shard has another owner.
        """

    def park(self, parked: list[ParkedStates]) -> None:
        """Park events ahead of the position.

        Raises:
            ShardLostError: the shard has another owner.
        """


class RetryRounds(Protocol):
    """Retries of parked events."""

    @property
    def pause(self) -> float:
        """Seconds until the next round may have work."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is in progress."""

    def settled(self, complete: Complete) -> None:
        """Record that a released batch is complete: its published events are no longer parked."""

    def advance(self, *, may_try: bool) -> None:
        """Do one round: record verdicts, load parked events after a replay or discard, try what is due.

        Args:
            may_try: whether Kafka accepts events.
        """


class Settler:
    """The settling part of a relay; for one thread.

    Args:
        breaker: the circuit breaker of the publishing part.
        heartbeat: seconds between heartbeats.
        is_stopped: whether the relay must end.
        on_settled: called with the number of published events that the position newly covers, the duration in
            seconds, and the shard's result.
        on_dead_letter: called with an event that became a dead letter without an attempt, and the reason.
    """

    def __init__(
        self,
        shard: SettleShard,
        ledger: Ledger,
        blocked: BlockedAggregates,
        retries: RetryRounds,
        breaker: Breaker,
        *,
        clock: Clock,
        heartbeat: float,
        is_stopped: Callable[[], bool],
        on_settled: Callable[[int, float, Any], None],
        on_dead_letter: Callable[[Event, str], None],
    ) -> None:
        self._shard = shard
        self._ledger = ledger
        self._blocked = blocked
        self._retries = retries
        self._breaker = breaker
        self._clock = clock
        self._heartbeat = heartbeat
        self._is_stopped = is_stopped
        self._on_settled = on_settled
        self._on_dead_letter = on_dead_letter
        self._position = shard.position
        self._beat_at = -math.inf
        self.barrier_pause = BarrierPause()

    def settle(self, *, last: bool = False) -> int | None:
        """Settle all complete batches and answer all requests.

        Args:
            last: whether this is the last settle before the relay ends.

        Returns:
            The number of published events; None if no batch was complete.
        """
        batches, requests = self._ledger.take()
        ticks = [batch for batch in batches if isinstance(batch.batch, Batch)]
        for batch in ticks:
            self._position = batch.moves(self._position)
        for batch in batches:
            if isinstance(batch.batch, ReleasedBatch):
                self._retries.settled(batch)
        tick_id = None
        for request in requests:
            if request.position is not None:
                self._position = self._position.opened_as(request.position)
            tick_id = request.tick_id or tick_id
        events = 0
        is_due = self._clock() - self._beat_at >= self._heartbeat
        # The publishing part relies on each answer as a proof that the shard is still owned.
        if is_due or last or requests or any(batch.batch.events for batch in ticks):
            events = self._move(ticks, tick_id, last=last)
            self._beat_at = self._clock()
        self._ledger.settled(batches)
        self._answer(requests)
        return events if batches else None

    def _answer(self, requests: list[SettleRequest]) -> None:
        for request in requests:
            if request.parked:
                self._shard.park(request.parked)
        self._ledger.answer(requests)

    def _move(self, ticks: list[Complete], tick_id: str | None, *, last: bool) -> int:
        parked = [batch for batch in ticks if batch.parked]
        states = [batch.parked_states() for batch in parked if not batch.is_in_table]
        events = sum(len(batch.batch.events) - len(batch.parked) for batch in ticks)
        newest = max((batch.batch.events[-1].seq for batch in ticks if batch.batch.events), default=None)
        begun = self._clock()
        settled = self._shard.settle(
            self._position, events, newest, parked=states, tick_id=tick_id, last=last
        )
        self._on_settled(events, self._clock() - begun, settled)
        if parked:
            for batch in ticks:
                self._blocked.parked(batch.parked_events())
                for event, reason in batch.dead.values():
                    self._on_dead_letter(event, reason)
        return events

    def advance(self) -> None:
        """Do one round of retries; report the barrier's pause as reached if nothing is in progress."""
        self._retries.advance(may_try=self.may_try)
        self.barrier_pause.is_reached = self.barrier_pause.is_wanted and self._retries.is_quiet

    @property
    def may_try(self) -> bool:
        """Whether parked events may be tried now."""
        is_unavailable = self._breaker.state is not State.CLOSED
        return not (is_unavailable or self._is_stopped() or self.barrier_pause.is_wanted)

    @property
    def rest(self) -> float:
        """Seconds until there is something to do, unless the ledger has work before."""
        until_beat = self._beat_at + self._heartbeat - self._clock()
        # While Kafka is unavailable nothing is tried, even if it is due.
        pause = self._retries.pause if self.may_try else self._heartbeat
        if self.barrier_pause.is_wanted:
            pause = CHANGE_POLL
        return max(0.0, min(until_beat, pause))
