"""Each statement about parked events: which rows it changes or finds, and into what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final

import psycopg
import pytest

from outbox_pipelines.relay.parking import parking_sql
from tests.conftest import Outbox, wait_until
from tests.relay.test_resharding import MORE_SHARDS

_PUT: Final = """
INSERT INTO outbox_parked (id, seq, tx, aggregate_type, aggregate_id, event_type, payload, created_at, state,
                           attempts, crashes, trying, command_due, next_attempt_at, last_error, failed_at)
VALUES (gen_random_uuid(), %(seq)s, %(tx)s, %(type)s, %(name)s, 'an event', '{"n": 1}', now(), %(state)s,
        %(attempts)s, %(crashes)s, %(trying)s, %(command)s, now() + make_interval(secs => %(due)s::float8),
        'before', '2026-03-01')"""
_GIVEN: Final[dict[str, Any]] = {
    **{"tx": "3", "type": "order", "name": "a", "state": "retrying", "attempts": 0, "crashes": 0},
    **{"trying": False, "command": False, "due": None},
}
# Seconds until the next attempt, rounded; whether it failed now.
_SEEN: Final = """
SELECT seq, state, attempts, crashes, trying, command_due, last_error,
       round(extract(epoch FROM next_attempt_at - clock_timestamp()))::int,
       failed_at > now() - interval '1 hour', xmin::text
FROM outbox_parked ORDER BY seq"""
_STATES: Final = ("waiting", "retrying", "replaying", "failed", "discarded")
_ONE: Final[dict[str, Any]] = {"shard": 0, "shards": 1}


class _Rows:
    """The table of parked events."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def put(self, *rows: dict[str, Any]) -> None:
        for row in rows:
            self._connection.execute(_PUT, _GIVEN | row)

    def execute(self, statement: str, **given: object) -> list[Any]:
        cursor = self._connection.execute(statement.encode(), given)
        return cursor.fetchall() if cursor.description else []

    def changed(self, statement: str, **given: object) -> dict[int, dict[str, object]]:
        """Run a statement; return what each row that it has written contains now."""
        before = {row[0]: row[-1] for row in self.execute(_SEEN)}
        self.execute(statement, **given)
        names = ("state", "attempts", "crashes", "trying", "command", "error", "due", "fails")
        return {
            row[0]: dict(zip(names, row[1:-1], strict=True))
            for row in self.execute(_SEEN)
            if row[-1] != before[row[0]]
        }


@pytest.fixture
def rows(outbox: Outbox) -> Iterator[_Rows]:
    with outbox.connect() as connection:
        yield _Rows(connection)


def _of_each_state(**more: object) -> list[dict[str, Any]]:
    """A row of each state, numbered from 1; and one more of the second, which no statement names."""
    named: list[dict[str, Any]] = [{"seq": n, "state": state, **more} for n, state in enumerate(_STATES, 1)]
    return [*named, *({**row, "seq": 10 + row["seq"]} for row in named)]


_SEQS: Final[dict[str, Any]] = {"seqs": [1, 2, 3, 4, 5], "errors": [f"now {n}" for n in range(1, 6)]}
_AS_BEFORE: Final = {"attempts": 0, "crashes": 2, "command": False, "error": "before", "fails": False}


