"""Protocols of Kafka's client in the core, and which partitions a producer has begun.

Invariants:
- Drivers implement the protocols with Kafka, tests with every fault.
- A call returns when Kafka has answered, or raises. Between two calls the core's state changes only in the
  objects that its threads share: `BlockedAggregates` and `Ledger`.
- A second event of a key is sent only after one of the key, or of each partition, was acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from enum import Enum
from typing import Final, Protocol

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.core.delivery import Delivery, Failed
from outbox_pipelines.relay.core.outcomes import Refusal

Clock = Callable[[], float]
"""Seconds of a clock that never goes back."""
OUTAGE_SECONDS: Final = 60.0
"""How long a run until empty waits for brokers that do not answer."""


class Gate(Protocol):
    """Decides which events are sent, and parks the others."""

    def blocked(self, delivery: Delivery) -> Container[tuple[str, str]]:
        """Return the aggregates for whose events `park_behind` must be called."""

    def park_behind(self, delivery: Delivery, event: Event) -> bool:
        """Park an event if its aggregate is blocked; return whether it must not be sent."""

    def suspect(self, delivery: Delivery, event: Event, reason: str) -> None:
        """Park an event that cannot become a message, to be tried alone, and block its aggregate."""

    def refused(self, delivery: Delivery, event: Event, refusal: Refusal) -> None:
        """Park an event that Kafka or its client refused, and block its aggregate.

        If the topic is the cause, it becomes unavailable.
        """

    def unavailable(self, reason: str) -> None:
        """Open the breaker: Kafka does not answer, and nothing more may be sent."""


class Producer(Protocol):
    """Kafka's client, which replaces its producer after a failure."""

    has_failed: bool
    """Whether it accepts no more messages. It still reports earlier ones."""
    trouble: str
    """The client's last error message; empty if there was none."""

    @property
    def is_outdated(self) -> bool:
        """Whether it must be replaced: it is old, or batches of another size are needed."""

    @property
    def must_shrink(self) -> bool:
        """Whether it may send batches that are larger than a topic accepts."""

    @property
    def in_flight(self) -> int:
        """Number of messages without a delivery report."""

    def send(self, delivery: Delivery, events: list[Event], gate: Gate) -> list[Event]:
        """Send events in order, adding each to `delivery.in_flight`; return those that were not accepted."""

    def serve(self, seconds: float, *, linger: bool) -> None:
        """Fetch delivery reports, waiting up to `seconds` for the first."""

    def refresh(self) -> None:
        """Apply changes of topics and of their limits."""

    def await_reports(self) -> None:
        """Fetch the last reports after a failure, for a limited time."""

    def purge(self) -> None:
        """Discard messages that are not acknowledged; they are reported as failed."""

    def flush(self, seconds: float) -> None:
        """Fetch reports until there is one for each message, for `seconds` at most."""

    def replace(self) -> None:
        """Replace the producer by a new one, with the batch size that is needed now.

        Raises:
            UnavailableError: Kafka does not accept a new producer.
        """

    def identify(self, in_flight: list[Event], failed: list[Failed]) -> list[tuple[Event, Refusal]]:
        """Return the events of failed messages, each with its refusal."""

    def shrink(self, refused: list[Event]) -> set[int]:
        """Plan smaller batches after one was too large; return the seqs of events too large for any batch."""

    def refuse_topic(self, event: Event, refusal: Refusal) -> None:
        """Mark the topic of this event as unavailable."""

    def refuse_halted(self, waiting: Iterable[Event]) -> bool:
        """Mark topics that accept nothing while others do as unavailable; return whether there are any.

        Args:
            waiting: events whose topics are looked up first if they are not known.
        """

    def answers(self) -> bool:
        """Return whether Kafka answers a probe, and the schema registry if its ids are needed.

        Raises:
            ShardLostError: Kafka answers others, but several times in a row not this producer.
        """

    def close(self) -> None:
        """End the client, with its threads and connections; nothing may be called afterwards."""


class CommitAnswer(Enum):
    """Kafka's answer to a commit."""

    DONE = "committed, and requested once"
    REPEATED = "committed, and another request for it may still arrive"
    NONE = "no answer yet: repeat the same call"
    REFUSED = "it must be aborted"


class TransactionalProducer(Producer, Protocol):
    """A client whose messages become visible when their transaction is committed."""

    def await_end(self) -> None:
        """Wait until Kafka has probably ended the last transaction."""

    def begin(self) -> None:
        """Begin a transaction, after the same wait."""

    def record(self, tick: str, last_seq: int, *, finished: bool, released: list[int]) -> str | None:
        """Add the record of the shard's position to the transaction; return the reason of a failure."""

    def commit(self) -> CommitAnswer:
        """Try to commit.

        Raises:
            ShardLostError: whether it is committed cannot be known, or another relay owns the shard.
        """

    def abort(self, seconds: float) -> str | None:
        """Abort the transaction; return the reason of a failure."""


class FirstAcknowledgments:
    """The partitions and keys that one producer has begun; one object for each producer, for one thread.

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
