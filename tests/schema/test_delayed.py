"""Events that are due later: `outbox_emit` with `deliver_after`, `outbox_move_due`, `outbox_cancel`."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.conftest import wait_until
from tests.schema.events import insert, one
from tests.schema.servers import Connection, Database

EMIT = "SELECT id, seq, duplicate FROM outbox_emit('order', %s, %s, '{}'"
AFTER = EMIT + ", deliver_after => clock_timestamp() + %s::interval)"
WAIT = EMIT + ", deliver_after => clock_timestamp() + %s::interval, later_events_wait => true)"
NOW = EMIT + ")"
KEYED = EMIT + ", idempotency_key => %s, deliver_after => clock_timestamp() + interval '1 hour')"
MANY = "SELECT seq IS NOT NULL FROM outbox_emit_many(%s::jsonb)"
WRITTEN = "SELECT event_type FROM outbox WHERE aggregate_id = %s ORDER BY seq"
DELAYED = "SELECT event_type FROM outbox_delayed WHERE aggregate_id = %s ORDER BY due, seq"
MOVE = "SELECT outbox_move_due(%s)"
# As if an hour had passed.
PASS = """
UPDATE outbox_delayed SET due = due - interval '1 hour', deliver_after = deliver_after - interval '1 hour'
WHERE aggregate_id = %s"""


@pytest.fixture
def aggregate() -> str:
    """An aggregate that no other test has."""
    return uuid.uuid4().hex


@pytest.fixture
def connection(kept: Database) -> Any:
    with kept.connect() as connection:
        connection.execute("DELETE FROM outbox_delayed")
        yield connection


def written(connection: Connection, aggregate: str) -> list[str]:
    return [event for (event,) in connection.execute(WRITTEN, [aggregate])]


def delayed(connection: Connection, aggregate: str) -> list[str]:
    return [event for (event,) in connection.execute(DELAYED, [aggregate])]


def test_a_delayed_event_becomes_an_ordinary_one_when_it_is_due(
    connection: Connection, aggregate: str
) -> None:
    """Guards against an event that is published early, twice, or with another id or the day of its emit."""
    id, seq, duplicate = one(connection, AFTER, aggregate, "reminded", "1 hour")
    assert (seq, duplicate) == (None, False)
    assert one(connection, MOVE, 10) == (0,)
    assert written(connection, aggregate) == []
    insert(connection, aggregate_id=aggregate, event_type="paid")
    connection.execute(PASS, [aggregate])
    assert one(connection, MOVE, 10) == (1,)
    assert written(connection, aggregate) == ["paid", "reminded"]
    assert delayed(connection, aggregate) == []
    assert one(
        connection, "SELECT id, created_at > now() - interval '1 minute' FROM outbox WHERE id = %s", id
    )
    assert one(connection, MOVE, 10) == (0,)


@pytest.mark.parametrize("when", ["-1 second", "-infinity"])
def test_a_time_in_the_past_means_at_once(connection: Connection, aggregate: str, when: str) -> None:
    """Guards against an event that waits for nothing."""
    due = "clock_timestamp() + interval '-1 second'" if when != "-infinity" else "'-infinity'"
    _, seq, _ = one(connection, f"{EMIT}, deliver_after => {due})", aggregate, "e")
    assert seq is not None
    assert written(connection, aggregate) == ["e"]


@pytest.mark.parametrize("when", ["infinity", "2999-01-01"])
def test_a_time_that_never_comes_is_refused(connection: Connection, aggregate: str, when: str) -> None:
    """Guards against an event that would never be seen."""
    with pytest.raises(psycopg.errors.DatetimeFieldOverflow, match="more than ten years"):
        connection.execute(EMIT + ", deliver_after => %s::timestamptz)", [aggregate, "e", when])


def test_an_event_that_could_not_be_moved_is_refused_when_it_is_written(
    connection: Connection, aggregate: str
) -> None:
    """Guards against a delayed event that the outbox refuses when it is due."""
    emit = (
        "SELECT outbox_emit('order', %s, %s, %s::jsonb, %s::jsonb, deliver_after => now() + interval '1 day')"
    )
    for given, refused in [
        ((aggregate, "", "{}", None), "event_type is empty"),
        ((aggregate, "e", "{}", "[]"), "headers of e are not an object"),
        ((aggregate, "e", f'"{"x" * 1_000_000}"', None), "more than 1000000"),
        ((aggregate, "e", "{}", '{"id": 1}'), "reserved names: id"),
    ]:
        with pytest.raises(psycopg.Error, match=refused):
            connection.execute(emit, given)


def test_later_events_overtake_unless_they_are_to_wait(connection: Connection, aggregate: str) -> None:
    """Guards against a choice that one of the ways to write does not respect."""
    one(connection, WAIT, aggregate + "b", "of another aggregate", "1 hour")
    one(connection, AFTER, aggregate, "overtaken", "1 hour")
    assert one(connection, NOW, aggregate, "at once")[1] is not None
    first = one(connection, WAIT, aggregate, "held", "1 hour")
    emitted = one(connection, NOW, aggregate, "by emit")
    assert emitted[1:] == (None, False)
    assert emitted[0] != first[0]
    assert (
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "VALUES ('order', %s, 'by insert', '1') RETURNING seq",
            [aggregate],
        ).fetchall()
        == []
    )
    lists = "SELECT id, seq FROM outbox_emit_lists('order', %s, 'by list', '1', NULL, NULL, NULL, NULL, NULL)"
    assert one(connection, lists, aggregate)[1] is None
    keyed = one(
        connection, EMIT + ", idempotency_key => %s)", aggregate, "by keyed emit", f"later {aggregate}"
    )
    assert keyed[1] is None
    # It has its own time, which is earlier.
    assert one(connection, AFTER, aggregate, "due sooner", "1 minute")[1] is None
    # Another aggregate with the same id.
    insert(connection, aggregate_id=aggregate, aggregate_type="invoice", event_type="other")
    assert written(connection, aggregate) == ["at once", "other"]
    connection.execute(PASS, [aggregate])
    # What is left still waits.
    assert one(connection, MOVE, 2) == (2,)
    assert one(connection, NOW, aggregate, "last")[1] is None
    while one(connection, MOVE, 1) == (1,):
        pass
    assert written(connection, aggregate)[2:] == [
        "overtaken", "held", "by emit", "by insert", "by list", "by keyed emit", "due sooner", "last"
    ]  # fmt: skip
    again = one(connection, EMIT + ", idempotency_key => %s)", aggregate, "x", f"later {aggregate}")
    assert again == (keyed[0], None, True)
    assert one(connection, NOW, aggregate, "e")[1] is not None


def test_a_list_keeps_its_order_around_a_delayed_event(connection: Connection, aggregate: str) -> None:
    """Guards against a list whose events before the delayed one wait for it."""
    events: list[dict[str, object]] = [
        {"event_type": "a"},
        {"event_type": "b", "deliver_after": "PT1H", "later_events_wait": True, "idempotency_key": aggregate},
        {"event_type": "c"},
        {"event_type": "d", "idempotency_key": aggregate},
        {"event_type": "e", "deliver_after": None},
    ]
    common = {"aggregate_type": "order", "aggregate_id": aggregate, "payload": 1}
    given = Jsonb([common | event for event in events])
    rows = connection.execute(
        "SELECT id, seq IS NOT NULL, duplicate FROM outbox_emit_many(%s)", [given]
    ).fetchall()
    assert [row[1:] for row in rows] == [
        (True, False), (False, False), (False, False), (False, True), (False, False)
    ]  # fmt: skip
    assert rows[1][0] == rows[3][0]
    assert len({row[0] for row in rows}) == 4
    connection.execute(PASS, [aggregate])
    connection.execute(MOVE, [10])
    assert written(connection, aggregate) == ["a", "b", "c", "e"]
    with pytest.raises(psycopg.Error, match="members of an event that are not known"):
        connection.execute(MANY, [Jsonb([common | {"event_type": "e", "deliver_at": 1}])])


def test_the_key_of_a_delayed_event_stays_used(connection: Connection, aggregate: str) -> None:
    """Guards against two events with one key: before it is due, when it is due, and after it was canceled."""
    id, _, _ = one(connection, KEYED, aggregate, "e", f"a {aggregate}")
    assert one(connection, KEYED, aggregate, "e", f"a {aggregate}") == (id, None, True)
    with pytest.raises(psycopg.errors.UniqueViolation):
        insert(connection, aggregate_id=aggregate, idempotency_key=f"a {aggregate}")
    connection.execute(PASS, [aggregate])
    assert one(connection, MOVE, 10) == (1,)
    assert written(connection, aggregate) == ["e"]
    assert one(connection, KEYED, aggregate, "e", f"a {aggregate}") == (id, None, True)
    other, _, _ = one(connection, KEYED, aggregate, "e", f"b {aggregate}")
    assert one(connection, "SELECT outbox_cancel(%s)", other) == (True,)
    assert one(connection, KEYED, aggregate, "e", f"b {aggregate}") == (other, None, True)


def test_canceling_says_whether_the_event_was_still_there(connection: Connection, aggregate: str) -> None:
    """Guards against a cancel that is believed too late, and events that wait for what was canceled."""
    held, _, _ = one(connection, WAIT, aggregate, "held", "2 hours")
    later, _, _ = one(connection, WAIT, aggregate, "later", "1 hour")
    one(connection, NOW, aggregate, "at once")
    with connection.transaction(force_rollback=True):
        assert one(connection, "SELECT outbox_cancel(%s)", held) == (True,)
    assert delayed(connection, aggregate) == ["held", "later", "at once"]
    assert one(connection, "SELECT outbox_cancel(%s)", held) == (True,)
    assert one(connection, "SELECT outbox_cancel(%s)", held) == (False,)
    # They waited for two hours; now for the one that is left.
    assert one(connection, MOVE, 10) == (0,)
    connection.execute(PASS, [aggregate])
    assert one(connection, MOVE, 10) == (2,)
    assert written(connection, aggregate) == ["later", "at once"]
    assert one(connection, "SELECT outbox_cancel(%s)", later) == (False,)
    last, _, _ = one(connection, WAIT, aggregate, "held", "1 hour")
    one(connection, NOW, aggregate, "free")
    one(connection, "SELECT outbox_cancel(%s)", last)
    assert one(connection, MOVE, 10) == (1,)
    assert written(connection, aggregate) == ["later", "at once", "free"]


def test_one_that_cannot_be_moved_delays_only_those_behind_it(connection: Connection, aggregate: str) -> None:
    """Guards against a due event that stops the events of others, or that is overtaken."""
    connection.execute("ALTER TABLE outbox ADD CONSTRAINT not_this CHECK (event_type <> 'poisoned')")
    try:
        one(connection, AFTER, aggregate, "before", "1 minute")
        one(connection, WAIT, aggregate, "poisoned", "2 minutes")
        one(connection, NOW, aggregate, "behind")
        one(connection, AFTER, aggregate + "b", "other", "3 minutes")
        for each in (aggregate, aggregate + "b"):
            connection.execute(PASS, [each])
        assert one(connection, MOVE, 10) == (4,)
        assert written(connection, aggregate) == ["before"]
        assert written(connection, aggregate + "b") == ["other"]
        reason = "SELECT last_error, retry_at > now() FROM outbox_delayed WHERE event_type = 'poisoned'"
        error, later = one(connection, reason)
        assert "not_this" in error
        assert later
        # Many behind it do not take the room of others.
        for _ in range(3):
            one(connection, NOW, aggregate, "behind")
        one(connection, AFTER, aggregate + "b", "other", "3 minutes")
        connection.execute(PASS, [aggregate + "b"])
        assert one(connection, MOVE, 2) == (1,)
        assert written(connection, aggregate + "b") == ["other", "other"]
    finally:
        connection.execute("ALTER TABLE outbox DROP CONSTRAINT not_this")
    assert one(connection, MOVE, 10) == (0,)
    assert one(connection, "SELECT outbox_move_due(10, true)") == (5,)
    assert written(connection, aggregate) == ["before", "poisoned", *["behind"] * 4]


def test_a_cancel_that_is_not_committed_delays_only_those_behind_it(
    kept: Database, connection: Connection, aggregate: str
) -> None:
    """Guards against a relay that waits for an application's transaction, or overtakes what it may undo."""
    held, _, _ = one(connection, WAIT, aggregate, "held", "1 minute")
    one(connection, NOW, aggregate, "behind")
    one(connection, AFTER, aggregate + "b", "other", "3 minutes")
    for each in (aggregate, aggregate + "b"):
        connection.execute(PASS, [each])
    with kept.connect(autocommit=False) as application:
        # Only the row: the function has also changed those behind it.
        application.execute("DELETE FROM outbox_delayed WHERE id = %s", [held])
        connection.execute(MOVE, [10])
        assert written(connection, aggregate) == []
        assert written(connection, aggregate + "b") == ["other"]
        application.rollback()
    connection.execute("SELECT outbox_move_due(10, true)")
    assert written(connection, aggregate) == ["held", "behind"]


