"""The asynchronous consumer: psycopg, and SQLAlchemy with psycopg and asyncpg."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from threading import current_thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
import sqlalchemy
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from outbox_pipelines.consumer import AsyncConsumer, Counts, Event
from outbox_pipelines.consumer.kafka_clients import DeadLetterTopic
from outbox_pipelines.consumer.membership import Member
from outbox_pipelines.errors import SetupError
from tests import forks
from tests.conftest import clean_environment, either, wait_until
from tests.consumer.place import Place, uuid7

INSERT = "INSERT INTO effects (event_id, key, n) VALUES ({})"
DRIVERS = ["connection", "psycopg", "asyncpg"]
EITHER_DRIVER = either("asyncpg", "connection", "psycopg")


def database(place: Place, driver: str, **engine: Any) -> dict[str, Any]:
    """What the consumer is given."""
    if driver == "connection":
        return {"dsn": place.dsn}
    parts = conninfo_to_dict(place.dsn)
    address = f"{parts['user']}@{parts['host']}:{parts['port']}/{parts['dbname']}"
    if "passfile" in parts:
        address += f"?passfile={parts['passfile']}"
    made = create_async_engine(f"postgresql+{driver}://{address}", poolclass=sqlalchemy.NullPool, **engine)
    return {"session": async_sessionmaker(made)}


async def effect(event: Event, transaction: Any) -> None:
    values = [event.id, event.aggregate_id, (event.payload or {}).get("n")]
    if isinstance(transaction, psycopg.AsyncConnection):
        await transaction.execute(INSERT.format("%s, %s, %s").encode(), values)
    else:
        given = dict(zip(("id", "key", "n"), values, strict=True))
        await transaction.execute(text(INSERT.format(":id, :key, :n")), given)


async def run_sql(transaction: Any, query: str) -> None:
    await transaction.execute(
        query.encode() if isinstance(transaction, psycopg.AsyncConnection) else text(query)
    )


def consumer(place: Place, driver: str, handler: Any = effect, **more: Any) -> AsyncConsumer:
    made = place.bare(kind=AsyncConsumer, **database(place, driver), **more)
    made.on("order.placed")(handler)
    return made


async def until(condition: Callable[[], object], what: str = "condition", seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


@asynccontextmanager
async def running(run: Callable[[asyncio.Event], Awaitable[Counts]]) -> AsyncIterator[list[Counts]]:
    """What it counted is there when the block has ended."""
    stop = asyncio.Event()
    task = asyncio.ensure_future(run(stop))
    counts: list[Counts] = []
    try:
        yield counts
    finally:
        stop.set()
        counts.append(await asyncio.wait_for(task, 120))


@pytest.mark.parametrize("driver", EITHER_DRIVER)
def test_events_are_handled_once(place: Place, driver: str) -> None:
    """Guards against a record in another transaction than the handler's, with each of the drivers."""

    async def scenario() -> None:
        place.load(50)
        for group in "billing", "again":
            async with running(consumer(place, driver, group=group).run) as counts:
                await until(partial(lambda group: place.uncommitted(group) == 0, group), "all offsets")
            assert counts == [Counts(handled=50) if group == "billing" else Counts(duplicates=50)]

    asyncio.run(scenario())
    assert place.value("SELECT count(DISTINCT event_id) FROM effects") == place.effects() == 50


@pytest.mark.parametrize("driver", EITHER_DRIVER)
def test_a_failed_event_leaves_nothing_and_comes_again_in_order(place: Place, driver: str) -> None:
    tries: list[int] = []

    async def fails_once(event: Event, transaction: Any) -> None:
        await effect(event, transaction)
        tries.append(event.payload["n"])
        if tries.count(3) == 1 and tries[-1] == 3:
            raise ValueError("no such customer")

    async def scenario() -> None:
        place.load(10, keys=1)
        async with running(consumer(place, driver, fails_once).run):
            await until(lambda: place.effects() == 10, "all effects")

    asyncio.run(scenario())
    assert place.rows("SELECT array_agg(n ORDER BY seq) FROM effects") == [(list(range(10)),)]