def test_a_refusal(rows: _Rows) -> None:
    """Guards against a dead letter too early, too late or never, and against its command forgotten."""
    rows.put(*_of_each_state(trying=True, crashes=2), {"seq": 6, "attempts": 3}, {"seq": 7, "attempts": 4})
    seqs = {"seqs": [*range(1, 8)], "errors": [f"now {n}" for n in range(1, 8)], "pauses": [100.0] * 7}
    last = [False] * 6 + [True]
    again = {"state": "retrying", "crashes": 0, "trying": False, "command": False, "due": 100, "fails": None}
    dead = {"state": "failed", "crashes": 0, "trying": False, "command": True, "due": 100, "fails": True}
    assert rows.changed(parking_sql.REFUSED, **seqs, last=last, command=True) == {
        2: again | {"attempts": 1, "error": "now 2"},
        3: dead | {"attempts": 1, "error": "now 3"},
        6: again | {"attempts": 4, "error": "now 6"},
        7: dead | {"attempts": 5, "error": "now 7"},
    }
    rows.put({"seq": 21, "state": "replaying"}, {"seq": 22, "attempts": 4}, {"seq": 23})
    given = {"seqs": [21, 22, 23], "errors": ["", "", ""], "pauses": [1.0] * 3, "last": [False, True, False]}
    with rows._connection.transaction(force_rollback=True):
        answered = rows.execute(parking_sql.REFUSED, **given, command=True)
        assert sorted(answered) == [(21, "failed", 1), (22, "failed", 5), (23, "retrying", 1)]
    assert not any(
        row["command"] for row in rows.changed(parking_sql.REFUSED, **given, command=False).values()
    )


def test_no_answer(rows: _Rows) -> None:
    """Guards against an outage that counts as an attempt."""
    rows.put(*_of_each_state(trying=True, crashes=2))
    given = {"seqs": [1, 2], "errors": [None, "now"], "pauses": [100.0, 200.0]}
    kept = _AS_BEFORE | {"trying": False}
    assert rows.changed(parking_sql.POSTPONED, **given) == {
        1: kept | {"state": "waiting", "due": 100},
        2: kept | {"state": "retrying", "due": 200, "error": "now"},
    }


def test_content_that_cannot_be_read(rows: _Rows) -> None:
    """Guards against an unreadable event that is tried without end."""
    rows.put(*_of_each_state(trying=True, crashes=2))
    dead = _AS_BEFORE | {"state": "failed", "trying": False, "due": None, "fails": True}
    with rows._connection.transaction(force_rollback=True):
        assert sorted(rows.execute(parking_sql.UNREADABLE, **_SEQS)) == [(1, 0), (2, 0), (3, 0)]
    assert rows.changed(parking_sql.UNREADABLE, **_SEQS) == {
        n: dead | {"error": f"now {n}"} for n in (1, 2, 3)
    }


def test_released_events_of_a_refused_batch(rows: _Rows) -> None:
    """Guards against a batch that is sent again as a whole, without end."""
    rows.put(*_of_each_state(trying=True, crashes=2, due=500))
    suspect = _AS_BEFORE | {"state": "retrying", "trying": False, "due": 0, "error": "now 1"}
    assert rows.changed(parking_sql.SUSPECTED, **_SEQS) == {1: suspect}


def test_accepted_by_kafka(rows: _Rows) -> None:
    """Guards against a dead letter, or what an operator has discarded, that is published."""
    rows.put(*_of_each_state(trying=True, crashes=2, due=500))
    free = _AS_BEFORE | {"state": "waiting", "trying": False, "due": None}
    assert rows.changed(parking_sql.ACCEPTED, seqs=[1, 2, 3, 4, 5]) == {2: free, 3: free}


def test_marks_of_what_is_tried(rows: _Rows) -> None:
    """Guards against a crash that is counted against an event which was not in flight."""
    rows.put({"seq": 1}, {"seq": 2})
    assert [*rows.changed(parking_sql.TRYING, seqs=[1])] == [1]
    assert [row[4] for row in rows.execute(_SEEN)] == [True, False]
    rows.put({"seq": 3, "trying": True})
    assert [*rows.changed(parking_sql.INNOCENT, seqs=[1, 2])] == [1]
    assert [row[4] for row in rows.execute(_SEEN)] == [False, False, True]


