"""Each shard sees its own parked events, and no others: two relays would publish the same event."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.parking import parking_sql
from outbox_pipelines.relay.parking.parked_table import ParkedTable
from tests.conftest import Outbox
from tests.relay.test_resharding import MORE_SHARDS

KEYS = [str(n) for n in range(20)]
_PARK = """
INSERT INTO outbox_parked SELECT o.*, %s FROM outbox o;
UPDATE outbox_parked SET trying = true, command_due = true, failed_at = now(), crashes = 1"""


@pytest.fixture
def shards(outbox: Outbox) -> Iterator[list[Shard]]:
    """Both of an outbox with events of twenty aggregates."""
    outbox.write(*KEYS)
    with outbox.connect() as connection:
        connection.execute(MORE_SHARDS, [[1]])
        connection.execute("UPDATE outbox_shards SET shards = 2, done = pg_current_snapshot()")
    with ExitStack() as ends:
        owned = [Shard(outbox.settings, number, f"relay {number}") for number in range(2)]
        for shard in owned:
            ends.callback(shard.close)
            assert shard.try_take()
        yield owned


def _replays(table: ParkedTable) -> list[str]:
    return [one.event.aggregate_id for one in table.replays(100)]


def _blocked(table: ParkedTable) -> list[str]:
    return [name for _, name in table.blocked()]


def _taken_over(table: ParkedTable) -> list[str]:
    return [one.event.aggregate_id for one in table.take_over(crashed=True)]


def _commands(table: ParkedTable) -> list[str]:
    rows = table._shard.execute(parking_sql.COMMANDS, {"under_way": [], "room": 100})
    return [row[3] for row in rows]


@pytest.mark.parametrize(
    ("state", "read"),
    [
        ("replaying", _replays),
        ("waiting", _blocked),
        ("retrying", _taken_over),
        ("failed", _commands),
    ],
)
def test_each_has_its_part(
    outbox: Outbox, shards: list[Shard], state: str, read: Callable[[ParkedTable], list[str]]
) -> None:
    """Guards against an event that two relays try at the same time, and publish twice."""
    with outbox.connect() as connection:
        for statement in _PARK.split(";"):
            connection.execute(statement.encode(), [state] if "%s" in statement else None)
    tables = [ParkedTable(outbox.settings, shard, threading.Lock()) for shard in shards]
    parts = [read(table) for table in tables]
    assert all(parts)
    assert sorted(parts[0] + parts[1]) == sorted(KEYS)
    counts = [table.unpublished()[0] for table in tables]
    assert counts == [len(part) for part in parts]


def test_one_has_no_replays_because_of_the_other(outbox: Outbox, shards: list[Shard]) -> None:
    """Guards against a run until empty that waits for replays of another shard."""
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox_parked SELECT o.*, 'replaying' FROM outbox o "
            "WHERE outbox_shard_of(aggregate_type, aggregate_id, 2) = 1"
        )
    tables = [ParkedTable(outbox.settings, shard, threading.Lock()) for shard in shards]
    assert [table.has_replays() for table in tables] == [False, True]
