"""Delayed events: a relay moves them into the outbox when they are due, whatever else happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.relay import service
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.parking import delayed_events
from outbox_pipelines.relay.read.slot import slot_setup
from tests.conftest import Outbox, either, wait_until
from tests.relay import faults
from tests.relay.delayed import delay, pass_time
from tests.relay.parked import keys, numbers_by_key
from tests.relay.slot import slots
from tests.relay.threads import quick, running

LEFT = "SELECT count(*) FROM outbox_delayed"
# Each event is moved in a statement that takes a while.
SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_sleep(0.0005); RETURN NEW; END $$;
CREATE TRIGGER slow BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION slow()"""


def _left(outbox: Outbox) -> int:
    with outbox.connect() as connection:
        [(left,)] = connection.execute(LEFT).fetchall()
    return int(left)


def test_a_run_until_empty_publishes_what_is_due_and_nothing_else(outbox: Outbox) -> None:
    """Guards against a run that says "empty" while something is due, or waits for what is not."""
    delay(outbox, *["due"] * 600)
    delay(outbox, "later", is_due=False)
    outbox.write("at once")
    assert service.relay(outbox.settings, until_empty=True).events == 601
    assert numbers_by_key(outbox.messages()) == {"at once": [0], "due": [*range(600)]}
    assert _left(outbox) == 1


@pytest.mark.parametrize(
    ("more", "has_slot"), either(({}, False), ({}, True), ({"delivery": "exactly_once"}, False))
)
def test_a_relay_publishes_it_when_it_is_due(outbox: Outbox, more: dict[str, Any], has_slot: bool) -> None:
    """Guards against an idle relay that does not look, and later events that overtake what they wait for."""
    if has_slot:
        slots.make(outbox)
    with running(quick(outbox, **more)):
        delay(outbox, "a", is_due=False, later_events_wait=True)
        outbox.write("a", "b")
        wait_until(lambda: keys(outbox) == ["b"], what="the one that does not wait")
        with outbox.connect() as connection:
            pass_time(connection)
        wait_until(lambda: len(keys(outbox)) == 3, seconds=20, what="the others")
    assert numbers_by_key(outbox.messages()) == {"a": [0, 0], "b": [1]}
    if has_slot:
        slot_setup.remove(outbox.settings, seconds=30, say=lambda line: None)


def test_another_shard_moves_the_events_of_one_without_a_relay(outbox: Outbox) -> None:
    """Guards against one missing relay that delays the delayed events of all shards (G9)."""
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET shards = 2")
        connection.execute(
            "INSERT INTO outbox_shards (shard, shards, done, system_identifier, database) "
            "SELECT 1, 2, done, system_identifier, database FROM outbox_shards"
        )
    delay(outbox, *range(20))
    assert 0 < service.relay(outbox.settings, shard=1, until_empty=True).events < 20
    assert _left(outbox) == 0


def test_what_cannot_be_moved_delays_no_others(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a relay that ends, or loses its shard, because a lock or an event prevents the move."""
    delay(outbox, "due")
    with outbox.connect(autocommit=False) as other:
        # The move waits for this lock, ordinary events do not.
        other.execute("LOCK TABLE outbox_delayed IN SHARE MODE")
        with running(quick(outbox)):
            wait_until(lambda: "delayed events cannot be moved" in caplog.text, what="the log line")
            outbox.write("a", "b")
            wait_until(lambda: sorted(keys(outbox)) == ["a", "b"], what="the others")
            other.rollback()
            wait_until(lambda: sorted(keys(outbox)) == ["a", "b", "due"], what="the delayed one")
    assert "starting over" not in caplog.text
    assert "delayed events are moved again" in caplog.text


class _Shard:
    """Answers each move with a number of events or an error; a move takes 0.15 s."""

    def __init__(self, *answers: int | Exception) -> None:
        self.left = [*answers]
        self.seconds = 0.0

    def execute(self, *_: object) -> list[tuple[int]]:
        self.seconds += 0.15
        answer = self.left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [(answer,)]


def test_a_look_takes_a_moment_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a settler that moves without end, and a backlog of which a part is moved each second."""
    shard = _Shard(500, 500, 500, 499, 0)
    monkeypatch.setattr(delayed_events, "time", SimpleNamespace(monotonic=lambda: shard.seconds))
    delayed = delayed_events.DelayedEvents(cast("Shard", shard))
    left = []
    for now in (0.0, 0.1, 0.1, 1.0, 1.1):
        delayed.look(now)
        left.append(len(shard.left))
    assert left == [3, 1, 1, 1, 0]


def test_only_a_passing_error_does_not_end_the_relay() -> None:
    """Guards against a relay that goes on in an ended session, or ends because of a lock."""
    lost = ShardLostError("lost")
    lost.__cause__ = psycopg.errors.AdminShutdown("terminated")
    passing = ShardLostError("lost")
    passing.__cause__ = psycopg.errors.LockNotAvailable("locked")
    shard = _Shard(passing, psycopg.errors.InsufficientPrivilege("no right"), lost)
    delayed = delayed_events.DelayedEvents(cast("Shard", shard))
    delayed.move_all()
    delayed.move_all()
    with pytest.raises(ShardLostError):
        delayed.move_all()


@pytest.mark.extended
def test_kill_9_of_relay_and_postgresql_in_the_middle_of_moves(
    own_servers: tuple[Postgres, Kafka, Outbox],
) -> None:
    """Guards against a delayed event that is lost, or twice in the table, when a move is interrupted."""
    postgres, _, outbox = own_servers
    with outbox.connect() as connection:
        connection.execute(SLOW)
    count = 6_000
    for number in range(30):
        delay(outbox, *[number] * (count // 30), later_events_wait=number % 2 == 0)

    def has_moved(below: int) -> Callable[[], bool]:
        def is_below() -> bool:
            try:
                return _left(outbox) < below
            except psycopg.OperationalError:
                return False

        return is_below

    for kill_server in (False, True, False, True):
        left = _left(outbox)
        with faults.relay(outbox):
            wait_until(has_moved(left), seconds=60, what="a move")
            time.sleep(0.05 * (1 + kill_server))
            if kill_server:
                postgres.kill()
                postgres.start()
                wait_until(has_moved(left + 1), seconds=60, what="PostgreSQL")
        assert _left(outbox) > 0
    service.relay(outbox.settings, until_empty=True)
    wait_until(lambda: _left(outbox) == 0, what="nothing left")
    with outbox.connect() as connection:
        [(rows, ids)] = connection.execute("SELECT count(*), count(DISTINCT id) FROM outbox").fetchall()
        order = connection.execute(
            "SELECT array_agg((payload ->> 'n')::int ORDER BY seq) FROM outbox GROUP BY aggregate_id"
        ).fetchall()
    assert (rows, ids) == (count, count)
    assert order == [([*range(count // 30)],)] * 30
    assert {message.value for message in outbox.messages()} != set()