def test_a_crash_while_it_was_published_alone(rows: _Rows) -> None:
    """Guards against a crash that does not count, or that blames another event."""
    rows.put(*_of_each_state())
    for n in (1, 3, 4, 5):
        assert rows.changed(parking_sql.CRASHED_ALONE, seq=n, pause=100.0) == {}
    kept = _AS_BEFORE | {"state": "retrying", "trying": False}
    assert rows.changed(parking_sql.CRASHED_ALONE, seq=2, pause=100.0) == {
        2: kept | {"crashes": 1, "due": 100}
    }


def test_suspected_aggregates_are_tried_one_by_one(rows: _Rows) -> None:
    """Guards against the events of other aggregates that slow down with it."""
    rows.put(*_of_each_state(due=500))
    rows.put({"seq": 21, "state": "waiting", "name": "b"}, {"seq": 22, "state": "waiting", "type": "offer"})
    found = rows.changed(parking_sql.ALONE, types=["order"], ids=["a"], error="now")
    assert {n: (row["state"], row["due"], row["error"]) for n, row in found.items()} == {
        1: ("retrying", 0, "now"),
        11: ("retrying", 0, "now"),
    }


_MOST: Final[dict[str, Any]] = {
    **{"most": 5, "pause": 10.0, "longest": 1000.0, "error": "a relay crashed", "command": True},
    **_ONE,
}


@pytest.mark.parametrize(
    ("crashed", "given", "expected"),
    [
        # Whether it was alone, its crashes, its state, seconds until the next attempt, its error.
        (False, {"crashes": 1}, (False, 1, "retrying", 0, "before")),
        (False, {"state": "waiting"}, (False, 0, "waiting", 0, "before")),
        (True, {}, (True, 1, "retrying", 10, "a relay crashed")),
        (True, {"state": "replaying"}, (True, 1, "replaying", 10, "a relay crashed")),
        (True, {"crashes": 1}, (True, 2, "retrying", 40, "a relay crashed 2 times")),
        (True, {"crashes": 3}, (True, 4, "retrying", 640, "a relay crashed 4 times")),
        (True, {"crashes": 4}, (True, 5, "failed", 1000, "a relay crashed 5 times")),
        # Released with others, of which another one may be the cause; and not the first time.
        (True, {"state": "waiting"}, (False, 1, "retrying", 0, "a relay crashed")),
        (True, {"state": "waiting", "crashes": 1}, (True, 2, "retrying", 40, "a relay crashed 2 times")),
    ],
)
def test_a_relay_that_ended_while_it_tried_one(
    rows: _Rows, crashed: bool, given: dict[str, Any], expected: tuple[object, ...]
) -> None:
    """Guards against an event that crashes relays without end, and one that is blamed for another."""
    rows.put({"seq": 1, "trying": True, **given}, {"seq": 2})
    with rows._connection.transaction(force_rollback=True):
        ((*names, was, state, attempts, error, alone, crashes, due),) = rows.execute(
            parking_sql.WAS_TRYING, **_MOST, crashed=crashed
        )
        assert (alone, crashes, state, round(due), error) == expected
        assert (names[0], was, attempts) == (1, given.get("state", "retrying"), 0)
    (found,) = rows.changed(parking_sql.WAS_TRYING, **_MOST, crashed=crashed).values()
    is_dead = expected[2] == "failed"
    assert found == {
        **{"state": state, "attempts": 0, "crashes": crashes, "trying": False, "command": is_dead},
        **{"error": error, "due": expected[3], "fails": True if is_dead else None},
    }
    if is_dead:
        rows.put({"seq": 3, "trying": True, **given})
        assert rows.changed(parking_sql.WAS_TRYING, **_MOST | {"command": False}, crashed=True)[3]["fails"]
        assert [row[5] for row in rows.execute(_SEEN) if row[0] == 3] == [False]


