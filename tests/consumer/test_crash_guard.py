"""Which events go through the inbox one at a time: those of partitions that a crashed process left."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import uuid
from functools import partial
from typing import Any

import psycopg
import pytest

from tests import forks
from tests.conftest import clean_environment, either, wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, effect, running
from tests.consumer.test_batches import Batches
from tests.consumer.test_transactions import sessions

Connection = psycopg.Connection[Any]
PARTITIONS = 4
BATCH = 20
CONNECTED = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND application_name ~ '^consumer'"
)


def leave(place: Place, crashes: int = 1) -> None:
    """All partitions are left by a process that crashed, and so did another one before if `crashes` is 1."""
    place.rows(
        "INSERT INTO partition_owners (source, consumer_group, topic, partition, owner, crashes) "
        "SELECT 'billing', %s, %s, nth, %s, %s FROM generate_series(0, 3) AS nth",
        f"{place.topic}-billing",
        place.topic,
        uuid.uuid4(),
        crashes,
    )


def owners(place: Place) -> int:
    return int(place.value("SELECT count(DISTINCT owner) FROM partition_owners"))


def one_at_a_time(place: Place) -> dict[int, int]:
    """How many events of each partition went through the inbox."""
    return dict(place.rows("SELECT partition, count(*)::int FROM inbox GROUP BY partition"))


def run_through(place: Place, events: int, group: str = "billing", **more: Any) -> Batches:
    batches = Batches()
    consumer = place.bare(group=group, **more)
    consumer.on("order.placed", batch=BATCH)(batches)
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted(group) == 0 and place.effects() == events, what="all effects")
        run.end()
    assert sum(batches.sizes) > 0
    return batches


@pytest.mark.extended
def test_nothing_goes_one_at_a_time_after_a_clean_end(place: Place) -> None:
    """Guards against batches that are small after each deployment."""
    for n in range(3):
        place.load(400, first=400 * n)
        batches = run_through(place, 400 * (n + 1))
        assert place.value("SELECT count(*) FROM partition_owners") == 0
        assert one_at_a_time(place) == {}
        assert max(batches.sizes) == BATCH
    # A transaction for each call of the handler, and none more.
    assert place.value("SELECT count(DISTINCT xmin::text) FROM effects") < 1200 / 2


@pytest.mark.extended
@pytest.mark.parametrize(
    "driver",
    ["psycopg", *(pytest.param(name, marks=pytest.mark.thorough(only=True)) for name in ("psycopg2", "dsn"))],
)
def test_a_batch_of_each_partition_goes_one_at_a_time_after_a_crash(place: Place, driver: str) -> None:
    """Guards against an event that ends the process in a batch of others, and is never found."""
    place.load(800, keys=40)
    leave(place)
    database: dict[str, Any] = {} if driver == "dsn" else {"session": sessions(place, driver)}
    if driver == "dsn":
        run_through(place, 800)
    else:
        consumer = place.bare(**database)
        consumer.on("order.placed", batch=BATCH)(lambda events, session: session.execute(_insert(events)))
        with running(consumer) as run:
            wait_until(lambda: place.uncommitted() == 0, what="all offsets")
            run.end()
    there = one_at_a_time(place)
    # What is taken together goes into the inbox together: less than a batch more.
    assert sorted(there) == list(range(PARTITIONS))
    assert all(BATCH <= each < 2 * BATCH for each in there.values()), there
    assert place.effects() == 800
    assert place.value("SELECT count(*) FROM partition_owners") == 0


def _insert(events: list[Any]) -> Any:
    from sqlalchemy import text

    rows = ", ".join(f"('{event.id}')" for event in events)
    return text(f"INSERT INTO effects (event_id) VALUES {rows}")


@pytest.mark.extended
@pytest.mark.parametrize("crashes", [0, 1])
def test_an_owner_of_too_few_events_leaves_the_partition_suspect(place: Place, crashes: int) -> None:
    """Guards against a short run between two crashes that makes the next one careless."""
    place.load(PARTITIONS, keys=PARTITIONS)
    leave(place, crashes)
    run_through(place, PARTITIONS)
    assert sum(one_at_a_time(place).values()) == crashes * PARTITIONS
    assert place.value("SELECT count(*) FROM partition_owners") == PARTITIONS


@pytest.mark.extended
@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
@pytest.mark.parametrize("how", ["stopped", "cancelled", "raised"])
def test_the_asynchronous_one(place: Place, driver: str, how: str) -> None:
    """Guards against a service that is careful after each end of its task, or never."""
    place.load(20)
    leave(place)

    async def handle(event: Any, transaction: Any) -> None:
        await test_async.effect(event, transaction)
        if how == "raised" and event.payload["n"] == 20:
            raise asyncio.CancelledError

    async def scenario() -> None:
        consumer = test_async.consumer(place, driver, handle)
        stop = asyncio.Event()
        task = asyncio.ensure_future(consumer.run(stop))
        await test_async.until(lambda: place.effects() == 20 and place.uncommitted() == 0, "all effects")
        assert owners(place) > 0
        if how == "stopped":
            stop.set()
            assert (await task).handled == 20
        else:
            task.cancel() if how == "cancelled" else place.load(1, first=20)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 120)

    asyncio.run(scenario())
    used = place.value("SELECT count(DISTINCT partition) FROM inbox")
    left = place.value("SELECT count(*) FROM partition_owners")
    # Of those without events the row of the dead one stays.
    assert left == PARTITIONS - (0 if how == "raised" else used)


def test_a_handler_that_exits_leaves_its_partitions_suspect(place: Place) -> None:
    """Guards against sys.exit() in a handler, at each start again."""
    place.load(1)
    consumer = place.bare()

    @consumer.on("order.placed", batch=BATCH)
    def exits(events: Any, connection: Connection) -> None:
        raise SystemExit(3)

    for _ in range(3):
        with running(consumer) as run, pytest.raises(SystemExit):
            run.wait()
    assert place.value("SELECT count(*) FROM partition_owners") == PARTITIONS
    assert place.rows("SELECT state, attempts FROM inbox") == [("waiting", 1)]


@pytest.mark.extended
def test_partitions_that_go_to_another_member_are_released(place: Place) -> None:
    """Guards against a member that is careful because another one has come or gone."""
    place.load(100)
    consumers = [place.bare() for _ in range(2)]
    for each in consumers:
        each.on("order.placed", batch=BATCH)(Batches())
    with running(consumers[0]) as first:
        wait_until(lambda: place.effects() == 100, what="all effects")
        [(owner, count)] = place.rows("SELECT owner, count(*) FROM partition_owners GROUP BY owner")
        assert count == PARTITIONS
        with running(consumers[1]) as second:
            wait_until(
                lambda: 0 < rows_of(place, owner) < PARTITIONS,
                what="partitions that are revoked",
                seconds=60,
            )
            place.load(200, first=100, keys=40)
            wait_until(
                lambda: place.value("SELECT count(DISTINCT by) FROM effects") == 2, what="both", seconds=60
            )
            second.end()
        wait_until(lambda: rows_of(place, owner) == PARTITIONS, what="partitions that come back", seconds=60)
        first.end()
    assert place.value("SELECT count(*) FROM partition_owners") == 0


def rows_of(place: Place, owner: uuid.UUID) -> int:
    return int(place.value("SELECT count(*) FROM partition_owners WHERE owner = %s", owner))


@pytest.mark.extended
def test_rows_stay_where_the_database_is_unavailable_at_the_end(place: Place) -> None:
    """Guards against an end that waits for the database, and a partition that counts as released."""
    cut = threading.Event()

    def connect() -> Connection:
        if cut.is_set():
            raise psycopg.OperationalError("away")
        return psycopg.connect(place.dsn, autocommit=True, application_name=place.topic)

    place.load(100)
    consumer = place.bare(connect=connect)
    consumer.on("order.placed")(effect)
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0 and place.effects() == 100, what="all effects")
        cut.set()
        place.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", place.topic
        )
        assert run.end().handled == 100
    assert place.value("SELECT count(*) FROM partition_owners") == PARTITIONS


@pytest.mark.parametrize("how", either("killed", "terminated"))
def test_how_a_process_ends_decides(place: Place, how: str) -> None:
    """Guards against a rolling restart that costs as much as a crash."""
    place.load(40)
    process = service(place, -1)
    try:
        wait_until(lambda: place.effects() == 40 and place.uncommitted() == 0, what="all effects", seconds=60)
        assert owners(place) == 1
    finally:
        process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
        process.wait(600)
    assert bool(place.value("SELECT count(*) FROM partition_owners")) == (how == "killed")
    place.load(400, first=40)
    batches = run_through(place, 440, kafka={"group.instance.id": "one"})
    # Also after a crash: only another one within so many events would be one too many.
    assert (max(batches.sizes), one_at_a_time(place)) == (BATCH, {})
    assert place.value("SELECT count(*) FROM partition_owners") == 0


def test_an_event_that_ends_the_process_within_a_batch_is_found(place: Place) -> None:
    """Guards against a service that restarts without end at one event among others."""
    place.load(200)
    deaths = 0
    while place.inbox().get("failed", 0) == 0:
        process = service(place, 117)
        wait_until(
            partial(lambda it: it.poll() is not None or place.inbox().get("failed"), process), seconds=60
        )
        if process.poll() is None:
            process.terminate()
        deaths += process.wait(600) == -signal.SIGKILL
        assert deaths <= 5
    # Twice in a batch, and then `attempts` times alone.
    assert 3 <= deaths <= 4
    process = service(place, 117)
    try:
        # The process before may have made the last effects: this one is signaled once it is at work.
        wait_until(lambda: place.effects() == 199 and place.value(CONNECTED) > 0, what="all", seconds=60)
    finally:
        process.terminate()
        assert process.wait(600) == 0
    assert place.value("SELECT count(DISTINCT n) FROM effects") == 199


def service(place: Place, fatal: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.consumer.killer", place.dsn, place.kafka, place.topic, str(fatal)]
    return forks.Popen([*command, str(BATCH)], env=clean_environment())
