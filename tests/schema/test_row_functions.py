"""The functions that a relay calls to park and to release events, and what says where it may look."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any, Final
from uuid import uuid4

import psycopg
import pytest

from outbox_pipelines.relay.parking import parking_sql
from tests.conftest import Outbox

_US: Final = timedelta(microseconds=1)
_SHOWN: Final = """
SELECT seq, state, next_attempt_at IS NOT NULL, failed_at IS NOT NULL, last_error FROM outbox_parked
ORDER BY seq"""


class _Events:
    """Events 1 to 5 of one time."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        ((self.at,),) = connection.execute("SELECT now()").fetchall()
        self.found: object = None
        """How many of the last ones are in the table, and a number that two have."""
        self.write(1, 2, 3, 4, 5)

    def write(self, *seqs: int) -> None:
        self.connection.execute("SET session_replication_role = replica")
        for seq in seqs:
            self.connection.execute(
                "INSERT INTO outbox (seq, created_at, aggregate_type, aggregate_id, event_type, payload) "
                "VALUES (%s, %s, 'order', 'a', 'x', '{}')",
                [seq, self.at],
            )
        self.connection.execute("SET session_replication_role = origin")

    def park(self, of: dict[int, str], **more: object) -> list[tuple[Any, ...]]:
        given: dict[str, object] = {
            "seqs": [*of],
            "states": [*of.values()],
            "errors": [f"error {seq}" for seq in of],
            **{"start": self.at, "stop": self.at + _US, "from": 1, "to": 5},
        }
        self.found = self.connection.execute(parking_sql.PARK, given | more).fetchone()
        return self.connection.execute(_SHOWN).fetchall()


@pytest.fixture
def events(outbox: Outbox) -> Any:
    with outbox.connect() as connection:
        yield _Events(connection)


def test_what_is_parked(events: _Events) -> None:
    """Guards against an event that is tried when it is only behind another one, and one not named."""
    found = events.park({1: "retrying", 2: "waiting", 3: "failed", 4: "replaying", 5: "discarded"})
    assert found == [
        (1, "retrying", True, False, "error 1"),
        (2, "waiting", False, False, "error 2"),
        (3, "failed", False, True, "error 3"),
    ]


def test_what_has_no_state_waits(events: _Events) -> None:
    """Guards against a state that is given to another event than the first."""
    given = {"states": ["retrying"], "errors": ["no"]}
    assert events.park(dict.fromkeys((4, 1, 2), ""), **given) == [
        (1, "waiting", False, False, None),
        (2, "waiting", False, False, None),
        (4, "retrying", True, False, "no"),
    ]


@pytest.mark.parametrize(
    ("more", "present"), [({}, 3), ({"from": 2, "to": 4}, 3), ({"from": 3}, 2), ({"to": 3}, 2)]
)
def test_the_span_in_which_is_looked(events: _Events, more: dict[str, Any], present: int) -> None:
    """Guards against an event of another batch that has the same number, and against a few of a batch."""
    found = [row[0] for row in events.park(dict.fromkeys((2, 3, 4), "waiting"), **more)]
    assert (found, events.found) == ([2, 3, 4] if present == 3 else [], (present, None))


@pytest.mark.parametrize(("start", "stop"), [(_US, 2 * _US), (-_US, timedelta())])
def test_the_days_in_which_is_looked(events: _Events, start: timedelta, stop: timedelta) -> None:
    """Guards against an event of another day that has the same number."""
    assert events.park({2: "waiting"}, start=events.at + start, stop=events.at + stop) == []
    assert events.found == (0, None)


def test_an_event_that_is_parked_again(events: _Events) -> None:
    """Guards against a relay that ends after a crash, and an event that is lost behind another one."""
    before = events.park({2: "retrying"})
    assert events.park({2: "waiting"}) == before
    assert [row[0] for row in events.park(dict.fromkeys((1, 2, 3), "waiting"))] == [1, 2, 3]
    for change in ("id = gen_random_uuid()", "tx = '7'"):
        with events.connection.transaction(force_rollback=True):
            events.connection.execute(f"UPDATE outbox_parked SET {change} WHERE seq = 2".encode())
            assert [row[0] for row in events.park(dict.fromkeys((1, 2, 4), "waiting"))] == [1, 2, 3]
            assert events.found == (3, 2)