def test_a_relay_that_crashed_while_it_tried_several(rows: _Rows) -> None:
    """Guards against several events that count a crash each time, although one of them is the cause."""
    rows.put({"seq": 1, "trying": True}, {"seq": 2, "trying": True, "crashes": 5})
    rows.put({"seq": 3, "trying": True, "state": "waiting"})
    found = rows.changed(parking_sql.WAS_TRYING, **_MOST, crashed=True)
    assert {n: (row["crashes"], row["state"], row["due"]) for n, row in found.items()} == {
        1: (1, "retrying", 0),
        2: (5, "retrying", 0),
        3: (1, "retrying", 0),
    }
    assert not any(row["command"] or row["fails"] for row in found.values())


def test_a_relay_that_crashed_has_tried_its_own(rows: _Rows) -> None:
    """Guards against events of another shard that count the crash, and what has been decided in between."""
    rows.put(*({"seq": n, "trying": True, "name": str(n)} for n in range(1, 9)))
    halves = []
    for n in (0, 1):
        with rows._connection.transaction(force_rollback=True):
            halves.append(
                {*rows.changed(parking_sql.WAS_TRYING, **_MOST | {"shards": 2, "shard": n}, crashed=True)}
            )
    assert all(halves)
    assert (halves[0] | halves[1], halves[0] & halves[1]) == ({*range(1, 9)}, set())


def test_what_is_released_while_a_relay_begins(rows: _Rows, outbox: Outbox) -> None:
    """Guards against a dead letter that was decided from a state which another session has just changed."""
    rows.put({"seq": 1, "trying": True, "crashes": 4})
    with outbox.connect(autocommit=False) as first, outbox.connect() as other:
        first.execute("UPDATE outbox_parked SET trying = false, state = 'waiting'")
        given = (parking_sql.WAS_TRYING, _MOST | {"crashed": True})
        thread = threading.Thread(target=other.execute, args=given)
        thread.start()
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = %(pid)s"
        wait_until(
            lambda: rows.execute(waits, pid=other.info.backend_pid) == [(1,)], what="the wait for the row"
        )
        first.commit()
        thread.join()
    assert [(row[1], row[3]) for row in rows.execute(_SEEN)] == [("waiting", 4)]


# The times of attempts: none, past, soon; and one that was set before the clock was set back.
_TIMES: Final[tuple[dict[str, Any], ...]] = ({"due": None}, {"due": -1}, {"due": 60}, {"due": 3600})


def test_dead_letters_to_be_tried_again(rows: _Rows) -> None:
    """Guards against a replay too early, never, in another order, or by two relays."""
    rows.put(*({"seq": n, "state": state, "name": state} for n, state in enumerate(_STATES, 1)))
    rows.put(*({"seq": 10 + n, "state": "replaying", "name": str(n)} | due for n, due in enumerate(_TIMES)))
    rows.put(
        {"seq": 20, "state": "replaying", "name": "0"}, {"seq": 9, "state": "replaying", "type": "offer"}
    )

    def found(limit: int, **shard: int) -> set[int]:
        return {row[0] for row in rows.execute(parking_sql.REPLAYS, **_ONE | shard, limit=limit)}

    assert found(99) == {3, 9, 10, 11, 13}
    assert len(found(2)) == 2
    halves = found(99, shards=2, shard=0), found(99, shards=2, shard=1)
    assert (halves[0] | halves[1], halves[0] & halves[1]) == (found(99), set())
    assert all(halves)
    any_of = [rows.execute(parking_sql.ANY_REPLAYS, shards=2, shard=n) for n in (0, 1)]
    assert any_of == [[(True,)], [(True,)]]
    rows.execute("UPDATE outbox_parked SET state = 'failed' WHERE seq <> 10")
    any_of = [rows.execute(parking_sql.ANY_REPLAYS, shards=2, shard=n) for n in (0, 1)]
    assert sorted(any_of) == [[(False,)], [(True,)]]


