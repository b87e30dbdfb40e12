"""A table of processed events of the service's own: older consumers and this one share what they know."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any, Final

import psycopg
import pytest

from outbox_pipelines.consumer import AsyncConsumer, Consumer, Counts, DedupeTable, Event, migrate
from outbox_pipelines.consumer.testing import handle, make_event
from outbox_pipelines.errors import SetupError
from tests.conftest import wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, at_work, effect, running, uuid7
from tests.consumer.test_transactions import sessions
from tests.schema.servers import Database

Connection = psycopg.Connection[Any]

# The shapes of the guides.
SHAPES: Final = {
    "source": (
        "CREATE TABLE legacy.processed_events (event_id uuid NOT NULL, source varchar(50) NOT NULL, "
        "processed_at timestamptz NOT NULL DEFAULT now(), UNIQUE (event_id, source))",
        DedupeTable("legacy.processed_events", source="source"),
    ),
    "time": (
        "CREATE TABLE legacy.processed_events (event_id varchar(36) PRIMARY KEY, "
        "processed_at timestamp NOT NULL)",
        DedupeTable("legacy.processed_events", processed_at="processed_at"),
    ),
    "key": (
        "CREATE TABLE legacy.processed_events (idempotency_key varchar(255) PRIMARY KEY, "
        "processed_at timestamp DEFAULT CURRENT_TIMESTAMP)",
        DedupeTable("legacy.processed_events", column="idempotency_key", value="idempotency_key"),
    ),
    "inbox": (
        "CREATE TABLE legacy.inbox (message_id varchar(255) PRIMARY KEY, source varchar(100) NOT NULL, "
        "payload jsonb NOT NULL, received_at timestamptz NOT NULL DEFAULT now(), processed_at timestamptz)",
        DedupeTable(
            "legacy.inbox",
            column="message_id",
            source="source",
            payload="payload",
            processed_at="processed_at",
            is_inbox=True,
        ),
    ),
}


class Old:
    """A consumer as the guides have it, on one of their tables."""

    def __init__(self, place: Place, shape: str) -> None:
        self.shape = shape
        self.connection = psycopg.connect(place.dsn, autocommit=False)

    def mark(self, event_id: uuid.UUID) -> bool:
        """Whether the event is new; the transaction stays open."""
        query = {
            "source": "INSERT INTO legacy.processed_events (event_id, source) VALUES (%s, 'billing') "
            "ON CONFLICT DO NOTHING RETURNING event_id",
            "time": "INSERT INTO legacy.processed_events VALUES (%s, now()) ON CONFLICT DO NOTHING "
            "RETURNING event_id",
            "key": "INSERT INTO legacy.processed_events (idempotency_key) VALUES ('key ' || %s) "
            "ON CONFLICT DO NOTHING RETURNING 1",
            "inbox": "INSERT INTO legacy.inbox (message_id, source, payload, processed_at) "
            "VALUES (%s, 'billing', '{}', now()) ON CONFLICT DO NOTHING RETURNING message_id",
        }[self.shape]
        return self.connection.execute(query.encode(), [str(event_id)]).fetchone() is not None


def cases(*usual: tuple[Any, ...]) -> list[Any]:
    """Each shape with each of the other values: the first in `make test`, the usual ones in CI."""
    others = list(product(*(dict.fromkeys(column) for column in list(zip(*usual, strict=True))[1:])))
    marks = dict.fromkeys(usual, pytest.mark.extended) | {usual[0]: ()}
    return [
        pytest.param(*case, marks=marks.get(case, pytest.mark.thorough(only=True)))
        for shape in SHAPES
        for case in ((shape, *other) for other in others)
    ]


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(place: Place, shape: str) -> DedupeTable:
    statement, table = SHAPES[shape]
    place.rows("CREATE SCHEMA IF NOT EXISTS legacy")
    place.rows(statement)
    return table


def send(place: Place, *events: uuid.UUID) -> None:
    for n, event_id in enumerate(events):
        key = {"idempotency_key": f"key {event_id}"}
        headers = {"id": str(event_id), "event_type": "order.placed", "aggregate_type": "order"}
        place.put(json.dumps({"n": n}), key=str(n % 3), **headers, **key)


def through(place: Place, consumer: Consumer, group: str = "billing") -> Counts:
    with running(consumer) as run:
        wait_until(partial(lambda group: place.uncommitted(group) == 0, group), what="all offsets")
        return run.end()


def marked(place: Place, shape: str) -> int:
    return int(
        place.value(f"SELECT count(*) FROM legacy.{'inbox' if shape == 'inbox' else 'processed_events'}")
    )


def batching(place: Place, table: DedupeTable, size: int | None, **more: Any) -> Consumer:
    consumer: Consumer = place.bare(dedupe_table=table, **more)

    @consumer.on("order.placed", batch=size)
    def placed(events: Any, connection: Connection) -> None:
        for event in events if size else [events]:
            effect(event, connection)

    return consumer


@pytest.mark.parametrize(
    ("shape", "batch"), cases(("source", 50), ("time", None), ("key", 50), ("inbox", None))
)
def test_they_share_what_they_know_in_both_directions(place: Place, shape: str, batch: int | None) -> None:
    """Guards against an event handled by both: before the move, or while both run."""
    table = make(place, shape)
    old = Old(place, shape)
    before, after = [uuid7() for _ in range(10)], [uuid7() for _ in range(10)]
    assert all(map(old.mark, before))
    old.connection.commit()
    send(place, *before, *after, *after[:3])
    counts = through(place, batching(place, table, batch))
    assert counts == Counts(handled=10, duplicates=13)
    assert sorted(place.rows("SELECT event_id FROM effects")) == sorted((str(each),) for each in after)
    assert not any(map(old.mark, after))
    old.connection.rollback()
    # All of it again, with and without it: ours alone knows them now.
    assert through(place, batching(place, table, batch, group="again"), "again") == Counts(duplicates=23)
    assert marked(place, shape) == 20
    old.connection.close()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("shape", "batch", "commits"),
    cases(("source", None, True), ("time", 50, False), ("key", None, False), ("inbox", 50, True)),
)
def test_an_event_that_the_other_is_handling_is_waited_for(
    place: Place, shape: str, batch: int | None, commits: bool
) -> None:
    """Guards against an event that both handle at the same time, or that none does."""
    table = make(place, shape)
    old = Old(place, shape)
    event_id = uuid7()
    assert old.mark(event_id)
    send(place, event_id)
    waits = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    with running(batching(place, table, batch)) as run:
        wait_until(lambda: place.value(waits) == 1, what="the consumer to wait")
        old.connection.commit() if commits else old.connection.rollback()
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == (Counts(duplicates=1) if commits else Counts(handled=1))
    assert place.effects() == (0 if commits else 1)
    old.connection.close()


@pytest.mark.extended
@pytest.mark.parametrize("run", [0, pytest.param(1, marks=pytest.mark.thorough(only=True))])
def test_both_at_full_speed(place: Place, run: int) -> None:
    """Each event has its effect once, whichever consumer is first."""
    table = make(place, "source")
    events = [uuid7() for _ in range(100)]
    send(place, *events)

    def old_one() -> None:
        old = Old(place, "source")
        for event_id in reversed(events):
            if old.mark(event_id):
                old.connection.execute("INSERT INTO effects (event_id, key) VALUES (%s, 'old')", [event_id])
            old.connection.commit()
        old.connection.close()

    with ThreadPoolExecutor(1) as pool, running(batching(place, table, 7)) as ours:
        pool.submit(old_one).result(600)
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        counts = ours.end()
    assert counts.handled + counts.duplicates == 100
    assert counts.dead_letters == 0
    assert place.rows("SELECT count(*), count(DISTINCT event_id) FROM effects") == [(100, 100)]


def test_a_failed_event_leaves_no_mark_until_it_is_handled(place: Place, shape: str) -> None:
    """Guards against a mark that outlives the rollback of its work: the retry would skip the event."""
    table = make(place, shape)
    consumer: Consumer = place.bare(dedupe_table=table)
    fails = threading.Event()
    fails.set()

    @consumer.on("order.placed")
    def placed(event: Event, connection: Connection) -> None:
        effect(event, connection)
        if fails.is_set():
            assert marked(place, shape) == 0
            fails.clear()
            raise ValueError("not yet")

    send(place, uuid7())
    with running(consumer) as run:
        wait_until(lambda: place.effects() == 1, what="the retry")
        counts = run.end()
    assert (counts.handled, counts.failures) == (1, 1)
    assert marked(place, shape) == 1


@pytest.mark.extended
def test_the_other_handles_what_waits_in_our_inbox(place: Place, shape: str) -> None:
    """Guards against a retry of an event that the older consumer has handled in between."""
    table = make(place, shape)
    event_id = uuid7()
    send(place, event_id)
    consumer = batching(place, table, None)
    with at_work(consumer, "receive") as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end().received == 1
    old = Old(place, shape)
    assert old.mark(event_id)
    old.connection.commit()
    assert consumer.drain(until_empty=True) == Counts(duplicates=1)
    assert (place.effects(), place.inbox()) == (0, {"processed": 1})
    old.connection.close()


def test_two_events_with_one_key_in_a_batch(place: Place) -> None:
    table = make(place, "key")
    for key in ("a", "a", "b", "a"):
        place.put('{"n": 1}', id=str(uuid7()), event_type="order.placed", idempotency_key=key)
    assert through(place, batching(place, table, 50)) == Counts(handled=2, duplicates=2)
    assert place.effects() == 2


@pytest.mark.extended
def test_a_message_of_the_inbox_that_was_never_processed_is_handled(place: Place) -> None:
    """Guards against an event that is lost since the old consumer had received it, and nothing more."""
    table = make(place, "inbox")
    event_id = uuid7()
    place.rows("INSERT INTO legacy.inbox (message_id, source, payload) VALUES (%s, 'x', '{}')", str(event_id))
    send(place, event_id, new := uuid7())
    assert through(place, batching(place, table, None)) == Counts(handled=2)
    rows = place.rows(
        "SELECT source, payload, processed_at IS NULL FROM legacy.inbox WHERE message_id = %s", str(new)
    )
    assert rows == [("billing", {"n": 1}, False)]
    assert place.value("SELECT count(*) FROM legacy.inbox WHERE processed_at IS NULL") == 0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("value", "headers", "body", "stored"),
    [
        ("header:request-id", {"request_id": "r 7"}, "{}", "r 7"),
        ("payload:idempotency_key", {}, '{"idempotency_key": "k"}', "k"),
        ("payload:number", {}, '{"number": 12}', "12"),
        ("id", {}, "{}", None),
    ],
)
def test_the_value_that_identifies_an_event(
    place: Place, value: str, headers: dict[str, str], body: str, stored: str | None
) -> None:
    place.rows("CREATE TABLE legacy_ids (event_id text PRIMARY KEY)")
    event_id = str(uuid7())
    place.put(body, id=event_id, event_type="order.placed", **headers)
    assert through(place, batching(place, DedupeTable("legacy_ids", value=value), None)).handled == 1
    assert place.rows("SELECT * FROM legacy_ids") == [(stored or event_id,)]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("type", "value", "headers", "reason"),
    [
        ("text", "idempotency_key", {}, "has no idempotency key, which dedupe_table legacy_ids needs"),
        ("text", "header:x", {}, "has no header 'x'"),
        ("text", "payload:x", {}, "has no payload 'x'"),
        ("uuid", "header:x", {"x": "7"}, "its header:x is no uuid, and does not fit the column event_id"),
        ("int", "header:x", {"x": str(2**31)}, "is no integer"),
        ("bigint", "header:x", {"x": "٣"}, "is no bigint"),
        ("varchar(3)", "header:x", {"x": "abcd"}, "has more than 3 characters"),
        ("text", "payload:n", {}, "has characters that PostgreSQL does not store"),
    ],
)
def test_a_value_that_the_table_cannot_have_is_a_dead_letter(
    place: Place, type: str, value: str, headers: dict[str, str], reason: str
) -> None:
    """Guards against a value that is cut and then is another event's, and against retries without an end."""
    place.rows(f"CREATE TABLE legacy_ids (event_id {type} PRIMARY KEY)")
    place.put('{"n": "a\\u0000b"}', id=str(uuid7()), event_type="order.placed", **headers)
    counts = through(place, batching(place, DedupeTable("legacy_ids", value=value), None))
    assert (counts.handled, counts.dead_letters) == (0, 1)
    [(error,)] = place.rows("SELECT last_error FROM inbox")
    assert reason in error