def test_one_relay_at_a_time_moves(kept: Database, connection: Connection, aggregate: str) -> None:
    """Guards against two relays of which the second one commits later events first."""
    for event in ("first", "second"):
        one(connection, AFTER, aggregate, event, "1 minute")
    connection.execute(PASS, [aggregate])
    with kept.connect(autocommit=False) as other:
        assert one(other, MOVE, 1) == (1,)
        assert one(connection, MOVE, 10) == (0,)
        other.commit()
    assert one(connection, MOVE, 10) == (1,)
    assert written(connection, aggregate) == ["first", "second"]


def test_an_event_that_has_drawn_its_number_before_the_move(
    kept: Database, connection: Connection, aggregate: str
) -> None:
    """Guards against an INSERT between whose number and look the event is moved that it should follow."""
    connection.execute(
        "CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NEW; END $$"
    )
    connection.execute(
        "CREATE TRIGGER outbox_pause BEFORE INSERT ON outbox FOR EACH ROW WHEN (NEW.event_type = 'paused') "
        "EXECUTE FUNCTION pause()"
    )
    try:
        one(connection, WAIT, aggregate, "held", "1 minute")
        connection.execute(PASS, [aggregate])
        connection.execute("SELECT pg_advisory_lock(7)")
        with kept.connect() as writer, ThreadPoolExecutor(1) as pool:
            paused = pool.submit(one, writer, NOW, aggregate, "paused")
            waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
            wait_until(lambda: kept.value(waits, writer.info.backend_pid), what="the pause")
            assert one(connection, MOVE, 10) == (1,)
            connection.execute("SELECT pg_advisory_unlock(7)")
            assert paused.result()[1] is not None
        assert written(connection, aggregate) == ["held", "paused"]
    finally:
        connection.execute("SELECT pg_advisory_unlock_all()")
        connection.execute("DROP TRIGGER outbox_pause ON outbox")
        connection.execute("DROP FUNCTION pause")


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("by", ["emit", "insert"])
def test_order_is_kept_while_events_are_moved(kept: Database, aggregate: str, level: str, by: str) -> None:
    """Guards against an event that overtakes, at the moment of the move, one that it should wait for."""
    statement = (
        "SELECT outbox_emit('order', %(id)s, %(n)s::text, '1')"
        if by == "emit"
        else "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
        "VALUES ('order', %(id)s, %(n)s::text, '1') RETURNING id"
    )
    hold = """SELECT outbox_emit('order', %(id)s, %(n)s::text, '1', later_events_wait => true,
                                 deliver_after => clock_timestamp() + interval '3 ms')"""
    with kept.connect() as setup:
        setup.execute("DELETE FROM outbox_delayed")
        setup.execute("CREATE TABLE IF NOT EXISTS numbered (id text PRIMARY KEY, n int NOT NULL)")
    ids = [f"{aggregate} {number}" for number in range(20)]
    is_over = threading.Event()

    def write(which: list[str]) -> None:
        with kept.connect(autocommit=False) as connection:
            connection.execute(f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}")
            connection.commit()
            for turn in range(15):
                for id in which:
                    while True:
                        try:
                            n = one(
                                connection,
                                "INSERT INTO numbered VALUES (%s, 1) "
                                "ON CONFLICT (id) DO UPDATE SET n = numbered.n + 1 RETURNING n",
                                id,
                            )[0]
                            connection.execute(
                                (hold if turn % 5 == 1 else statement).encode(), {"id": id, "n": n}
                            )
                            connection.commit()
                            break
                        except psycopg.errors.SerializationFailure:
                            connection.rollback()

    def move() -> None:
        with kept.connect() as connection:
            while not is_over.is_set():
                connection.execute(MOVE, [3])

    with ThreadPoolExecutor(4) as pool:
        movers = [pool.submit(move) for _ in range(2)]
        writers = [pool.submit(write, which) for which in (ids, ids[::-1])]
        try:
            for writer in writers:
                writer.result()
        finally:
            is_over.set()
        for mover in movers:
            mover.result()
    with kept.connect() as connection:
        deadline = time.monotonic() + 30
        while one(connection, "SELECT count(*) FROM outbox_delayed") != (0,) and time.monotonic() < deadline:
            connection.execute("SELECT outbox_move_due(1000, true)")
        for id in ids:
            assert written(connection, id) == [str(n) for n in range(1, 31)]