def test_what_is_left_unpublished(rows: _Rows) -> None:
    """Guards against a run until empty that ends too early, or never."""
    ask = parking_sql.UNPUBLISHED
    assert rows.execute(ask, **_ONE) == [(0, 0, 0.0)]
    rows.put(*({"seq": n, "state": state, "name": str(n)} for n, state in enumerate(_STATES, 1)))
    assert rows.execute(ask, **_ONE) == [(4, 0, 0.0)]
    for state in _STATES:
        for n, due in enumerate(_TIMES):
            more: dict[str, Any] = {
                "seq": 100 + 10 * _STATES.index(state) + n,
                "state": state,
                "name": f"{state} {n}",
            }
            rows.put(more | due | {"crashes": 1}, more | due | {"seq": more["seq"] + 100})
    ((unpublished, paused, seconds),) = rows.execute(ask, **_ONE)
    # Those with crashes that are tried, and whose time is near: the first of them counts.
    assert (unpublished, paused, round(seconds)) == (4 + 2 * 16, 2, 60)
    rows.put({"seq": 999, "name": "retrying 2", "due": 120, "crashes": 1})
    assert round(rows.execute(ask, **_ONE)[0][2]) == 60
    both = [rows.execute(ask, shards=2, shard=n)[0] for n in (0, 1)]
    assert sum(half[0] for half in both) == 37
    assert all(half[0] for half in both)


def test_commands_of_dead_letters(rows: _Rows) -> None:
    """Guards against a command that is not run, or run for what is no dead letter any more."""
    rows.put(*_of_each_state(command=True), {"seq": 20, "state": "failed"})
    rows.put({"seq": 21, "state": "failed", "command": True, "name": "b"})
    rows.execute("UPDATE outbox_parked SET failed_at = '2025-03-01' WHERE seq = 14")

    def found(under_way: list[int], room: int = 99, **shard: int) -> list[int]:
        given = _ONE | shard | {"under_way": under_way, "room": room}
        return [row[0] for row in rows.execute(parking_sql.COMMANDS, **given)]

    assert (found([])[0], sorted(found([]))) == (14, [4, 14, 21])
    assert sorted(found([4])) == [14, 21]
    assert found([], room=1) == [14]
    assert sorted(found([], shards=2, shard=0) + found([], shards=2, shard=1)) == [4, 14, 21]
    assert [*rows.changed(parking_sql.COMMANDS_RAN, seqs=[4])] == [4]
    assert sorted(found([])) == [14, 21]
    assert [*rows.changed(parking_sql.COMMANDS_DUE, seqs=[4])] == [4]
    assert sorted(found([])) == [4, 14, 21]
    rows.execute("UPDATE outbox_parked SET last_error = NULL WHERE seq = 14")
    ((*_, error),) = rows.execute(parking_sql.COMMANDS, **_ONE, under_way=[], room=1)
    assert error == ""


_NO_RULES: Final[dict[str, Any]] = {"blocks": False, "event_blocks": "{}", "aggregate_blocks": "{}"}
_AGGREGATE: Final[dict[str, Any]] = {"types": ["order"], "ids": ["a"], "shard": 0, **_NO_RULES}


def test_the_first_of_an_aggregate(rows: _Rows) -> None:
    """Guards against an aggregate that goes on behind an event that blocks it."""
    rows.put({"seq": 1, "name": "b"}, {"seq": 2, "type": "offer"}, {"seq": 3, "state": "failed"})
    rows.put({"seq": 5, "due": 60, "attempts": 2, "crashes": 1}, {"seq": 6})
    ((*names, state, attempts, due, crashes, covered),) = rows.execute(parking_sql.HEADS, **_AGGREGATE)
    assert (names[0], state, attempts, round(due), crashes) == (5, "retrying", 2, 60, 1)
    rows.execute("UPDATE outbox_parked SET next_attempt_at = now() + interval '1 hour'")
    assert rows.execute(parking_sql.HEADS, **_AGGREGATE)[0][-3] == 0
    assert covered is True
    rows.execute("UPDATE outbox_shards SET done = '3:3:'")
    assert rows.execute(parking_sql.HEADS, **_AGGREGATE)[0][-1] is False