@pytest.mark.extended
@pytest.mark.parametrize("type", ["uuid", "text", "varchar", "char(36)", "varchar(36)"])
def test_columns_for_ids(place: Place, type: str) -> None:
    place.rows(f"CREATE TABLE legacy_ids (event_id {type} PRIMARY KEY)")
    event_id = uuid7()
    place.put("{}", id=str(event_id), event_type="order.placed")
    place.put("{}", id=str(event_id), event_type="order.placed")
    consumer = batching(place, DedupeTable("legacy_ids"), None)
    assert through(place, consumer) == Counts(handled=1, duplicates=1)
    assert place.value("SELECT CAST(event_id AS text) FROM legacy_ids") == str(event_id)


@pytest.mark.extended
@pytest.mark.parametrize("type", ["smallint", "int", "bigint"])
def test_columns_for_serial_ids(place: Place, type: str) -> None:
    place.rows(f"CREATE TABLE legacy_ids (event_id {type} PRIMARY KEY)")
    place.rows("INSERT INTO legacy_ids VALUES (1)")
    for number in ("1", "02", "-3"):
        place.put("{}", id=number, event_type="order.placed")
    assert through(place, batching(place, DedupeTable("legacy_ids"), None)) == Counts(handled=2, duplicates=1)
    assert place.rows("SELECT event_id FROM legacy_ids ORDER BY 1") == [(-3,), (1,), (2,)]