def test_who_may_do_what(kept: Database, connection: Connection, aggregate: str) -> None:
    """Guards against a writer that delays, reads or cancels what it may not write."""
    writer, relay, operator = kept.role(), kept.role(), kept.role()
    connection.execute(
        f"SELECT outbox_grant_writer('{writer}', '{{order}}'), outbox_grant_relay('{relay}'), "
        f"outbox_grant_operator('{operator}')"
    )
    other = "SELECT id FROM outbox_emit('invoice', %s, 'e', '1', deliver_after => now() + interval '1 hour')"
    foreign = one(connection, other, aggregate)[0]
    with kept.connect(user=writer) as application:
        own, _, _ = one(application, WAIT, aggregate, "held", "1 hour")
        assert one(application, NOW, aggregate, "behind")[1] is None
        assert application.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "VALUES ('order', %s, 'e', '1') RETURNING id", [aggregate]
        ).fetchall() == []  # fmt: skip
        denied: list[Callable[[], object]] = [
            lambda: application.execute(other, [aggregate]),
            lambda: application.execute("SELECT outbox_cancel(%s)", [foreign]),
            lambda: application.execute("SELECT payload FROM outbox_delayed"),
            lambda: application.execute("DELETE FROM outbox_delayed"),
            lambda: application.execute("SELECT outbox_move_due()"),
            lambda: application.execute("SELECT outbox_cancel_delayed('{}', 'r', 'a')"),
            lambda: application.execute("SELECT outbox_move('{}')"),
        ]
        for deny in denied:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                deny()
        assert one(application, "SELECT outbox_cancel(%s)", own) == (True,)
    connection.execute(PASS, [aggregate])
    with kept.connect(user=operator) as person:
        ask = "SELECT outbox_cancel_delayed(%s, 'not wanted', 'alice')"
        assert one(person, ask, [foreign]) == (1,)
        assert one(person, ask, [foreign]) == (0,)
        [(actor, behalf, shown)] = person.execute(
            "SELECT actor, on_behalf_of, filter -> 0 ->> 'id' FROM outbox_audit WHERE action = 'cancel'"
        ).fetchall()
        assert (actor, behalf, shown) == (operator, "alice", str(foreign))
    with kept.connect(user=relay) as session:
        assert one(session, MOVE, 10) == (2,)
    assert written(connection, aggregate) == ["behind", "e"]
