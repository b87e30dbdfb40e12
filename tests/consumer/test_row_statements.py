"""The statements of the inbox, about its rows: which they find, and which they change, into what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest

from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer.inbox import array
from tests.consumer.place import Place

_STATES: Final = ("waiting", "failed", "processed", "discarded")
_PUT: Final = """
INSERT INTO inbox (seq, message_id, source, topic, partition, "offset", key, event_type, headers, sent_at,
                   state, attempts, next_attempt_at, last_error, received_at, processed_at)
OVERRIDING SYSTEM VALUE
VALUES (%(seq)s, CAST(lpad(CAST(%(seq)s AS text), 32, '0') AS uuid), %(source)s, %(topic)s, 0, 0, %(key)s,
        'x', '[]', now(), %(state)s, %(attempts)s, now() + %(due)s, 'before', now() - %(age)s,
        CASE WHEN %(state)s IN ('processed', 'discarded') THEN now() - %(age)s END)"""
_NONE: Final = timedelta()
_US: Final = timedelta(microseconds=1)
_HOUR: Final = timedelta(hours=1)
_GIVEN: Final[dict[str, Any]] = {
    **{
        "seq": 1,
        "source": "billing",
        "topic": "t",
        "key": "a",
        "state": "waiting",
        "attempts": 2,
        "due": _NONE,
        "age": _HOUR,
    }
}
# Of one attempt at the first message.
_OURS: Final[dict[str, Any]] = {
    **{
        "seq": 1,
        "attempts": 2,
        "seconds": 60,
        "error": "after",
        "block": False,
        "state": "failed",
        "back": 1,
    },
    **{"seqs": [1, 2], "id": UUID(int=99)},
}


class _Rows:
    """The tables of a consumer, in a transaction that is rolled back: now() is the time of its beginning."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def put(self, *rows: dict[str, Any]) -> None:
        for row in rows:
            self.connection.execute(_PUT, _GIVEN | row)

    def __call__(self, statement: str, **given: object) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(statement.encode(), given)
        return cursor.fetchall() if cursor.description else []

    def changed(self, statement: str, **given: object) -> dict[int, tuple[Any, ...]]:
        """Run a statement; return what each row that it has changed contains now."""
        shown = (
            "SELECT seq, state, attempts, last_error, "
            "round(extract(epoch FROM next_attempt_at - now()))::int, coalesce(processed_at = now(), false), "
            "message_id FROM inbox ORDER BY seq"
        )
        before = {seq: row for seq, *row in self(shown)}
        self(statement, **given)
        return {seq: tuple(row) for seq, *row in self(shown) if before[seq] != row}


@pytest.fixture
def rows(place: Place) -> Iterator[_Rows]:
    with psycopg.connect(place.dsn) as connection:
        yield _Rows(connection)
        connection.rollback()


@pytest.mark.parametrize(
    ("more", "claims", "reads", "finishes", "misses"),
    [
        ({}, True, True, True, True),
        # Not due; another attempt; other states.
        ({"due": _US}, False, False, True, True),
        ({"attempts": 3}, False, False, True, False),
        ({"state": "failed"}, False, False, True, True),
        ({"state": "failed", "attempts": 3}, False, False, False, False),
        ({"state": "processed"}, False, False, False, False),
        ({"state": "discarded"}, False, False, False, False),
        ({"seq": 5}, False, False, False, False),
    ],
)
def test_which_message_an_attempt_is_about(
    rows: _Rows, more: dict[str, Any], claims: bool, reads: bool, finishes: bool, misses: bool
) -> None:
    """Guards against a message that is handled twice, and a result that replaces an operator's decision."""
    rows.put(more, {"seq": 9, "key": "b"})
    with rows.connection.transaction(force_rollback=True):
        found = rows.changed(queries.CLAIM, **_OURS)
        assert found == ({1: ("waiting", 3, queries.CUT_OFF, 60, False, UUID(int=1))} if claims else {})
    with rows.connection.transaction(force_rollback=True):
        assert len(rows(queries.READ, **_OURS)) == reads
    with rows.connection.transaction(force_rollback=True):
        found = rows.changed(queries.FINISH, **_OURS)
        assert [*found] == ([1] if finishes else [])
        assert all(row[:3:2] == ("processed", None) and row[4] for row in found.values())
    with rows.connection.transaction(force_rollback=True):
        found = rows.changed(queries.MISSED, **_OURS)
        assert found == ({1: ("failed", 1, "after", 60, False, UUID(int=1))} if misses else {})


