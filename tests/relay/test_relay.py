"""From the table to the topic: what arrives, in which order, and where the position stands afterwards."""

from __future__ import annotations

import json
import threading
import uuid

import psycopg
import pytest

from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.relay import service
from outbox_pipelines.relay.run import Totals
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, may_log_in, wait_until


def _drain(outbox: Outbox) -> int:
    return service.relay(outbox.settings, until_empty=True).events


def test_an_event_arrives_with_key_value_and_headers(outbox: Outbox) -> None:
    """Guards against a message that a consumer cannot use."""
    with outbox.connect(autocommit=False) as connection:
        written = emit(
            connection,
            "order",
            42,
            "order.placed",
            {"total": 5, "note": "größer"},
            headers={"tenant": "eu"},
            correlation_id="c-1",
            version=2,
        )
    assert _drain(outbox) == 1
    (message,) = outbox.messages()
    assert message.key == "42"
    assert message.value is not None
    assert json.loads(message.value) == {"total": 5, "note": "größer"}
    assert message.headers == {
        "id": str(written.id),
        "event-type": "order.placed",
        "aggregate-type": "order",
        "correlation-id": "c-1",
        "version": "2",
        "tenant": "eu",
    }


def test_keys_are_placed_as_java_producers_place_them(outbox: Outbox) -> None:
    """Guards against librdkafka's own partitioner: a topic shared with Java would lose its order per key."""
    outbox.write("order-1", "order-2", "order-3", "k", "größer")
    _drain(outbox)
    placed = {message.key: message.partition for message in outbox.messages()}
    assert placed == {key: _java_partition(key, 8) for key in placed}


def test_one_aggregate_arrives_in_order(outbox: Outbox) -> None:
    """Guards against reordering between batches (G2)."""
    outbox.fill(12_000, aggregates=7)
    assert _drain(outbox) == 12_000
    for aggregate in range(7):
        numbers = [json.loads(m.value or "")["n"] for m in outbox.messages() if m.key == str(aggregate)]
        assert numbers == sorted(numbers)
        assert len(numbers) == len(set(numbers))


def test_events_of_several_types_go_to_their_topics(outbox: Outbox) -> None:
    """Guards against one topic for all."""
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "order", 1, "order.placed", {})
        emit(connection, "customer", 1, "customer.moved", {})
    _drain(outbox)
    assert [m.headers["event-type"] for m in outbox.messages("customer")] == ["customer.moved"]
    assert [m.headers["event-type"] for m in outbox.messages("order")] == ["order.placed"]


def test_until_empty_publishes_each_event_once_over_many_runs(outbox: Outbox) -> None:
    """Guards against a position that is not saved, or not read."""
    outbox.write(1, 2)
    assert _drain(outbox) == 2
    assert _drain(outbox) == 0
    outbox.write(3)
    assert _drain(outbox) == 1
    assert len(outbox.messages()) == 3


def test_the_position_moves_when_there_is_nothing_to_publish(outbox: Outbox) -> None:
    """Guards against ticks that grow without limit behind transactions that write no event."""
    with outbox.connect() as connection:
        other = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        _drain(outbox)
        row = connection.execute(
            "SELECT pg_snapshot_xmax(done)::text::bigint, target FROM outbox_shards"
        ).fetchone()
    assert row is not None
    assert other is not None
    assert row[0] > other[0]
    assert row[1] is None


def test_a_running_relay_publishes_what_commits_and_stops_on_request(outbox: Outbox) -> None:
    """Guards against a relay that needs a restart to see new events, or loses some at a stop."""
    stop, taken = threading.Event(), threading.Event()
    totals: list[Totals] = []
    relay = threading.Thread(
        target=lambda: totals.append(service.relay(outbox.settings, stop=stop, on_take=lambda _: taken.set()))
    )
    relay.start()
    assert taken.wait(600)
    for n in range(20):
        outbox.write(n)
    wait_until(lambda: len(outbox.messages()) == 20, what="20 events in the topic")
    stop.set()
    relay.join(600)
    assert totals[0].events == 20
    assert outbox_measurements.read(outbox.settings).shards[0].owner is None
    assert _drain(outbox) == 0


