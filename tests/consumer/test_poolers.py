"""A pgbouncer between consumers and their database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.consumer import AsyncConsumer, Counts
from tests.conftest import either, wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, effect, running
from tests.pgbouncer import pgbouncer

_END_ALL = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()"""


def _has_effects(place: Place, count: int) -> bool:
    return place.effects() == count


@pytest.mark.parametrize("mode", either("transaction", "session"))
def test_a_pooler_loses_its_server(place: Place, tmp_path: Path, mode: str) -> None:
    """Guards against a consumer that ends with the server's session: a pooler's words are no outage's."""
    with pgbouncer(place.dsn, tmp_path, pool_mode=mode, default_pool_size=20) as dsn:
        consumer = place.bare(connect=lambda: psycopg.connect(dsn, prepare_threshold=None))
        consumer.on("order.placed")(effect)
        with running(consumer) as run:
            for n in range(1, 4):
                place.load(20, first=20 * n)
                wait_until(partial(_has_effects, place, 20 * n), what="the effects")
                place.rows(_END_ALL)
            place.load(20)
            wait_until(lambda: place.effects() == 80, what="the effects after the last loss")
            assert run.end().handled == 80
    assert place.inbox() == {}


@contextmanager
def _sharing_sessions(place: Place, folder: Path) -> Iterator[str]:
    """A pool of several sessions, of which each transaction gets the next."""
    with pgbouncer(place.dsn, folder, pool_mode="transaction", server_round_robin=1) as dsn:
        clients = [psycopg.connect(dsn) for _ in range(3)]
        for client in clients:
            client.execute("SELECT 1")
        for client in clients:
            # First: the session of one that leaves in a transaction is closed.
            client.commit()
            client.close()
        yield dsn


def test_nothing_is_prepared_in_others_sessions(place: Place, tmp_path: Path) -> None:
    """Guards against a statement that is missing, or another client's, where transactions change sessions."""
    place.load(100)
    with _sharing_sessions(place, tmp_path) as dsn:
        consumer = place.bare(dsn=dsn)
        consumer.on("order.placed")(effect)
        with running(consumer) as run:
            wait_until(lambda: place.uncommitted() == 0, what="all offsets")
            assert run.end() == Counts(handled=100)
    assert place.inbox() == {}


@pytest.mark.extended
def test_the_same_in_an_event_loop(place: Place, tmp_path: Path) -> None:
    place.load(100)

    async def scenario(dsn: str) -> None:
        consumer = place.bare(kind=AsyncConsumer, dsn=dsn)
        consumer.on("order.placed")(test_async.effect)
        async with test_async.running(consumer.run):
            await test_async.until(lambda: place.uncommitted() == 0)

    with _sharing_sessions(place, tmp_path) as dsn:
        asyncio.run(scenario(dsn))
    assert (place.effects(), place.inbox()) == (100, {})