def test_a_message_that_another_process_has(rows: _Rows, place: Place) -> None:
    """Guards against a process that waits for a message of another one, which may take long."""
    with psycopg.connect(place.dsn) as other:
        other.execute(_PUT, _GIVEN)
        other.commit()
        other.execute("SELECT FROM inbox FOR UPDATE")
        rows.connection.execute("SET LOCAL lock_timeout = '10s'")
        for statement in (queries.CLAIM, queries.FINISH, queries.MISSED):
            assert rows.changed(statement, **_OURS) == {}
        assert rows(queries.READ, **_OURS) == []


def test_what_a_message_waits_for(rows: _Rows) -> None:
    """Guards against a message that is handled before an earlier one of its key, or waits for no reason."""
    rows.put({"seq": 1, "source": "other"}, {"seq": 2, "key": "b"}, {"seq": 3, "topic": "u"})
    rows.put({"seq": 4, "state": "processed"}, {"seq": 5, "state": "discarded"}, {"seq": 6}, {"seq": 7})

    def claims(*, block: bool) -> bool:
        with rows.connection.transaction(force_rollback=True):
            return bool(rows.changed(queries.CLAIM, **_OURS | {"seq": 6, "block": block}))

    assert claims(block=False)
    assert claims(block=True)
    rows("UPDATE inbox SET state = 'failed' WHERE seq = 5")
    assert claims(block=False)
    assert not claims(block=True)
    rows("UPDATE inbox SET state = 'waiting' WHERE seq = 5")
    assert not claims(block=False)


def test_events_that_are_new(rows: _Rows) -> None:
    """Guards against an event that is handled twice, or before an earlier one of its key."""
    given: dict[str, Any] = {"source": "billing", "block": False, "topic": "t", "bucket": -1, "content": None}
    one = given | {"id": UUID(int=1), "key": "a"}
    rows.put({"seq": 1})
    assert rows(queries.RECORD, **one) == []
    assert len(rows(queries.RECORD, **one | {"key": "b"})) == 1
    assert rows(queries.RECORD, **one | {"key": "b"}) == []

    def many(*numbers: int, key: str = "b") -> list[tuple[Any, ...]]:
        arrays = {
            "ids": array([str(UUID(int=n)) for n in numbers]),
            "topics": array(["t"] * len(numbers)),
            "keys": array([key] * len(numbers)),
            "contents": None,
        }
        return [(count, new) for count, _, new in rows(queries.RECORD_MANY, **given, **arrays)]

    assert many(9, 8) == [(2, None)]
    assert many(9, 7, 7) == [(1, [str(UUID(int=7))])]
    assert many(6, key="a") == [(0, None)]
    # In one order, whatever that of the events is.
    found = rows(
        "SELECT CAST(right(CAST(event_id AS text), 1) AS int) FROM processed_events_other ORDER BY ctid"
    )
    assert found == [(1,), (8,), (9,), (7,)]


def test_messages_that_are_received(rows: _Rows) -> None:
    """Guards against a message that is received twice, or behind a later one of its key."""
    ids = [UUID(int=n) for n in (9, 8, 9)]
    many = {
        **{"ids": ids, "kept_ids": ids, "topics": ["t"] * 3, "partitions": [0] * 3, "offsets": [5, 6, 7]},
        **{"keys": ["a"] * 3, "types": ["x"] * 3, "message_keys": [b"a"] * 3, "payloads": [b"{}"] * 3},
        **{"headers": ["[]"] * 3, "sent_at": ["2026-03-01Z"] * 3, "contents": [""] * 3},
    }
    given = {"source": "billing", "state": "waiting", "attempts": 1, "seconds": 60, "error": "why"}
    given["paused"] = False
    found = rows(queries.RECEIVE, **many, **given)
    assert [name for _, name in sorted(found)] == [str(UUID(int=9)), str(UUID(int=8))]
    shown = rows(
        'SELECT "offset", extract(epoch FROM next_attempt_at - now())::int, attempts, last_error '
        "FROM inbox ORDER BY seq"
    )
    assert shown == [(5, 60, 1, "why"), (6, 60, 1, "why")]
    assert rows("SELECT count(paused_since) FROM inbox") == [(0,)]
    assert rows(queries.RECEIVE, **many, **given) == []
    # One of them is new.
    ids = [UUID(int=n) for n in (8, 9, 6)]
    found = rows(queries.RECEIVE, **many | {"ids": ids, "kept_ids": ids}, **given | {"paused": True})
    assert [name for _, name in found] == [str(UUID(int=6))]
    assert rows("SELECT count(paused_since) FROM inbox") == [(1,)]
    order = rows("SELECT right(event_id::text, 1) FROM processed_events_other ORDER BY ctid")
    assert order == [("8",), ("9",), ("6",)]
    one = {"id": UUID(int=7), "source": "billing", "bucket": -1, "content": None}
    assert [rows(queries.RECORD_ID, **one) for _ in range(2)] == [[(True,)], []]


