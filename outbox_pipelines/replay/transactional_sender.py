"""Send events through Kafka transactions, each with the replay's position in it: no event comes twice.

Invariants:
- A position becomes visible together with its events. That of the database is equal, or behind it.
- The transactional id is the replays' own: no relay is fenced. Who starts fences every replay before it, then
  moves the one that Kafka's last record names.
- A record is written when all events of its transaction are acknowledged.
- After a commit that was refused, is in doubt or was asked for twice, a new producer comes first, and the
  record of Kafka says where to go on: requests of the old one may still arrive. A new producer would also
  fence a successor, so the database must confirm afterwards that this session, which has the lock, is alive.
- Transactions are short: read_committed consumers of the topic wait for their end, also with live events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Final, NoReturn
from uuid import UUID

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from outbox_pipelines.core.event import Event
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.relay.core.outcomes import Cause, ShardLostError
from outbox_pipelines.relay.core.producers import CommitAnswer
from outbox_pipelines.relay.kafka import client, client_errors, progress_topic
from outbox_pipelines.relay.kafka.transactional_producer import KafkaNames, TransactionEnds, begin
from outbox_pipelines.relay.lease.shard_ownership import identity_of
from outbox_pipelines.replay import replay_sql
from outbox_pipelines.replay.replay_record import Replay, advance
from outbox_pipelines.replay.replay_topics import EventTypeNames as Types
from outbox_pipelines.replay.sender import QUEUE, AgainError, Sender, StoppedError
from outbox_pipelines.settings import RelaySettings

_SECONDS: Final = 0.1
_MOST_EVENTS: Final = 10_000
_MOST_CHARACTERS: Final = 8_000_000
# Transactions that fail one after another, without a success.
_MOST_FAILURES: Final = 5
_INIT_SECONDS: Final = 10.0
_ABORT_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Record:
    """How far a replay is, as a transaction has it."""

    replay: str
    position: int
    sent: int

    def encode(self) -> bytes:
        """As the value of a message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes | None) -> Record | None:
        """From the value of a message; None where no replay wrote it."""
        try:
            record = cls(**json.loads(value or b""))
            UUID(record.replay)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        is_one = all(type(each) is int and 0 <= each < 2**63 for each in (record.position, record.sent))
        return record if is_one else None


