"""The publishing part of a relay: takes read and released batches, publishes them, passes complete ones on.

Invariants:
- Released events are published before newly read ones, so that their aggregate is free again soon.
- After crashes, or if a batch is large (to limit memory), it is settled before the next one is taken.
- A stop waits for events in flight, for a limited time; events that were read and not sent are read again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from outbox_pipelines.core.position import Position
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.relay.core.batch import Batch, BatchQueue, ReleasedBatch
from outbox_pipelines.relay.core.blocked import BlockedAggregates
from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.core.crash_guard import HARMLESS_SECONDS, CrashGuard
from outbox_pipelines.relay.core.delivery import Complete, Delivery
from outbox_pipelines.relay.core.ledger import Ledger, SettleRequest
from outbox_pipelines.relay.core.producers import OUTAGE_SECONDS, Clock
from outbox_pipelines.relay.core.publisher import Publisher

# How long a graceful stop waits for acknowledgments: an outage must not delay it indefinitely.
_STOP_SECONDS: Final = 10.0
# While acknowledgments are awaited, new batches are looked for this often.
REPORT_POLL: Final = 0.001


class ReleasedBatches(Protocol):
    """The retries of parked events, which release batches to be published."""

    released: deque[ReleasedBatch]
    """To be published."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is in progress, and nothing is due now."""


class Flow:
    """The publishing part of a relay; for one thread.

    Args:
        is_stopped: whether the relay must end.
        until_empty: end when everything that is read is published or parked.
        on_complete: called with the batches that have become complete.
        report_poll: while acknowledgments are awaited, new batches are looked for this often, in seconds.
    """

    def __init__(
        self,
        publisher: Publisher,
        batches: BatchQueue,
        ledger: Ledger,
        blocked: BlockedAggregates,
        retries: ReleasedBatches,
        crash_guard: CrashGuard,
        *,
        clock: Clock,
        is_stopped: Callable[[], bool],
        until_empty: bool,
        on_complete: Callable[[list[Complete]], None],
        report_poll: float = REPORT_POLL,
    ) -> None:
        self._publisher = publisher
        self._batches = batches
        self._ledger = ledger
        self._blocked = blocked
        self._retries = retries
        self._crash_guard = crash_guard
        self._clock = clock
        self._is_stopped = is_stopped
        self._until_empty = until_empty
        self._on_complete = on_complete
        self._report_poll = report_poll
        self._reading = True
        self._rest: Batch | None = None
        """The unpublished rest of a batch that is published in portions."""
        self._alone: Batch | None = None
        self._harmless_at = math.inf
        self._stop_by = math.inf
        self._unavailable_since: float | None = None
        self._opening: SettleRequest | None = None
        """Opens the tick; None when it is open."""

    def step(self) -> bool:
        """Publish a batch, or wait for acknowledgments; return False at the end.

        Raises:
            ShardLostError: the shard is lost.
            UnavailableError: with `until_empty`, Kafka has been unavailable for too long.
        """
        if self._alone is not None:
            return self._await_alone(self._alone)
        if self._is_done():
            return False
        if self._is_stopped():
            # Events that were read and not sent are read again. While Kafka is unavailable, the end of the
            # queue would never be reached, and the stop would never finish.
            self._reading = False
        room = self._publisher.has_room and self._ledger.has_room
        try:
            batch = self._next(room)
        except LookupError:
            idle = self._reading and room and not self._publisher.pending
            # At the end, the database and parked events are waited for, and Kafka has nothing to report.
            is_short = room and (self._reading or not self._publisher.pending)
            wait = 0.0 if idle else self._report_poll if is_short else 0.05
            self._publisher.poll(wait, linger=not room)
        else:
            if batch is None:
                self._reading = False
            else:
                if isinstance(batch, Batch) and (self._crash_guard.is_needed or batch.is_large):
                    self._alone, self._harmless_at = batch, self._clock() + HARMLESS_SECONDS
                self._publisher.publish(batch)
        self._hand_on()
        return True

    def _await_alone(self, batch: Batch) -> bool:
        if not (self._publisher.pending or self._ledger.unsettled):
            self._alone = None
            self._crash_guard.passed(batch)
            return True
        if self._clock() > self._harmless_at:
            self._crash_guard.waits()
            self._harmless_at = math.inf
        if self._until_empty:
            self._check_outage()
        if self._is_stopped():
            self._reading = False
            if self._is_done():
                return False
        self._publisher.poll(self._report_poll, linger=False)
        self._hand_on()
        return True

    def _hand_on(self) -> None:
        if batches := self._publisher.acknowledged():
            self._on_complete(batches)
            self._ledger.hand_over(batches)

    def _next(self, room: bool) -> Batch | ReleasedBatch | None:
        """Return the next batch to publish; None at the end of all batches.

        Raises:
            LookupError: there is nothing now.
        """
        if not room:
            raise LookupError
        released = self._retries.released
        if released and not self._is_stopped() and self._publisher.takes(released[0]):
            return released.popleft()
        if not self._reading:
            raise LookupError
        if not self._publisher.pending:
            self._batches.want()
        # Events read until then join the batch; otherwise they would wait for another transaction.
        self._publisher.await_turn()
        batch = self._rest
        if batch is None:
            patience = 0.05 if self._blocked.aggregates else 0.2
            batch = self._batches.get(0.0 if self._publisher.pending else patience, self._publisher.takes)
            # The reader waits until such a batch is settled, as a whole.
            if batch is None or self._crash_guard.is_needed or batch.is_large:
                return batch
        elif not self._publisher.takes(batch):
            raise LookupError
        batch, self._rest = batch.cut(max(1, self._publisher.portion(batch)))
        return batch

    def _is_done(self) -> bool:
        if self._is_stopped() and not self._reading:
            # Events in flight may finish; parked events wait for the next relay.
            self._stop_by = min(self._stop_by, self._clock() + _STOP_SECONDS)
            is_over = self._publisher.breaker.state is State.OPEN or self._clock() > self._stop_by
            return is_over or not self._publisher.pending
        if self._until_empty:
            self._check_outage()
        if self._reading or self._publisher.pending or self._ledger.unsettled:
            return False
        return self._retries.is_settled and not self._retries.released

    def _check_outage(self) -> None:
        """Raise an error if a run until empty has waited too long for Kafka."""
        breaker = self._publisher.breaker
        if breaker.state is State.CLOSED:
            self._unavailable_since = None
        elif self._unavailable_since is None:
            self._unavailable_since = self._clock()
        elif self._clock() - self._unavailable_since > OUTAGE_SECONDS:
            seconds = f"{OUTAGE_SECONDS:.0f} s"
            raise UnavailableError(f"Kafka has accepted nothing for {seconds}: {breaker.reason}")

    # --- implements `SettleRequests` of the transactions --------------------------------------------------

    def open_tick(self, position: Position | None, tick_id: str) -> None:
        self._hand_on()
        self._opening = SettleRequest(position, tick_id)
        self._ledger.request(self._opening)

    def await_tick(self) -> None:
        if self._opening is not None:
            self._ledger.wait_for(self._opening)
            self._opening = None

    def park(self, deliveries: list[Delivery]) -> None:
        self._request(SettleRequest(parked=[delivery.parked_states() for delivery in deliveries]))

    def settle_all(self) -> None:
        self._request(SettleRequest())

    def _request(self, request: SettleRequest) -> None:
        self._hand_on()
        self._ledger.request(request)
        self._ledger.wait_for(request)