def test_the_mark_of_a_handler_ends_with_its_transaction(rows: _Rows) -> None:
    """Guards against later transactions of a session that count as a handler's, and cannot be committed."""
    shown = "SELECT coalesce(current_setting('outbox.handling', true), '')"
    given = {"source": "billing", "block": False, "topic": "t", "key": "a", "bucket": -1, "content": None}
    assert rows(queries.END_HANDLING) == [(None,)]
    # As where the handler has committed, and a pooler has given another session.
    for code in reversed(queries.NOT_OURS):
        with pytest.raises(psycopg.Error) as caught:
            rows.connection.execute(queries.END_HANDLING_AND_COMMIT.encode())
        assert caught.value.sqlstate == code
        rows.connection.rollback()
        # From now on the session knows the name.
        rows("SELECT set_config('outbox.handling', 'on', true)")
        rows.connection.rollback()
    rows(queries.RECORD, **given, id=UUID(int=1))
    assert rows(shown) == [("on",)]
    assert rows(queries.END_HANDLING) == [(True,)]
    rows.connection.commit()
    assert rows(shown) == [("",)]


def test_attempts_that_are_taken_back(rows: _Rows) -> None:
    """Guards against an outage that counts or waits long, and a dead letter that is tried again."""
    rows.put(*({"seq": n, "state": state} for n, state in enumerate(_STATES, 1)), {"seq": 5, "attempts": 0})
    given: dict[str, Any] = {"seqs": [1, 2, 3, 4, 5]}
    rows.put({"seq": 7})
    taken = rows.changed(queries.TAKE_BACK, **given, seconds=60)
    assert {seq: (row[1], row[3]) for seq, row in taken.items()} == {1: (1, 0)}
    rows.connection.execute(
        "UPDATE inbox SET next_attempt_at = now() + interval '1 hour', paused_since = now()"
    )
    rows.put({"seq": 6, "due": _HOUR})
    taken = rows.changed(queries.TAKE_BACK, **given, seconds=60)
    assert {seq: (row[1], row[3]) for seq, row in taken.items()} == {1: (0, 60), 5: (0, 60)}
    assert {seq: row[3] for seq, row in rows.changed(queries.HURRY, **given).items()} == {1: 0, 5: 0}
    assert rows("SELECT seq FROM inbox WHERE paused_since IS NULL ORDER BY seq") == [(1,), (5,), (6,)]


def test_a_handler_that_failed_after_its_own_commit(rows: _Rows) -> None:
    """Guards against a message of another state that becomes a dead letter."""
    rows.put(*({"seq": n, "state": state} for n, state in enumerate(_STATES, 1)))
    for seq in (1, 2, 4):
        assert rows.changed(queries.SPOILT, **_OURS | {"seq": seq}) == {}
    found = rows.changed(queries.SPOILT, **_OURS | {"seq": 3})
    assert found == {3: ("failed", 2, "after", 0, False, UUID(int=99))}


def _record(rows: _Rows, source: str, number: int, content: int | None) -> None:
    rows(
        "INSERT INTO processed_events (event_id, source, bucket, content) "
        "VALUES (%(id)s, %(source)s, processed_bucket(%(id)s), %(content)s)",
        id=UUID(int=number),
        source=source,
        content=None if content is None else UUID(int=content),
    )