@pytest.mark.extended
@pytest.mark.parametrize("driver", EITHER_DRIVER)
@pytest.mark.parametrize("how", ["passed over", "rolled back"])
def test_a_transaction_that_was_spoilt_is_not_committed_as_nothing(
    place: Place, driver: str, how: str
) -> None:
    """Guards against a lost event: the COMMIT of an aborted transaction is answered without an error."""

    async def spoils(event: Event, transaction: Any) -> None:
        await effect(event, transaction)
        if how == "rolled back":
            if driver == "connection":
                await run_sql(transaction, "ROLLBACK")
            else:
                await transaction.rollback()
            return
        with contextlib.suppress(psycopg.Error, sqlalchemy.exc.DBAPIError):
            await run_sql(transaction, "SELECT 1 / 0")

    async def scenario() -> None:
        place.send(uuid7())
        async with running(consumer(place, driver, spoils, retry_seconds=300).run) as counts:
            await until(lambda: place.uncommitted() == 0, "its offset")
        assert counts == [Counts(received=1, failures=1)]

    asyncio.run(scenario())
    [(error,)] = place.rows("SELECT last_error FROM inbox WHERE state = 'waiting'")
    assert re.search("error was ignored" if how == "passed over" else "handler ended the trans", error)
    assert place.effects() == 0


@pytest.mark.parametrize("driver", EITHER_DRIVER)
def test_receive_and_drain(place: Place, driver: str) -> None:
    async def scenario() -> None:
        place.load(30)
        async with running(consumer(place, driver).receive):
            await until(lambda: place.uncommitted() == 0, "all offsets")
        assert place.inbox() == {"waiting": 30}
        assert await consumer(place, driver).drain(until_empty=True) == Counts(handled=30)

    asyncio.run(scenario())
    assert place.value("SELECT count(DISTINCT event_id) FROM effects") == 30


@pytest.mark.parametrize("driver", EITHER_DRIVER)
def test_a_message_that_got_its_id_by_a_repair_is_handled_once(place: Place, driver: str) -> None:
    """Guards against a new id that one of the drivers does not record in the handler's transaction."""

    def send() -> None:
        for event_id in ids:
            place.put('{"n": 1}', event_id=event_id, event_type="order.placed")

    async def scenario() -> None:
        send()
        async with running(consumer(place, driver).run):
            await until(lambda: place.inbox() == {"failed": 2}, "dead letters")
        place.rows("UPDATE inbox SET state = 'waiting'")
        names = {"id": "event-id"}
        repaired = consumer(place, driver, header_names=names)
        assert await repaired.drain(until_empty=True) == Counts(handled=2)
        send()
        async with running(consumer(place, driver, header_names=names).run) as counts:
            await until(lambda: place.uncommitted() == 0, "all offsets")
        assert counts == [Counts(duplicates=2)]

    # One with a digest of its content, and one without.
    ids = ["1", str(uuid7())]
    asyncio.run(scenario())
    assert place.effects() == 2


@pytest.mark.parametrize("driver", EITHER_DRIVER)
@pytest.mark.parametrize("is_caught", [False, True])
def test_a_handler_that_hangs_is_interrupted(place: Place, driver: str, is_caught: bool) -> None:
    """Guards against an event that counts as handled because its handler catches the cancellation."""

    async def hangs(event: Event, transaction: Any) -> None:
        await effect(event, transaction)
        if event.payload["n"] == 1 and is_caught:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)
        elif event.payload["n"] == 1:
            await run_sql(transaction, "SELECT pg_sleep(600)")

    async def scenario() -> None:
        place.load(3, keys=3)
        made = consumer(place, driver, hangs, max_attempts=2, retry_seconds=0.1, handler_seconds=0.5)
        async with running(made.run):
            await until(lambda: place.inbox().get("failed") and place.effects() == 2, "a dead letter")

    asyncio.run(scenario())
    [(error,)] = place.rows("SELECT last_error FROM inbox WHERE state = 'failed'")
    assert "took longer than 0.5 s and was interrupted" in error


