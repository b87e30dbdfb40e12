"""Publishes batches to Kafka, and decides for each event: acknowledged, or to be parked.

Invariants:
- One idempotent producer, acks=all, gapless, no expiry: the acknowledged events of an aggregate are a prefix
  of those that were sent.
- A refusal names a batch of the client, not an event, and ends the producer. Its events are suspects: their
  aggregates are blocked, everything else is sent again by a new producer, in order.
- No event is the cause of a batch that is too large: its events are sent again in smaller batches.
- A batch is complete when every event of it is acknowledged or parked. Only complete batches are returned.
- For one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from typing import Final

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.core.batch import Batch, ReleasedBatch
from outbox_pipelines.relay.core.blocked import BlockedAggregates
from outbox_pipelines.relay.core.breaker import Breaker, State
from outbox_pipelines.relay.core.delivery import Complete, Delivery
from outbox_pipelines.relay.core.outcomes import WAITING, Cause, Dead, Refusal, ShardLostError, Suspect
from outbox_pipelines.relay.core.producers import Clock, Producer

_MOST_BYTES: Final = 32_000_000
# Messages between two calls that serve reports: often enough to limit memory, seldom enough to cost nothing.
_POLL_EVERY: Final = 1000
# Producers in a row that fail without a reason until Kafka counts as unavailable.
_MOST_UNEXPLAINED: Final = 3

Blamed = tuple[Delivery, Event, Refusal]


class Publisher:
    """Publishes batches in order.

    Args:
        producer: Kafka's client.
        blocked: the blocked aggregates, which it reads and adds to.
        patience: seconds without an acknowledgment until Kafka counts as unavailable.
    """

    # Events in flight at once: enough that the broker never waits, few enough that memory stays small.
    most_events = 30_000

    def __init__(
        self, producer: Producer, blocked: BlockedAggregates, *, patience: float, clock: Clock
    ) -> None:
        self._producer = producer
        self._blocked = blocked
        self._clock = clock
        self._deliveries: deque[Delivery] = deque()
        self._pending_events = 0
        self._pending_size = 0
        self._completed = 0
        self._progress = (0, 0)
        self._unexplained = 0
        self.breaker = Breaker(patience)

    @property
    def pending(self) -> int:
        """Number of batches that are not complete."""
        return len(self._deliveries)

    @property
    def has_room(self) -> bool:
        """Whether Kafka accepts events, and few enough are in flight for another batch."""
        return (
            self._pending_events < self.most_events
            and self._pending_size < _MOST_BYTES
            and self.breaker.takes
        )

    def takes(self, batch: Batch | ReleasedBatch) -> bool:
        """Return whether this batch can be published now; otherwise call `poll` until it can."""
        return True

    def portion(self, batch: Batch) -> int:
        """Return how many events of this batch, at least one, may be published at a time."""
        return len(batch.events)

    def await_turn(self) -> None:
        """Return when a batch would be sent at once."""

    def publish(self, batch: Batch | ReleasedBatch) -> None:
        """Hand a batch to the producer; return before it is acknowledged.

        Raises:
            ShardLostError: another relay has taken over, or the results of events are unknown.
        """
        self.breaker.took()
        delivery = Delivery(batch, self._clock())
        if isinstance(batch, Batch) and (batch.unreadable or batch.suspects):
            self._park_unread(delivery, batch)
        self._deliveries.append(delivery)
        self._pending_events += len(batch.events)
        self._pending_size += batch.size
        # Unsent events of earlier batches come first: they must not be overtaken.
        self._pump()

    def _park_unread(self, delivery: Delivery, batch: Batch) -> None:
        """Park the events whose content was not read: as dead letters, or to be tried alone."""
        for event in batch.events:
            if event.seq in batch.unreadable:
                self._blocked.park(event, suspect=True)
                delivery.park(event, Dead(batch.unreadable[event.seq]))
            elif event.seq in batch.suspects:
                self.suspect(delivery, event, batch.suspects[event.seq])
        delivery.unsent = [event for event in batch.events if event.seq not in delivery.parked]

    def poll(self, seconds: float, *, linger: bool = True) -> None:
        """Serve delivery reports, waiting up to `seconds` for the first; probe an unavailable Kafka.

        Args:
            linger: False if no other batch is about to be published: the client then sends at once instead of
                waiting for a fuller batch.

        Raises:
            ShardLostError: another relay has taken over, or the results of events are unknown.
        """
        self._producer.refresh()
        self._producer.serve(seconds, linger=linger)
        if self._producer.has_failed or any(delivery.failed for delivery in self._deliveries):
            self._recover()
        self._watch(self._clock())
        if self.breaker.state is not State.OPEN and any(delivery.unsent for delivery in self._deliveries):
            self._pump()

    def acknowledged(self) -> list[Complete]:
        """Return the batches that became complete since the last call, in order."""
        complete = []
        while self._deliveries and self._deliveries[0].is_complete:
            complete.append(self._deliveries.popleft().complete())
            self._count_out(complete[-1])
        return complete

    def _count_out(self, complete: Complete) -> None:
        self._pending_events -= len(complete.batch.events)
        self._pending_size -= complete.batch.size
        self._completed += 1
        self._unexplained = 0

    def discard(self) -> None:
        """Drop events that are not acknowledged: no position covers them, so they are read again."""
        self._producer.purge()
        self._producer.flush(1.0)
        self._producer.close()
        self._deliveries.clear()
        self._pending_events = self._pending_size = 0

    # --- implements `Gate` --------------------------------------------------------------------------------

    def blocked(self, delivery: Delivery) -> Container[tuple[str, str]]:
        return self._blocked.aggregates if isinstance(delivery.batch, Batch) else delivery.halted

    def park_behind(self, delivery: Delivery, event: Event) -> bool:
        if isinstance(delivery.batch, Batch) and not self._blocked.park(event):
            return False
        delivery.park(event, WAITING)
        return True

    def suspect(self, delivery: Delivery, event: Event, reason: str) -> None:
        if isinstance(delivery.batch, Batch):
            self._blocked.park(event, suspect=True)
        else:
            delivery.halted.add((event.aggregate_type, event.aggregate_id))
        delivery.park(event, Suspect(reason))

    def refused(self, delivery: Delivery, event: Event, refusal: Refusal) -> None:
        if refusal.cause is Cause.TOPIC:
            self._producer.refuse_topic(event, refusal)
        self.suspect(delivery, event, refusal.reason)

    def unavailable(self, reason: str) -> None:
        self.breaker.trip(self._clock(), reason)

    # ------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send the unsent events, batch by batch."""
        if self._producer.is_outdated and not self._renew():
            return
        for delivery in self._deliveries:
            while delivery.unsent:
                events, delivery.unsent = delivery.unsent[:_POLL_EVERY], delivery.unsent[_POLL_EVERY:]
                rest = self._producer.send(delivery, events, self)
                if rest:
                    delivery.unsent = rest + delivery.unsent
                    return
                self._producer.serve(0, linger=True)

    def _renew(self) -> bool:
        """Replace an outdated producer; return False while it has messages in flight."""
        # Two producers at once would not keep the order.
        if self._producer.in_flight:
            return False
        self._producer.replace()
        return True

    def _recover(self) -> None:
        """Block the aggregates of a refused batch, and send all other events with a new producer.

        The failed producer's last reports are fetched first.
        """
        self._producer.await_reports()
        self._send_again()

    def _send_again(self, *, explained: bool = False) -> None:
        self._producer.purge()
        self._producer.flush(1.0)
        reclaimed = [(delivery, delivery.reclaim(self._producer.identify)) for delivery in self._deliveries]
        if any(failed is None for _, failed in reclaimed):
            raise ShardLostError("Kafka's client did not report a result for each event: starting over")
        # All suspects first: events of their aggregates before them are parked as well.
        explained |= self._blame(
            [(delivery, *refused) for delivery, failed in reclaimed for refused in failed or ()]
        )
        self._producer.replace()
        for delivery, failed in reclaimed:
            again = [event for event, _ in failed or () if event.seq not in delivery.parked]
            delivery.send_again(again)
        is_outage = any(
            refusal.cause is Cause.OUTAGE for _, failed in reclaimed for _, refusal in failed or ()
        )
        self._conclude(explained, f"Kafka's client failed: {self._producer.trouble}", patience=not is_outage)

    def _conclude(self, explained: bool, reason: str, *, patience: bool = True) -> None:
        """Close the breaker after a refusal, which is an answer; open it after failures without a reason."""
        if explained:
            self._unexplained, self._producer.trouble = 0, ""
            self.breaker.acknowledged()
            return
        # With patience: the report of the refusal may be missing, and comes with the next try.
        self._unexplained += 1
        if not patience or self._unexplained >= _MOST_UNEXPLAINED:
            self.breaker.trip(self._clock(), reason)

    def _blame(self, failed: Iterable[Blamed]) -> bool:
        """Park the refused events; return whether an event, its topic or a batch's size is a cause."""
        too_large: list[Blamed] = []
        blamed = False
        for delivery, event, refusal in failed:
            if refusal.cause is Cause.OWNER:
                raise ShardLostError(f"another relay owns the shard: {refusal.reason}")
            if refusal.cause in (Cause.EVENT, Cause.TOPIC):
                blamed = True
                if refusal.is_size:
                    too_large.append((delivery, event, refusal))
                else:
                    self.refused(delivery, event, refusal)
        if too_large:
            hopeless = self._producer.shrink([event for _, event, _ in too_large])
            for delivery, event, refusal in too_large:
                if event.seq in hopeless:
                    self.refused(delivery, event, refusal)
        return blamed

    @property
    def _acknowledged(self) -> int:
        """Changes with acknowledgments, as long as no batch becomes complete."""
        return self._deliveries[0].acknowledged

    def _watch(self, now: float) -> None:
        """Update the breaker from the acknowledgments, and probe Kafka when the breaker asks for it."""
        if not self._deliveries:
            if self.breaker.state is State.HALF_OPEN:
                self.breaker.acknowledged()
            self.breaker.idle()
        elif (progress := (self._completed, self._acknowledged)) != self._progress:
            self._progress, self._producer.trouble = progress, ""
            self.breaker.acknowledged()
        else:
            self.breaker.quiet(now, self._producer.trouble or "Kafka acknowledges nothing")
        if self.breaker.wants_probe(now):
            self.breaker.probed(now, answers := self._producer.answers())
            waiting = [event for delivery in self._deliveries for event in delivery.batch.events]
            if answers and self._producer.refuse_halted(waiting):
                # Events for these topics are parked when they are sent again.
                self._send_again(explained=True)