def test_what_was_recorded(rows: _Rows) -> None:
    """Guards against an event that counts as handled because another source has handled it."""
    for source, number, content in (
        ("billing", 1, 7),
        ("other", 1, 8),
        ("other", 2, 9),
        ("billing", 3, None),
    ):
        _record(rows, source, number, content)
    given: dict[str, Any] = {
        "ids": [UUID(int=n) for n in (1, 2, 3)],
        "source": "billing",
        "buckets": [-1],
    }
    assert sorted(rows(queries.KNOWN, **given)) == [(str(UUID(int=1)),), (str(UUID(int=3)),)]
    assert rows(queries.KNOWN, **given | {"ids": [UUID(int=3)]}) == [(str(UUID(int=3)),)]
    assert rows(queries.CONTENTS, **given) == [(str(UUID(int=1)), str(UUID(int=7)))]
    assert rows(queries.CONTENTS, **given | {"ids": [UUID(int=4)]}) == []
    for number, content, expected in ((1, 7, True), (1, 8, False), (3, None, True), (3, 7, False)):
        one = {"id": UUID(int=number), "source": "billing", "bucket": -1}
        found = rows(queries.IS_SAME, **one, content=None if content is None else UUID(int=content))
        assert found == [(expected,)]


def test_whether_a_transaction_is_committed(rows: _Rows) -> None:
    """Guards against another transaction, source or event that is taken for ours."""
    _record(rows, "billing", 1, None)
    rows("UPDATE processed_events SET processed_at = '2026-03-01'")
    ((began,),) = rows("SELECT extract(epoch FROM '2026-03-01'::timestamptz)::text")
    later = str(float(began) + 1)
    ours: dict[str, Any] = {"id": UUID(int=1), "source": "billing", "began": began}
    assert rows(queries.IS_RECORDED, **ours) == [(True,)]
    for other in ({"id": UUID(int=2)}, {"source": "other"}, {"began": later}):
        assert rows(queries.IS_RECORDED, **ours | other) == [(False,)]
    rows.put(*({"seq": n, "state": state} for n, state in enumerate(_STATES, 1)))
    rows("UPDATE inbox SET processed_at = '2026-03-01'")
    found = [rows(queries.IS_SETTLED, seq=seq, began=began)[0][0] for seq in (1, 2, 3, 4, 5)]
    assert found == [False, False, True, False, False]
    assert rows(queries.IS_SETTLED, seq=3, began=later) == [(False,)]


def test_who_owns_partitions(rows: _Rows) -> None:
    """Guards against a crash that is not noticed, or counted against events of another group."""
    ours, theirs = str(UUID(int=1)), str(UUID(int=2))
    given: dict[str, Any] = {"source": "billing", "group": "g", "topics": ["t", "u"], "partitions": [0, 1]}
    columns = "source, consumer_group, topic, partition, owner::text"
    owned = f"SELECT {columns} FROM partition_owners ORDER BY 1, 2, 3, 4"
    for source, group, partition in (("other", "g", 0), ("billing", "h", 0), ("billing", "g", 5)):
        rows(
            "INSERT INTO partition_owners (source, consumer_group, topic, partition, owner) "
            "VALUES (%(source)s, %(group)s, 't', %(partition)s, %(owner)s)",
            source=source,
            group=group,
            partition=partition,
            owner=theirs,
        )
    others = rows(owned)
    for _ in range(2):
        assert rows(queries.OWN_FREE, **given, owner=ours, crashes=1) == []
    assert rows(queries.OWN_FREE, **given, owner=theirs, crashes=0) == [("t", 0, False), ("u", 1, False)]
    with rows.connection.transaction(force_rollback=True):
        for _ in range(2):
            # Those of the first crash are theirs now.
            found = rows(queries.OWN_FREE, **given, owner=theirs, crashes=1)
            assert found == [("t", 0, True), ("u", 1, True)]
        assert rows(queries.OWN_FREE, **given, owner=ours, crashes=1) == [("t", 0, False), ("u", 1, False)]
        rows(queries.OWN, **given, owner=ours)
        assert rows(queries.OWN_FREE, **given, owner=ours, crashes=1) == []
        assert rows(queries.OWN_FREE, **given, owner=theirs, crashes=1)[0][2]
    rows(queries.DISOWN, **given, owner=theirs)
    assert len(rows(owned)) == len(others) + 2
    rows(queries.OWN, **given, owner=theirs)
    rows(queries.DISOWN, **given | {"topics": ["u"], "partitions": [1]}, owner=theirs)
    assert ("billing", "g", "t", 0, theirs) in rows(owned)
    rows(queries.OWN, **given, owner=theirs)
    rows(queries.DISOWN, **given | {"topics": ["t"], "partitions": [1]}, owner=theirs)
    assert ("billing", "g", "u", 1, theirs) in rows(owned)
    rows(queries.DISOWN, **given, owner=theirs)
    assert rows(owned) == others


