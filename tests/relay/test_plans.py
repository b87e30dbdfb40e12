"""What grows costs a relay nothing: asserted in plans, where a regression shows without a clock."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg
import pytest

from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.days.partitions import ahead
from outbox_pipelines.days.partitions.calendar import leaf_of
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.lease.resharding import OperatorChange
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.parking import parking_sql
from outbox_pipelines.relay.read.snapshots import SnapshotSource
from tests.conftest import Outbox
from tests.relay.explained import Explained

_BLOCKED: Final = 1_000
_BEHIND: Final = 20


@pytest.fixture
def connection(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection[Any]]:
    """A connection whose sources are explained."""
    monkeypatch.setattr(Explained, "read", Counter())
    monkeypatch.setattr(Explained, "relations", set())
    monkeypatch.setattr(Explained, "nodes", set())
    with outbox.connect() as connection:
        connection.cursor_factory = Explained
        yield connection


def _read(source: SnapshotSource) -> int:
    upto = source.now()
    return sum(len(batch.events) for batch in iter(lambda: source.read(upto), None))


def _source(
    connection: psycopg.Connection[Any], shards: int = 1, batch_bytes: int = 8_000_000
) -> SnapshotSource:
    ((done,),) = connection.execute(relay_sql.SNAPSHOT.encode()).fetchall()
    position = Position(Snapshot.parse(done))
    return SnapshotSource(connection, position, batch_events=1_000, batch_bytes=batch_bytes, shards=shards)


@pytest.mark.parametrize("events", [100, 700, 3_000], ids=["kept plan", "small tick", "windows"])
def test_closed_days_are_not_looked_into(
    outbox: Outbox, connection: psycopg.Connection[Any], events: int
) -> None:
    """Guards against a poll that costs more with each day that is kept."""
    today = datetime.now(UTC).date()
    ahead.ensure(outbox.settings, None, today - timedelta(30))
    with outbox.connect() as admin:
        admin.execute(
            "UPDATE outbox_days SET state = 'closed', sealed_at = now(), closed_at = now() "
            "WHERE day < current_date - 1"
        )
    source = _source(connection)
    outbox.fill(events)
    assert _read(source) == events
    leaves = {relation for relation in Explained.relations if re.fullmatch(r"outbox_\d{8}", relation)}
    assert leaf_of(today) in leaves
    assert min(leaves) >= leaf_of(today - timedelta(1))


@pytest.mark.parametrize("events", [100, 700, 3_000], ids=["kept plan", "small tick", "windows"])
def test_what_was_published_beside_an_open_transaction_is_not_read_again(
    outbox: Outbox, connection: psycopg.Connection[Any], events: int
) -> None:
    """Guards against a range of the index that begins at the oldest open transaction: each tick would read
    all that was written since."""
    source = _source(connection)
    with outbox.connect(autocommit=False) as late:
        late.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'order', 'late', 'order.placed', '{}' FROM generate_series(1, 5)"
        )
        outbox.fill(5_000)
        assert _read(source) == 5_000
        Explained.read.clear()
        outbox.fill(events)
        assert _read(source) == events
        assert Explained.read["removed"] == 0
        # A tick is begun as a smaller one, and a window looks at the edges.
        assert Explained.read["rows"] <= events + 4 * min(events, 1_000)
        late.commit()
    Explained.read.clear()
    assert _read(source) == 5
    assert Explained.read["removed"] == 0
    assert Explained.read["rows"] <= 4 * 5


def test_a_shard_begins_a_backlog_without_a_look_at_all_of_it(
    outbox: Outbox, connection: psycopg.Connection[Any]
) -> None:
    """Guards against a first batch that waits for a bitmap of the whole backlog, in each shard."""
    source = _source(connection, shards=16)
    outbox.fill(20_000)
    with outbox.connect() as admin:
        admin.execute("VACUUM (ANALYZE) outbox")
    assert 0 < _read(source) < 2_500
    assert not {node for node in Explained.nodes if node.startswith("Bitmap")}


@pytest.mark.parametrize(
    ("one_in", "batch_bytes", "most"), [(10_000, 8_000_000, 1.5), (100, 8_000_000, 1.5), (20, 100_000, 3)]
)
def test_some_large_events_among_small_ones(
    outbox: Outbox, connection: psycopg.Connection[Any], one_in: int, batch_bytes: int, most: float
) -> None:
    """Guards against small events that are read one by one, or again and again, because others are large."""
    source = _source(connection, batch_bytes=batch_bytes)
    with outbox.connect() as writer:
        writer.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'order', i::text, 'order.placed', "
            "       to_jsonb(repeat(md5(i::text), CASE WHEN i %% %s = 1 THEN 1000 ELSE 1 END)) "
            "FROM generate_series(1, 6000) i",
            [one_in],
        )
    assert _read(source) == 6_000
    assert Explained.read["rows"] < most * 6_000


_FILL: Final = """
INSERT INTO outbox_parked (seq, id, tx, created_at, aggregate_type, aggregate_id, event_type, payload, state)
SELECT a * 100 + i, gen_random_uuid(), '3', now(), 'order', a::text, 'order.placed', '{}',
       CASE WHEN i = 0 THEN 'retrying' ELSE 'waiting' END
