"""Kafka's offset moves only after a commit that no crash of the database undoes, whatever is set."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm

from outbox_pipelines.consumer import Consumer, Event, migrate
from outbox_pipelines.database import connect
from outbox_pipelines.local import Stack, postgres
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.settings import load_settings
from tests.conftest import either, topic_prefix, wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, at_work, effect, running, uuid7

Connection = psycopg.Connection[Any]
# A commit that does not wait for the disk is certainly lost: nothing is written out in the background.
HASTY = {"synchronous_commit": "off", "wal_writer_delay": "10s", "bgwriter_lru_maxpages": 0}
EVENTS = 20


@pytest.fixture
def hasty(stack: Stack, tmp_path: Path) -> Iterator[tuple[Place, Postgres]]:
    """A place whose database forgets commits when it is killed."""
    with postgres.Postgres(tmp_path, HASTY) as server:
        with psycopg.connect(server.dsn) as connection:
            # Durable itself.
            connection.execute("SET synchronous_commit = on")
            migrate(connection)
            connection.execute("CREATE TABLE effects (seq bigserial, event_id text, key text, n int)")
        place = Place(server.dsn, stack.kafka, f"{topic_prefix()}-order-events")
        yield replace(place, topic=place.beside("hasty").topic), server


def _handle(event: Event, connection: Connection) -> None:
    # Also where a handler asks for it.
    connection.execute("SET LOCAL synchronous_commit = off")
    effect(event, connection)


def _kill(place: Place, server: Postgres) -> None:
    """Kill the database as soon as Kafka has the offsets."""
    wait_until(lambda: place.uncommitted() == 0, what="all offsets")
    server.kill()
    server.start()


def test_the_server_forgets(hasty: tuple[Place, Postgres]) -> None:
    """Guards against tests that show nothing."""
    place, server = hasty
    place.rows("INSERT INTO effects (n) VALUES (1)")
    server.kill()
    server.start()
    assert place.effects() == 0


@pytest.mark.parametrize(
    "way",
    either("by id", "in batches", "failing", "connect", "session"),
)
def test_no_event_is_skipped(hasty: tuple[Place, Postgres], way: str) -> None:
    """Guards G10: after four kills, 447 of 2,989 events were skipped without a trace."""
    place, server = hasty
    place.load(EVENTS)
    dsn = place.dsn
    ways: dict[str, dict[str, Any]] = {
        "connect": {"connect": lambda: psycopg.connect(dsn)},
        "session": {"session": _sessions(dsn)},
        "failing": {"retry_seconds": 300},
    }
    consumer: Consumer = place.bare(**ways.get(way, {}))

    @consumer.on("order.placed", batch=10 if way == "in batches" else None)
    def handle(given: Any, transaction: Any) -> None:
        if way == "failing":
            raise ValueError("no")
        connection = transaction.connection().connection.dbapi_connection if way == "session" else transaction
        for event in given if isinstance(given, list) else [given]:
            _handle(event, connection)

    with running(consumer) as run:
        _kill(place, server)
        run.end()
    if way == "failing":
        assert place.inbox() == {"waiting": EVENTS}
    else:
        assert place.value("SELECT count(DISTINCT event_id) FROM effects") == place.effects() == EVENTS


def _sessions(dsn: str) -> Any:
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=sqlalchemy.NullPool
    )
    return orm.sessionmaker(engine)


def test_no_received_event_is_skipped(hasty: tuple[Place, Postgres]) -> None:
    place, server = hasty
    place.load(EVENTS)
    with at_work(place.consumer(), "receive") as run:
        _kill(place, server)
        run.end()
    assert place.inbox() == {"waiting": EVENTS}


@pytest.mark.extended
@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
def test_the_same_with_each_driver(hasty: tuple[Place, Postgres], driver: str) -> None:
    place, server = hasty
    place.load(EVENTS)

    async def scenario() -> None:
        async with test_async.running(test_async.consumer(place, driver).run):
            await test_async.until(lambda: place.uncommitted() == 0, "all offsets")
            # In this thread: the server ends with the thread that has started it.
            server.kill()
            server.start()

    asyncio.run(scenario())
    assert place.value("SELECT count(DISTINCT event_id) FROM effects") == place.effects() == EVENTS


def test_a_handler_in_another_language(place: Place) -> None:
    with psycopg.connect(place.dsn) as connection:
        for given, after in (("off", "on"), ("local", "on"), ("remote_apply", "remote_apply")):
            connection.execute(f"SET LOCAL synchronous_commit = {given}".encode())
            connection.execute("SELECT processed_mark(%s, 'billing')", [uuid7()])
            assert connection.execute("SHOW synchronous_commit").fetchone() == (after,)
            connection.rollback()


@pytest.mark.parametrize(
    ("given", "after"), [("off", "on"), ("local", "on"), ("remote_apply", "remote_apply")]
)
def test_the_sessions_of_the_package(place: Place, given: str, after: str) -> None:
    """Guards against a slot, a connector or a file that is gone, while the rows about it are forgotten."""
    dsn = psycopg.conninfo.make_conninfo(place.dsn, options=f"-c synchronous_commit={given}")
    with connect(load_settings(dsn=dsn), name="test") as connection:
        assert connection.execute("SHOW synchronous_commit").fetchone() == (after,)