def test_batches(place: Place) -> None:
    sizes: list[int] = []

    async def many(events: list[Event], transaction: Any) -> None:
        sizes.append(len(events))
        for event in events:
            await effect(event, transaction)

    async def scenario() -> None:
        place.load(500)
        made = place.bare(kind=AsyncConsumer, **database(place, "connection"))
        made.on("order.placed", batch=50)(many)
        async with running(made.run) as counts:
            await until(lambda: place.uncommitted() == 0, "all offsets")
        assert counts == [Counts(handled=500)]

    asyncio.run(scenario())
    assert max(sizes) == 50
    assert place.effects() == 500


def test_the_loop_goes_on_beside_it(place: Place) -> None:
    """Guards against a consumer that holds up the rest of a service while it waits for events."""

    async def scenario() -> None:
        waits: list[float] = []
        async with running(consumer(place, "connection").run):
            connected = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name <> 'tests' AND state = 'idle'"
            )
            await until(lambda: place.value(connected))
            for _ in range(100):
                before = time.monotonic()
                await asyncio.sleep(0.001)
                waits.append(time.monotonic() - before)
        # If a poll blocked, each of them would take its 0.2 s; a busy machine delays some.
        assert statistics.median(waits) < 0.1

    asyncio.run(scenario())


def test_what_blocks_has_a_thread(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a service that stands still while a copy, Redis or a rebalance takes its seconds."""
    threads: dict[str, set[str]] = {}

    def noted(name: str, do: Callable[..., Any]) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            threads.setdefault(name, set()).add(current_thread().name)
            return do(*given, **named)

        return call

    async def refuses(event: Event, transaction: Any) -> None:
        if event.payload["n"] == 1:
            raise ValueError("no such customer")

    async def scenario() -> None:
        monkeypatch.setattr(DeadLetterTopic, "send", noted("send", Mock()))
        monkeypatch.setattr(Member, "poll", noted("poll", Member.poll))
        known = noted("known", lambda source, ids: set())
        cache: Any = SimpleNamespace(known=known, remember=noted("remember", Mock()))
        made = consumer(place, "connection", refuses, max_attempts=1, dead_letter_topic="dead", cache=cache)
        async with running(made.run):
            place.load(2)
            await until(lambda: {"send", "known", "remember"} <= threads.keys(), "all calls")

    asyncio.run(scenario())
    assert current_thread().name not in set().union(*threads.values()), threads


def test_a_cancelled_consumer_leaves_the_group_and_nothing_half_done(place: Place) -> None:
    """Guards against a web service whose shutdown cuts an event in two."""
    at_it = asyncio.Event()

    async def slow(event: Event, transaction: Any) -> None:
        await effect(event, transaction)
        at_it.set()
        await asyncio.sleep(600)

    async def scenario() -> None:
        place.send(uuid7())
        task = asyncio.ensure_future(consumer(place, "connection", slow).run())
        await asyncio.wait_for(at_it.wait(), 120)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with running(consumer(place, "connection").run):
            await until(lambda: place.effects() == 1, "its effect")

    asyncio.run(scenario())


def test_sigterm_ends_it_in_order(place: Place) -> None:
    place.load(1000)
    command = [sys.executable, "-m", "tests.consumer.async_service", place.dsn, place.kafka, place.topic]
    process: forks.Popen[str] = forks.Popen(
        command, env=clean_environment(), stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: place.effects() >= 20, what="some effects")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert (process.returncode, output) == (0, f"{Counts(handled=place.effects())}\n")
    assert place.uncommitted() == 1000 - place.effects()


def test_a_handler_of_the_other_kind_is_refused(place: Place) -> None:
    with pytest.raises(SetupError, match="define it without async, or use AsyncConsumer"):
        place.bare().on("order.placed")(effect)
    with pytest.raises(SetupError, match="define it with async"):
        place.bare(kind=AsyncConsumer).on("order.placed")(lambda event, connection: None)
