"""A connection that is lost before the handler is called costs no attempt; one that is lost in it does."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import Counts, Event
from tests.conftest import either, wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, at_work, effect, running, uuid7
from tests.history.proxy import Proxy

Connection = psycopg.Connection[Any]
# Statements that wait for a lock: those that begin an attempt, and the one that parks an event.
RECORD = "INSERT ON processed_events FOR EACH ROW"
FINISH = "UPDATE ON inbox FOR EACH ROW WHEN (NEW.state = 'processed')"
RECEIVE = "INSERT ON inbox FOR EACH ROW"
_WAIT = """
CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM pg_advisory_xact_lock(1);
    RETURN NEW;
END $$;
CREATE TRIGGER wait BEFORE """
_END_WHO_WAITS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event = 'advisory'"""


class Lock:
    """What a statement of the consumer waits for."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._holder = psycopg.connect(place.dsn, autocommit=True)

    def hold(self, statement: str) -> None:
        self._place.rows(f"{_WAIT}{statement} EXECUTE FUNCTION wait()")
        self._holder.execute("SELECT pg_advisory_lock(1)")

    def cut(self) -> bool:
        """Terminate the connection of the waiting session; return whether there was one."""
        if not self._place.rows(_END_WHO_WAITS):
            return False
        self._holder.execute("SELECT pg_advisory_unlock(1)")
        return True

    def close(self) -> None:
        self._holder.close()


@pytest.fixture
def lock(place: Place) -> Iterator[Lock]:
    made = Lock(place)
    yield made
    made.close()


@pytest.mark.parametrize("batch", either(None, 10))
def test_an_event_has_all_its_attempts(place: Place, lock: Lock, batch: int | None) -> None:
    """Guards against dead letters made by a database that is restarted."""
    place.send(uuid7(), uuid7(), keys=1)
    consumer = place.bare(max_attempts=1)

    @consumer.on("order.placed", batch=batch)
    def handle(events: Any, connection: Connection) -> None:
        for event in events if batch else [events]:
            effect(event, connection)

    lock.hold(RECORD)
    with running(consumer) as run:
        wait_until(lock.cut, what="an attempt that has begun")
        wait_until(lambda: place.effects() == 2, what="both effects")
        assert run.end() == Counts(handled=2)
    assert place.inbox() == {}


@pytest.mark.parametrize("way", either({}, {"per_transaction": 8}, {"batch": 8}), ids=str)
def test_a_commit_without_an_answer_is_found(place: Place, way: dict[str, Any]) -> None:
    """Guards against events that are handled again, one by one, although their transaction is committed."""
    place.load(8, keys=1)
    with Proxy(int(psycopg.conninfo.conninfo_to_dict(place.dsn)["port"] or 0)) as proxy:
        there = psycopg.conninfo.make_conninfo(place.dsn, host="127.0.0.1", port=proxy.port)
        consumer = place.bare(connect=lambda: psycopg.connect(there))
        lost = threading.Event()

        @consumer.on("order.placed", **way)
        def handle(events: Any, connection: Connection) -> None:
            for event in events if "batch" in way else [events]:
                effect(event, connection)
                if event.payload["n"] == 7 and not lost.is_set():
                    lost.set()
                    proxy.swallow_answers()

        with running(consumer) as run:
            wait_until(lambda: place.effects() == 8, what="a commit")
            proxy.cut()
            proxy.heal()
            wait_until(lambda: place.uncommitted() == 0, what="all offsets")
            counts = run.end()
    assert (place.effects(), place.inbox()) == (8, {})
    assert counts.handled + counts.duplicates == 8
    assert counts.duplicates > 0


class Cutter:
    """A cache that knows nothing; after each event it cuts the connection to the database."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self.cuts = 0

    def known(self, source: str, ids: object) -> set[uuid.UUID]:
        return set()

    def remember(self, source: str, ids: object) -> None:
        self.cuts += self._proxy.cut()