def test_what_is_old(rows: _Rows) -> None:
    """Guards against ids that are forgotten too early: their events would be handled again."""
    keep = {"keep": _HOUR}
    table = "processed_events_other"
    is_over = queries.IS_OVER.format(partition=table)
    assert rows(is_over, **keep) == [(False,)]
    for number, age in ((1, _HOUR + _US), (2, _HOUR), (3, _NONE)):
        _record(rows, "billing", number, None)
        rows(
            "UPDATE processed_events SET processed_at = now() - %(age)s WHERE event_id = %(id)s",
            id=UUID(int=number),
            age=age,
        )
    left = "SELECT CAST(right(CAST(event_id AS text), 1) AS int) FROM processed_events ORDER BY 1"
    assert rows(is_over, **keep) == [(False,)]
    rows(queries.DELETE_OTHERS, **keep, limit=9)
    assert rows(left) == [(2,), (3,)]
    rows("DELETE FROM processed_events WHERE event_id = %(id)s", id=UUID(int=3))
    # As old as it may be.
    assert rows(is_over, **keep) == [(False,)]
    rows("UPDATE processed_events SET processed_at = processed_at - interval '1 us'")
    assert rows(is_over, **keep) == [(True,)]
    _record(rows, "billing", 4, None)
    rows("UPDATE processed_events SET processed_at = now() - interval '1 day'")
    rows(queries.DELETE_OTHERS, **keep, limit=1)
    assert len(rows(left)) == 1
    done = {"state": "processed"}
    rows.put(done | {"seq": 1, "age": _HOUR + _US}, done | {"seq": 2, "age": _HOUR})
    rows.put({"seq": 3, "age": 2 * _HOUR})
    rows(queries.DELETE_RECEIVED, **keep, limit=9)
    assert rows("SELECT seq FROM inbox ORDER BY seq") == [(2,), (3,)]
    assert [name for (name,) in rows(queries.PARTITIONS)] == [f"processed_events_{n:02}" for n in range(64)]


def test_how_far_a_source_is_behind(rows: _Rows) -> None:
    """Guards against a status without dead letters, or with the age of what is done."""
    rows.put(
        {"seq": 1, "age": 2 * _HOUR},
        {"seq": 2, "age": _HOUR},
        {"seq": 3, "state": "failed", "age": 9 * _HOUR},
        {"seq": 4, "state": "processed", "age": 9 * _HOUR},
        {"seq": 5, "source": "accounts", "state": "failed"},
        {"seq": 6, "source": "done", "state": "processed"},
        {"seq": 7, "source": "done", "state": "discarded"},
        {"seq": 8, "source": "zone"},
        {"seq": 9, "source": "absent", "state": "processed"},
    )
    none = "[]"
    assert rows(queries.STATUS, source="billing") == [("billing", 2, 1, 7200, none)]
    assert rows(queries.STATUS, source="done") == [("done", 0, 0, None, none)]
    assert rows(queries.STATUS, source=None) == [
        ("accounts", 0, 1, None, none),
        ("billing", 2, 1, 7200, none),
        ("zone", 1, 0, 3600, none),
    ]


def test_which_handlers_are_paused(rows: _Rows) -> None:
    """Guards against a pause that ends with each try, has a crash's reason, or stays after an attempt."""

    def paused() -> object:
        [(*_, shown)] = rows(queries.STATUS, source="billing")
        return json.loads(shown)

    rows.put({"seq": 1}, {"seq": 2})
    given = _OURS | {"state": "waiting"}
    rows(queries.MISSED, **given)
    assert paused() == [["x", 0, 60, "after"]]
    rows("UPDATE inbox SET paused_since = now() - interval '1 hour', next_attempt_at = now() WHERE seq = 1")
    # While it is tried.
    assert rows(queries.CLAIM, **given | {"attempts": 1})
    assert paused() == [["x", 3600, 0, None]]
    rows(queries.MISSED, **given)
    assert paused() == [["x", 3600, 60, "after"]]
    rows(queries.MISSED, **given | {"attempts": 1, "back": 0})
    assert paused() == []