def test_what_nothing_blocks(rows: _Rows) -> None:
    """Guards against an event that overtakes an earlier one, or that waits without end."""
    rows.put({"seq": 1, "state": "waiting", "name": "b"}, {"seq": 2, "state": "waiting", "type": "offer"})
    rows.put(*({"seq": n, "state": "waiting"} for n in (3, 4, 6)), {"seq": 7, "state": "failed"})
    rows.put(
        {"seq": 1000, "state": "retrying", "name": "b"}, {"seq": 5, "state": "retrying", "type": "offer"}
    )

    def found(limit: int = 99) -> list[int]:
        return [row[0] for row in rows.execute(parking_sql.FREE, **_AGGREGATE, limit=limit)]

    assert found() == [3, 4, 6]
    assert found(2) == [3, 4]


def test_what_is_behind_a_blocking_event_is_not_free(rows: _Rows) -> None:
    """Guards against an event that overtakes one which is tried alone, or is not covered yet."""
    rows.put(*({"seq": n, "state": "waiting"} for n in (3, 4, 6)), {"seq": 5})
    rows.put({"seq": 2, "state": "failed"}, {"seq": 1, "name": "b"}, {"seq": 8})

    def found() -> list[int]:
        return [row[0] for row in rows.execute(parking_sql.FREE, **_AGGREGATE, limit=99)]

    assert found() == [3, 4]
    rows.execute("UPDATE outbox_shards SET done = '3:3:'")
    assert found() == []


def test_the_position_of_the_own_shard_counts(rows: _Rows, outbox: Outbox) -> None:
    """Guards against a parked event that is changed before its own shard's position covers it."""
    rows.put({"seq": 1, "state": "waiting"})
    rows._connection.execute(MORE_SHARDS, [[1]])
    rows.execute("UPDATE outbox_shards SET done = '3:3:' WHERE shard = 0")
    found = [
        [row[0] for row in rows.execute(parking_sql.FREE, **_AGGREGATE | {"shard": n}, limit=9)]
        for n in (0, 1)
    ]
    assert found == [[], [1]]


@pytest.mark.parametrize(
    ("rules", "is_blocked"),
    [
        ({}, False),
        ({"blocks": True}, True),
        ({"event_blocks": '{"an event": true}', "aggregate_blocks": '{"order": false}'}, True),
        (
            {"blocks": True, "event_blocks": '{"an event": false}', "aggregate_blocks": '{"order": true}'},
            False,
        ),
        ({"aggregate_blocks": '{"order": true}', "event_blocks": '{"another": false}'}, True),
        ({"blocks": True, "aggregate_blocks": '{"order": false}'}, False),
    ],
)
def test_what_a_dead_letter_blocks(rows: _Rows, rules: dict[str, Any], is_blocked: bool) -> None:
    """Guards against the rule of another type, or the general one where a type has its own."""
    rows.put({"seq": 1, "state": "failed"}, {"seq": 2, "state": "waiting"})
    rows.put({"seq": 1001, "state": "replaying", "name": "b"})
    both = _AGGREGATE | {"types": ["order"] * 2, "ids": ["a", "b"]} | rules
    assert [row[0] for row in rows.execute(parking_sql.FREE, **both, limit=9)] == ([] if is_blocked else [2])
    heads = [(row[0], row[-5]) for row in rows.execute(parking_sql.HEADS, **both)]
    assert heads == ([(1, "failed"), (1001, "replaying")] if is_blocked else [(2, "waiting")])
    found = sorted(rows.execute(parking_sql.BLOCKED, **_ONE, **_NO_RULES | rules))
    assert found == [("order", "a"), ("order", "b")][: 2 if is_blocked else 1]


