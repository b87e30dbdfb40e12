"""The cache in front of what was handled, with a real Redis: it hints, and never hurts.

The last tests have a consumer that asks it.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.redis_server import PROGRAM, RedisServer
from outbox_pipelines.consumer.cache import RedisCache
from outbox_pipelines.consumer.psycopg_transactions import Connections
from outbox_pipelines.errors import SetupError
from tests.conftest import wait_until
from tests.consumer.place import Place, running, uuid7

if PROGRAM is None and os.environ.get("CI") != "true":
    pytest.skip("redis-server is not installed: apt-get install redis-server", allow_module_level=True)

BILLING = "billing"
PAUSE = 0.3


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(shared: RedisServer) -> Iterator[RedisServer]:
    """At work and empty; a test may do to it what it likes."""
    with shared.client() as client:
        client.flushall()
        yield shared
        shared.thaw() if shared.running() else shared.start()
        client.config_set("maxmemory", 0)


@pytest.fixture
def cache(server: RedisServer) -> RedisCache:
    return RedisCache.at(server.url, seconds=60, timeout=0.5, pause_seconds=PAUSE)


def _recalls(cache: RedisCache, events: list[uuid.UUID]) -> bool:
    cache.remember(BILLING, events)
    return bool(cache.known(BILLING, events))


def ids(count: int) -> list[uuid.UUID]:
    return [uuid7() for _ in range(count)]


def test_it_knows_only_what_it_was_given(cache: RedisCache) -> None:
    events = ids(1000)
    cache.remember(BILLING, events[::2])
    assert cache.known(BILLING, events) == set(events[::2])
    assert cache.known(BILLING, events[1::2]) == set()
    assert cache.known(BILLING, []) == set()
    cache.remember(BILLING, [])


def test_sources_and_prefixes_are_distinguished(server: RedisServer, cache: RedisCache) -> None:
    """Guards against a consumer that passes over what another one handled."""
    events = ids(3)
    cache.remember(BILLING, events)
    assert cache.known("shipping", events) == set()
    other = RedisCache.at(server.url, seconds=60, timeout=0.5, prefix="other:")
    assert other.known(BILLING, events) == set()


@pytest.mark.extended
def test_it_forgets_after_its_seconds(server: RedisServer) -> None:
    """Guards against a Redis that grows without limit."""
    cache = RedisCache.at(server.url, seconds=2, timeout=0.5)
    events = ids(2)
    cache.remember(BILLING, events)
    assert cache.known(BILLING, events) == set(events)
    wait_until(lambda: cache.known(BILLING, events) == set(), what="it to forget")


def test_whatever_is_at_a_key_it_names_no_other_event(server: RedisServer, cache: RedisCache) -> None:
    """Guards against answers that are taken for more than they say: keys that others wrote, of any kind."""
    lie, odd, none = ids(3)
    with server.client() as client:
        client.set(b"outbox-handled:billing:" + lie.bytes, "whatever")
        client.rpush(b"outbox-handled:billing:" + odd.bytes, "a", "list")
    assert cache.known(BILLING, [none, lie, odd]) == {lie}
    cache.remember(BILLING, [odd])
    assert cache.known(BILLING, [odd]) == {odd}


def test_data_that_is_lost_is_only_forgotten(server: RedisServer, cache: RedisCache) -> None:
    events = ids(3)
    cache.remember(BILLING, events)
    with server.client() as client:
        client.flushall()
    assert cache.known(BILLING, events) == set()
    cache.remember(BILLING, events)
    assert cache.known(BILLING, events) == set(events)


def test_a_killed_server_is_reported_once_and_is_used_again(
    server: RedisServer, cache: RedisCache, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against an outage that ends the consumer, fills its log, or never ends."""
    caplog.set_level(logging.INFO, "outbox_pipelines.consumer.cache")
    events = ids(3)
    cache.remember(BILLING, events)
    server.kill()
    until = time.monotonic() + 3 * PAUSE
    while time.monotonic() < until:
        assert cache.known(BILLING, events) == set()
        cache.remember(BILLING, events)
    assert [record.message.partition(";")[0] for record in caplog.records] == ["Redis does not work"]
    server.start()
    wait_until(lambda: _recalls(cache, events), what="it")
    assert cache.known(BILLING, events) == set(events)
    assert [record.message for record in caplog.records[1:]] == ["Redis works again"]


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_an_unavailable_server_costs_next_to_nothing(
    server: RedisServer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a consumer as slow as the timeouts of a cache that it does not need."""
    cache = RedisCache.at(server.url, seconds=60, pause_seconds=600)
    cache.remember(BILLING, ids(1))
    getattr(server, how)()
    tries: list[int] = []
    connect: Any = redis.Connection.connect

    def tried(self: redis.Connection) -> Any:
        tries.append(1)
        return connect(self)

    monkeypatch.setattr(redis.Connection, "connect", tried)
    for event in ids(1000):
        assert cache.known(BILLING, [event]) == set()
        cache.remember(BILLING, [event])
    assert len(tries) <= 2


@pytest.mark.extended
def test_answers_that_come_late_are_not_taken_for_others(server: RedisServer, cache: RedisCache) -> None:
    """Guards against a connection that goes on after a timeout, one answer behind."""
    handled, new = ids(5), ids(5)
    cache.remember(BILLING, handled)
    for _ in range(3):
        server.freeze()
        assert cache.known(BILLING, handled) == set()
        server.thaw()
        wait_until(lambda: cache.known(BILLING, handled), what="it to be asked again")
        assert cache.known(BILLING, new) == set()
        assert cache.known(BILLING, handled) == set(handled)


def test_one_that_is_full_is_no_error(server: RedisServer, cache: RedisCache) -> None:
    """Guards against refusals that are no broken connections."""
    events = ids(3)
    with server.client() as client:
        client.config_set("maxmemory", 1)
        cache.remember(BILLING, events)
        client.config_set("maxmemory", 0)
    wait_until(lambda: _recalls(cache, events), what="it")


def test_an_address_without_a_server(caplog: pytest.LogCaptureFixture) -> None:
    cache = RedisCache.at("redis://no-such-host.invalid:1", seconds=60)
    cache.remember(BILLING, ids(1))
    assert cache.known(BILLING, ids(1)) == set()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"socket_timeout": 0.1, "socket_connect_timeout": 0.1},
        {"socket_timeout": 0.1, "socket_connect_timeout": None, "retry": Retry(NoBackoff(), 0)},
        {"socket_timeout": 2, "socket_connect_timeout": 0.1, "retry": Retry(NoBackoff(), 0)},
    ],
    ids=["as it comes", "retries", "without end", "long"],
)
def test_a_client_that_waits_for_long_is_refused(server: RedisServer, settings: dict[str, object]) -> None:
    """Guards against the client's own settings, with which an absent Redis takes 3 s of each call."""
    with pytest.raises(SetupError, match=r"use RedisCache\.at"):
        RedisCache(redis.Redis(port=server.port, **settings), seconds=60)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="how long an event is cached"):
        RedisCache.at(server.url, seconds=0)
    with pytest.raises(SetupError, match="seconds is inf"):
        RedisCache.at(server.url, seconds=float("inf"))
    with pytest.raises(SetupError, match="the URL of the cache is wrong"):
        RedisCache.at("cache:6379", seconds=60)


