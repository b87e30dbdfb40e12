"""Reading from a slot: every committed event once, in the order of commits, as from snapshots."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.database import schema
from outbox_pipelines.local import postgres
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.read.slot import slot_source
from outbox_pipelines.relay.read.slot.slot_setup import remove
from outbox_pipelines.relay.read.slot.slot_source import Skipped
from outbox_pipelines.relay.read.slot.stream import SlotLostError
from outbox_pipelines.settings import load_settings
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, wait_until
from tests.relay.faults import seed
from tests.relay.slot.slots import Reading, begins, between_snapshots, make, reading

Connection = psycopg.Connection[Any]


def _insert(connection: Connection, events: int = 1, size: int = 10) -> list[int]:
    return [
        seq
        for (seq,) in connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'order', i::text, 'order.placed', jsonb_build_object('pad', repeat('x', %s)) "
            "FROM generate_series(1, %s) i RETURNING seq",
            [size, events],
        )
    ]


def _seqs(events: list[Event]) -> list[int]:
    return [event.seq for event in events]


@pytest.mark.parametrize("with_time", [False, True])
def test_an_event_is_the_same_from_both_sources(outbox: Outbox, with_time: bool) -> None:
    """Guards against messages that change with the source."""
    slot = make(outbox)
    done = begins(outbox)
    with outbox.connect(autocommit=False) as writer:
        emit(
            writer, "order", 1, "order.placed", {"text": 'ü "quoted" \\ \n 漢字 🎈', "n": 1.50, "none": None}
        )
        emit(
            writer,
            "größe",
            'a"b\\c',
            "order.placed",
            [1, {"a": []}],
            headers={"one": "ü", "empty": ""},
            idempotency_key='key "1"',
            correlation_id="c\n1",
            causation_id="c2",
            version=7,
        )
        emit(writer, "order", 2, "order.placed", "text", headers={})
        emit(writer, "order", 3, "order.placed", None, version=-1)
        writer.commit()
        _insert(writer, 2, 600_000)
        writer.commit()
    with reading(outbox, slot, done, with_time=with_time) as slot_reader, outbox.connect() as connection:
        found = slot_reader.events()
        expected = between_snapshots(connection, Position(done), with_time=with_time)
    assert [event._replace(metadata=None) for event in found] == [
        event._replace(metadata=None) for event in expected
    ]
    assert [_metadata(event) for event in found] == [_metadata(event) for event in expected]


def _metadata(event: Event) -> Any:
    import json

    return None if event.metadata is None else json.loads(event.metadata)


def test_the_order_is_that_of_commits(outbox: Outbox) -> None:
    """Guards against an order that only holds for writers that lock the aggregate (G2)."""
    slot = make(outbox)
    with (
        reading(outbox, slot, begins(outbox)) as slot_reader,
        outbox.connect(autocommit=False) as first,
        outbox.connect(autocommit=False) as second,
    ):
        early = _insert(first)
        late = _insert(second)
        second.commit()
        first.commit()
        assert _seqs(slot_reader.events()) == late + early


def test_what_is_rolled_back_or_prepared_is_not_read(outbox: Outbox) -> None:
    """Guards against phantoms (G1)."""
    slot = make(outbox)
    with (
        reading(outbox, slot, begins(outbox)) as slot_reader,
        outbox.connect(autocommit=False) as writer,
        outbox.connect() as other,
    ):
        _insert(writer, 3)
        writer.rollback()
        kept = _insert(writer)
        with writer.transaction(force_rollback=True):
            _insert(writer)
        kept += _insert(writer)
        writer.commit()
        assert _seqs(slot_reader.events()) == kept
        other.execute("BEGIN")
        prepared = _insert(other)
        other.execute("PREPARE TRANSACTION 'cdc'")
        assert slot_reader.events() == []
        other.execute("COMMIT PREPARED 'cdc'")
        assert _seqs(slot_reader.events()) == prepared


def test_a_new_day_is_delivered(outbox: Outbox) -> None:
    """Guards against a publication that ends with the partitions of its first day."""
    slot = make(outbox)
    with reading(outbox, slot, begins(outbox)) as slot_reader, outbox.connect() as connection:
        connection.execute(
            "CREATE TABLE outbox_old PARTITION OF outbox "
            "FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00')"
        )
        with connection.transaction():
            connection.execute("SET LOCAL outbox.backfill = on")
            connection.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at) "
                "VALUES ('order', '1', 'e', '{}', '2020-01-01 12:00+00')"
            )
        assert len(slot_reader.events()) == 1
        connection.execute("DROP TABLE outbox_old")
        assert len(_insert(connection)) == len(slot_reader.events()) == 1


@pytest.mark.parametrize("events", [9, 10, 11, 35])
def test_a_large_transaction_is_a_tick_of_its_own(outbox: Outbox, events: int) -> None:
    """Guards against a position that cannot be within a transaction: a crash would publish it all again."""
    slot = make(outbox)
    done = begins(outbox)
    with outbox.connect() as writer:
        small = _insert(writer, 2)
        large = _insert(writer, events)
        more = _insert(writer, 3)
    with reading(outbox, slot, done, batch_events=10) as slot_reader:
        batches = slot_reader.batches()
    assert _follow(batches, Position(done)) == small + large + more
    assert max(len(batch.events) for batch in batches) <= 10


def _follow(batches: list[Batch], position: Position) -> list[int]:
    """The events of batches, each of which continues where the one before has ended."""
    for batch in batches:
        assert batch.done == position.done
        assert batch.starts_tick == (position.target is None)
        if position.target is not None:
            assert batch.target == position.target
        position = batch.position
    return [event.seq for batch in batches for event in batch.events]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_another_source_continues_within_a_large_transaction(outbox: Outbox, after: int) -> None:
    """Guards against events that are lost or repeated where a slot is lost, or a relay starts again."""
    slot = make(outbox)
    done = begins(outbox)
    with outbox.connect() as connection:
        _insert(connection, 5)
        large = _insert(connection, 35)
        more = _insert(connection, 3)
        with reading(outbox, slot, done, batch_events=10) as slot_reader:
            wait_until(lambda: slot_reader.source.read(), what="the small transactions")
            for n in range(after):
                wait_until(lambda: slot_reader.source.read(), what=f"part {n}")
            position = slot_reader.source.position
        assert position.target is not None
        assert position.last_seq == large[10 * after - 1]
        assert _seqs(between_snapshots(connection, position)) == large[10 * after :] + more


def test_a_restart_skips_what_is_published(outbox: Outbox) -> None:
    """Guards against duplicates of all that the server has not forgotten yet."""
    slot = make(outbox)
    with outbox.connect() as writer:
        with reading(outbox, slot, begins(outbox)) as slot_reader:
            _insert(writer, 3)
            assert len(slot_reader.events()) == 3
            done = slot_reader.source.done
        second = _insert(writer, 2)
        with reading(outbox, slot, done) as slot_reader:
            assert _seqs(slot_reader.events()) == second


@pytest.mark.extended
def test_the_server_keeps_what_is_not_settled(outbox: Outbox) -> None:
    """Guards against events that the server forgets before they are published, and a log that grows."""
    slot = make(outbox)

    def confirmed() -> int:
        with outbox.connect() as connection:
            row = connection.execute(
                "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = %s",
                [slot],
            ).fetchone()
        assert row is not None
        return int(row[0])

    with outbox.connect() as writer:
        with reading(outbox, slot, begins(outbox)) as slot_reader:
            _insert(writer, 3)
            assert len(slot_reader.events()) == 3
            end = slot_reader.source._end
            slot_reader.source._stream._said_at = -math.inf
            slot_reader.source.confirm()
        assert confirmed() < end
        with reading(outbox, slot, begins(outbox)) as slot_reader:
            assert len(slot_reader.events()) == 3
            slot_reader.settle()

            def is_confirmed() -> bool:
                slot_reader.source.read()
                return confirmed() >= end

            wait_until(is_confirmed, what="the settled position at the server")

            # A database without events does not keep the log of others, either.
            writer.execute("CREATE TABLE noise AS SELECT repeat('x', 1000) FROM generate_series(1, 1000)")
            end = slot_reader.source._ask_end()
            wait_until(is_confirmed, what="the log of another table forgotten")


class _Guard:
    """A crash guard that lets so many events be read at once."""

    def __init__(self, step: int | None) -> None:
        self.now = step
        self.marked: list[int] = []

    def step(self) -> int | None:
        return self.now

    def approach(self) -> None:
        pass

    def before(self, seq: int) -> str | None:
        self.marked.append(seq)
        return None


@pytest.mark.parametrize("step", [1, 3])
def test_after_a_crash_events_are_read_a_few_at_a_time(outbox: Outbox, step: int) -> None:
    """Guards against an event that crashes each relay that reads it (G3)."""
    slot = make(outbox)
    done = begins(outbox)
    with outbox.connect() as writer:
        written = _insert(writer, 7) + _insert(writer) + _insert(writer)
    guard = _Guard(step)
    with reading(outbox, slot, done, guard=guard) as slot_reader:
        batches = slot_reader.batches()
        assert _follow(batches, Position(done)) == written
        assert max(len(batch.events) for batch in batches) == step
        assert all(event.payload for batch in batches for event in batch.events)
        assert guard.marked == (written if step == 1 else [])
        # The guard ends with a position that covers the present, even if no event comes.
        with outbox.connect() as connection:
            row = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
        assert row is not None
        wait_until(lambda: slot_reader.source.read() or slot_reader.source.done.xmax >= int(row[0]))


@pytest.mark.extended
@pytest.mark.slow
def test_an_event_that_other_sessions_do_not_see_yet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an event of a commit that waits for a synchronous standby, which a failover undoes (G1);
    against a later commit that is published before it; and against a wait that is not reported."""
    monkeypatch.setattr(slot_source, "_REPORT_SECONDS", 0.0)
    caplog.set_level("INFO", slot_source.__name__)
    # A server of its own: every commit waits there.
    with postgres.Postgres(tmp_path) as server:
        outbox = Outbox(load_settings(dsn=server.dsn))
        schema.migrate(outbox.settings)
        slot = make(outbox)
        with reading(outbox, slot, begins(outbox)) as slot_reader, outbox.connect() as quick:
            # Reading its content from the table is another way than taking it from the slot.
            for size in (600_000, 10):
                with _waiting_commit(outbox, size) as hidden:
                    quick.execute("SET synchronous_commit = local")
                    expected = hidden + _insert(quick)
                    wait_until(partial(_is_read_or_held, slot_reader, caplog), what="the transaction")
                    assert not slot_reader.source.has_caught_up
                assert _seqs(slot_reader.events()) == expected
                assert "visible again" in caplog.text
                caplog.clear()