class TransactionalSender(Sender):
    """Sends the events of one replay; must be used by one thread.

    Args:
        connection: of the session that has the lock of replays.

    Raises:
        UnavailableError: Kafka does not answer.
        SetupError: it gives no transactions, or no topic for the records.
    """

    def __init__(
        self,
        settings: RelaySettings,
        connection: Connection,
        replay: Replay,
        routes: Mapping[Types, str],
        partitions: Mapping[str, int],
        *,
        rate: float,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._replay = replay.id
        self._relay_settings = settings
        identity = identity_of(connection, settings.db_schema)
        self._kafka_names = KafkaNames(f"outbox-{identity}-replay", f"outbox-progress-{identity}-replay", 0)
        self._ends = TransactionEnds()
        self._failures = 0
        self._refused_seq = 0
        """Of an event that Kafka has refused alone: it then comes first in a transaction."""
        self._forget()
        progress_topic.create_topic(settings, self._kafka_names.topic, 1)
        super().__init__(
            settings,
            replay.id,
            routes,
            partitions,
            rate=rate,
            is_stopped=is_stopped,
            position=replay.position,
            sent=replay.sent,
        )

    def _forget(self) -> None:
        """Nothing is in a transaction."""
        self._refused = self._alone = None
        self._is_open = self._is_partial = self._has_failed = False
        self._last_seq = self._count = self._size = 0
        self._opened = 0.0

    def _new(self) -> Producer:
        """Fence every replay before, and move the last one to where Kafka's record is."""
        # What overtakes a refused event is aborted with it.
        self._begun = set(self._routes.values())
        producer = begin(
            self._relay_settings,
            self._kafka_names,
            self._on_error,
            _INIT_SECONDS,
            **QUEUE,
            delivery_report_only_error=True,
        )
        last = progress_topic.read_last(self._relay_settings, self._kafka_names.topic, 0, Record.decode)
        # Also without a record: only a session that is alive has the lock.
        found = self._connection.execute(
            replay_sql.LIST, {"id": last.replay if last is not None else self._replay}
        ).fetchone()
        if last is not None and found is not None:
            other = Replay(*found)
            advance(self._connection, other.id, last.position, last.sent, other.state, other.error)
            if other.id == self._replay and last.position > self.position:
                self.position, self.sent = last.position, last.sent
        return producer

    def restart(self) -> None:
        self._failures += 1
        if self._failures > _MOST_FAILURES:
            raise SetupError(f"Kafka aborts every transaction: {self.trouble or 'no reason given'}")
        self._producer.purge()
        while True:
            try:
                self._producer = self._new()
                break
            except UnavailableError as error:
                self.trouble = str(error)
                if self._is_stopped():
                    raise StoppedError from None
        self._forget()

    def _send(self, events: list[Event]) -> int:
        try:
            if not self._is_open:
                self._ends.wait()
                self._producer.begin_transaction()
                self._is_open, self._opened = True, time.monotonic()
        except KafkaException:
            raise AgainError from None
        self._is_partial = True
        passed = self._hand_over(events, self._report)
        self._is_partial = False
        self._last_seq, self._count = events[-1].seq, self._count + passed
        self._size += sum(len(event.payload) for event in events)
        if self._count >= _MOST_EVENTS or self._size >= _MOST_CHARACTERS:
            self._commit()
        return passed

    def _send_alone(self, event: Event) -> int:
        if event.seq == self._refused_seq and self._is_open:
            self._commit()
        return super()._send_alone(event)

    def _wait(self) -> None:
        if self._is_stopped():
            raise StoppedError
        self._poll(0.1)
        self._check()

    def settle(self) -> None:
        self._poll(0)
        self._check()
        if self._is_open and time.monotonic() > self._opened + _SECONDS:
            self._commit()

    def _check(self) -> None:
        if self._refused is not None:
            self._end(*self._refused)
        if self._has_failed:
            raise AgainError

    def _end(self, cause: Cause, why: str) -> NoReturn:
        if self._alone is not None and self._alone.seq != self._refused_seq:
            self._refused_seq = self._alone.seq
            raise AgainError
        super()._end(cause, why)

    def _drain(self) -> None:
        """All of it is aborted."""

    def _commit(self) -> None:
        """Commit what is in the transaction, with the position."""
        record = Record(str(self._replay), self._last_seq, self.sent + self._count)
        is_repeated = False
        try:
            while len(self._producer):
                client.flush(self._producer, 0.1)
                self._check()
                if len(self._producer) and self._is_stopped():
                    self._is_partial = True
                    raise StoppedError
            self._producer.produce(self._kafka_names.topic, record.encode(), "0", partition=0)
            while (answer := self._ends.commit(self._producer)) is CommitAnswer.NONE:
                is_repeated, self.trouble = True, self._ends.trouble
                if self._is_stopped():
                    # Whether it is committed, the next process finds out.
                    self._is_open = False
                    raise StoppedError
        except (KafkaException, BufferError, ShardLostError) as error:
            self.trouble = str(error)
            raise AgainError from None
        if answer is CommitAnswer.REFUSED:
            self._producer.poll(0)
            self._check()
            raise AgainError
        self.position, self.sent, self.trouble = record.position, record.sent, ""
        self._failures = 0
        self._forget()
        if is_repeated or answer is CommitAnswer.REPEATED:
            self.restart()

    def finish(self) -> bool:
        if self._is_open and not self._is_partial:
            self._commit()
        return not self._is_open

    def close(self) -> None:
        self._producer.purge()
        if self._is_open:
            self._ends.abort(self._producer, _ABORT_SECONDS)
        super().close()

    def _report(self, event: Event, error: KafkaError | None, message: Message) -> None:
        if error is None:
            return
        try:
            self._require_refusal(error)
        except AgainError:
            self._has_failed = True
            # That the rest of a transaction is discarded is no reason.
            if client_errors.cause(error) is not Cause.CONSEQUENCE:
                self.trouble = error.str()
        else:
            self._refuse(error, message)

    def _fail(self, error: KafkaException) -> NoReturn:
        raise AgainError

    def _require_refusal(self, error: KafkaError) -> None:
        if client_errors.refusal(error).cause not in (Cause.EVENT, Cause.TOPIC):
            raise AgainError
