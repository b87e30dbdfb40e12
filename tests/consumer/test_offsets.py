"""`dedupe="offset"`: a row for each partition moves with the events' effects."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from outbox_pipelines.consumer import AsyncConsumer, Consumer, Counts, DedupeTable, Event
from outbox_pipelines.errors import SetupError
from tests.conftest import wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, effect, running, uuid7
from tests.consumer.test_batches import Batches, out_of_order
from tests.schema.servers import Database

Connection = psycopg.Connection[Any]
WAYS: list[dict[str, Any]] = [{}, {"per_transaction": 50}, {"batch": 50}]


def offsets(place: Place) -> int:
    """How many offsets the source is behind in all partitions."""
    return int(place.value("SELECT sum(next_offset)::int FROM processed_offsets WHERE source = 'billing'"))


def by_offset(
    place: Place, way: dict[str, Any] | None = None, refuses: int | None = None, **more: Any
) -> Consumer:
    consumer: Consumer = place.bare(dedupe="offset", **more)
    if way and "batch" in way:
        consumer.on("order.placed", **way)(Batches(refuses))
        return consumer

    def handle(event: Event, connection: Connection) -> None:
        effect(event, connection)
        if event.payload["n"] == refuses:
            raise ValueError("no such customer")

    consumer.on("order.placed", **(way or {}))(handle)
    return consumer


def run_through(place: Place, consumer: Consumer, group: str = "billing") -> Counts:
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted(group) == 0 or run.failure, what="all offsets")
        return run.end()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_event_is_handled_once_without_a_row_of_its_own(place: Place, way: dict[str, Any]) -> None:
    place.load(300)
    assert run_through(place, by_offset(place, way)) == Counts(handled=300)
    assert (place.effects(), place.processed(), offsets(place)) == (300, 0, 300)
    again = run_through(place, by_offset(place, way, group="again"), "again")
    assert again == Counts(duplicates=300)
    place.load(100, first=300)
    assert run_through(place, by_offset(place, way, group="again"), "again") == Counts(handled=100)
    assert (place.effects(), out_of_order(place)) == (400, {})


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_fails_waits_and_what_is_behind_it_too(place: Place, way: dict[str, Any]) -> None:
    """Guards against an offset that passes an event by, and against events that overtake it."""
    place.load(200, keys=10)
    counts = run_through(place, by_offset(place, way, refuses=133, retry_seconds=300))
    assert (counts.handled, counts.received, counts.failures) == (193, 7, 1)
    assert place.inbox() == {"waiting": 7}
    assert offsets(place) == 200
    # Another batch does not overtake it, and nothing of it comes twice.
    place.load(100, first=200, keys=10)
    counts = run_through(place, by_offset(place, way, retry_seconds=300))
    assert (counts.handled, counts.received) == (90, 10)
    place.rows("UPDATE inbox SET next_attempt_at = now()")
    consumer = by_offset(place, way)
    with running(consumer) as run:
        wait_until(lambda: place.effects() == 300, what="the inbox")
        run.end()
    assert out_of_order(place) == {}


def test_a_message_that_is_no_event_is_a_dead_letter(place: Place) -> None:
    place.send(uuid7(), keys=1)
    place.put("no event", key="0")
    place.send(uuid7(), keys=1)
    counts = run_through(place, by_offset(place))
    assert (counts.handled, counts.dead_letters) == (2, 1)
    assert run_through(place, by_offset(place, group="again"), "again") == Counts(duplicates=3)


@pytest.mark.parametrize("driver", test_async.DRIVERS)
def test_the_asynchronous_one(place: Place, driver: str) -> None:
    place.load(100, keys=2)

    async def handle(event: Event, transaction: Any) -> None:
        await test_async.effect(event, transaction)
        if event.payload["n"] == 70:
            raise ValueError("no such customer")

    made = place.bare(
        kind=AsyncConsumer, dedupe="offset", retry_seconds=300, **test_async.database(place, driver)
    )
    made.on("order.placed", per_transaction=20)(handle)

    async def scenario() -> None:
        async with test_async.running(made.run) as counts:
            await test_async.until(lambda: place.uncommitted() == 0, "all offsets")
        assert (counts[0].handled, counts[0].received, counts[0].failures) == (85, 15, 1)

    asyncio.run(scenario())
    assert (place.effects(), offsets(place)) == (85, 100)


def test_another_owner_of_the_partition_is_waited_for(place: Place) -> None:
    """Guards against two processes that both believe to have a partition."""
    ids = place.send(*(uuid7() for _ in range(3)), keys=1)
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
    with running(by_offset(place)) as run, psycopg.connect(place.dsn) as other:
        wait_until(lambda: place.uncommitted() == 0, what="the first offsets")
        # As a process that has lost the partition and does not know it yet: it has handled one more.
        other.execute("UPDATE processed_offsets SET next_offset = 4 WHERE next_offset = 3")
        ids += place.send(*(uuid7() for _ in range(3)), keys=1)
        other.execute("INSERT INTO effects (event_id) VALUES (%s)", [ids[3]])
        wait_until(lambda: place.value(waits, "%outbox_move%") == 1, what="the wait")
        other.commit()
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == Counts(handled=5, duplicates=1)
    assert [event_id for (event_id,) in place.rows("SELECT event_id FROM effects ORDER BY seq")] == ids


def test_a_change_from_ids_loses_and_repeats_nothing(place: Place) -> None:
    """Guards against events whose ids are recorded, and which come again after the change."""
    place.load(100)
    assert run_through(place, place.consumer()) == Counts(handled=100)
    # All are delivered again.
    assert run_through(place, by_offset(place, group="again"), "again") == Counts(duplicates=100)
    place.load(50, first=100)
    assert run_through(place, by_offset(place, group="again"), "again") == Counts(handled=50)
    assert (place.effects(), place.processed()) == (150, 100)
    # And not back again: these ids are not recorded.
    with pytest.raises(SetupError, match=r"billing has recorded offsets .* outbox consumer offsets forget"):
        place.consumer(group="back").run()


def recreate(place: Place) -> None:
    admin = AdminClient({"bootstrap.servers": place.kafka})
    admin.delete_topics([place.topic])[place.topic].result(600)

    def is_created() -> bool:
        try:
            admin.create_topics([NewTopic(place.topic, 4, 1)])[place.topic].result(600)
        except Exception:  # noqa: BLE001 - it is still being deleted
            return False
        return True

    wait_until(is_created, what="the topic")


def test_a_topic_that_was_created_again_is_refused(place: Place) -> None:
    """Guards against new events that are skipped because old ones had their offsets."""
    place.load(40)
    assert run_through(place, by_offset(place)) == Counts(handled=40)
    recreate(place)
    place.load(80, first=40)
    with pytest.raises(SetupError, match=r"another topic .* offsets forget billing --topic"):
        run_through(place, by_offset(place, group="after"), "after")
    assert place.effects() == 40
    operator = Database(place.dsn, Path())
    listed = json.loads(operator.outbox("consumer", "offsets", "list", "--json").output)["offsets"]
    assert sum(each["next_offset"] for each in listed) == 40
    forget = ("consumer", "offsets", "forget", "billing", "--topic", place.topic)
    assert [operator.outbox(*forget).exit_code for _ in range(2)] == [0, 1]
    assert "no consumer" in operator.outbox("consumer", "offsets", "list").output
    assert run_through(place, by_offset(place, group="after"), "after") == Counts(handled=80)
    assert place.effects() == 120


def test_a_topic_that_is_created_again_under_a_consumer_is_refused(place: Place) -> None:
    place.load(40)
    with running(by_offset(place)) as run:
        wait_until(lambda: place.effects() == 40 and place.uncommitted() == 0, what="all effects")
        recreate(place)
        place.load(20, first=40)
        wait_until(lambda: run.failure, what="the refusal", seconds=60)
        with pytest.raises(SetupError, match="another topic"):
            run.wait()
    assert place.effects() == 40


def test_messages_that_kafka_has_lost_are_noticed(place: Place) -> None:
    place.load(40, keys=1)
    assert run_through(place, by_offset(place)) == Counts(handled=40)
    place.rows("UPDATE processed_offsets SET next_offset = next_offset + 1 WHERE next_offset = 40")
    with pytest.raises(SetupError, match="ends at offset 40, but billing has handled events up to 41"):
        run_through(place, by_offset(place, group="after"), "after")


def test_offsets_that_are_deleted_under_a_consumer_are_noticed(place: Place) -> None:
    place.load(4, keys=1)
    with running(by_offset(place)) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        place.rows("DELETE FROM processed_offsets")
        place.load(1, keys=1)
        wait_until(lambda: run.failure, what="the refusal")
        with pytest.raises(SetupError, match="were deleted while it was running"):
            run.wait()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"dedupe_table": DedupeTable("old")}, "remove dedupe_table"),
        ({"kafka": {"isolation.level": "read_uncommitted"}}, "needs read_committed"),
    ],
)
def test_what_needs_ids_is_refused(place: Place, more: dict[str, Any], told: str) -> None:
    with pytest.raises(SetupError, match=told):
        by_offset(place, **more)


def test_the_inbox_alone_needs_ids(place: Place) -> None:
    with pytest.raises(SetupError, match="receive"):
        by_offset(place).receive()