def test_a_client_of_ones_own_that_decodes(server: RedisServer) -> None:
    client = redis.Redis(
        port=server.port,
        socket_timeout=0.5,
        socket_connect_timeout=0.5,
        retry=Retry(NoBackoff(), 0),
        decode_responses=True,
    )
    cache = RedisCache(client, seconds=60)
    events = ids(2)
    cache.remember(BILLING, events[:1])
    assert cache.known(BILLING, events) == {events[0]}


def test_a_lie_costs_no_event(place: Place, cache: RedisCache) -> None:
    """Guards against a cache that is trusted blindly: Redis reports all events as handled."""
    events = ids(30)
    cache.remember(BILLING, events)
    place.send(*events)
    with running(place.consumer(cache=cache)) as run:
        wait_until(lambda: place.effects() == 30, what="all effects")
        assert run.end().handled == 30


@pytest.mark.extended
def test_a_cache_that_forgets_or_crashes_doubles_no_effect(
    place: Place, server: RedisServer, cache: RedisCache
) -> None:
    """Guards against a record that is in Redis alone."""
    events = ids(30)
    place.send(*events)
    with running(place.consumer(cache=cache)) as run:
        wait_until(lambda: place.effects() == 30, what="all effects")
        run.end()
    with server.client() as client:
        client.flushall()
    for group, then in ("again", server.kill), ("once more", lambda: None):
        with running(place.consumer(group=group, cache=cache)) as run:
            wait_until(
                partial(lambda group: place.uncommitted(group) == 0, group), what="the end of the topic"
            )
            assert run.end().duplicates == 30
        then()
    assert place.effects() == place.processed() == 30


def test_what_it_knows_is_not_handled_again_but_looked_up(
    place: Place, cache: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a cache that is not queried: a replay begins no transaction for each event."""
    transactions = 0
    begin = Connections.transaction

    def counted(self: Connections) -> object:
        nonlocal transactions
        transactions += 1
        return begin(self)

    place.send(*ids(200))
    with running(place.consumer(cache=cache)) as run:
        wait_until(lambda: place.effects() == 200, what="all effects")
        run.end()
    monkeypatch.setattr(Connections, "transaction", counted)
    with running(place.consumer(group="again", cache=cache)) as run:
        wait_until(lambda: place.uncommitted("again") == 0, what="the end of the topic")
        assert run.end().duplicates == 200
    assert transactions < 60