def test_other_columns_get_their_constants(place: Place) -> None:
    place.rows("CREATE TYPE state AS ENUM ('new', 'done')")
    place.rows(
        'CREATE TABLE legacy_ids (event_id text PRIMARY KEY, "State" state NOT NULL, host text NOT NULL)'
    )
    table = DedupeTable("legacy_ids", constants={"State": "done", "host": "a:b %s {x}"})
    event_id = uuid7()
    place.put("{}", id=str(event_id), event_type="order.placed")
    assert through(place, batching(place, table, None)).handled == 1
    assert place.rows("SELECT * FROM legacy_ids") == [(str(event_id), "done", "a:b %s {x}")]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("shape", "driver"),
    cases(("source", "connection"), ("time", "psycopg"), ("key", "asyncpg"), ("inbox", "connection")),
)
def test_the_asynchronous_consumer(place: Place, shape: str, driver: str) -> None:
    table = make(place, shape)
    old = Old(place, shape)
    events = [uuid7() for _ in range(4)]
    assert old.mark(events[0])
    old.connection.commit()
    old.connection.close()
    send(place, *events)
    seen: list[str] = []

    async def placed(events: list[Event], transaction: Any) -> None:
        seen.extend(each.id for each in events)

    async def scenario() -> None:
        database = test_async.database(place, driver)
        consumer = place.bare(kind=AsyncConsumer, dedupe_table=table, **database)
        consumer.on("order.placed", batch=2)(placed)
        async with test_async.running(consumer.run) as counts:
            await test_async.until(lambda: place.uncommitted() == 0, "all offsets")
        assert counts == [Counts(handled=3, duplicates=1)]

    asyncio.run(scenario())
    assert sorted(seen) == sorted(map(str, events[1:]))
    assert marked(place, shape) == 4


