"""Kafka as the relay meets it: acknowledged, refused, fenced, cut off; transactions in doubt.

Invariants:
- Of one producer the broker takes messages in order, each once; behind a refused one none, once it has taken
  one of the partition: a producer that it does not know there may begin anywhere.
- A message of a producer that is gone may still arrive, or never.
- A new producer of a transactional id ends the transaction of the one before, and shuts it out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from outbox_pipelines.event import Event
from outbox_pipelines.relay.core.delivery import Delivery
from outbox_pipelines.relay.core.errors import ShardLostError
from outbox_pipelines.relay.core.first_acknowledgments import FirstAcknowledgments
from outbox_pipelines.relay.core.ports import CommitAnswer, Gate
from outbox_pipelines.relay.core.record import Record
from outbox_pipelines.relay.core.refusal import Kind, Refusal
from tests.model.explore import Key

_TOPIC = "topic"
_PURGED = Refusal(Kind.CONSEQUENCE, "purged")


class Connection:
    """One producer at the broker."""

    def __init__(self) -> None:
        self.in_flight: deque[tuple[Event, Delivery | None]] = deque()
        self.reports: list[tuple[Delivery | None, Event, Refusal | None]] = []
        self.is_open = True
        self.has_failed = False
        self.transaction: int | None = None
        self.is_committing = False
        self.known: set[str] = set()
        """Partitions of which a message was taken."""
        self.begun = FirstAcknowledgments()
        self.broken: set[str] = set()
        """Partitions, which are aggregates here, of which a message was refused: what is behind it is too."""

    def key(self) -> Key:
        return (
            tuple(event.seq for event, _ in self.in_flight),
            tuple((event.seq, refusal is None) for _, event, refusal in self.reports),
            self.is_open,
            self.has_failed,
            self.transaction,
            self.is_committing,
            tuple(sorted(self.known)),
            tuple(sorted(self.begun._keys.get(_TOPIC, {}).items())),
            tuple(sorted(self.broken)),
        )


def _gone() -> Connection:
    return GONE


class _Gone(Connection):
    """One of which nothing is left."""

    def __reduce__(self) -> Any:
        return _gone, ()


GONE = _Gone()
GONE.is_open = False


class Kafka:
    """A broker with one topic, with a partition for each aggregate, and the progress topic.

    Args:
        refuses: seqs of events that it does not take.
    """

    def __init__(self, refuses: Sequence[int] = ()) -> None:
        self.refuses = set(refuses)
        self.log: list[tuple[int, int | None]] = []
        """Seqs of events, with the transaction of each."""
        self.records: list[tuple[Record, int]] = []
        self.transactions: list[str] = []
        """Whether each is open, committed or aborted."""
        self.connections: list[Connection] = []
        self.fence = -1
        """The number of the youngest connection with the transactional id."""

    def connect(self, *, transactional: bool) -> int:
        self.connections.append(Connection())
        number = len(self.connections) - 1
        if transactional:
            if self.fence >= 0:
                old = self.connections[self.fence]
                if old.transaction is not None and self.transactions[old.transaction] == "open":
                    self.transactions[old.transaction] = "aborted"
            self.fence = number
        return number

    def handle(self, number: int) -> None:
        """The broker takes or refuses what came first of a connection."""
        connection = self.connections[number]
        event, delivery = connection.in_flight.popleft()
        is_fenced = connection.transaction is not None and (
            self.fence != number or self.transactions[connection.transaction] != "open"
        )
        if is_fenced:
            connection.has_failed = True
            connection.reports.append((delivery, event, Refusal(Kind.OWNER, "fenced")))
        elif event.aggregate_id in connection.broken:
            connection.reports.append((delivery, event, _PURGED))
        elif event.seq in self.refuses:
            connection.has_failed = True
            if event.aggregate_id in connection.known:
                connection.broken.add(event.aggregate_id)
            connection.reports.append((delivery, event, Refusal(Kind.EVENT, "refused")))
        else:
            self.log.append((event.seq, connection.transaction))
            connection.known.add(event.aggregate_id)
            connection.reports.append((delivery, event, None))

    def is_committed(self, transaction: int | None) -> bool:
        return transaction is None or self.transactions[transaction] == "committed"

    @property
    def visible(self) -> list[int]:
        """What a consumer that reads committed messages sees, in order."""
        return [seq for seq, transaction in self.log if self.is_committed(transaction)]

    def last_record(self) -> Record | None:
        found = [record for record, transaction in self.records if self.is_committed(transaction)]
        return found[-1] if found else None

    def key(self) -> Key:
        alive = [
            (number, connection.key())
            for number, connection in enumerate(self.connections)
            if connection.is_open or connection.in_flight
        ]
        last = self.last_record()
        return (
            tuple(sorted(self.refuses)),
            tuple(
                (seq, transaction if not self.is_committed(transaction) else None)
                for seq, transaction in self.log
                if transaction is None or self.transactions[transaction] != "aborted"
            ),
            tuple((n, state) for n, state in enumerate(self.transactions) if state == "open"),
            None if last is None else (last.tick, last.last_seq, last.finished, tuple(last.released)),
            tuple(
                (record.tick, record.last_seq, record.finished, tuple(record.released), transaction)
                for record, transaction in self.records
                if self.transactions[transaction] == "open"
            ),
            tuple(alive),
            self.fence,
        )


class Producer:
    """Kafka's client: implements the core's `TransactionalProducer`."""

    is_outdated = False
    must_shrink = False

    def __init__(self, process: Any, kafka: Kafka, *, transactional: bool) -> None:
        self._process = process
        self._kafka = kafka
        self._transactional = transactional
        self.trouble = ""
        self.has_failed = False
        self.number = kafka.connect(transactional=transactional)

    @property
    def connection(self) -> Connection:
        return self._kafka.connections[self.number]

    @property
    def in_flight(self) -> int:
        return len(self.connection.in_flight) + len(self.connection.reports)

    def send(self, delivery: Delivery, events: list[Event], gate: Gate) -> list[Event]:
        if self.connection.is_committing:
            # The client takes nothing while a commit is under way.
            self.has_failed = True
            return events
        with self._process.call("send"):
            blocked = gate.blocked(delivery)
            begun = self.connection.begun
            later = []
            for event in events:
                if (event.aggregate_type, event.aggregate_id) in blocked and gate.holds_back(delivery, event):
                    continue
                if not self._transactional and begun.is_awaited(_TOPIC, event.aggregate_id):
                    later.append(event)
                    continue
                self.connection.in_flight.append((event, delivery))
                delivery.in_flight.append(event)
                begun.sent(_TOPIC, event.aggregate_id)
        return later

    def serve(self, seconds: float, *, linger: bool) -> None:
        connection = self.connection
        self.has_failed |= connection.has_failed
        for delivery, event, refusal in connection.reports:
            if delivery is not None:
                delivery.report(refusal, event)
            if refusal is None:
                connection.begun.acknowledge(_TOPIC, event.aggregate_id, 0)
        connection.reports.clear()

    def refresh(self) -> None: ...

    def await_reports(self) -> None:
        if not self._process.happens("await reports", "no answer"):
            while self.connection.in_flight:
                self._kafka.handle(self.number)
        self.serve(0, linger=True)

    def purge(self) -> None:
        connection = self.connection
        for event, delivery in connection.in_flight:
            connection.reports.append((delivery, event, _PURGED))
        # They may have left already: the broker accepts them, and the client gets no answer.
        connection.in_flight = deque((event, None) for event, _ in connection.in_flight)
        self.serve(0, linger=True)

    def flush(self, seconds: float) -> None:
        self.serve(0, linger=True)

    def replace(self) -> None:
        self.close()
        with self._process.call("new producer"):
            self.number = self._kafka.connect(transactional=self._transactional)
        self.has_failed = False

    def identify(self, in_flight: list[Event], failed: list[Any]) -> list[tuple[Event, Refusal]]:
        return [(event, refusal) for event, refusal in failed]

    def shrink(self, refused: list[Event]) -> set[int]:
        return {event.seq for event in refused}

    def refuse_topic(self, event: Event, refusal: Refusal) -> None: ...

    def answers(self) -> bool:
        return True

    def close(self) -> None:
        self.connection.is_open = False
        self.connection.reports.clear()

    # --- transactions -------------------------------------------------------------------------------------

    def await_end(self) -> None: ...

    def begin(self) -> None:
        with self._process.call("begin"):
            self._kafka.transactions.append("open")
            self.connection.transaction = len(self._kafka.transactions) - 1

    def record(self, tick: str, last_seq: int, *, finished: bool, released: list[int]) -> str | None:
        transaction = self.connection.transaction
        assert transaction is not None
        self._kafka.records.append((Record(tick, last_seq, finished, released), transaction))
        return None

    def commit(self) -> CommitAnswer:
        kafka, connection = self._kafka, self.connection
        transaction = connection.transaction
        assert transaction is not None
        # The client waits for all that is in flight first.
        while connection.in_flight:
            kafka.handle(self.number)
        self.serve(0, linger=True)
        if connection.has_failed and kafka.fence == self.number:
            connection.is_committing = False
            return CommitAnswer.REFUSED
        connection.is_committing = True
        if self._process.happens("commit", "no answer, not done"):
            return CommitAnswer.NONE
        if self._process.happens("commit", "in doubt, not done"):
            raise ShardLostError("a transaction ended in doubt")
        with self._process.call("commit"):
            if kafka.fence != self.number or kafka.transactions[transaction] == "aborted":
                raise ShardLostError("fenced")
            kafka.transactions[transaction] = "committed"
        if self._process.happens("commit", "no answer, done"):
            return CommitAnswer.NONE
        if self._process.happens("commit", "in doubt, done"):
            raise ShardLostError("a transaction ended in doubt")
        connection.transaction, connection.is_committing = None, False
        return CommitAnswer.DONE

    def abort(self, seconds: float) -> str | None:
        kafka, connection = self._kafka, self.connection
        with self._process.call("abort"):
            if connection.transaction is None:
                return "there is no transaction"
            if kafka.fence != self.number:
                return "fenced"
            if kafka.transactions[connection.transaction] == "open":
                kafka.transactions[connection.transaction] = "aborted"
            connection.transaction, connection.is_committing = None, False
            connection.has_failed = False
            connection.broken.clear()
            connection.in_flight.clear()
        return None