def test_pauses_of_several_messages(rows: _Rows) -> None:
    """Guards against the pause of another source or of a message that is done, and against the reason of an
    earlier try."""
    for seq, event_type, since, due, state in (
        (1, "x", 1, 20, "waiting"),
        (2, "x", 2, 60, "waiting"),
        (3, "y", 3, 30, "waiting"),
        (4, "x", 4, 90, "processed"),
        (5, "z", 5, 90, "failed"),
    ):
        rows.put({"seq": seq, "state": state}, {"seq": 10 + seq, "state": state, "source": "other"})
        rows(
            "UPDATE inbox SET event_type = %(type)s, last_error = %(error)s, "
            "paused_since = now() - make_interval(hours => %(since)s), "
            "next_attempt_at = now() + make_interval(secs => %(due)s) WHERE seq = %(seq)s",
            **{"seq": seq, "type": event_type, "error": str(seq), "since": since, "due": due},
        )
        rows("UPDATE inbox SET event_type = 'w', paused_since = now() WHERE seq = %(seq)s", seq=10 + seq)
    [(*_, shown)] = rows(queries.STATUS, source="billing")
    assert json.loads(shown) == [["y", 10800, 30, "3"], ["x", 7200, 60, "2"]]


def test_whether_the_tables_exist(rows: _Rows) -> None:
    """Guards against a table of the application that is taken for the consumer's, and against a consumer that
    refuses its own because they have a trigger more."""
    rows("CREATE TRIGGER another AFTER INSERT ON inbox FOR EACH ROW EXECUTE FUNCTION handled_guard()")
    assert rows(queries.TABLES) == [(True,)]
    for change in (
        "ALTER TABLE consumer_migrations RENAME TO theirs",
        "DROP TRIGGER handled_guard ON inbox",
        "ALTER TRIGGER handled_guard ON processed_events RENAME TO theirs",
    ):
        with rows.connection.transaction(force_rollback=True):
            rows(change)
            assert rows(queries.TABLES) == [(False,)]


def test_what_is_shown_of_a_message(rows: _Rows) -> None:
    """Guards against an operator's actions with another message, or in another order."""
    rows.put({"seq": 1}, {"seq": 2}, {"seq": 3})
    rows("UPDATE inbox SET message_id = (SELECT message_id FROM inbox WHERE seq = 1) WHERE seq = 3")
    for number, (seq, day) in enumerate(((1, 2), (1, 1), (2, 1))):
        rows(
            "INSERT INTO inbox_audit (at, actor, action, reason, seq, message_id, source) VALUES "
            "('2026-03-01'::timestamptz + make_interval(days => %(day)s), 'a', 'replay', %(reason)s, "
            "%(seq)s, gen_random_uuid(), 'billing')",
            day=day,
            reason=str(number),
            seq=seq,
        )
    found = [shown for shown, _, _ in rows(queries.SHOW, id=UUID(int=1))]
    assert [[action["reason"] for action in each["actions"]] for each in found] == [["1", "0"], []]


def test_what_an_operator_does(rows: _Rows) -> None:
    """Guards against a replay that has no attempts left or comes late, and an action that is not recorded."""
    rows.put({"seq": 1, "state": "failed", "due": _HOUR}, {"seq": 2, "state": "failed", "source": "other"})
    meant = dict.fromkeys(("ids", "event_type", "key", "error", "since", "until"))
    given = meant | {"state": "failed", "source": "billing", "actor": "me", "reason": "why"}
    with rows.connection.transaction(force_rollback=True):
        found = rows.changed(queries.REPLAY, **given)
        assert found == {1: ("waiting", 0, "before", 0, False, UUID(int=1))}
        audit = rows("SELECT actor, action, reason, seq, message_id, source FROM inbox_audit")
        assert audit == [("me", "replay", "why", 1, UUID(int=1), "billing")]
    found = rows.changed(queries.DISCARD, **given)
    assert found == {1: ("discarded", 2, "before", 3600, True, UUID(int=1))}
    audit = rows("SELECT actor, action, reason, seq, message_id, source FROM inbox_audit")
    assert audit == [("me", "discard", "why", 1, UUID(int=1), "billing")]
