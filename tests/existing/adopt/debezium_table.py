"""Debezium's textbook table, published by what stands for Debezium: a reader of its slot."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from outbox_pipelines.database import connect
from outbox_pipelines.relay.read.slot import pgoutput
from outbox_pipelines.relay.read.slot.stream import Stream
from tests.conftest import wait_until
from tests.existing.adopt.conftest import Adopted, Make
from tests.existing.guides import Guide
from tests.kafka_clients import Producer

PUBLICATION: Final = "dbz_publication"
DDL: Final = """
CREATE TABLE outbox (
    id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,
    type varchar(255) NOT NULL, payload jsonb NOT NULL)"""
PARTITIONED: Final = """
CREATE TABLE outbox (
    id uuid NOT NULL, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,
    type varchar(255) NOT NULL, payload jsonb, "timestamp" timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (id, "timestamp")) PARTITION BY RANGE ("timestamp");
CREATE TABLE outbox_all PARTITION OF outbox DEFAULT"""
# Of Quarkus' extension, with its default types.
QUARKUS: Final = """
CREATE TABLE outbox (
    id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,
    type varchar(255) NOT NULL, "timestamp" timestamp(6) NOT NULL DEFAULT localtimestamp,
    payload varchar(8000), tracingspancontext varchar(256))"""
MAPPING: Final = """
name = "outbox"
slot = "{slot}"
[columns]
aggregate_type = "aggregatetype"
aggregate_id = "aggregateid"
event_type = "type"
"""


def insert(connection: psycopg.Connection[Any], key: str, event_type: str, body: dict[str, Any]) -> str:
    """A writer that keeps its rows."""
    event_id = str(uuid.uuid4())
    connection.execute(
        "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) VALUES (%s, 'Order', %s, %s, %s)",
        [event_id, key, event_type, json.dumps(body)],
    )
    return event_id


def insert_and_delete(
    connection: psycopg.Connection[Any], key: str, event_type: str, body: dict[str, Any]
) -> str:
    """A writer such as Quarkus', which deletes the row at once."""
    with connection.transaction():
        event_id = insert(connection, key, event_type, body)
        done = connection.execute("DELETE FROM outbox WHERE id = %s", [event_id])
        assert done.rowcount == 1
    return event_id


@dataclass(frozen=True)
class Published:
    """The table, and the reader of its slot."""

    adopted: Adopted
    slot: str

    def write(self, *numbers: int, keep: bool = False) -> list[str]:
        """Events of one aggregate, each in a transaction of its own; the ids."""
        writer = insert if keep else insert_and_delete
        with self.adopted.connect() as connection:
            return [writer(connection, "7", "order.placed", {"n": n}) for n in numbers]

    def numbers(self) -> list[int]:
        return self.adopted.numbers().get("7", [])

    def publish(
        self, transactions: int | None = None, *, confirm: bool = True, has_header: bool = True
    ) -> int:
        """Publish what the slot delivers, as Debezium does; the number of events.

        Args:
            transactions: stop after so many with events.
            confirm: whether it tells the slot; Debezium does not tell its last transaction.
            has_header: whether messages have the header `id`.
        """
        settings = self.adopted.settings
        producer = Producer({"bootstrap.servers": settings.kafka, "partitioner": "murmur2_random"})
        topic = self.adopted.table.outbox.topic("Order")
        names: dict[int, list[str]] = {}
        events = begun = end = 0
        with self.adopted.connect() as connection:
            changes = connection.execute(
                "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1', "
                "'publication_names', %s)",
                [self.slot, PUBLICATION],
            ).fetchall()
            rows = 0
            for (message,) in changes:
                if message[0] == pgoutput.RELATION:
                    relation, columns = pgoutput.read_relation(message)
                    names[relation] = columns
                elif message[0] == pgoutput.INSERT:
                    columns = names[pgoutput.relation_of_row(message)]
                    row = dict(zip(columns, pgoutput.read_row(message), strict=True))
                    headers: dict[str, str | bytes | None] = {"id": row["id"]} if has_header else {}
                    producer.produce(topic, key=row["aggregateid"], value=row["payload"], headers=headers)
                    rows += 1
                elif message[0] == pgoutput.COMMIT:
                    end, events = pgoutput.end_of_commit(message), events + rows
                    begun += rows > 0
                    rows = 0
                    if begun == transactions:
                        break
            assert producer.flush(30) == 0
            if end and confirm:
                at = f"{end >> 32:X}/{end & 0xFFFFFFFF:X}"
                connection.execute("SELECT pg_replication_slot_advance(%s, %s)", [self.slot, at])
        return events

    @contextmanager
    def read(self) -> Iterator[None]:
        """A session reads the slot, and confirms nothing."""
        with closing(connect(self.adopted.settings, name="debezium", replication=True)) as connection:
            Stream(connection, self.slot, PUBLICATION)
            yield
        self.wait_for_no_reader()

    def wait_for_no_reader(self) -> None:
        """The server notices the end of a reader a moment after it."""
        active = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s AND active"
        wait_until(lambda: self.one(active) == 0, what="no reader")

    def one(self, query: str) -> Any:
        with self.adopted.connect() as connection:
            row = connection.execute(query.encode(), [self.slot] if "%s" in query else None).fetchone()
        return None if row is None else row[0]

    def has_slot(self) -> bool:
        return bool(self.one("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s"))


@contextmanager
def published(make: Make, *, ddl: str = DDL, publication: str = "FOR TABLE outbox") -> Iterator[Published]:
    """The table with publication and slot; the slot is dropped afterwards."""
    slot = f"debezium_{uuid.uuid4().hex[:12]}"
    guide = Guide(
        "Debezium", ddl, MAPPING.format(slot=slot), (insert_and_delete,), {"value_format": "payload"}
    )
    adopted = make(guide)
    with adopted.connect() as connection:
        connection.execute(f"CREATE PUBLICATION {PUBLICATION} {publication}".encode())
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    table = Published(adopted, slot)
    try:
        yield table
    finally:
        table.wait_for_no_reader()
        with adopted.connect() as connection:
            drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s"
            connection.execute(drop, [slot])
