"""Relays that are wrong in one way each: the judge must find every one of them.

Each is a common first attempt, on the outbox or on the textbook's table, whose rows are marked. Nothing else
is wrong with them.

As a program: ``python -m tests.history.broken NAME`` relays until it is killed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import psycopg
from confluent_kafka import OFFSET_BEGINNING, KafkaException, TopicPartition

from outbox_pipelines.settings import Settings, load_settings
from tests.history import reader, standstill
from tests.history.record import Delivery
from tests.kafka_clients import Consumer, Producer

_POSITION = """
CREATE TABLE position (at text NOT NULL);
INSERT INTO position VALUES ({start})"""
# Filled by the outbox, in the writer's transaction, so that the same writers serve.
_TEXTBOOK = """
CREATE TABLE textbook (seq bigint PRIMARY KEY, id uuid NOT NULL, aggregate_type text NOT NULL,
                       aggregate_id text NOT NULL, payload jsonb NOT NULL, published_at timestamptz);
CREATE FUNCTION to_textbook() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO textbook VALUES (NEW.seq, NEW.id, NEW.aggregate_type, NEW.aggregate_id, NEW.payload);
    RETURN NULL;
END $$;
CREATE TRIGGER to_textbook AFTER INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION to_textbook()"""
_COLUMNS = "seq, id::text, aggregate_type, aggregate_id, payload::text"


class Row(NamedTuple):
    """An event, as such a relay reads it."""

    seq: int
    id: str
    kind: str
    account: str
    payload: str
    mark: str = ""


class Broken:
    """The skeleton: read, publish, wait for the acknowledgements, settle."""

    prepare: ClassVar[str]
    autocommit: ClassVar[bool] = True
    linger_ms: ClassVar[int] = 0
    delivery: ClassVar[Delivery] = "at_least_once"

    def __init__(self, settings: Settings) -> None:
        self.connection: psycopg.Connection[Any] = psycopg.connect(settings.dsn, autocommit=self.autocommit)
        self._topic, self._kafka = settings.topic, settings.kafka
        self._producer = Producer(
            {
                "bootstrap.servers": settings.kafka,
                "enable.idempotence": True,
                "linger.ms": self.linger_ms,
                "partitioner": "murmur2_random",
            }
        )

    def read(self) -> list[Row]:
        raise NotImplementedError

    def settle(self, rows: list[Row]) -> None:
        raise NotImplementedError

    def publish(self, rows: list[Row]) -> None:
        for row in rows:
            topic = self._topic.format(aggregate_type=row.kind)
            self._producer.produce(topic, row.payload, row.account, headers={"id": row.id})

    def flush(self) -> None:
        assert self._producer.flush(30) == 0

    def step(self) -> int:
        """One round; how many events."""
        rows = self.read()
        if rows:
            self.publish(rows)
            self.flush()
            self.settle(rows)
        return len(rows)

    def close(self) -> None:
        self.connection.close()
        del self._producer


class PollsBySeq(Broken):
    """Behind the last number. Numbers are drawn before commits: what commits late is never seen."""

    prepare = _POSITION.format(start=0)

    def read(self) -> list[Row]:
        return self._rows(
            f"SELECT {_COLUMNS}, seq::text AS mark FROM outbox WHERE seq > (SELECT at::bigint FROM position) "
            "ORDER BY seq LIMIT 100"
        )

    def settle(self, rows: list[Row]) -> None:
        self.connection.execute("UPDATE position SET at = %s", [rows[-1].mark])

    def _rows(self, query: str) -> list[Row]:
        return [Row(*row) for row in self.connection.execute(query.encode())]


class CutsAtXid(PollsBySeq):
    """Up to the oldest running transaction. Loses nothing, but a lower id may have committed second: the cut
    then falls between two events of one account."""

    prepare = _POSITION.format(start="pg_current_xact_id()")

    def read(self) -> list[Row]:
        return self._rows(
            f"SELECT {_COLUMNS}, pg_snapshot_xmin(pg_current_snapshot())::text FROM outbox "
            "WHERE tx >= (SELECT at::xid8 FROM position) AND tx < pg_snapshot_xmin(pg_current_snapshot()) "
            "ORDER BY seq"
        )


class OrdersByTime(PollsBySeq):
    """By `created_at`, which is when the transaction began, not when it committed."""

    prepare = _POSITION.format(start="'-infinity'")

    def read(self) -> list[Row]:
        return self._rows(
            f"SELECT {_COLUMNS}, created_at::text AS mark FROM outbox "
            "WHERE created_at > (SELECT at::timestamptz FROM position) ORDER BY created_at, seq"
        )


class SettlesFirst(PollsBySeq):
    """Moves its position when the client has taken the events: what its buffer holds dies with it."""

    linger_ms = 60_000

    def flush(self) -> None:
        self._producer.poll(0)


class Claims(Broken):
    """Claims rows and marks them. Right when alone; two of them overtake each other."""

    prepare = _TEXTBOOK
    autocommit = False

    def read(self) -> list[Row]:
        query = (
            f"SELECT {_COLUMNS} FROM textbook WHERE published_at IS NULL "
            "ORDER BY seq LIMIT 100 FOR UPDATE SKIP LOCKED"
        )
        rows = [Row(*row) for row in self.connection.execute(query.encode())]
        if not rows:
            self.connection.rollback()
        return rows

    def settle(self, rows: list[Row]) -> None:
        seqs = [row.seq for row in rows]
        self.connection.execute("UPDATE textbook SET published_at = now() WHERE seq = ANY (%s)", [seqs])
        self.connection.commit()


class SettlesRange(Claims):
    """Marks a range of numbers, with a row in it that committed after the claim."""

    def settle(self, rows: list[Row]) -> None:
        self.connection.execute(
            "UPDATE textbook SET published_at = now() WHERE seq BETWEEN %s AND %s AND published_at IS NULL",
            [rows[0].seq, rows[-1].seq],
        )
        self.connection.commit()


class KeepsProducer(PollsBySeq):
    """exactly_once by transactions that hold a record of the position, with one producer for all of its life.
    A commit that came late, after the client had asked again, ends the transaction that is open then."""

    prepare = ""
    delivery = "exactly_once"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._records = settings.topic.format(aggregate_type="record")
        with suppress(KafkaException):
            reader.create(settings.kafka, {"record": self._records})
        self._producer = Producer(
            {"bootstrap.servers": settings.kafka, "transactional.id": self._records, "linger.ms": 0}
        )
        self._producer.init_transactions(30)
        self.position = self.recorded()

    def read(self) -> list[Row]:
        return self._rows(
            f"SELECT {_COLUMNS}, seq::text AS mark FROM outbox WHERE seq > {self.position} "
            # The cut is not what is wrong here.
            "AND tx < pg_snapshot_xmin(pg_current_snapshot()) ORDER BY seq LIMIT 100"
        )

    def begin(self) -> None:
        self._producer.begin_transaction()

    def record(self, rows: list[Row]) -> None:
        self._producer.produce(self._records, rows[-1].mark, partition=0)

    def commit(self, rows: list[Row]) -> None:
        self._producer.commit_transaction(30)
        self.position = int(rows[-1].mark)

    def step(self) -> int:
        rows = self.read()
        if rows:
            self.begin()
            self.publish(rows)
            self.flush()
            self.record(rows)
            self.commit(rows)
        return len(rows)

    def recorded(self) -> int:
        """The last record whose transaction was committed; 0 if there is none."""
        consumer = Consumer(
            {"bootstrap.servers": self._kafka, "group.id": "records", "enable.partition.eof": True}
        )
        consumer.assign([TopicPartition(self._records, 0, OFFSET_BEGINNING)])
        last = 0
        try:
            while (message := consumer.poll(30)) is not None and not message.error():
                last = int(message.value() or b"")
        finally:
            consumer.close()
        return last


class RecordsFirst(KeepsProducer):
    """The same, with the record in the log before the events are: a transaction that ends between them
    says that they are published."""

    def step(self) -> int:
        rows = self.read()
        if rows:
            self.begin()
            self.record(rows)
            self.flush()
            self.publish(rows)
            self.commit(rows)
        return len(rows)


RELAYS: Mapping[str, type[Broken]] = {
    "polls_by_seq": PollsBySeq,
    "cuts_at_xid": CutsAtXid,
    "orders_by_time": OrdersByTime,
    "settles_first": SettlesFirst,
    "claims": Claims,
    "settles_range": SettlesRange,
    "keeps_producer": KeepsProducer,
    "records_first": RecordsFirst,
}


def command(name: str) -> tuple[str, ...]:
    return sys.executable, "-m", "tests.history.broken", name


if __name__ == "__main__":
    standstill.listen()
    relay = RELAYS[sys.argv[1]](load_settings())
    while True:
        if not relay.step():
            time.sleep(0.002)