def test_an_idle_relay_leaves_no_trace_but_its_heartbeat(outbox: Outbox) -> None:
    """Guards against a relay that feeds on itself: each settle makes a transaction, so a new snapshot."""
    stop, taken = threading.Event(), threading.Event()
    relay = threading.Thread(
        target=lambda: service.relay(outbox.settings, stop=stop, on_take=lambda _: taken.set())
    )
    relay.start()
    assert taken.wait(600)
    with outbox.connect() as connection:
        beats: set[float] = set()

        def beaten_for_two_seconds() -> bool:
            row = connection.execute(
                "SELECT extract(epoch FROM heartbeat)::float8 FROM outbox_shards"
            ).fetchone()
            assert row is not None
            beats.add(row[0])
            return max(beats) - min(beats) > 2

        wait_until(beaten_for_two_seconds)
    # One a second; one that feeds on itself settles at every poll.
    assert len(beats) <= 4
    stop.set()
    relay.join(600)


def test_progress_says_when_an_event_was_published(outbox: Outbox) -> None:
    """Guards against a view whose processed_at stays empty, and a latency that is not measured."""
    outbox.fill(6000)
    _drain(outbox)
    with outbox.connect() as connection:
        rows = connection.execute(
            "SELECT status, count(*), count(processed_at), bool_and(processed_at >= created_at) "
            "FROM outbox_events GROUP BY status"
        ).fetchall()
    assert rows == [("PROCESSED", 6000, 6000, True)]
    (shard,) = outbox_measurements.read(outbox.settings).shards
    assert shard.backlog == 0
    assert shard.latency_seconds is not None
    assert shard.events_per_second == pytest.approx(100)


def test_status_counts_what_waits(outbox: Outbox) -> None:
    """Guards against a backlog that counts published events, or misses late ones."""
    outbox.write(1, 2, 3)
    _drain(outbox)
    with outbox.connect(autocommit=False) as late:
        emit(late, "order", 9, "order.placed", {})
        outbox.write(4, 5)
        _drain(outbox)
        late.commit()
        outbox.write(6)
        (shard,) = outbox_measurements.read(outbox.settings).shards
    assert shard.backlog == 2
    assert 0 < shard.oldest_seconds < 60


def test_a_relay_keeps_days_ahead(outbox: Outbox) -> None:
    """Guards against business transactions that fail because tomorrow's partition does not exist."""
    with outbox.connect() as connection:
        connection.execute(
            "DO $$ BEGIN EXECUTE (SELECT 'DROP TABLE ' || max(inhrelid::regclass::text) "
            "FROM pg_inherits WHERE inhparent = 'outbox'::regclass); END $$"
        )
        connection.execute("DELETE FROM outbox_days WHERE day = (SELECT max(day) FROM outbox_days)")
    assert outbox_measurements.read(outbox.settings).partitions_ahead == 13
    _drain(outbox)
    assert outbox_measurements.read(outbox.settings).partitions_ahead == 14


def test_a_role_of_its_own_is_enough(outbox: Outbox) -> None:
    """Guards against a relay that must own the tables, or lacks a grant at its first big tick."""
    role = f"relay_{uuid.uuid4().hex[:8]}"
    with outbox.connect() as connection:
        connection.execute(f"CREATE ROLE {role} {may_log_in(outbox.settings.dsn)}".encode())
        try:
            connection.execute("SELECT outbox_grant_relay(%s::regrole)", [role])
            dsn = psycopg.conninfo.make_conninfo(outbox.settings.dsn, user=role)
            modest = Outbox(outbox.settings.model_copy(update={"dsn": dsn}))
            outbox.write(1)
            assert _drain(modest) == 1
            outbox.fill(12_000)
            assert outbox_measurements.read(modest.settings).shards[0].backlog == 12_000
            assert _drain(modest) == 12_000
        finally:
            connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def _java_partition(key: str, partitions: int) -> int:
    """Java's default partitioner: murmur2 of the key's bytes, made positive."""
    data, mask = key.encode(), 0xFFFFFFFF
    h = 0x9747B28C ^ len(data)
    whole = len(data) // 4 * 4
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0x5BD1E995 & mask
        h = (h * 0x5BD1E995 & mask) ^ ((k ^ k >> 24) * 0x5BD1E995 & mask)
    if rest := data[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * 0x5BD1E995 & mask
    h = (h ^ h >> 13) * 0x5BD1E995 & mask
    return ((h ^ h >> 15) & 0x7FFFFFFF) % partitions