@pytest.mark.extended
@pytest.mark.parametrize(
    ("shape", "driver"),
    cases(("source", "psycopg"), ("time", "psycopg2"), ("key", "psycopg2"), ("inbox", "psycopg")),
)
def test_a_session_of_sqlalchemy(place: Place, shape: str, driver: str) -> None:
    table = make(place, shape)
    event_id = uuid7()
    send(place, event_id, event_id)
    consumer: Consumer = place.bare(dedupe_table=table, session=sessions(place, driver))
    consumer.on("order.placed")(lambda event, session: None)
    assert through(place, consumer) == Counts(handled=1, duplicates=1)
    assert marked(place, shape) == 1


def test_the_kit_for_tests_uses_it(place: Place) -> None:
    table = make(place, "source")
    consumer = batching(place, table, None)
    event = make_event("order.placed", {"n": 1})
    with psycopg.connect(place.dsn) as connection:
        connection.execute(
            "INSERT INTO legacy.processed_events (event_id, source) VALUES (%s, 'billing')", [event.id]
        )
        assert handle(consumer, event, using=connection) == ["duplicate"]
        assert handle(consumer, make_event("order.placed", {"n": 1}), using=connection) == ["handled"]
    bare: Consumer = place.bare(dedupe_table=table)
    bare.on("order.placed")(lambda event, nothing: None)
    assert handle(bare, event, using=None) == ["handled"]