def _is_read_or_held(slot_reader: Reading, caplog: pytest.LogCaptureFixture) -> bool:
    batch = slot_reader.source.read()
    assert batch is None or not batch.events
    return "waits for a synchronous standby" in caplog.text


@contextmanager
def _waiting_commit(outbox: Outbox, size: int) -> Iterator[list[int]]:
    """An event whose commit waits for a standby that does not answer, until the block ends."""
    with (
        outbox.connect(autocommit=False) as writer,
        outbox.connect() as noise,
        outbox.connect() as admin,
        ThreadPoolExecutor() as threads,
        ExitStack() as ends,
    ):
        seqs = _insert(writer, 1, size)
        admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'missing'")
        admin.execute("SELECT pg_reload_conf()")
        ends.callback(admin.execute, "SELECT pg_reload_conf()")
        ends.callback(admin.execute, "ALTER SYSTEM RESET synchronous_standby_names")
        is_set = threading.Event()
        ends.callback(is_set.set)
        threads.submit(_commit_until, noise, is_set)
        wait_until(lambda: _waiting(admin) == 1, what="commits that wait for the standby")
        is_set.set()
        threads.submit(writer.commit)
        wait_until(lambda: _waiting(admin) == 2, what="the event's commit waits")
        yield seqs


def _commit_until(connection: Connection, stop: threading.Event) -> None:
    """The server takes a changed setting over a moment after the reload."""
    while not stop.is_set():
        connection.execute("SELECT pg_current_xact_id()")