def test_two_events_with_one_number_are_not_parked(events: _Events) -> None:
    """Guards against a row that is parked and published, and one of its batch that is passed over."""
    events.write(3)
    assert events.park(dict.fromkeys((1, 2, 3), "waiting")) == []
    assert events.found == (3, 3)


def test_what_is_released(events: _Events) -> None:
    """Guards against a dead letter that is released, or another event."""
    events.park({1: "retrying", 2: "waiting", 3: "failed", 4: "waiting", 5: "waiting"})
    for seq, state in ((4, "replaying"), (5, "discarded")):
        events.connection.execute("SET session_replication_role = replica")
        events.connection.execute("UPDATE outbox_parked SET state = %s WHERE seq = %s", [state, seq])
        events.connection.execute("SET session_replication_role = origin")
    events.connection.execute(parking_sql.RELEASED, {"seqs": [2, 3, 4, 5]})
    assert [row[0] for row in events.connection.execute(_SHOWN)] == [1, 3, 5]
    released = events.connection.execute("SELECT seq FROM outbox_released ORDER BY seq").fetchall()
    assert released == [(2,), (4,)]


def test_the_first_day_that_is_open(outbox: Outbox) -> None:
    """Guards against a day that no relay looks at, although it is open."""
    first: Final = date(2026, 3, 1)

    def found(*states: str) -> object:
        connection.execute("DELETE FROM outbox_days")
        for number, state in enumerate(states):
            if not state:
                continue
            connection.execute(
                "INSERT INTO outbox_days (day, state, sealed_at, closed_at) VALUES (%s, %s, now(), now())",
                [first + timedelta(number), state],
            )
        ((shown,),) = connection.execute("SELECT outbox_open_from()::text").fetchall()
        return shown

    with outbox.connect() as connection:
        assert found() == "-infinity"
        assert found("open", "open") == "-infinity"
        assert found("closed", "open", "open") == "2026-03-02"
        assert found("closed", "open", "archived") == "2026-03-02"
        assert found("closed", "dropped") == "2026-03-03"
        assert found("open", "closed", "open") == "2026-03-01"
        # A day between them that has no row yet.
        assert found("closed", "", "open") == "2026-03-02"


def test_the_last_number_of_all(outbox: Outbox) -> None:
    """Guards against numbers that are given again: of events, parked and released ones, and dropped days."""
    with outbox.connect() as connection:
        assert connection.execute("SELECT outbox_last_seq()").fetchone() == (0,)
        outbox.write("a", "b", "c")
        assert connection.execute("SELECT outbox_last_seq()").fetchone() == (3,)
        connection.execute("SET session_replication_role = replica")
        for seq in (5, 4):
            connection.execute(
                "INSERT INTO outbox_parked (id, seq, tx, aggregate_type, aggregate_id, event_type, payload, "
                "created_at, state) VALUES (%s, %s, '3', 'order', 'a', 'x', '{}', now(), 'failed')",
                [uuid4(), seq],
            )
        assert connection.execute("SELECT outbox_last_seq()").fetchone() == (5,)
        for seq in (7, 6):
            connection.execute(
                "INSERT INTO outbox_released (seq, id, attempts) VALUES (%s, %s, 1)", [seq, uuid4()]
            )
        assert connection.execute("SELECT outbox_last_seq()").fetchone() == (7,)
        days = connection.execute("SELECT day FROM outbox_days ORDER BY day LIMIT 2").fetchall()
        for seq, (day,) in zip((9, 8), days, strict=True):
            connection.execute("UPDATE outbox_days SET last_seq = %s WHERE day = %s", [seq, day])
        assert connection.execute("SELECT outbox_last_seq()").fetchone() == (9,)
