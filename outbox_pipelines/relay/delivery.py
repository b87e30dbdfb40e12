"""What became of the events of a batch on their way to Kafka, and the proof that it may be settled.

Invariants:
- Every event of a delivery is unsent, in flight, acknowledged, parked, a suspect or dead; never two of these.
- A `Complete` cannot be made while an event is unsent or in flight. Only a `Complete` can be settled, so an
  event that is neither acknowledged nor parked nor dead is never passed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import KafkaError, Message

from outbox_pipelines.event import Event, Piece, Released

Identify = Callable[[list[Event], list[tuple[Message, KafkaError]]], list[tuple[Event, KafkaError]]]


class IncompleteError(Exception):
    """A batch was to be settled of which an event is neither acknowledged nor parked nor dead."""


class Delivery:
    """A batch that is being published, and what became of its events so far."""

    __slots__ = (
        "_acknowledged_before",
        "acknowledged",
        "begun_at",
        "dead",
        "failed",
        "flying",
        "halted",
        "in_table",
        "parked",
        "piece",
        "suspects",
        "unsent",
    )

    def __init__(self, piece: Piece | Released) -> None:
        self.piece = piece
        self.begun_at = time.monotonic()
        self.unsent: list[Event] = piece.events
        self.flying: list[Event] = []
        """Sent by the current producer."""
        self.acknowledged = 0
        self._acknowledged_before = 0
        self.failed: list[tuple[Message, KafkaError]] = []
        self.parked: list[Event] = []
        """Parked behind another event of their aggregate."""
        self.suspects: dict[int, tuple[Event, str]] = {}
        """By seq: parked for the reason given; to be tried alone."""
        self.dead: dict[int, tuple[Event, str]] = {}
        """By seq: not to be tried at all, for the reason given."""
        self.in_table = 0
        """How many of its parked events are in the table already."""
        self.halted: set[tuple[str, str]] = set()
        """Aggregates of released events that cannot go on."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing of it is left to be sent or reported."""
        held = len(self.parked) + len(self.suspects) + len(self.dead)
        return self.acknowledged + held == len(self.piece.events) and not (self.unsent or self.failed)

    @property
    def is_in_table(self) -> bool:
        """Whether all of its parked events are in the table: others can join them until it is complete."""
        return self.in_table == len(self.parked) + len(self.suspects) + len(self.dead)

    def complete(self) -> Complete:
        """Return the proof that this batch may be settled.

        Raises:
            IncompleteError: an event of it is unsent, in flight or refused.
        """
        return Complete(self)

    def held(self) -> list[Event]:
        """The events that Kafka does not get now."""
        return [
            *self.parked,
            *(event for event, _ in self.suspects.values()),
            *(event for event, _ in self.dead.values()),
        ]

    def aside(self) -> dict[int, tuple[str, str | None]]:
        """What is to be parked, by seq: the state, and why."""
        return {
            **{event.seq: ("waiting", None) for event in self.parked},
            **{seq: ("retrying", why) for seq, (_, why) in self.suspects.items()},
            **{seq: ("failed", why) for seq, (_, why) in self.dead.items()},
        }

    def report(self, error: KafkaError | None, message: Message) -> None:
        """Count a delivery report of Kafka's client."""
        if error is None:
            self.acknowledged += 1
        else:
            self.failed.append((message, error))

    def restart(self) -> None:
        """Mark all of it that is not parked as unsent: its transaction was aborted."""
        held = self.aside()
        self.unsent = [event for event in self.piece.events if event.seq not in held]
        self.flying, self.failed = [], []
        self.acknowledged = self._acknowledged_before = 0

    def reclaim(self, identify: Identify) -> list[tuple[Event, KafkaError]] | None:
        """Take back what the current producer did not publish; None if it did not report each event."""
        if len(self.flying) != self.acknowledged - self._acknowledged_before + len(self.failed):
            return None
        failed = identify(self.flying, self.failed)
        self._acknowledged_before = self.acknowledged
        self.flying, self.failed = [], []
        return failed


class Complete:
    """A batch of which every event is acknowledged (in exactly_once: committed), parked or dead.

    Raises:
        IncompleteError: this does not hold of the delivery.
    """

    __slots__ = ("_aside", "_held", "begun_at", "dead", "is_in_table", "parked", "piece", "suspects")

    def __init__(self, delivery: Delivery) -> None:
        if not delivery.is_complete:
            raise IncompleteError(
                f"of {len(delivery.piece.events)} events, {delivery.acknowledged} are acknowledged, "
                f"{len(delivery.held())} parked, {len(delivery.failed)} refused, "
                f"{len(delivery.unsent)} unsent"
            )
        self.piece = delivery.piece
        self.begun_at = delivery.begun_at
        self.parked = delivery.parked
        self.suspects = delivery.suspects
        self.dead = delivery.dead
        self.is_in_table = delivery.is_in_table
        self._aside = delivery.aside()
        self._held = delivery.held()

    def aside(self) -> dict[int, tuple[str, str | None]]:
        """What is to be parked, by seq: the state, and why."""
        return self._aside

    def held(self) -> list[Event]:
        """The events that Kafka did not get."""
        return self._held

    def published(self) -> list[Event]:
        """The events that Kafka has."""
        held = self._aside
        return [event for event in self.piece.events if event.seq not in held] if held else self.piece.events