def _waiting(admin: Connection) -> int:
    row = admin.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'").fetchone()
    assert row is not None
    return int(row[0])


def test_random_transactions_are_read_once_in_order_of_commit(outbox: Outbox) -> None:
    """Guards against everything above in combination, with changes of the source in between."""
    chance = random.Random(seed())
    slot = make(outbox)
    done = begins(outbox)
    committed: list[int] = []
    writers = [outbox.connect(autocommit=False) for _ in range(5)]
    pending: dict[int, list[int]] = {}
    found: list[int] = []
    with outbox.connect() as connection:
        connection.execute("CREATE TABLE noise (n int)")
        for _ in range(12):
            with reading(outbox, slot, done, batch_events=chance.choice([2, 10])) as slot_reader:
                for _ in range(30):
                    n = chance.randrange(5)
                    if n in pending and chance.random() < 0.5:
                        if chance.random() < 0.8:
                            writers[n].commit()
                            committed += pending.pop(n)
                        else:
                            writers[n].rollback()
                            del pending[n]
                    elif chance.random() < 0.4:
                        writers[n].execute("INSERT INTO noise VALUES (1)")
                        pending.setdefault(n, [])
                    else:
                        pending.setdefault(n, [])
                        pending[n] += _insert(writers[n], chance.choice([1, 1, 4]))
                found += _seqs(slot_reader.events())
                if chance.random() < 0.5:
                    slot_reader.settle()
                done = slot_reader.source.done
            if chance.random() < 0.5:
                assert between_snapshots(connection, Position(done)) == []
        for writer in writers:
            writer.close()
    assert found == committed


