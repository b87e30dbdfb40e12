"""A consumer that starts while a server is unavailable: it waits, unless waiting does not help."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import AsyncConsumer
from outbox_pipelines.errors import RefusedError, UnavailableError
from tests.conftest import patience, wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, at_work, running, uuid7
from tests.history.proxy import Proxy


def _of(server: str, place: Place, port: int) -> Place:
    if server == "Kafka":
        return replace(place, kafka=f"127.0.0.1:{port}")
    return replace(place, dsn=psycopg.conninfo.make_conninfo(place.dsn, host="127.0.0.1", port=port))


@pytest.fixture(params=["PostgreSQL", "Kafka"])
def unavailable(request: pytest.FixtureRequest, place: Place) -> Iterator[tuple[Proxy, Place]]:
    """A server that refuses connections, and the place as it is seen through it."""
    if request.param == "Kafka":
        port = int(place.kafka.rpartition(":")[2])
    else:
        port = int(str(psycopg.conninfo.conninfo_to_dict(place.dsn)["port"]))
    with Proxy(port) as proxy:
        proxy.refuse()
        yield proxy, _of(request.param, place, proxy.port)
        proxy.heal()


def _is_refused(proxy: Proxy) -> None:
    wait_until(lambda: proxy.refused >= 4, what="some attempts to connect")


def test_it_waits(place: Place, unavailable: tuple[Proxy, Place], caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a service that its supervisor starts again minutes after the server is back."""
    proxy, there = unavailable
    place.send(uuid7())
    with caplog.at_level(logging.WARNING), running(there.consumer()) as run:
        _is_refused(proxy)
        proxy.heal()
        wait_until(lambda: place.effects() == 1, what="its effect")
        assert run.end().handled == 1
    said = [each.getMessage() for each in caplog.records if "unavailable" in each.getMessage()]
    assert len(said) == 1, said


@pytest.mark.extended
@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
def test_each_driver_waits(place: Place, unavailable: tuple[Proxy, Place], driver: str) -> None:
    proxy, there = unavailable

    async def scenario() -> None:
        place.send(uuid7())
        async with test_async.running(test_async.consumer(there, driver).run) as counts:
            await asyncio.to_thread(_is_refused, proxy)
            proxy.heal()
            await test_async.until(lambda: place.effects() == 1, "its effect")
        assert counts[0].handled == 1

    asyncio.run(scenario())


@pytest.mark.extended
@pytest.mark.parametrize("part", ["receive", "drain"])
def test_the_halves_wait(place: Place, unavailable: tuple[Proxy, Place], part: str) -> None:
    proxy, there = unavailable
    if part == "drain" and there.dsn == place.dsn:
        pytest.skip("needs no Kafka")
    place.send(uuid7())
    with at_work(there.consumer(), part) as run:
        _is_refused(proxy)
        proxy.heal()
        if part == "receive":
            wait_until(lambda: place.inbox() == {"waiting": 1}, what="an event in the inbox")
        run.end()


def test_a_stop_ends_the_wait(unavailable: tuple[Proxy, Place]) -> None:
    proxy, there = unavailable
    with running(there.consumer()) as run:
        _is_refused(proxy)
        began = time.monotonic()
        assert run.end().handled == 0
    assert time.monotonic() - began < patience(30)


@pytest.mark.parametrize("unavailable", ["PostgreSQL"], indirect=True)
def test_runs_that_end_do_not_wait(unavailable: tuple[Proxy, Place]) -> None:
    """Guards against a job, or a question about the backlog, that waits instead of a report."""
    _, there = unavailable
    with pytest.raises(UnavailableError, match="the consumer billing cannot use its database"):
        there.consumer().drain(until_empty=True)
    with pytest.raises(UnavailableError):
        there.consumer().backlog()
    made: AsyncConsumer = there.bare(kind=AsyncConsumer)
    made.on("order.placed")(test_async.effect)
    with pytest.raises(UnavailableError):
        asyncio.run(made.drain(until_empty=True))


@pytest.mark.parametrize("wrong", [{"dbname": "absent"}, {"user": "absent"}])
@pytest.mark.parametrize("driver", ["blocking", *test_async.DRIVERS])
def test_what_waiting_does_not_help(place: Place, wrong: dict[str, str], driver: str) -> None:
    """Guards against a service with a wrong setting that waits without an error."""
    there = replace(place, dsn=psycopg.conninfo.make_conninfo(place.dsn, **wrong))
    with pytest.raises(RefusedError, match="absent"):
        _run(there, driver)


def _run(there: Place, driver: str) -> None:
    if driver == "blocking":
        there.consumer().run()
    else:
        asyncio.run(test_async.consumer(there, driver).run())


@pytest.mark.extended
def test_a_login_that_is_refused_later_is_waited_for(place: Place) -> None:
    """Guards against a running consumer that ends while its password is changed."""
    calls: list[int] = []

    def connect() -> Any:
        calls.append(1)
        if 1 < len(calls) < 5:
            raise psycopg.OperationalError('password authentication failed for user "app"')
        return psycopg.connect(place.dsn, application_name=place.topic)

    with running(place.consumer(connect=connect)) as run:
        place.send(uuid7())
        wait_until(lambda: place.effects() == 1, what="an effect")
        place.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", place.topic
        )
        place.send(uuid7())
        wait_until(lambda: place.effects() == 2, what="the next effect")
        run.end()
    assert len(calls) >= 5