def test_blocked_aggregates(rows: _Rows) -> None:
    """Guards against an aggregate that is not known to be blocked, or that another shard's relay blocks."""
    rows.put(*({"seq": n, "state": state, "name": state} for n, state in enumerate(_STATES, 1)))
    rows.put({"seq": 9, "state": "waiting", "name": "waiting"})

    def found(**shard: int) -> list[Any]:
        return sorted(rows.execute(parking_sql.BLOCKED, **_ONE | shard, **_NO_RULES))

    assert found() == [("order", "retrying"), ("order", "waiting")]
    with_dead_letters = rows.execute(parking_sql.BLOCKED, **_ONE, **_NO_RULES | {"blocks": True})
    assert {name for _, name in with_dead_letters} == {*_STATES} - {"discarded"}
    assert sorted(found(shards=2, shard=0) + found(shards=2, shard=1)) == found()


def test_after_a_replay(rows: _Rows) -> None:
    """Guards against an answer about events that the operator has not named."""
    rows.put(*_of_each_state())
    rows.execute("UPDATE outbox_parked SET last_error = NULL WHERE seq = 4")
    found = [(row[1], row[9]) for row in rows.execute(parking_sql.AFTER_REPLAY, seqs=[5, 4, 2])]
    assert found == [(2, "before"), (4, "")]


def test_what_is_shown_of_an_event(rows: _Rows) -> None:
    """Guards against the actions of another event, or in another order, and against an event without any."""
    rows.put(*({"seq": n, "state": "failed"} for n in (1, 2, 3)))
    for number, (action, seqs) in enumerate((("replay", [1, 2]), ("discard", [1]), ("replay", [2])), 1):
        rows.execute(
            "INSERT INTO outbox_audit (action, reason, filter, events) "
            "VALUES (%(action)s, %(why)s, '{}', %(seqs)s)",
            action=action,
            why=str(number),
            seqs=seqs,
        )
    # Two events with one id.
    rows.execute("UPDATE outbox_parked SET id = (SELECT id FROM outbox_parked WHERE seq = 1) WHERE seq = 3")

    def found(seq: int) -> list[tuple[int, list[str]]]:
        ((own,),) = rows.execute("SELECT id FROM outbox_parked WHERE seq = %(seq)s", seq=seq)
        shown = [row for (row,) in rows.execute(parking_sql.SHOW_PARKED, id=own)]
        return [(row["seq"], [action["reason"] for action in row["actions"]]) for row in shown]

    assert found(1) == [(1, ["1", "2"]), (3, [])]
    assert found(2) == [(2, ["1", "3"])]


def test_content_that_is_too_large_to_show(rows: _Rows) -> None:
    """Guards against a command that loads a payload of any size."""
    rows.put({"seq": 1}, {"seq": 2})
    rows.execute('UPDATE outbox_parked SET headers = \'{"h": "1"}\' WHERE seq = 2')

    def shown(seq: int, most: int) -> Any:
        return rows.execute(parking_sql.SHOW_CONTENT, seq=seq, most=most)[0]

    assert shown(1, 1000) == ('{"n": 1}', None, False)
    assert shown(2, 1000) == ('{"n": 1}', '{"h": "1"}', True)
    assert shown(2, 9) == (None, None, True)
    # As it is stored, and as text: either may be the larger one.
    rows.execute("UPDATE outbox_parked SET payload = '1e999', headers = '{\"h\": 1e999}' WHERE seq = 2")
    stored = "SELECT pg_column_size(payload), pg_column_size(headers) FROM outbox_parked WHERE seq = 3"
    rows.put({"seq": 3})
    rows.execute('UPDATE outbox_parked SET headers = \'{"h": "1"}\' WHERE seq = 3')
    for seq, sizes in ((2, (1000, len('{"h": }') + 1000)), (3, rows.execute(stored)[0])):
        for column, size in enumerate(sizes):
            assert shown(seq, size)[column] is not None
            assert shown(seq, size - 1)[column] is None
