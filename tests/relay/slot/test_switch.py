"""Changes of the source under a relay that runs: nothing is lost, repeated or reordered."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from outbox_pipelines.core.secret import Secret
from outbox_pipelines.database import connect, schema
from outbox_pipelines.relay.read.slot import slot_cutover
from outbox_pipelines.relay.read.slot.slot_cutover import read
from outbox_pipelines.relay.read.slot.slot_setup import remove
from outbox_pipelines.relay.read.slot.stream import Stream
from outbox_pipelines.settings import Settings
from outbox_pipelines.writer import emit
from tests.conftest import EITHER_DELIVERY, Outbox, either, wait_until
from tests.relay.parked import numbers, numbers_by_key, parked_rows, write
from tests.relay.slot.slots import make
from tests.relay.threads import owners, quick, running, wait_until_relayed
from tests.relay.topic import NOISE, create_topic


def is_read(settings: Settings) -> bool:
    return read(settings).reader is not None


@contextmanager
def writing(outbox: Outbox) -> Iterator[dict[str, int]]:
    """A writer of four aggregates, in transactions that overlap with nothing; how many events each has."""
    stop = threading.Event()
    counts = dict.fromkeys("abcd", 0)

    def run() -> None:
        with outbox.connect(autocommit=False) as connection:
            for key in itertools.cycle("abcd"):
                if stop.wait(0.01):
                    return
                for n in (counts[key], counts[key] + 1):
                    emit(connection, "order", key, "order.placed", {"n": n})
                connection.commit()
                counts[key] += 2

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield counts
    finally:
        stop.set()
        thread.join(600)


def _more(counts: dict[str, int], before: int) -> Callable[[], bool]:
    return lambda: sum(counts.values()) > before + 20


@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_there_and_back_while_events_are_written(outbox: Outbox, delivery: str) -> None:
    """Guards against a gap, a repetition or another order where the source changes (G1, G2, G5)."""
    settings = quick(outbox, delivery=delivery)
    said: list[str] = []
    with running(settings), writing(outbox) as counts:
        wait_until(lambda: owners(outbox) != [None], what="a relay")
        for _ in range(3):
            before = sum(counts.values())
            slot_cutover.run(settings, "cdc", seconds=30, say=said.append)
            assert said[-1] == "the relay reads from the slot"
            wait_until(_more(counts, before), what="events by the slot")
            before = sum(counts.values())
            slot_cutover.run(settings, "polling", seconds=30, say=said.append)
            assert not read(settings).exists
            wait_until(_more(counts, before), what="events by snapshots")
    with running(settings):
        wait_until_relayed(outbox)
    found = numbers_by_key(outbox.messages())
    assert found == {key: list(range(count)) for key, count in counts.items()}


@pytest.mark.extended
@pytest.mark.parametrize(
    "delivery", ["at_least_once", pytest.param("exactly_once", marks=pytest.mark.thorough(only=True))]
)
def test_a_slot_that_ends_is_replaced_by_snapshots(
    outbox: Outbox, delivery: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a relay that stops, or skips events, when its slot is lost."""
    settings = quick(outbox, delivery=delivery)
    slot = make(outbox)
    caplog.set_level(logging.INFO)
    with running(settings), writing(outbox) as counts, outbox.connect() as admin:
        wait_until(lambda: is_read(settings), what="a relay reads the slot")
        wait_until(lambda: _is_dropped(admin, slot), what="the slot dropped")
        before = sum(counts.values())
        wait_until(_more(counts, before), what="events without a slot")
        wait_until(lambda: read(settings).error is not None, what="the reason in the shard's row")
        (problem,) = read(settings).problems
        assert "is missing, so events are read between snapshots" in problem
        # What a person does then.
        slot_cutover.run(settings, "cdc", seconds=30, say=lambda line: None)
        wait_until(lambda: is_read(settings), seconds=30, what="the relay reads the new slot")
        assert read(settings).problems == []
    with running(settings):
        wait_until_relayed(outbox)
    found = numbers_by_key(outbox.messages())
    assert found == {key: list(range(count)) for key, count in counts.items()}
    assert any("cannot be read" in record.getMessage() for record in caplog.records)
    remove(settings, seconds=30, say=lambda line: None)


def _is_dropped(admin: psycopg.Connection[Any], slot: str) -> bool:
    """Drop a slot that is read, again and again until its reader does not come back first."""
    query = (
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND active"
    )
    admin.execute(query, [slot])
    with suppress(psycopg.errors.ObjectInUse):
        admin.execute("SELECT pg_drop_replication_slot(%s)", [slot])
        return True
    return False


