"""What the row of a shard remembers of relays that crashed, and what a new owner begins with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final, LiteralString

import psycopg
import pytest

from outbox_pipelines.relay import relay_sql
from tests.conftest import Outbox, wait_until
from tests.relay.test_resharding import MORE_SHARDS

_GIVEN: Final[dict[str, Any]] = {"shard": 0, "seq": 7}


class _Shard:
    """The row of a shard, as relays in turn change it."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    @property
    def epoch(self) -> int:
        ((epoch,),) = self.execute("SELECT epoch FROM outbox_shards")
        return int(epoch)

    def counts(self) -> tuple[object, ...]:
        """Crashes in a row; the event that was published alone, and the crashes there."""
        query: LiteralString = "SELECT crashes, crash_guard_seq, crash_guard_crashes FROM outbox_shards"
        return tuple(self.execute(query)[0])

    def execute(self, statement: LiteralString, **given: object) -> list[Any]:
        cursor = self._connection.execute(statement, _GIVEN | given)
        return cursor.fetchall() if cursor.description else []

    def taken(self, owner: str) -> tuple[object, ...]:
        """Let a relay take it; whether the one before has crashed, and the counts that it is given."""
        before = self.epoch
        ((epoch, _, crashed, *counts),) = [row[:6] for row in self.execute(relay_sql.TAKE, owner=owner)]
        # It fences the one before.
        assert epoch == self.epoch == before + 1
        assert tuple(counts) == self.counts()
        return crashed, *counts

    def alone(self, seq: int) -> None:
        self.execute(relay_sql.CRASH_GUARD, seq=seq, epoch=self.epoch)


@pytest.fixture
def shard(outbox: Outbox) -> Iterator[_Shard]:
    with outbox.connect() as connection:
        yield _Shard(connection)


def test_crashes_are_counted_at_the_event_that_was_published_alone(shard: _Shard) -> None:
    """Guards against an event that crashes relays without end, and against one that is blamed for another."""
    assert shard.taken("a") == (False, 0, None, 0)
    assert shard.taken("b") == (True, 1, None, 0)
    # A process that has lost its session and starts over.
    assert shard.taken("b") == (False, 1, None, 0)
    shard.alone(7)
    assert shard.counts() == (1, 7, 0)
    assert shard.taken("b") == (False, 1, 7, 0)
    assert shard.taken("c") == (True, 2, 7, 1)
    shard.alone(7)
    assert shard.counts() == (2, 7, 1)
    assert shard.taken("d") == (True, 3, 7, 2)
    shard.alone(8)
    assert shard.counts() == (3, 8, 0)
    assert shard.taken("e") == (True, 4, 8, 1)
    shard.execute(relay_sql.CALM, epoch=shard.epoch)
    assert shard.counts() == (0, None, 0)
    shard.alone(9)
    assert shard.taken("f") == (True, 1, 9, 1)
    shard.execute(relay_sql.RELEASE, epoch=shard.epoch)
    assert shard.taken("g") == (False, 0, None, 0)


def test_a_new_owner_begins_with_what_is_its_own(shard: _Shard) -> None:
    """Guards against a shard that shows the state of the relay before, except what it said of Kafka."""
    shard.execute(
        "UPDATE outbox_shards SET breaker = 'open', breaker_reason = 'an outage', barrier_paused = true, "
        "barrier_reached = true, heartbeat = now() - interval '1 day', owned_since = now() - interval '1 day'"
    )
    ((*_, breaker, reason),) = shard.execute(relay_sql.TAKE, owner="a")
    assert (breaker, reason) == ("open", "an outage")
    found = shard.execute(
        "SELECT owner, pid = pg_backend_pid(), breaker, breaker_reason, barrier_paused, barrier_reached, "
        "heartbeat > now() - interval '1 hour', owned_since > now() - interval '1 hour' FROM outbox_shards"
    )
    assert found == [("a", True, "open", "an outage", False, False, True, True)]


def test_another_shard_is_left_alone(shard: _Shard) -> None:
    """Guards against a relay that counts the crash of another shard's, or takes two shards."""
    shard.execute(MORE_SHARDS.replace("%s", "'{1}'"))
    shard.execute("UPDATE outbox_shards SET shards = 2, owner = 'b' WHERE shard = 1")
    # In the table it is the last.
    shard.execute("UPDATE outbox_shards SET heartbeat = now() WHERE shard = 0")
    ((_, _, crashed, crashes, *_),) = shard.execute(relay_sql.TAKE, owner="a")
    assert (crashed, crashes) == (False, 0)
    assert shard.execute("SELECT shard, owner FROM outbox_shards ORDER BY shard") == [(0, "a"), (1, "b")]


def test_a_relay_that_ends_in_this_moment_has_not_crashed(shard: _Shard, outbox: Outbox) -> None:
    """Guards against a hand-over that counts as a crash."""
    shard.taken("a")
    with outbox.connect(autocommit=False) as first, outbox.connect() as other:
        first.execute(relay_sql.RELEASE, {"shard": 0, "epoch": shard.epoch})
        taken: list[Any] = []

        def take() -> None:
            taken.extend(other.execute(relay_sql.TAKE, _GIVEN | {"owner": "b"}).fetchall())

        thread = threading.Thread(target=take)
        thread.start()
        waits: LiteralString = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = %(pid)s"
        wait_until(lambda: shard.execute(waits, pid=other.info.backend_pid) == [(1,)], what="the wait")
        first.commit()
        thread.join()
    assert taken[0][2:4] == (False, 0)


def test_no_relay_takes_it_while_older_rows_are_published(shard: _Shard) -> None:
    """Guards against events that overtake those from before `outbox adopt switch`."""
    shard.execute(
        "INSERT INTO outbox_adopted (relation, schema, name, kept_as, state) "
        "VALUES (1, 'public', 'events', 'events_before', 'draining')"
    )
    assert shard.execute(relay_sql.TAKE, owner="a") == []
    shard.execute("UPDATE outbox_adopted SET state = 'adopted'")
    assert shard.taken("a") == (False, 0, None, 0)
