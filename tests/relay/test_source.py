"""Reading between snapshots: every committed event once, in order, however transactions overlap."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.read import snapshots
from outbox_pipelines.relay.read.snapshots import SnapshotSource
from tests.conftest import Outbox
from tests.relay.explained import Explained

INSERT = (
    "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
    "SELECT 'order', i::text, 'order.placed', jsonb_build_object('pad', repeat('x', %s)) "
    "FROM generate_series(1, %s) i RETURNING seq"
)


@pytest.fixture
def connection(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    with outbox.connect() as connection:
        yield connection


@pytest.fixture(params=["a look first", "one statement"])
def read_all(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Event]]:
    """Returns all that a source finds now: as a busy one does, or one that looks first."""
    if request.param == "a look first":
        return _all
    monkeypatch.setattr(snapshots, "_STEADY", 0)
    return _news


def _source(
    connection: psycopg.Connection[Any], position: Position | None = None, **limits: int
) -> SnapshotSource:
    if position is None:
        row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
        assert row is not None
        position = Position(Snapshot.parse(row[0]))
    return SnapshotSource(
        connection,
        position,
        batch_events=limits.get("batch_events", 5000),
        batch_bytes=limits.get("batch_bytes", 8_000_000),
        shard=limits.get("shard", 0),
        shards=limits.get("shards", 1),
    )


def _shard_of(connection: psycopg.Connection[Any], aggregate_id: str, shards: int) -> int:
    row = connection.execute("SELECT outbox_shard_of('order', %s, %s)", [aggregate_id, shards]).fetchone()
    assert row is not None
    return int(row[0])


def _write(connection: psycopg.Connection[Any], events: int = 1, size: int = 10) -> list[int]:
    return [seq for (seq,) in connection.execute(INSERT, [size, events])]


def _all(source: SnapshotSource) -> list[Event]:
    return [event for batch in _batches(source) for event in batch.events]


def _news(source: SnapshotSource) -> list[Event]:
    """What `read` finds without an end."""
    return [event for batch in iter(source.read, None) for event in batch.events]


def _batches(source: SnapshotSource) -> list[Batch]:
    upto = source.now()
    return list(iter(lambda: source.read(upto), None))


def _seqs(events: list[Event]) -> list[int]:
    return [event.seq for event in events]


def test_reads_what_committed_and_nothing_twice(
    outbox: Outbox, connection: psycopg.Connection[Any], read_all: Callable[..., list[Event]]
) -> None:
    """Guards against a tick that overlaps the one before."""
    source = _source(connection)
    with outbox.connect() as writer:
        first = _write(writer, 3)
        assert _seqs(read_all(source)) == first
        assert read_all(source) == []
        second = _write(writer, 2)
        assert _seqs(read_all(source)) == second


def test_a_rolled_back_event_is_never_read(
    outbox: Outbox, connection: psycopg.Connection[Any], read_all: Callable[..., list[Event]]
) -> None:
    """Guards against phantoms (G1)."""
    source = _source(connection)
    with outbox.connect(autocommit=False) as writer:
        _write(writer, 2)
        assert read_all(source) == []
        writer.rollback()
        committed = _write(writer)
        writer.commit()
    assert _seqs(read_all(source)) == committed


def test_a_late_commit_with_a_low_seq_is_read_when_it_commits(
    outbox: Outbox, connection: psycopg.Connection[Any], read_all: Callable[..., list[Event]]
) -> None:
    """Guards against `seq > last`, which loses it permanently (G1)."""
    source = _source(connection)
    with outbox.connect(autocommit=False) as slow, outbox.connect() as quick:
        late = _write(slow, 2)
        early = _write(quick, 3)
        assert max(late) < min(early)
        assert _seqs(read_all(source)) == early
        slow.commit()
        assert _seqs(read_all(source)) == late


@pytest.mark.parametrize("more", [0, 40])
def test_what_commits_after_the_target_waits_for_the_next(
    outbox: Outbox, connection: psycopg.Connection[Any], more: int
) -> None:
    """Guards against a read that sees more than its target: the next tick would read it again."""
    source = _source(connection, batch_events=10)
    with outbox.connect(autocommit=False) as slow, outbox.connect() as quick:
        early = _write(quick, 1 + more)
        late = _write(slow)
        early += _write(quick, 1 + more)
        upto = source.now()
        slow.commit()
        found = [event for batch in iter(lambda: source.read(upto), None) for event in batch.events]
        assert _seqs(found) == early
        assert _seqs(_all(source)) == late


def test_a_transaction_with_a_late_id_and_an_early_seq(
    outbox: Outbox, connection: psycopg.Connection[Any], read_all: Callable[..., list[Event]]
) -> None:
    """Guards against a cut at a transaction id: here the lower id commits second."""
    with outbox.connect(autocommit=False) as slow, outbox.connect(autocommit=False) as quick:
        slow.execute("SELECT pg_current_xact_id()")
        first = _write(quick)
        source = _source(connection)
        quick.commit()
        assert _seqs(read_all(source)) == first
        second = _write(slow)
        slow.commit()
        assert _seqs(read_all(source)) == second


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("events", [9, 10, 11, 95])
def test_ticks_around_the_size_of_a_batch_are_whole_and_in_order(
    outbox: Outbox, connection: psycopg.Connection[Any], events: int, shards: int
) -> None:
    """Guards against an off-by-one where a small tick becomes a big one.

    All events are of one aggregate: a shard expects to share a window with the others, and has it alone.
    """
    source = _source(connection, batch_events=10, shard=_shard_of(connection, "1", shards), shards=shards)
    with outbox.connect() as writer:
        written = [seq for _ in range(events) for seq in _write(writer)]
    batches = _batches(source)
    assert _seqs([event for batch in batches for event in batch.events]) == written
    assert all(len(batch.events) <= 10 for batch in batches)
    assert [batch.ends_tick for batch in batches] == [False] * (len(batches) - 1) + [True]


def test_a_big_tick_holds_late_rows_in_their_place(
    outbox: Outbox, connection: psycopg.Connection[Any], read_all: Callable[..., list[Event]]
) -> None:
    """Guards against a big tick that reads its range and forgets the transactions that ended late."""
    source = _source(connection, batch_events=10)
    with outbox.connect(autocommit=False) as slow, outbox.connect() as quick:
        expected = _write(slow, 3)
        _write(quick, 40)
        assert len(read_all(source)) == 40
        expected += _write(slow, 3)
        expected += _write(quick, 50)
        slow.commit()
    assert _seqs(read_all(source)) == sorted(expected)


@pytest.mark.parametrize("shards", [1, 4])
def test_a_big_tick_whose_first_transaction_wrote_last(
    outbox: Outbox, connection: psycopg.Connection[Any], shards: int
) -> None:
    """Guards against a big tick that begins at the seq of its first transaction, or ends with its last."""
    source = _source(connection, batch_events=10, shard=_shard_of(connection, "1", shards), shards=shards)
    with outbox.connect(autocommit=False) as first, outbox.connect(autocommit=False) as last:
        first.execute("SELECT pg_current_xact_id()")
        expected = [seq for _ in range(30) for seq in _write(last)]
        expected += [seq for _ in range(30) for seq in _write(first)]
        first.commit()
        last.commit()
    assert _seqs(_all(source)) == expected


def test_a_jump_of_the_sequence_is_crossed_at_once(
    outbox: Outbox, connection: psycopg.Connection[Any]
) -> None:
    """Guards against a relay that crawls through a billion numbers, window by window."""
    source = _source(connection, batch_events=10)
    with outbox.connect() as writer, writer.transaction():
        expected = _write(writer, 15)
        writer.execute("SELECT setval('outbox_seq', 1000000000)")
        expected += _write(writer, 15)
    assert _seqs(_all(source)) == expected


def test_events_of_midnight(outbox: Outbox, connection: psycopg.Connection[Any]) -> None:
    """Guards against a day that is read from its second microsecond on."""
    source = _source(connection, batch_events=10, batch_bytes=100_000)
    with outbox.connect() as writer, writer.transaction():
        writer.execute("SET LOCAL outbox.backfill = on")
        at_midnight = INSERT.replace("payload)", "payload, created_at)").replace(
            "FROM", ", date_trunc('day', now(), 'UTC') FROM"
        )
        expected = [seq for (seq,) in writer.execute(at_midnight, [10, 15])]
        writer.execute("SELECT setval('outbox_seq', 1000000000)")
        expected += [seq for (seq,) in writer.execute(at_midnight, [20_000, 15])]
    assert _seqs(_all(source)) == expected


def test_large_payloads_make_small_batches(outbox: Outbox, connection: psycopg.Connection[Any]) -> None:
    """Guards against 5,000 events of a megabyte each in memory."""
    source = _source(connection, batch_bytes=100_000)
    with outbox.connect() as writer:
        written = _write(writer, 1200, size=1000)
    batches = _batches(source)
    assert len(batches) > 1
    assert _seqs([event for batch in batches for event in batch.events]) == written


@pytest.mark.parametrize("batch_events", [10, 5000])
def test_goes_on_inside_a_tick_where_the_position_says(
    outbox: Outbox, connection: psycopg.Connection[Any], batch_events: int
) -> None:
    """Guards against a successor that takes a new target: it would skip late rows with a low seq.

    Also against late rows of the tick itself that are read again.
    """
    with (
        outbox.connect(autocommit=False) as early,
        outbox.connect(autocommit=False) as slow,
        outbox.connect() as quick,
    ):
        first = _write(early, 5)
        # Without a later one that has ended, it would not be late at the start.
        quick.execute("SELECT pg_current_xact_id()")
        start = _source(connection).now()
        late = _write(slow, 5)
        written = _write(quick, 60)
        early.commit()
        target = _source(connection).now()
        slow.commit()
        for last_seq, rest in ((first[2], first[3:] + written), (written[24], written[25:])):
            source = _source(connection, Position(start, target, last_seq), batch_events=batch_events)
            assert _seqs(_all(source)) == rest + late


@pytest.mark.parametrize("shards", [1, 3])
def test_random_transactions_are_all_read_once_and_in_order_of_commit(
    outbox: Outbox,
    connection: psycopg.Connection[Any],
    shards: int,
    read_all: Callable[..., list[Event]],
) -> None:
    """Guards against whatever the cases above did not think of; the seed is printed."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    sources = [_source(connection, batch_events=7, shard=shard, shards=shards) for shard in range(shards)]
    writers = [outbox.connect(autocommit=False) for _ in range(6)]
    held: dict[int, list[int]] = {}
    committed: list[int] = []
    found: list[int] = []
    for _ in range(400):
        n = chance.randrange(6)
        step = chance.random()
        if step < 0.5:
            held.setdefault(n, []).extend(_write(writers[n], chance.choice([1, 1, 2, 12])))
        elif step < 0.6:
            writers[n].execute("SELECT pg_current_xact_id()")
        elif step < 0.7:
            writers[n].rollback()
            held.pop(n, None)
        elif step < 0.9:
            writers[n].commit()
            committed += held.pop(n, [])
        else:
            found += [seq for source in sources for seq in _seqs(read_all(source))]
            assert sorted(found) == sorted(committed)
    for writer in writers:
        writer.close()
    assert len(found) == len(set(found))


