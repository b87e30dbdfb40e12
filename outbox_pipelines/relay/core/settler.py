"""Moves the position over complete batches, parks events that were not published, and retries parked events.

Invariants:
- The position moves over a `Complete` only, and only from where it is: `Complete.moves`.
- Released events are removed before the next tick is opened: from then on Kafka's record of them is not
  believed.
- An order is done when all that was complete before it is settled, and what it asks for is written.
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
from outbox_pipelines.relay.core.ledger import Ledger, Order, Parked
from outbox_pipelines.relay.core.producers import Clock

MANY_EVENTS: Final = 200
"""A settle of so many is followed by the next at once."""
CHANGE_POLL: Final = 0.02
"""How often it is looked whether all stands still, while the number of shards changes."""


class Shard(Protocol):
    """The right to move the position, and the position."""

    @property
    def position(self) -> Position:
        """How far the shard is."""

    def settle(
        self,
        position: Position,
        events: int = 0,
        newest: int | None = None,
        *,
        parked: Sequence[Parked],
        tick_id: str | None = None,
        last: bool = False,
    ) -> Any:
        """Move the position and park events, in one transaction; also a heartbeat.

        Raises:
            ShardLostError: the shard has another owner.
        """

    def park(self, parked: list[Parked]) -> None:
        """Park events ahead of the position.

        Raises:
            ShardLostError: the shard has another owner.
        """


class Retries(Protocol):
    """What becomes of parked events."""

    @property
    def pause(self) -> float:
        """How long until something may want attention, in seconds."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way."""

    def settled(self, complete: Complete) -> None:
        """A released batch is complete."""

    def look_after(self, *, may_try: bool) -> None:
        """One round of it."""


class Settler:
    """The settling part of a relay; for one thread.

    Args:
        breaker: what is known of Kafka.
        heartbeat: seconds between heartbeats.
        is_stopped: whether the relay must end.
        on_settled: called with the number of published events that the position has moved over, the duration
            in seconds, and the shard's result.
        on_dead_letter: called with an event that became a dead letter without an attempt, and the reason.
    """

    def __init__(
        self,
        shard: Shard,
        ledger: Ledger,
        blocked: BlockedAggregates,
        retries: Retries,
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
        """Deal with all that is complete or ordered.

        Returns how many of its events Kafka has; None if nothing was complete.

        Args:
            last: the relay ends with this.
        """
        batches, orders = self._ledger.take()
        ticks = [batch for batch in batches if isinstance(batch.batch, Batch)]
        for batch in ticks:
            self._position = batch.moves(self._position)
        for batch in batches:
            if isinstance(batch.batch, ReleasedBatch):
                self._retries.settled(batch)
        tick_id = None
        for order in orders:
            if order.position is not None:
                self._position = self._position.opened_as(order.position)
            tick_id = order.tick_id or tick_id
        events = 0
        is_due = self._clock() - self._beat_at >= self._heartbeat
        # Who waits for an order relies on the shard, so each is a proof that it is still owned.
        if is_due or last or orders or any(batch.batch.events for batch in ticks):
            events = self._move(ticks, tick_id, last=last)
            self._beat_at = self._clock()
        self._ledger.settled(batches)
        self._carry_out(orders)
        return events if batches else None

    def _carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            if order.parked:
                self._shard.park(order.parked)
        self._ledger.carried_out(orders)

    def _move(self, ticks: list[Complete], tick_id: str | None, *, last: bool) -> int:
        parked = [batch for batch in ticks if batch.parked]
        aside = [batch.parked_states() for batch in parked if not batch.is_in_table]
        events = sum(len(batch.batch.events) - len(batch.parked) for batch in ticks)
        newest = max((batch.batch.events[-1].seq for batch in ticks if batch.batch.events), default=None)
        begun = self._clock()
        settled = self._shard.settle(self._position, events, newest, parked=aside, tick_id=tick_id, last=last)
        self._on_settled(events, self._clock() - begun, settled)
        if parked:
            for batch in ticks:
                self._blocked.parked(batch.parked_events())
                for event, why in batch.dead.values():
                    self._on_dead_letter(event, why)
        return events

    def look_after(self) -> None:
        """One round for what is parked, and for a stand-still that is wanted."""
        self._retries.look_after(may_try=self.may_try)
        self.barrier_pause.is_reached = self.barrier_pause.is_wanted and self._retries.is_quiet

    @property
    def may_try(self) -> bool:
        """Whether parked events may be tried now."""
        away = self._breaker.state is not State.CLOSED
        return not (away or self._is_stopped() or self.barrier_pause.is_wanted)

    @property
    def rest(self) -> float:
        """How long there is nothing to do, unless the ledger has work, in seconds."""
        until_beat = self._beat_at + self._heartbeat - self._clock()
        # While Kafka is unavailable nothing is tried, even if it is due.
        pause = self._retries.pause if self.may_try else self._heartbeat
        if self.barrier_pause.is_wanted:
            pause = CHANGE_POLL
        return max(0.0, min(until_beat, pause))
