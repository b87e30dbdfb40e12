"""Kafka as the relay meets it: acknowledged, refused, fenced, cut off; transactions in doubt.

Invariants:
- Of one producer the broker takes messages in order, each once; behind a refused one none, once it has taken
  one of the partition: a producer that it does not know there may begin anywhere.
- A message of a producer that is gone may still arrive, or never.
- A new producer of a transactional id ends the transaction of the one before, and shuts it out.
- A request to end a transaction may arrive once more, and late: until the producer is shut out, it ends
  whatever transaction is open then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.relay.core.delivery import Delivery
from outbox_pipelines.relay.core.outcomes import Cause, Refusal, ShardLostError
from outbox_pipelines.relay.core.producers import CommitAnswer, FirstAcknowledgments, Gate
from outbox_pipelines.relay.core.record import Record
from tests.model.explore import Key

_TOPIC = "topic"
_PURGED = Refusal(Cause.CONSEQUENCE, "purged")


class Connection:
    """One producer at the broker."""

    def __init__(self, *, transactional: bool = False) -> None:
        self.transactional = transactional
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
        self.late: list[tuple[int, str]] = []
        """Requests to end a transaction that may still arrive: the connection, and how it ends."""

    def connect(self, *, transactional: bool) -> int:
        self.connections.append(Connection(transactional=transactional))
        number = len(self.connections) - 1
        if transactional:
            if self.fence >= 0:
                old = self.connections[self.fence]
                if old.transaction is not None and self.transactions[old.transaction] == "open":
                    self.transactions[old.transaction] = "aborted"
                if not old.is_open:
                    # All of it would be refused, and no client would learn that.
                    old.in_flight.clear()
            self.fence = number
            self.late.clear()
        return number

    def arrive(self) -> None:
        """A request comes late."""
        number, end = self.late.pop(0)
        transaction = self.connections[number].transaction
        if self.fence == number and transaction is not None and self.transactions[transaction] == "open":
            self.transactions[transaction] = end

    def handle(self, number: int) -> None:
        """The broker takes or refuses what came first of a connection."""
        connection = self.connections[number]
        event, delivery = connection.in_flight.popleft()
        is_fenced = connection.transactional and (
            self.fence != number
            or connection.transaction is None
            or self.transactions[connection.transaction] != "open"
        )
        if is_fenced:
            connection.has_failed |= delivery is not None
            connection.reports.append((delivery, event, Refusal(Cause.OWNER, "fenced")))
        elif event.aggregate_id in connection.broken:
            connection.reports.append((delivery, event, _PURGED))
        elif event.seq in self.refuses:
            connection.has_failed = True
            if event.aggregate_id in connection.known:
                connection.broken.add(event.aggregate_id)
            connection.reports.append((delivery, event, Refusal(Cause.EVENT, "refused")))
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
        """What does not depend on the numbers of connections and transactions."""
        last = self.last_record()
        return (
            tuple(sorted(self.refuses)),
            tuple(
                (seq, None if self.is_committed(transaction) else self._name(transaction))
                for seq, transaction in self.log
                if transaction is None or self.transactions[transaction] != "aborted"
            ),
            self.transactions.count("open"),
            None if last is None else (last.tick, last.last_seq, last.finished, tuple(last.released)),
            tuple(
                (
                    record.tick,
                    record.last_seq,
                    record.finished,
                    tuple(record.released),
                    self._name(transaction),
                )
                for record, transaction in self.records
                if self.transactions[transaction] == "open"
            ),
            # Of a producer that is shut out, one ends nothing.
            tuple((number == self.fence, end) for number, end in self.late),
        )

    def key_of(self, number: int) -> Key:
        """What is known of a connection."""
        connection = self.connections[number]
        return connection.key(), self._name(connection.transaction), number == self.fence

    def _name(self, transaction: int | None) -> Key:
        """How a transaction ended; of open ones, which one it is."""
        if transaction is None or self.transactions[transaction] != "open":
            return transaction if transaction is None else self.transactions[transaction]
        return self.transactions[:transaction].count("open")


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
        # What was purged is reported, and may still arrive.
        awaited = [delivery for _, delivery in self.connection.in_flight if delivery is not None]
        return len(awaited) + len(self.connection.reports)

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
                if (event.aggregate_type, event.aggregate_id) in blocked and gate.park_behind(
                    delivery, event
                ):
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
        if self._process.happens("fence", "no answer"):
            raise UnavailableError("Kafka does not start transactions")
        self.close()
        with self._process.call("fence" if self._transactional else "new producer"):
            self.number = self._kafka.connect(transactional=self._transactional)
        self.has_failed = False

    def identify(self, in_flight: list[Event], failed: list[Any]) -> list[tuple[Event, Refusal]]:
        return [(event, refusal) for event, refusal in failed]

    def shrink(self, refused: list[Event]) -> set[int]:
        return {event.seq for event in refused}

    def refuse_topic(self, event: Event, refusal: Refusal) -> None: ...

    def refuse_halted(self, waiting: Iterable[Event]) -> bool:
        return False

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
        kafka, transaction = self._kafka, self.connection.transaction
        assert transaction is not None
        if kafka.fence == self.number and kafka.transactions[transaction] == "open":
            kafka.records.append((Record(tick, last_seq, finished, released), transaction))
        else:
            self.connection.has_failed = True
        return None

    def commit(self) -> CommitAnswer:
        kafka, connection = self._kafka, self.connection
        transaction = connection.transaction
        assert transaction is not None
        if self._process.happens("commit", "a late request first"):
            kafka.arrive()
        if self._process.happens("commit", "record refused"):
            kafka.records.pop()
            connection.has_failed = True
        # The client waits for all that is in flight first.
        while connection.in_flight:
            kafka.handle(self.number)
        self.serve(0, linger=True)
        if connection.has_failed and kafka.fence == self.number:
            connection.is_committing = False
            return CommitAnswer.REFUSED
        connection.is_committing = True
        if self._process.happens("commit", "no answer, not done"):
            self._ask_twice("committed")
            return CommitAnswer.NONE
        if self._process.happens("commit", "in doubt, not done"):
            raise ShardLostError("a transaction ended in doubt")
        is_silent = self._process.happens("commit", "no answer, done")
        is_in_doubt = self._process.happens("commit", "in doubt, done")
        is_repeated = self._process.happens("commit", "asked twice")
        with self._process.call("commit"):
            if kafka.fence != self.number or kafka.transactions[transaction] == "aborted":
                raise ShardLostError("fenced")
            kafka.transactions[transaction] = "committed"
        if is_silent:
            self._ask_twice("committed")
            return CommitAnswer.NONE
        if is_in_doubt:
            raise ShardLostError("a transaction ended in doubt")
        connection.transaction, connection.is_committing = None, False
        if is_repeated:
            self._ask_twice("committed")
            if self._process.world.notices:
                return CommitAnswer.REPEATED
        return CommitAnswer.DONE

    def _ask_twice(self, end: str) -> None:
        """Leave a request in the network that has been asked again, by another connection."""
        world = self._process.world
        if world.late:
            world.late -= 1
            self._kafka.late.append((self.number, end))

    def abort(self, seconds: float) -> str | None:
        kafka, connection = self._kafka, self.connection
        if self._process.happens("abort", "asked twice"):
            self._ask_twice("aborted")
        with self._process.call("abort"):
            if connection.transaction is None:
                return "there is no transaction"
            if kafka.fence != self.number:
                return "fenced"
            if kafka.transactions[connection.transaction] != "open":
                return "the transaction has ended"
            kafka.transactions[connection.transaction] = "aborted"
            connection.transaction, connection.is_committing = None, False
            connection.has_failed = False
            connection.broken.clear()
        return None