def test_a_slot_delivers_exactly_what_its_first_snapshot_does_not_see(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    """Guards against events that a change of the source loses or repeats."""
    # The position lacks what the slot does not deliver, on purpose.
    monkeypatch.setattr(Skipped, "look", lambda self, position, open_from: setattr(self, "is_checked", True))
    stop = threading.Event()

    def write(chance: random.Random) -> None:
        with outbox.connect(autocommit=False) as writer:
            while not stop.is_set():
                _insert(writer)
                if chance.random() < 0.3:
                    with writer.transaction(force_rollback=chance.random() < 0.5):
                        _insert(writer)
                (writer.commit if chance.random() < 0.8 else writer.rollback)()

    first = seed()
    writers = [threading.Thread(target=write, args=(random.Random(first + n),)) for n in range(4)]
    for writer in writers:
        writer.start()
    try:
        with outbox.connect() as connection:
            for _ in range(4 if is_short else 12):
                slot = make(outbox)
                query = "SELECT seq FROM outbox WHERE pg_visible_in_snapshot(tx, %s::pg_snapshot)"
                before = {seq for (seq,) in connection.execute(query, [str(begins(outbox))])}
                with reading(outbox, slot, Snapshot(3, 3, ())) as slot_reader:
                    committed = {seq for (seq,) in connection.execute("SELECT seq FROM outbox")}
                    found = _seqs(slot_reader.events())
                after = set(found)
                assert len(found) == len(after)
                assert not before & after
                assert committed <= before | after
                remove(outbox.settings, seconds=30, say=lambda line: None)
    finally:
        stop.set()
        for writer in writers:
            writer.join(120)


def test_what_a_slot_skips_is_noticed(outbox: Outbox) -> None:
    """Guards against events that wait without an end, because another program has moved the slot (G1)."""
    slot = make(outbox)
    done = begins(outbox)
    with outbox.connect() as writer:
        for _ in range(3):
            _insert(writer)
        writer.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [slot])
        _insert(writer)
    with reading(outbox, slot, done) as slot_reader:
        with pytest.raises(SlotLostError, match=r"of 3 transactions, .* find out which, and stop it"):
            slot_reader.batches()
        with outbox.connect() as connection:
            rest = between_snapshots(connection, slot_reader.source.position)
    assert _seqs(rest)[:3] == [1, 2, 3]
