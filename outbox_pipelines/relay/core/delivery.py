"""The state of a batch's events while they are published, and the proof that the batch may be settled.

Invariants:
- Every event of a delivery is unsent, in flight, acknowledged, or parked; never two of these.
- A `Complete` cannot be made while an event is unsent or in flight. Only a `Complete` can be settled, so an
  event that is neither acknowledged nor parked nor dead is never skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Position
from outbox_pipelines.core.sequence import twice
from outbox_pipelines.relay.core.batch import Batch, ReleasedBatch
from outbox_pipelines.relay.core.outcomes import WAITING, Dead, Outcome, ParkedStates, Refusal, Suspect

# The client's report of a failed message: only the driver reads it.
Failed = Any
Identify = Callable[[list[Event], list[Failed]], list[tuple[Event, Refusal]]]


class IncompleteError(Exception):
    """A batch cannot be settled: one of its events is neither acknowledged nor parked nor dead."""


class Delivery:
    """A batch that is being published, and the current state of its events.

    Args:
        now: when it was passed to the client, in seconds of a monotonic clock.
    """

    __slots__ = (
        "_acknowledged_before",
        "acknowledged",
        "batch",
        "begun_at",
        "failed",
        "halted",
        "in_flight",
        "in_table",
        "parked",
        "unsent",
    )

    def __init__(self, batch: Batch | ReleasedBatch, now: float = 0.0) -> None:
        self.batch = batch
        self.begun_at = now
        self.unsent: list[Event] = batch.events
        self.in_flight: list[Event] = []
        """Sent by the current producer."""
        self.acknowledged = 0
        self._acknowledged_before = 0
        self.failed: list[Failed] = []
        self.parked: dict[int, tuple[Event, Outcome]] = {}
        """By seq: events that are not sent to Kafka now."""
        self.in_table = 0
        """How many of the parked events are in the table already."""
        self.halted: set[tuple[str, str]] = set()
        """Aggregates of released events that must wait."""

    @property
    def is_complete(self) -> bool:
        """Whether every event of it is acknowledged or parked."""
        return self.acknowledged + len(self.parked) == len(self.batch.events) and not (
            self.unsent or self.failed
        )

    @property
    def is_in_table(self) -> bool:
        """Whether all events parked so far are in the table: more can follow until the batch is complete."""
        return self.in_table == len(self.parked)

    def complete(self) -> Complete:
        """Return the proof that this batch may be settled.

        Raises:
            IncompleteError: an event of it is unsent, in flight or refused.
        """
        return Complete(self)

    def park(self, event: Event, outcome: Outcome = WAITING) -> None:
        """Do not send this event to Kafka now.

        Raises:
            SequenceError: two events of the batch have the same seq.
        """
        if not self.parked:
            self._require_distinct()
        self.parked[event.seq] = event, outcome

    def parked_states(self) -> ParkedStates:
        """Return what is to be parked, by seq: the state and the reason."""
        return {seq: (outcome.state, outcome.reason) for seq, (_, outcome) in self.parked.items()}

    def report(self, error: object | None, message: object) -> None:
        """Count a delivery report of Kafka's client."""
        if error is None:
            self.acknowledged += 1
        else:
            self.failed.append((message, error))

    def restart(self) -> None:
        """Mark all events that are not parked as unsent: their transaction was aborted."""
        self.unsent = [event for event in self.batch.events if event.seq not in self.parked]
        self.in_flight, self.failed = [], []
        self.acknowledged = self._acknowledged_before = 0

    def send_again(self, events: list[Event]) -> None:
        """Mark events as unsent, in the order of the batch.

        Raises:
            SequenceError: two events of the batch have the same seq.
        """
        self._require_distinct()
        unsent = {event.seq for event in events + self.unsent}
        self.unsent = [event for event in self.batch.events if event.seq in unsent]

    def _require_distinct(self) -> None:
        """Raise `SequenceError` if a seq does not name one event. Only where it must: it takes time."""
        seen: set[int] = set()
        for event in self.batch.events:
            if event.seq in seen:
                raise twice(event.seq)
            seen.add(event.seq)

    def reclaim(self, identify: Identify) -> list[tuple[Event, Refusal]] | None:
        """Take back what the current producer did not publish; None if it did not report each event."""
        if len(self.in_flight) != self.acknowledged - self._acknowledged_before + len(self.failed):
            return None
        failed = identify(self.in_flight, self.failed)
        self._acknowledged_before = self.acknowledged
        self.in_flight, self.failed = [], []
        return failed


class Complete:
    """A batch of which every event is acknowledged (in exactly_once: committed), parked or dead.

    Raises:
        IncompleteError: the delivery is not complete.
    """

    __slots__ = ("batch", "begun_at", "is_in_table", "parked")

    def __init__(self, delivery: Delivery) -> None:
        if not delivery.is_complete:
            raise IncompleteError(
                f"of {len(delivery.batch.events)} events, {delivery.acknowledged} are acknowledged, "
                f"{len(delivery.parked)} parked, {len(delivery.failed)} refused, "
                f"{len(delivery.unsent)} unsent"
            )
        self.batch = delivery.batch
        self.begun_at = delivery.begun_at
        self.parked = delivery.parked
        """By seq: each event that was not published, and why. All others were published."""
        self.is_in_table = delivery.is_in_table

    def moves(self, position: Position) -> Position:
        """Return the position after this batch is settled: the only way to move a position.

        Raises:
            ValueError: the batch does not begin at the position, so that events would be skipped.
        """
        batch = self.batch
        assert isinstance(batch, Batch)
        first = batch.events[0].seq if batch.events else math.inf
        is_next = position.target is None and batch.starts_tick
        goes_on = position.target == batch.target and first > (position.last_seq or 0)
        is_forward = batch.target.covers(batch.done)
        if batch.done != position.done or not is_forward or not (is_next or goes_on):
            raise ValueError(f"a batch from {batch.done} to {batch.target} does not follow {position}")
        return batch.position

    def parked_states(self) -> ParkedStates:
        """Return what is to be parked, by seq: the state and the reason."""
        return {seq: (outcome.state, outcome.reason) for seq, (_, outcome) in self.parked.items()}

    def parked_events(self) -> list[Event]:
        """Return the events that were not published."""
        return [event for event, _ in self.parked.values()]

    @property
    def suspects(self) -> dict[int, str]:
        """By seq: those to be tried alone, and why."""
        return {
            seq: outcome.reason for seq, (_, outcome) in self.parked.items() if isinstance(outcome, Suspect)
        }

    @property
    def dead(self) -> dict[int, tuple[Event, str]]:
        """By seq: dead letters, and why."""
        return {
            seq: (event, outcome.reason)
            for seq, (event, outcome) in self.parked.items()
            if isinstance(outcome, Dead)
        }

    def published(self) -> list[Event]:
        """Return the published events."""
        parked = self.parked
        return (
            [event for event in self.batch.events if event.seq not in parked] if parked else self.batch.events
        )