def test_a_rejected_event_is_parked_before_the_slot_moves_on(outbox: Outbox) -> None:
    """Guards against a rejected event that blocks all others, or that the server forgets (G3)."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    make(outbox)
    settings = quick(outbox, max_attempts=2)
    with running(settings):
        wait_until(lambda: is_read(settings), what="a relay reads the slot")
        write(outbox, ("other", {"n": 0}), ("guilty", {"n": 0, "noise": NOISE}))
        write(outbox, ("guilty", {"n": 1}), ("other", {"n": 1}))
        wait_until(lambda: [row[2] for row in parked_rows(outbox)] == ["failed"], what="a dead letter")
        wait_until(lambda: numbers(outbox, "guilty") == [1], what="the event behind it")
        assert is_read(settings)
    assert numbers(outbox, "other") == [0, 1]


def test_a_frozen_reader_is_ended_by_the_owner(outbox: Outbox) -> None:
    """Guards against a relay that cannot read the slot because its frozen predecessor still does."""
    slot = make(outbox)
    settings = quick(outbox)
    frozen = connect(settings, name="frozen", replication=True)
    Stream(frozen, slot, slot)
    with running(settings):
        write(outbox, ("a", {"n": 0}))
        own = frozen.info.backend_pid
        wait_until(lambda: read(settings).reader not in (None, own), what="the owner reads the slot")
        write(outbox, ("a", {"n": 1}))
        wait_until(lambda: numbers(outbox, "a") == [0, 1], what="both events")
    frozen.close()


@pytest.mark.extended
@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_until_empty_reads_the_slot_as_well(outbox: Outbox, delivery: str) -> None:
    """Guards against a slot that keeps the log because only runs until empty relay the outbox."""
    make(outbox)
    write(outbox, *((str(n % 7), {"n": n}) for n in range(50)))
    first = outbox.outbox("relay", "--until-empty", OUTBOX_DELIVERY=delivery)
    assert first.returncode == 0, first.stderr
    assert len(outbox.messages()) == 50
    write(outbox, *((str(n % 7), {"n": n}) for n in range(50, 60)))
    assert outbox.outbox("relay", "--until-empty", OUTBOX_DELIVERY=delivery).returncode == 0
    assert sorted(number for some in numbers_by_key(outbox.messages()).values() for number in some) == list(
        range(60)
    )


def test_the_number_of_shards_stays_one(outbox: Outbox) -> None:
    """Guards against shards that are not read, because a slot has one reader."""
    make(outbox)
    changed = outbox.outbox("shards", "set", "2")
    assert changed.returncode == 2
    assert "outbox cutover --to polling" in changed.stderr


BY_HAND = [
    "DROP PUBLICATION {}",
    "ALTER PUBLICATION {} DROP TABLE outbox",
    "ALTER PUBLICATION {} SET (publish = 'delete')",
    "ALTER PUBLICATION {} SET TABLE outbox WHERE (aggregate_id <> 'b')",
    "ALTER PUBLICATION {} SET TABLE outbox (id, seq, tx, aggregate_id)",
]


@pytest.mark.parametrize("statement", either(*BY_HAND))
def test_a_publication_that_is_changed_by_hand(
    outbox: Outbox, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against events that wait without an end, and a relay that ends, because the slot skips them."""
    monkeypatch.setattr("outbox_pipelines.relay.read.slot.slot_source._LOOK_SECONDS", 0.2)
    monkeypatch.setattr("outbox_pipelines.relay.read.switch._AGAIN_SECONDS", 0.2)
    settings = quick(outbox)
    slot = make(outbox)
    with running(settings), outbox.connect() as admin:
        wait_until(lambda: is_read(settings), what="a relay reads the slot")
        write(outbox, ("a", {"n": 0}), ("b", {"n": 0}))
        wait_until(lambda: numbers(outbox, "b") == [0], what="an event by the slot")
        admin.execute(statement.format(slot).encode())
        write(outbox, ("a", {"n": 1}), ("b", {"n": 1}))
        wait_until(lambda: numbers(outbox, "a") == numbers(outbox, "b") == [0, 1], what="the skipped events")
        wait_until(lambda: "publication" in str(read(settings).error), what="the reason in the shard's row")
        # What a person does then, as the commands say.
        admin.execute(f"DROP PUBLICATION IF EXISTS {slot}".encode())
        slot_cutover.run(settings, "cdc", seconds=30, say=lambda line: None)
        wait_until(lambda: is_read(settings), seconds=30, what="the relay reads the slot again")
        write(outbox, ("a", {"n": 2}), ("b", {"n": 2}))
        wait_until(lambda: numbers(outbox, "b") == [0, 1, 2], what="an event by the slot")
        assert read(settings).problems == []


def test_a_slot_that_another_program_moves(outbox: Outbox) -> None:
    """Guards against a run until empty that succeeds and leaves events."""
    slot = make(outbox)
    for number in range(2):
        write(outbox, ("a", {"n": number}))
        if number:
            with outbox.connect() as admin:
                admin.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [slot])
        write(outbox, ("b", {"n": number}))
        relayed = outbox.outbox("relay", "--until-empty")
        assert relayed.returncode == 0, relayed.stderr
        assert numbers(outbox, "a") == numbers(outbox, "b") == list(range(number + 1))


@pytest.mark.extended
def test_a_schema_whose_name_is_quoted(outbox: Outbox) -> None:
    """Guards against a publication that its own commands do not recognize, and a slot that is not read."""
    dsn = make_conninfo(outbox.settings.dsn, options='-csearch_path="My-Shop"')
    shop = Outbox(quick(outbox, db_schema="My-Shop", dsn=Secret(dsn)))
    schema.migrate(shop.settings)
    create_topic(shop)
    settings = quick(shop)
    with running(settings):
        # Without an owner, `cutover` does not wait for one: the slot would be read a moment later.
        wait_until(lambda: owners(shop) != [None], what="a relay")
        for n, target in enumerate(("cdc", "polling")):
            slot_cutover.run(settings, target, seconds=30, say=print)
            wait_until(lambda: not read(settings).changing, what="the end of the change")
            found = read(settings)
            assert (found.source, found.problems) == (target, [])
            write(shop, ("a", {"n": n}))
            wait_until_relayed(shop)
    assert numbers_by_key(shop.messages()) == {"a": [0, 1]}
