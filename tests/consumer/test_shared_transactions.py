"""Events that share a transaction, each with a call of its handler."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import AsyncConsumer, Counts, Event
from outbox_pipelines.consumer.items import SECONDS, Pace
from outbox_pipelines.errors import SetupError
from tests.conftest import wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, effect, running, uuid7
from tests.consumer.test_batches import out_of_order

Connection = psycopg.Connection[Any]


def transactions(place: Place) -> int:
    return int(place.value("SELECT count(DISTINCT xmin::text) FROM effects"))


@pytest.fixture
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that does little is no slow one, however slow the machine is."""
    monkeypatch.setattr("outbox_pipelines.consumer.items.SECONDS", 600)
    monkeypatch.setattr("outbox_pipelines.consumer.limits._LONGEST_SHARED", 600)


@pytest.mark.usefixtures("in_no_time")
def test_events_of_several_handlers_share_a_transaction(place: Place) -> None:
    """Guards against transactions that end at each event of another type, or at one without a handler."""
    for n in range(150):
        place.send(uuid7(), type=("order.placed", "order.paid", "order.seen")[n % 3], keys=1)
    for group, counts in (
        ("billing", Counts(handled=100, ignored=50)),
        ("again", Counts(duplicates=100, ignored=50)),
    ):
        consumer = place.bare(group=group)
        consumer.on("order.placed", per_transaction=50)(effect)
        consumer.on("order.paid", per_transaction=40)(lambda event, connection: effect(event, connection))
        with running(consumer) as run:
            wait_until(partial(lambda group: place.uncommitted(group) == 0, group), what="all offsets")
            assert run.end() == counts
    assert place.effects() == 100
    assert 100 / 40 <= transactions(place) <= 100 / 4
    assert out_of_order(place) == {}


@pytest.mark.usefixtures("in_no_time")
def test_one_fails_and_the_others_are_handled(place: Place) -> None:
    """Guards against a poisoned event that takes its neighbors with it, or costs them attempts."""
    place.load(400, keys=10)
    calls: list[int] = []

    def handle(event: Event, connection: Connection) -> None:
        calls.append(event.payload["n"])
        effect(event, connection)
        if event.payload["n"] == 333:
            raise ValueError("no such customer")

    consumer = place.bare(retry_seconds=300)
    consumer.on("order.placed", per_transaction=100)(handle)
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        counts = run.end()
    assert (counts.handled, counts.received, counts.failures) == (393, 7, 1)
    assert place.rows("SELECT attempts, count(*)::int FROM inbox GROUP BY 1 ORDER BY 1") == [(0, 6), (1, 1)]
    assert place.effects() == 393
    assert transactions(place) < 200
    # Together, and alone.
    assert calls.count(333) == 2
    assert out_of_order(place) == {}


@pytest.mark.usefixtures("in_no_time")
def test_a_handler_cannot_commit_what_it_shares(place: Place) -> None:
    """Guards against events that are recorded by a neighbor's commit, and never handled."""
    place.load(100, keys=1)

    def handle(event: Event, connection: Connection) -> None:
        effect(event, connection)
        if event.payload["n"] == 50:
            connection.execute("COMMIT")

    consumer = place.bare(retry_seconds=300)
    consumer.on("order.placed", per_transaction=100)(handle)
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        counts = run.end()
    assert (counts.handled, counts.received, counts.dead_letters) == (50, 50, 0)
    assert place.effects() == 50


@pytest.mark.extended
def test_slow_handlers_do_not_share(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a transaction that is as long as all of its handlers together."""
    monkeypatch.setattr("outbox_pipelines.consumer.limits._LONGEST_SHARED", 0.05)
    place.load(20, keys=1)

    def handle(event: Event, connection: Connection) -> None:
        effect(event, connection)
        time.sleep(0.04)

    consumer = place.bare()
    consumer.on("order.placed", per_transaction=100)(handle)
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == Counts(handled=20)
    assert transactions(place) >= 10
    assert place.effects() == 20


@pytest.mark.extended
@pytest.mark.usefixtures("in_no_time")
def test_handlers_that_are_fast_again_share_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a slow minute after which each event has its own transaction for good."""
    monkeypatch.setattr("outbox_pipelines.consumer.items._FIRST", 1)
    place.load(200, keys=1)
    consumer = place.bare()
    consumer.on("order.placed", per_transaction=100)(effect)
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == Counts(handled=200)
    assert transactions(place) < 100


def test_the_pace_follows_the_time_that_transactions_take() -> None:
    pace = Pace()
    for _ in range(4):
        pace.took(pace.events, SECONDS / 10)
    fast = pace.events
    assert fast > 100
    # Fewer than could have been: nothing is learned.
    pace.took(1, SECONDS / 10)
    assert pace.events == fast
    pace.took(fast, 2 * SECONDS)
    assert pace.events == fast // 2
    for _ in range(20):
        pace.took(pace.events, 2 * SECONDS)
    assert pace.events == 1
    pace.too_long(5)
    assert pace.events == 1


@pytest.mark.extended
@pytest.mark.usefixtures("in_no_time")
@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
def test_the_asynchronous_one(place: Place, driver: str) -> None:
    place.load(100, keys=1)

    async def handle(event: Event, transaction: Any) -> None:
        await test_async.effect(event, transaction)
        if event.payload["n"] == 70:
            raise ValueError("no such customer")

    made = place.bare(kind=AsyncConsumer, **test_async.database(place, driver), retry_seconds=300)
    made.on("order.placed", per_transaction=100)(handle)

    async def scenario() -> None:
        async with test_async.running(made.run) as counts:
            await test_async.until(lambda: place.uncommitted() == 0, "all offsets")
        assert (counts[0].handled, counts[0].received, counts[0].failures) == (70, 30, 1)

    asyncio.run(scenario())
    assert place.effects() == 70
    assert transactions(place) < 65


@pytest.mark.extended
@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
def test_a_handler_that_rolls_back_harms_no_neighbor(place: Place, driver: str) -> None:
    """Guards against handlers that work outside of the transaction: asyncpg commits each statement there."""
    place.load(40, keys=1)
    ended: list[int] = []

    async def handle(event: Event, transaction: Any) -> None:
        await test_async.effect(event, transaction)
        # In the middle of the first transaction: later ones have as many events as the machine is fast.
        if event.payload["n"] == 5 and not ended:
            ended.append(5)
            await test_async.run_sql(transaction, "ROLLBACK")

    made = place.bare(kind=AsyncConsumer, **test_async.database(place, driver), retry_seconds=300)
    made.on("order.placed", per_transaction=40)(handle)

    async def scenario() -> None:
        async with test_async.running(made.run) as counts:
            await test_async.until(lambda: place.uncommitted() == 0, "all offsets")
        assert counts == [Counts(handled=40)]

    asyncio.run(scenario())
    assert ended
    assert place.rows("SELECT n FROM effects ORDER BY n") == [(n,) for n in range(40)]


@pytest.mark.parametrize(
    "given", [{"per_transaction": 0}, {"per_transaction": 10_001}, {"per_transaction": 2, "batch": 2}]
)
def test_numbers_that_mean_nothing_are_refused(place: Place, given: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match="per_transaction"):
        place.bare().on("order.placed", **given)