@pytest.mark.parametrize("is_late", [True, False])
def test_one_statement_reads_what_its_snapshot_sees(
    outbox: Outbox, connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Guards against a row whose transaction still runs for the position: each tick would read it again.

    Only the owner can write such a row, with the id of another transaction.
    """
    monkeypatch.setattr(snapshots, "_STEADY", 0)
    with outbox.connect(autocommit=False) as other, outbox.connect() as owner:
        begin = "SELECT pg_current_xact_id()::text"
        source = None if is_late else _source(connection)
        ((running,),) = other.execute(begin)
        owner.execute(begin)
        source = source or _source(connection)
        assert (int(running) in source.done.xip) is is_late
        owner.execute("SET session_replication_role = replica")
        write = INSERT.replace("payload)", "payload, tx)").replace("FROM", f", '{running}' FROM")
        written = [seq for (seq,) in owner.execute(write, [1, 1])]
        assert _news(source) == []
        other.commit()
        assert _seqs(_news(source)) == written


def test_a_tick_that_was_opened_keeps_its_target(connection: psycopg.Connection[Any]) -> None:
    """Guards against a tick that a predecessor has opened and that is joined with the next one: the position
    cannot move over it, and the relay ends with an error at each start."""
    done = _source(connection).done
    _write(connection)
    opened = _source(connection).now()
    _write(connection)
    source = _source(connection, Position(done, opened, 0))
    first, second = _batches(source)
    assert (first.target, first.starts_tick, first.is_whole) == (opened, False, False)
    assert (second.done, second.is_whole) == (opened, True)


@pytest.mark.parametrize("is_filled", [True, False], ids=["full", "empty"])
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("kind", ["small_tick", "small_tick_with_late", "news", "news_with_late"])
def test_a_kept_plan_reads_by_transactions(outbox: Outbox, kind: str, shards: int, is_filled: bool) -> None:
    """Guards against a plan that reads all rows of a day for each poll: a stall that grows with the day."""
    if is_filled:
        outbox.fill(20_000)
    reading = relay_sql.EVENTS if shards == 1 else relay_sql.SHARD_EVENTS
    with outbox.connect() as connection:
        connection.execute("VACUUM ANALYZE outbox")
        now = _source(connection).now()
        connection.execute(relay_sql.PLAN_ONCE.encode())
        ((first,),) = connection.execute(relay_sql.OPEN_FROM.encode()).fetchall()
        given = {
            **{
                "limit": 500,
                "most": 8_000_000,
                "last_seq": 0,
                "target": str(now),
                **relay_sql.lanes_of(0, shards),
            },
            **{"first": str(now.xmax - 1), "end": str(now.xmax), "late": "{5}", "open_from": first},
        }
        query = getattr(reading, kind).replace("%(open_from)s", f"'{first}'")
        names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", query)))
        for number, name in enumerate(names, 1):
            query = query.replace(f"%({name})s", f"${number}")
        connection.execute(f"PREPARE tick AS {query.replace('%%', '%')}".encode())
        values = ", ".join(f"'{given[name]}'" for name in names)
        plan = [line for (line,) in connection.execute(f"EXPLAIN EXECUTE tick ({values})".encode())]
    scans = [line for line in plan if re.search(r"Scan (using|on) outbox_", line) and "Heap" not in line]
    assert len(scans) > 10
    assert [line for line in scans if "_tx_seq_" not in line] == []
    # A lane that is not part of the index is a filter, which reads the rows of the other shards.
    conditions = [line for line in plan if "Index Cond" in line and "tx" in line]
    assert len([line for line in conditions if "hashtextextended" in line]) == len(conditions) * (shards > 1)
    assert "Parallel" not in "".join(plan)


@pytest.mark.parametrize("events", [400, 2_000, 12_000])
def test_a_shard_reads_its_own_rows(outbox: Outbox, monkeypatch: pytest.MonkeyPatch, events: int) -> None:
    """Guards against shards that each read the rows of all: four of them read four times as much as one.

    By a kept plan, by a plan for one tick, and by windows of a big one.
    """
    outbox.fill(5_000, aggregates=1_000)
    with outbox.connect() as connection:
        # An analysis between two reads would change their plans.
        days = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox'::regclass"
        for (day,) in connection.execute(days).fetchall():
            connection.execute(f"ALTER TABLE {day} SET (autovacuum_enabled = off)".encode())
        start = _source(connection).done
        outbox.fill(events, aggregates=1_000)
        upto = _source(connection).now()
        connection.cursor_factory = Explained
        read = []
        for shards in (1, 4):
            counts = Counter[str]()
            monkeypatch.setattr(Explained, "read", counts)
            found = []
            for shard in range(shards):
                source = _source(connection, Position(start), batch_events=1_000, shard=shard, shards=shards)
                for batch in iter(partial(source.read, upto), None):
                    found += batch.events
            assert len(found) == len({event.seq for event in found}) == events
            read.append(counts)
    one, four = read
    assert (one["removed"], four["removed"]) == (0, 0)
    # The rest are rows of a tick that was begun as a smaller one.
    assert events <= four["rows"] <= events + 4 * (one["rows"] - events + 10)