def test_a_connection_lost_between_two_events_costs_no_attempt(place: Place) -> None:
    """Guards against a dead letter of an event that was recorded in one message with the commit before it."""
    place.load(4, keys=1)
    with Proxy(int(psycopg.conninfo.conninfo_to_dict(place.dsn)["port"] or 0)) as proxy:
        there = psycopg.conninfo.make_conninfo(place.dsn, host="127.0.0.1", port=proxy.port)
        cutter = Cutter(proxy)
        consumer = place.consumer(connect=lambda: psycopg.connect(there), max_attempts=1, cache=cutter)
        with running(consumer) as run:
            wait_until(lambda: place.effects() == 4, what="all effects")
            assert run.end() == Counts(handled=4)
    assert (place.inbox(), cutter.cuts) == ({}, 4)


def test_a_message_of_the_inbox_has_all_its_attempts(place: Place, lock: Lock) -> None:
    place.send(uuid7())
    consumer = place.consumer(max_attempts=2, retry_seconds=300)
    with at_work(consumer, "receive"):
        wait_until(lambda: place.uncommitted() == 0, what="its offset")
    lock.hold(FINISH)
    with at_work(consumer, "drain") as run:
        wait_until(lock.cut, what="an attempt that has begun")
        wait_until(lambda: place.effects() == 1, what="its effect")
        assert run.end() == Counts(handled=1)
    assert place.rows("SELECT state, attempts FROM inbox") == [("processed", 1)]


@pytest.mark.extended
@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
def test_the_same_with_each_driver(place: Place, lock: Lock, driver: str) -> None:
    place.send(uuid7())
    lock.hold(RECORD)

    async def scenario() -> None:
        consumer = test_async.consumer(place, driver, max_attempts=1)
        async with test_async.running(consumer.run) as counts:
            await test_async.until(lock.cut, "an attempt that has begun")
            await test_async.until(lambda: place.effects() == 1, "its effect")
        assert counts == [Counts(handled=1)]

    asyncio.run(scenario())


@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
def test_an_event_is_still_parked(place: Place, lock: Lock, driver: str) -> None:
    """Guards against a consumer that ends when the database is restarted, as if that refused it."""
    place.send(uuid7())
    lock.hold(RECEIVE)

    async def refuse(event: Event, transaction: Any) -> None:
        raise ValueError("no")

    async def scenario() -> None:
        consumer = test_async.consumer(place, driver, refuse, retry_seconds=300)
        async with test_async.running(consumer.run) as counts:
            await test_async.until(lock.cut, "an event that is parked")
            await test_async.until(lambda: place.inbox() == {"waiting": 1}, "its row")
        assert counts == [Counts(received=1, failures=1)]

    asyncio.run(scenario())


def test_a_consumer_that_waits_for_the_database_ends(place: Place, lock: Lock) -> None:
    """Guards against an event that is parked, or waited for, while the service is being stopped."""
    place.send(uuid7())
    calls: list[int] = []

    def connect() -> Connection:
        calls.append(1)
        # Only its first connection is let in.
        if len(calls) > 1:
            raise psycopg.OperationalError("no entry")
        return psycopg.connect(place.dsn)

    lock.hold(RECORD)
    with running(place.consumer(connect=connect)) as run:
        wait_until(lock.cut, what="an attempt that has begun")
        wait_until(lambda: len(calls) > 1, what="another connection")
        assert run.end() == Counts()
    assert (place.uncommitted(), place.inbox()) == (1, {})


@pytest.mark.extended
def test_an_event_whose_handler_ends_its_connection_is_found(place: Place) -> None:
    """Guards against an event that crashes the database's process again and again."""
    place.send(uuid7(), uuid7(), keys=1)
    consumer = place.bare(max_attempts=2, retry_seconds=0.05)

    @consumer.on("order.placed")
    def handle(event: Event, connection: Connection) -> None:
        if event.payload["n"] == 0:
            connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        effect(event, connection)

    with running(consumer) as run:
        wait_until(lambda: place.effects() == 1, what="the other one's effect")
        assert run.end().dead_letters == 1
