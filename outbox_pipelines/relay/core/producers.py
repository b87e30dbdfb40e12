"""What the core asks of Kafka's client, and which partitions a producer has begun.

Invariants:
- Drivers answer with Kafka, the tests with every fault.
- A call returns when the world has answered, or raises. Between two calls nothing can happen to the core but
  by the objects that its threads share: `BlockedAggregates` and `Ledger`.
- A second event of a key is sent only after one of the key, or of each partition, was acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from enum import Enum
from typing import Protocol

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.core.delivery import Delivery, Failed
from outbox_pipelines.relay.core.outcomes import Refusal

Clock = Callable[[], float]
"""Seconds of a clock that never goes back."""


class Gate(Protocol):
    """What holds events back while they are handed over."""

    def blocked(self, delivery: Delivery) -> Container[tuple[str, str]]:
        """Aggregates whose events must be asked for, one by one."""

    def holds_back(self, delivery: Delivery, event: Event) -> bool:
        """Hold back an event of a blocked aggregate; return whether it must not be sent."""

    def suspect(self, delivery: Delivery, event: Event, reason: str) -> None:
        """Hold back an event that cannot be a message, and its aggregate."""

    def refused(self, delivery: Delivery, event: Event, refusal: Refusal) -> None:
        """Hold back an event that the client did not take, and its aggregate."""

    def unavailable(self, reason: str) -> None:
        """Kafka does not answer: nothing more is to be handed over."""


class Producer(Protocol):
    """A client of Kafka, one producer after another."""

    has_failed: bool
    """It takes nothing more, and goes on reporting."""
    trouble: str
    """What it said last, for people; empty if nothing."""

    @property
    def is_outdated(self) -> bool:
        """Whether one with batches of another size is wanted."""

    @property
    def must_shrink(self) -> bool:
        """Whether it may send batches that a topic refuses."""

    @property
    def in_flight(self) -> int:
        """How many messages it has not reported."""

    def send(self, delivery: Delivery, events: list[Event], gate: Gate) -> list[Event]:
        """Hand events over in order, each that is taken into `delivery.in_flight`; return the rest."""

    def serve(self, seconds: float, *, linger: bool) -> None:
        """Fetch reports, waiting up to so long for the first."""

    def refresh(self) -> None:
        """Apply news about topics and their limits."""

    def await_reports(self) -> None:
        """Fetch the last reports after a failure, for a while."""

    def purge(self) -> None:
        """Discard messages that are not acknowledged; they are reported as failed."""

    def flush(self, seconds: float) -> None:
        """Fetch reports until all are in, for so long at most."""

    def replace(self) -> None:
        """Take a new producer.

        Raises:
            UnavailableError: Kafka does not give one.
        """

    def identify(self, in_flight: list[Event], failed: list[Failed]) -> list[tuple[Event, Refusal]]:
        """The events of messages that failed."""

    def shrink(self, refused: list[Event]) -> set[int]:
        """Plan smaller batches after one was too large; return the seqs of events that none will help."""

    def refuse_topic(self, event: Event, refusal: Refusal) -> None:
        """Take the topic of this event for unavailable."""

    def refuse_halted(self, waiting: Iterable[Event]) -> bool:
        """Take topics for unavailable that accept nothing while others do; return whether there are any.

        Args:
            waiting: events whose topics are looked up for that, if they are not known.
        """

    def answers(self) -> bool:
        """Return whether Kafka answers a probe.

        Raises:
            ShardLostError: it answers others, but not this producer.
        """

    def close(self) -> None:
        """End the client, with its threads and connections; nothing may be called afterwards."""


class CommitAnswer(Enum):
    """What Kafka said of a commit."""

    DONE = "it is committed, and was asked for once"
    REPEATED = "it is committed, and a request for it may still arrive"
    NONE = "no answer yet: the same call again"
    REFUSED = "it must be aborted"


class TransactionalProducer(Producer, Protocol):
    """One whose messages become visible by transactions."""

    def await_end(self) -> None:
        """Wait until Kafka has probably ended the last transaction."""

    def begin(self) -> None:
        """Begin a transaction, after the same wait."""

    def record(self, tick: str, last_seq: int, *, finished: bool, released: list[int]) -> str | None:
        """Put the record of how far it is into the transaction; return why that fails."""

    def commit(self) -> CommitAnswer:
        """Try to commit.

        Raises:
            ShardLostError: whether it is committed cannot be known, or another relay has taken over.
        """

    def abort(self, seconds: float) -> str | None:
        """Abort the transaction; return why that fails."""


class FirstAcknowledgments:
    """What one producer has begun; one object for each producer, for one thread.

    By its sequence number, a broker knows that a message follows a refused one, and refuses it as well. That
    holds only on partitions where it has accepted a message of the producer before; elsewhere it accepts any
    number. If the first request to a partition is refused while the next is in flight, the events of the next
    overtake it; neither idempotence nor `enable.gapless.guarantee` prevents this (measured with Kafka 4.1).
    """

    def __init__(self) -> None:
        self._partitions: dict[str, set[int]] = {}
        """By topic: the partitions that have acknowledged something."""
        self._keys: dict[str, dict[str, bool]] = {}
        """By topic and key: whether an event of it was acknowledged; False while the first is in flight."""

    def are_complete(self, topic: str, partitions: int) -> bool:
        """Return whether each partition of a topic has acknowledged something: any event may be sent."""
        return len(self._partitions.get(topic, ())) >= partitions

    def is_awaited(self, topic: str, key: str) -> bool:
        """Return whether an event of this key is in flight, and none of it was acknowledged before."""
        return not self._keys.get(topic, {}).get(key, True)

    def sent(self, topic: str, key: str) -> None:
        """Count an event that was handed to the producer."""
        self._keys.setdefault(topic, {}).setdefault(key, False)

    def acknowledge(self, topic: str, key: str, partition: int) -> bool:
        """Count an acknowledgment; return whether it is the first of its partition."""
        self._keys.setdefault(topic, {})[key] = True
        partitions = self._partitions.setdefault(topic, set())
        is_first = partition not in partitions
        partitions.add(partition)
        return is_first
