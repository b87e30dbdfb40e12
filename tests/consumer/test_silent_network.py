"""A network that swallows bytes in silence: the kernel notices it, and a stop ends in spite of it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from contextlib import closing
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm

from outbox_pipelines.consumer import AsyncConsumer, Consumer, limits, psycopg_transactions
from outbox_pipelines.database import reading_dsn
from outbox_pipelines.errors import UnavailableError
from tests.conftest import either, patience, wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, effect, running, uuid7
from tests.history.proxy import Proxy


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PATIENCE", 1.0)


def _through(dsn: str, network: Proxy) -> str:
    return psycopg.conninfo.make_conninfo(dsn, host="127.0.0.1", port=network.port)


def _port(dsn: str) -> int:
    return int(psycopg.conninfo.conninfo_to_dict(dsn)["port"])  # type: ignore[arg-type]


def _is_stuck(consumer: Any) -> bool:
    """Whether the consumer waits: one that has nothing to do polls five times a second."""
    return bool(time.monotonic() - consumer.figures.progress_at > 2)


@pytest.mark.parametrize("way", either("dsn", "connect", "session"))
def test_a_stop_ends(place: Place, way: str) -> None:
    """Guards against a consumer that ignores SIGTERM, since it waits for an answer without end."""
    with Proxy(_port(place.dsn)) as network:
        dsn = _through(place.dsn, network)
        engine = sqlalchemy.create_engine(
            "postgresql+psycopg://", creator=lambda: psycopg.connect(dsn, connect_timeout=2)
        )
        ways: dict[str, dict[str, Any]] = {
            "dsn": {"dsn": dsn},
            "connect": {"connect": lambda: psycopg.connect(dsn, connect_timeout=2)},
            "session": {"session": orm.sessionmaker(engine)},
        }
        consumer = place.bare(**ways[way])
        consumer.on("order.placed")(
            lambda event, it: effect(
                event, it.connection().connection.dbapi_connection if way == "session" else it
            )
        )
        with running(consumer) as run:
            place.send(uuid7())
            wait_until(lambda: place.effects() == 1, what="an effect")
            _swallow(place, network, consumer)
            run.stop.set()
            run.thread.join(60)
            assert not run.thread.is_alive()
        network.heal()


def _swallow(place: Place, network: Proxy, consumer: Any) -> None:
    # The answers alone: the server must do what it is asked for, or its session would keep the event's row.
    network.swallow_answers()
    place.send(uuid7())
    wait_until(lambda: _is_stuck(consumer), what="a consumer that waits")


@pytest.mark.extended
@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
def test_the_same_with_each_driver(place: Place, driver: str) -> None:
    with Proxy(_port(place.dsn)) as network:
        there = Place(_through(place.dsn, network), place.kafka, place.topic)

        async def scenario() -> None:
            timeout = {"timeout" if driver == "asyncpg" else "connect_timeout": 2}
            database = test_async.database(there, driver, connect_args=timeout)
            consumer = place.bare(kind=AsyncConsumer, **database)
            consumer.on("order.placed")(test_async.effect)
            async with test_async.running(consumer.run):
                place.send(uuid7())
                await test_async.until(lambda: place.effects() == 1, "an effect")
                await asyncio.to_thread(_swallow, place, network, consumer)

        asyncio.run(asyncio.wait_for(scenario(), 300))
        network.heal()


@pytest.mark.extended
def test_a_handler_has_its_time_and_no_more(place: Place) -> None:
    """Guards against a statement of a handler that is cut too early, or never outside of the main thread."""
    with Proxy(_port(place.dsn)) as network:
        consumer = place.bare(dsn=_through(place.dsn, network), handler_seconds=4, max_attempts=1)
        has_begun = threading.Event()

        @consumer.on("order.placed")
        def handle(_event: Any, connection: Any) -> None:
            connection.execute("SELECT 1")
            network.swallow_answers()
            has_begun.set()
            connection.execute("SELECT 2")

        with running(consumer) as run:
            place.send(uuid7())
            wait_until(has_begun.is_set, what="a handler at work")
            began = time.monotonic()
            run.stop.set()
            run.thread.join(60)
            assert not run.thread.is_alive()
            assert time.monotonic() - began > 3
        network.heal()


OPTIONS = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 2,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 30_000,
}


def _options(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any],
) -> dict[tuple[int, int], int]:
    with closing(socket.socket(fileno=os.dup(connection.fileno()))) as its:
        return {each: its.getsockopt(*each) for each in OPTIONS}


def test_the_kernel_notices_a_peer_that_vanished(place: Place) -> None:
    """Guards against a firewall that drops a connection: five events were unhandled after 400 s."""
    with psycopg_transactions.dsn(place.dsn, "billing")() as connection:
        assert _options(connection) == OPTIONS
    with psycopg.connect(reading_dsn(place.dsn)) as connection:
        assert _options(connection) == OPTIONS

    async def scenario() -> None:
        async with await psycopg_transactions.async_dsn(place.dsn, "billing")() as connection:
            assert _options(connection) == OPTIONS

    asyncio.run(scenario())


@pytest.mark.extended
def test_a_question_about_the_inbox_ends(place: Place) -> None:
    with Proxy(_port(place.dsn)) as network:
        consumer: Consumer = place.consumer(dsn=_through(place.dsn, network))
        network.swallow()
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="cannot use its database"):
            consumer.backlog()
        assert time.monotonic() - began < patience(30)
        network.heal()
