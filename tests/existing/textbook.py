"""Textbook outbox tables, their mappings, and what the tests do with them."""

from __future__ import annotations

import json
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from outbox_pipelines.database import schema
from outbox_pipelines.existing.claim_sessions import MarkedTableSource
from outbox_pipelines.existing.table_ownership import TableOwnership
from outbox_pipelines.relay import service
from outbox_pipelines.relay.run import Totals
from outbox_pipelines.settings import Settings
from tests.conftest import Message, Outbox, patience, read_topic, session
from tests.relay.topic import create_topic

_COLUMNS: Final = """
    seq bigint GENERATED ALWAYS AS IDENTITY, id uuid NOT NULL DEFAULT gen_random_uuid(),
    aggregate_type text NOT NULL, aggregate_id text NOT NULL, event_type text NOT NULL,
    payload jsonb NOT NULL, headers jsonb, correlation_id text, created_at timestamptz NOT NULL DEFAULT now(),
    retry_count int NOT NULL DEFAULT 0, last_error text, next_attempt_at timestamptz"""

# With published_at, null while pending.
PUBLISHED_AT: Final = f"""
CREATE TABLE events ({_COLUMNS}, published_at timestamptz);
CREATE UNIQUE INDEX ON events (seq) WHERE published_at IS NULL"""
PUBLISHED_AT_MAPPING: Final = """
name = "public.events"

[columns]
published_at = "published_at"
created_at = "created_at"
headers = "headers"
correlation_id = "correlation_id"
retry_count = "retry_count"
last_error = "last_error"
next_attempt_at = "next_attempt_at"
"""

# With a status of words of its own, and other names.
STATUS: Final = """
CREATE TYPE event_state AS ENUM ('new', 'sent', 'broken');
CREATE TABLE events (
    id bigserial PRIMARY KEY, kind varchar(40) NOT NULL, entity uuid NOT NULL, name text NOT NULL,
    body text NOT NULL, state event_state NOT NULL DEFAULT 'new', sent_at timestamp, broken_at timestamptz,
    tries smallint, problem varchar(20), retry_at timestamp, made_at timestamp NOT NULL DEFAULT localtimestamp
);
CREATE INDEX ON events (id) WHERE state = 'new'"""
STATUS_MAPPING: Final = """
name = "events"

[columns]
seq = "id"
aggregate_type = "kind"
aggregate_id = "entity"
event_type = "name"
payload = "body"
created_at = "made_at"
status = "state"
processed_at = "sent_at"
failed_at = "broken_at"
retry_count = "tries"
last_error = "problem"
next_attempt_at = "retry_at"

[status]
pending = "new"
processed = "sent"
failed = "broken"
"""


# Rows in the same transaction, right after ours.
COPY: Final = """
CREATE FUNCTION copy_to_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO events (id, aggregate_type, aggregate_id, event_type, payload)
    VALUES (NEW.id, NEW.aggregate_type, NEW.aggregate_id, NEW.event_type, NEW.payload);
    RETURN NULL;
END $$;
CREATE TRIGGER copy_to_events AFTER INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION copy_to_events()"""


@dataclass(frozen=True)
class Table:
    """A table of the shape with published_at, in a database without any table of ours."""

    outbox: Outbox

    @property
    def settings(self) -> Settings:
        return self.outbox.settings

    @property
    def environment(self) -> dict[str, str]:
        """For subprocesses."""
        return self.outbox.environment | {"OUTBOX_TABLE": json.dumps(self.settings.table)}

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        return self.outbox.connect(autocommit=autocommit)

    def write(self, *events: tuple[str, Any]) -> list[int]:
        """One transaction with these (aggregate id, payload); their seqs."""
        connection = session(self.settings.dsn)
        with connection.transaction():
            return [insert(connection, key, payload) for key, payload in events]

    def fill(self, events: int, aggregates: int = 100) -> None:
        """Many committed events in one statement; payload {"n": 1 …}."""
        session(self.settings.dsn).execute(
            "INSERT INTO events (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'order', (i %% %s)::text, 'order.placed', jsonb_build_object('n', i) "
            "FROM generate_series(1, %s) i",
            [aggregates, events],
        )

    def rows(self, what: str = "seq, published_at IS NOT NULL") -> list[tuple[Any, ...]]:
        return self.outbox.rows(f"SELECT {what} FROM events ORDER BY seq")

    def pending(self) -> list[int]:
        return [seq for seq, is_published in self.rows() if not is_published]

    def messages(self) -> list[Message]:
        return read_topic(self.settings.kafka, self.outbox.topic())

    def keys(self) -> list[str]:
        return [message.key for message in self.messages()]

    def numbers(self, key: str) -> list[int]:
        return [json.loads(message.value or "")["n"] for message in self.messages() if message.key == key]

    def with_(self, **settings: object) -> Table:
        return Table(Outbox(self.settings.model_copy(update=settings)))

    def described(self, text: str) -> Table:
        """The same by another description: what `[table]` contains, or a file with that section."""
        content = tomllib.loads(text)
        return self.with_(table=content.get("table", content))

    def drain(self, **settings: object) -> Totals:
        return service.relay(self.with_(**settings).settings, until_empty=True)

    def make_topic(self, partitions: int = 1, /, **config: str) -> None:
        create_topic(self.outbox, partitions, **config)

    @contextmanager
    def relayed(self, *, is_standby: bool = False, **settings: object) -> Iterator[None]:
        """A relay in this process for as long as the block runs."""
        stop, taken = threading.Event(), threading.Event()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                service.relay(self.with_(**settings).settings, stop=stop, on_take=lambda shard: taken.set())
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)
                taken.set()

        relay = threading.Thread(target=run)
        relay.start()
        try:
            assert is_standby or taken.wait(patience(20))
            yield
        finally:
            stop.set()
            relay.join(600)
        assert failures == []
        assert not relay.is_alive()


@contextmanager
def holding(table: Table, **settings: object) -> Iterator[tuple[TableOwnership, MarkedTableSource]]:
    """The table, taken by this test."""
    settings_ = table.with_(**settings).settings
    ownership = TableOwnership(settings_, "test")
    assert ownership.try_take()
    source = MarkedTableSource(settings_, ownership)
    try:
        yield ownership, source
    finally:
        source.sessions.close()
        ownership.close()


def copy_of_outbox(table: Table) -> None:
    """Gives the database an outbox of ours too, whose rows are copied: for writers that know nothing else."""
    schema.migrate(table.settings)
    with table.connect() as connection:
        connection.execute(COPY.encode())


def insert(connection: psycopg.Connection[Any], key: object, payload: Any) -> int:
    row = connection.execute(
        "INSERT INTO events (aggregate_type, aggregate_id, event_type, payload) "
        "VALUES ('order', %s, 'order.placed', %s) RETURNING seq",
        [str(key), json.dumps(payload)],
    ).fetchone()
    assert row is not None
    return int(row[0])


def make(dsn: str, kafka: str, topic: str, ddl: str, mapping: str, **settings: Any) -> Table:
    """Makes the table, whose settings have the mapping."""
    from outbox_pipelines.settings import load_settings

    session(dsn).execute(ddl.encode())
    given = load_settings(dsn=dsn, kafka=kafka, topic=topic, table=tomllib.loads(mapping), **settings)
    return Table(Outbox(given))