@pytest.fixture
def database(empty: Database) -> Database:
    with empty.connect() as connection:
        migrate(connection)
    return empty


def problem(database: Database, table: DedupeTable, user: str = "postgres") -> str:
    """Why a consumer does not start."""
    consumer = Consumer(
        source="billing",
        topics=["t"],
        kafka={"bootstrap.servers": "127.0.0.1:1"},
        connect=lambda: database.connect(user=user),
        dedupe_table=table,
    )
    consumer.on_other(lambda event, connection: None)
    with pytest.raises(SetupError) as refused:
        consumer.drain(until_empty=True)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("made", "table", "told"),
    [
        (
            "",
            DedupeTable("old"),
            "dedupe_table old does not exist, or the role may not use its schema: correct",
        ),
        ("", DedupeTable("a.old"), "dedupe_table a.old does not exist"),
        (
            "",
            DedupeTable("processed_events"),
            "is the consumer's own table public.processed_events: give yours",
        ),
        ("", DedupeTable("inbox"), "is the consumer's own table"),
        ("CREATE VIEW old AS SELECT 1 AS event_id", DedupeTable("old"), "public.old is not a table"),
        ("CREATE TABLE old (id uuid, n int)", DedupeTable("old"), "has no column event_id: it has id, n"),
        (
            "CREATE TABLE old (event_id uuid)",
            DedupeTable("old"),
            'has no unique constraint on ("event_id"): run CREATE UNIQUE INDEX CONCURRENTLY ON public.old '
            '("event_id")',
        ),
        (
            "CREATE TABLE old (event_id uuid, source text, UNIQUE (event_id, source))",
            DedupeTable("old", source_value=None),
            'no unique constraint on ("event_id")',
        ),
        (
            "CREATE TABLE old (event_id uuid, source text, n int, UNIQUE (event_id, source, n))",
            DedupeTable("old", source="source"),
            'no unique constraint on ("event_id", "source")',
        ),
        (
            "CREATE TABLE old (event_id uuid, n int); CREATE UNIQUE INDEX ON old (event_id) WHERE n = 1",
            DedupeTable("old"),
            "no unique constraint",
        ),
        (
            "CREATE TABLE old (event_id uuid UNIQUE DEFERRABLE)",
            DedupeTable("old"),
            "no unique constraint",
        ),
        (
            "CREATE TABLE old (event_id uuid PRIMARY KEY, host text NOT NULL)",
            DedupeTable("old"),
            "its column host is NOT NULL without a default: name it (source=, processed_at=, received_at=, "
            'payload=, constants=), or run ALTER TABLE public.old ALTER COLUMN "host" SET DEFAULT …',
        ),
        (
            "CREATE TABLE old (event_id bytea PRIMARY KEY)",
            DedupeTable("old"),
            "the type of its column event_id is bytea; supported there: text,",
        ),
        (
            "CREATE TABLE old (event_id text PRIMARY KEY, at bigint)",
            DedupeTable("old", processed_at="at"),
            "the type of its column at is bigint; supported there: timestamp with time zone",
        ),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_before_the_first_event(
    database: Database, made: str, table: DedupeTable, told: str
) -> None:
    if made:
        database.rows(made)
    assert told in problem(database, table)


def test_missing_privileges_are_named(database: Database) -> None:
    role = database.role()
    ours = "GRANT SELECT, INSERT, UPDATE, DELETE ON processed_events, inbox, partition_owners TO "
    database.rows(ours + role)
    database.rows("CREATE TABLE old (event_id uuid PRIMARY KEY, at timestamptz)")
    plain, inbox = DedupeTable("old"), DedupeTable("old", processed_at="at", is_inbox=True)
    run = f'run GRANT {{}} ON public.old TO "{role}"'
    assert run.format("SELECT, INSERT") in problem(database, plain, role)
    assert run.format("SELECT, INSERT, UPDATE") in problem(database, inbox, role)
    database.rows(f"GRANT SELECT, INSERT ON old TO {role}")
    assert run.format("UPDATE") in problem(database, inbox, role)
    database.rows("CREATE SCHEMA hidden; CREATE TABLE hidden.old (event_id uuid PRIMARY KEY)")
    assert "grant USAGE on the schema" in problem(database, DedupeTable("hidden.old"), role)


def test_tables_of_ones_own_that_hide_the_consumers_are_named(database: Database) -> None:
    """Guards against advice to create tables that exist."""
    database.rows(
        "ALTER TABLE processed_events RENAME TO theirs; CREATE TABLE processed_events (event_id uuid)"
    )
    told = problem(database, DedupeTable("processed_events"))
    assert "leads to a table processed_events or inbox that is not the consumer's" in told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": ""}, "write a name, or a schema"),
        ({"name": "a.b.c"}, "write a name, or a schema"),
        ({"name": 'a"b'}, "no quotes"),
        ({"name": "a", "column": "x%s"}, "no quotes"),
        ({"name": "a", "source": "x:y"}, "no quotes"),
        ({"name": "a", "source": "event_id"}, "uses the column event_id twice"),
        ({"name": "a", "constants": {"event_id": "1"}}, "uses the column event_id twice"),
        ({"name": "a", "value": "key"}, "give id, idempotency_key, header:NAME or payload:NAME"),
        ({"name": "a", "value": "header:"}, "give id, idempotency_key"),
        ({"name": "a", "source_value": "x"}, "name its column too"),
        ({"name": "a", "is_inbox": True}, "as processed_at="),
    ],
)
def test_a_description_that_cannot_be_right_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SetupError, match=told):
        DedupeTable(**given)


def test_what_is_no_description_is_refused() -> None:
    make: Callable[..., Consumer] = Consumer
    with pytest.raises(SetupError, match="dedupe_table is 'processed_events': write for example DedupeTable"):
        make(
            source="a",
            topics=["t"],
            kafka={"bootstrap.servers": "k"},
            dsn="",
            dedupe_table="processed_events",
        )