FROM generate_series(1, %s) a, generate_series(0, %s) i"""


@pytest.mark.parametrize("is_filled", [True, False], ids=["full", "empty"])
def test_parked_events_are_found_by_an_index(outbox: Outbox, is_filled: bool) -> None:
    """Guards against a round of retries that reads all parked events for each aggregate, or once: also by a
    plan that is kept from a time when there were none."""
    seqs = [aggregate * 100 for aggregate in range(1, 21)]
    given = {
        **{"types": ["order"] * 20, "ids": [str(seq // 100) for seq in seqs], "seqs": seqs, "limit": 250},
        **{"errors": [""] * 20, "pauses": [1.0] * 20, "last": [False] * 20, "command": False},
        **{
            "blocks": False,
            "event_blocks": "{}",
            "aggregate_blocks": "{}",
            "shard": 0,
            "shards": 1,
            "under_way": seqs,
            "room": 16,
        },
    }
    statements = {
        name: getattr(parking_sql, name)
        for name in (
            *("HEADS", "FREE", "BODIES", "TRYING", "INNOCENT", "ACCEPTED", "REFUSED", "POSTPONED"),
            *("SUSPECTED", "REPLAYS", "ANY_REPLAYS", "COMMANDS", "COMMANDS_RAN"),
        )
    }
    with outbox.connect() as connection:
        if is_filled:
            connection.execute(_FILL, [_BLOCKED, _BEHIND])
            connection.execute("SELECT setval('outbox_seq', outbox_last_seq())")
        connection.execute("VACUUM (ANALYZE) outbox_parked")
    shard = Shard(outbox.settings, 0, "test")
    assert shard.try_take()
    for name, statement in statements.items():
        plan = [line for (line,) in shard.execute(f"EXPLAIN {statement}", {**given, "most": 8_000_000})]
        assert not [line for line in plan if "Seq Scan on outbox_parked" in line], (name, plan)
    shard.close()


_READ: Final = """
SELECT sum(seq_tup_read)::int, sum(idx_tup_fetch)::int FROM pg_stat_xact_user_tables
WHERE relname ~ '^outbox_([0-9]+|parked)$'"""


@pytest.mark.parametrize("is_filled", [True, False], ids=["full", "empty"])
def test_a_batch_is_parked_without_a_look_at_others(outbox: Outbox, is_filled: bool) -> None:
    """Guards against a batch behind a rejected event that reads the day, or all that is parked, once or for
    each of its events: also by a plan that is kept from a time when there were none."""
    with outbox.connect() as connection:
        if not is_filled:
            connection.execute("VACUUM (ANALYZE) outbox, outbox_parked")
        connection.execute(_FILL, [_BLOCKED, _BEHIND])
        connection.execute("SELECT setval('outbox_seq', outbox_last_seq())")
        outbox.fill(20_000)
        if is_filled:
            connection.execute("VACUUM (ANALYZE) outbox, outbox_parked")
        ((first,),) = connection.execute("SELECT min(seq) FROM outbox")
    shard = Shard(outbox.settings, 0, "test")
    assert shard.try_take()
    with shard.transaction():
        # More often than a plan is made for the numbers that are given.
        for n in range(10):
            batch = range(first + n * 1_000, first + (n + 1) * 1_000, 3)
            shard.park([dict.fromkeys(batch, ("waiting", None))])
            ((read, fetched),) = shard.execute(_READ, {})
            assert (read, fetched <= (n + 1) * 2_000) == (0, True), (n, read, fetched)
        # A transaction that committed late has low numbers.
        shard.park([dict.fromkeys((first + 1, first + 19_999), ("waiting", None))])
        ((read, more),) = shard.execute(_READ, {})
        assert (read, more - fetched < 20) == (0, True), more - fetched
        ((parked,),) = shard.execute("SELECT count(*) FROM outbox_parked", {})
    assert parked == _BLOCKED * (_BEHIND + 1) + 10 * 334 + 2
    shard.close()


def test_a_position_of_many_versions_is_found_at_once(outbox: Outbox) -> None:
    """Guards against a look at the row of the shard, twice a second, that reads each version which an open
    transaction keeps."""
    places: list[str] = []
    with outbox.connect() as connection:
        ((first,),) = connection.execute("SELECT ctid::text FROM outbox_shards").fetchall()
        ((moved,),) = connection.execute(
            "UPDATE outbox_shards SET wanted = 2, wanted_at = now() RETURNING ctid::text"
        )
        assert moved != first
        change = OperatorChange(connection, {"shard": 0, "epoch": 0}, lambda: places[-1])
        for place in (first, moved):
            places.append(place)
            assert change.look()
        given = {"shard": 0, "ctid": moved}
        plan = connection.execute(f"EXPLAIN {relay_sql.CHANGE_AT}".encode(), given).fetchall()
    assert "Tid Scan" in plan[0][0]
