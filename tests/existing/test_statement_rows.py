"""The statements of a marked table, about its rows: no relay runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest

from outbox_pipelines.existing import existing_sql
from outbox_pipelines.existing.table_ownership import TableOwnership
from outbox_pipelines.existing.table_statements import Statements
from outbox_pipelines.relay import adoption
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.parking.dead_letter_store import CONDITIONS
from tests.existing import textbook
from tests.existing.conftest import Make
from tests.existing.textbook import Table

# By seq: never tried; published; a dead letter; refused by a relay; counted by an earlier publisher; a dead
# letter that an UPDATE has revived; published, with the reason of a dead letter.
_ROWS: Final = """
INSERT INTO events (aggregate_type, aggregate_id, event_type, payload, created_at,
                    published_at, retry_count, last_error, next_attempt_at)
VALUES ('order', 'a', 'x', '{}', now() - interval '1 hour', NULL, 0, NULL, NULL),
       ('order', 'b', 'x', '{}', now() - interval '9 hours', '2001-01-01', 0, NULL, NULL),
       ('order', 'c', 'x', '{}', now() - interval '8 hours', NULL, 3, 'outbox: dead letter: big', NULL),
       ('order', 'd', 'x', '{}', '-infinity', NULL, 2, 'outbox: small', now() + interval '1 hour'),
       ('order', 'e', 'x', '{}', now() - interval '2 hours', NULL, 7, 'down', NULL),
       ('order', 'f', 'x', '{}', now() + interval '5 hours', NULL, 0, 'outbox: dead letter: big', NULL),
       ('order', 'g', 'x', '{}', now() - interval '7 hours', '2001-01-01', 1, 'outbox: dead letter: y',
        NULL)"""


class _Rows:
    """These rows, the table's statements, and a session."""

    def __init__(self, table: Table, statements: Statements, connection: psycopg.Connection[Any]) -> None:
        self.table = table
        self.statements = statements
        self.connection = connection

    def __call__(self, statement: Any, *conditions: Any, **given: Any) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(self.statements(statement, *conditions), given)
        return cursor.fetchall() if cursor.description else []

    def changed(self, statement: Any, **given: Any) -> list[int]:
        """The rows that a statement changes."""
        shown = "SELECT seq, xmin::text FROM events ORDER BY seq"
        before = dict(self.connection.execute(shown).fetchall())
        self(statement, **given)
        after = self.connection.execute(shown).fetchall()
        return [seq for seq, xmin in after if before[seq] != xmin]


@pytest.fixture
def rows(table: Table) -> Iterator[_Rows]:
    owner = TableOwnership(table.settings, "a test")
    try:
        with table.connect() as connection:
            connection.execute(_ROWS)
            yield _Rows(table, owner.statements, connection)
    finally:
        owner.close()


def test_which_rows_are_marked(rows: _Rows) -> None:
    """Guards against a row that is marked and was not published, or whose time of publishing changes."""
    assert rows(existing_sql.UNMARKED, keys=[1, 2, 3]) == [(2,)]
    assert rows.changed(existing_sql.MARK, keys=[1, 2, 3]) == [1, 3]
    assert rows(existing_sql.UNMARKED, keys=[1, 2, 3]) == [(0,)]


def test_which_rows_are_refused(rows: _Rows) -> None:
    """Guards against a published row that is tried again, and a dead letter that another relay has made."""
    given = {"errors": ["z"] * 4, "pauses": [1.0] * 4, "lasts": [False] * 4}
    assert rows.changed(existing_sql.REFUSED, keys=[1, 2, 3, 4], **given) == [1, 4]
    assert rows.changed(existing_sql.POSTPONED, keys=[2, 3, 4, 5], errors=["z"] * 4) == [4, 5]


def test_which_rows_are_pending(rows: _Rows) -> None:
    """Guards against a row that is passed over, and one that is published although it is a dead letter."""
    assert rows(existing_sql.ANY, "{key} = 6") == [(True,)]
    for seq in (2, 3, 7):
        assert rows(existing_sql.ANY, f"{{key}} = {seq}") == [(False,)]
    assert rows(existing_sql.UNPUBLISHED) == [(4,)]
    assert rows(existing_sql.LAST) == [("6",)]
    assert rows(existing_sql.TRIED)[0][:4] == ("order", "d", "4", 2)
    assert len(rows(existing_sql.TRIED)) == 1
    assert rows(existing_sql.FAILED) == [("order", "c")]
    assert rows(existing_sql.STILL_FAILED, types=["order", "order"], ids=["a", "c"]) == [("order", "c")]
    assert rows(existing_sql.STILL_FAILED, types=["order"], ids=["a"]) == []
    assert rows(existing_sql.FAILURES, cap=9) == [(1,)]
    assert rows(existing_sql.REASONS, cap=9) == [("big", 1)]


def test_the_first_that_was_tried_of_each_aggregate(rows: _Rows) -> None:
    """Guards against a later row of an aggregate, which counts as the one that blocks it."""
    rows.connection.execute("UPDATE events SET aggregate_id = 'd' WHERE seq IN (1, 4, 5)")
    rows.connection.execute("UPDATE events SET retry_count = 1, last_error = 'outbox: y' WHERE seq = 5")
    assert [row[:4] for row in rows(existing_sql.TRIED)] == [("order", "d", "4", 2)]


def test_the_backlog(rows: _Rows) -> None:
    """Guards against the age of a published row, of a dead letter, or of a row from the future."""
    ((count, age),) = rows(existing_sql.BACKLOG, cap=9)
    assert count == 4
    assert 7200 <= age < 10_000
    # The first ones alone.
    ((count, age),) = rows(existing_sql.BACKLOG, cap=1)
    assert count == 1
    assert 3600 <= age < 7200
    rows.connection.execute("DELETE FROM events WHERE seq NOT IN (4, 6)")
    ((count, age),) = rows(existing_sql.BACKLOG, cap=9)
    assert (count, 0 <= age < 1000) == (2, True)


def test_why_rows_are_tried_again(rows: _Rows) -> None:
    """Guards against a status without the reason for which events wait."""
    assert sorted(rows(existing_sql.RETRIED, cap=9)) == [("big", 1, 3), ("down", 1, 3), ("small", 1, 3)]
    rows.connection.execute("UPDATE events SET last_error = 'outbox: small' WHERE seq = 5")
    assert rows(existing_sql.RETRIED, cap=9) == [("small", 2, 3), ("big", 1, 3)]
    assert rows(existing_sql.RETRIED, cap=2) == [("small", 1, 1)]


def test_the_content_of_numbered_rows(rows: _Rows) -> None:
    """Guards against the content of another row, of one that is published, or of a dead letter."""
    given = {"numbers": [11, 12, 13, 14, 15], "keys": [5, 2, 3, 4, 1], "most": 1000}
    found = rows(existing_sql.EVENTS, **given, seqs=[11, 12, 13, 14])
    assert [(seq, name) for seq, _, _, name, *_ in found] == [(11, "e"), (14, "d")]


def test_rows_that_another_session_has(rows: _Rows) -> None:
    """Guards against a row that waits without end because another one of its aggregate was claimed."""
    with rows.table.connect(autocommit=False) as other:
        assert rows(existing_sql.LOCKED, limit=2) == []
        rows.connection.execute("UPDATE events SET aggregate_id = 'd' WHERE seq = 5")
        other.execute("SELECT FROM events WHERE seq IN (5, 4, 2) FOR UPDATE")
        assert rows(existing_sql.LOCKED, limit=9) == [("order", "d")]
        assert rows(existing_sql.LOCKED, limit=1) == []


def test_a_claim_needs_the_table(rows: _Rows) -> None:
    """Guards against a session that claims rows although another relay owns the table, or has replaced it."""
    with closing(rows.table.connect()) as session, closing(rows.table.connect()) as other:
        owner = TableOwnership(rows.table.settings, "a test")
        try:
            # It has the lock of a relay that waits for the table.
            assert owner.try_wait()
            with pytest.raises(ShardLostError):
                owner.begin_claim(session)
            assert owner.try_take()
            owner.begin_claim(session)
            # The claims' lock is shared until the claim ends: a successor waits for it.
            successor = TableOwnership(rows.table.settings, "another")
            try:
                assert not successor.try_take()
                with pytest.raises(ShardLostError):
                    successor.begin_claim(other)
                session.execute("ROLLBACK")
                rows.connection.execute("ALTER TABLE events RENAME TO events_before")
                with pytest.raises(ShardLostError):
                    owner.begin_claim(session)
            finally:
                successor.close()
        finally:
            owner.close()


def test_two_tables_with_different_descriptions(rows: _Rows) -> None:
    """Guards against a relay that is refused because of the relay of another table."""
    rows.connection.execute("CREATE TABLE second (LIKE events INCLUDING ALL)")
    description = textbook.PUBLISHED_AT_MAPPING.replace("public.events", "public.second")
    owner = TableOwnership(rows.table.settings, "a test")
    try:
        TableOwnership(rows.table.described(description).settings, "another").close()
    finally:
        owner.close()


def test_a_table_that_waits_for_the_append_only_outbox(rows: _Rows) -> None:
    """Guards against rows that are published before the earlier events of the other table."""
    rows.connection.execute(
        "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'"
    )
    rows.connection.execute("CREATE TABLE other (id int)")
    owner = TableOwnership(rows.table.settings, "a test")
    made = "CREATE TRIGGER {} BEFORE UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION nothing()"
    try:
        for name, table, must_wait in (
            ("another", "events", False),
            (adoption.ORDER_TRIGGER, "other", False),
            (adoption.ORDER_TRIGGER, "events", True),
        ):
            rows.connection.execute(made.format(name, table).encode())
            assert owner.try_take() is not must_wait
    finally:
        owner.close()


def test_a_successor_waits_for_open_claims(rows: _Rows) -> None:
    """Guards against rows of a claim whose relay has ended, which its successor claims, too."""
    with closing(rows.table.connect()) as session:
        owner = TableOwnership(rows.table.settings, "a test")
        assert owner.try_take()
        owner.begin_claim(session)
        owner.close()
        successor = TableOwnership(rows.table.settings, "another")
        try:
            assert not successor.try_take()
            session.execute("ROLLBACK")
            assert successor.try_take()
        finally:
            successor.close()


_NOON: Final = datetime(2026, 3, 1, 12, tzinfo=UTC)
_US: Final = timedelta(microseconds=1)
_ONE: Final = UUID(int=1)
_TWO: Final = UUID(int=2)
_DEAD: Final = """
INSERT INTO events (kind, entity, name, body, state, broken_at, tries, problem)
SELECT kind, entity::uuid, name, '{}', state::event_state, failed_at, 3, problem
FROM (VALUES
    ('order', %(one)s, 'placed', 'broken', 'too large', %(noon)s::timestamptz),
    ('offer', %(one)s, 'placed', 'broken', 'too large', %(noon)s),
    ('order', %(two)s, 'placed', 'broken', 'too large', %(noon)s),
    ('order', %(one)s, 'paid', 'broken', 'too large', %(noon)s),
    ('order', %(one)s, 'placed', 'broken', NULL, %(noon)s),
    ('order', %(one)s, 'placed', 'broken', 'too large', %(noon)s + interval '1 hour'),
    ('order', %(one)s, 'placed', 'new', 'too large', %(noon)s),
    ('order', %(one)s, 'placed', 'broken', 'too large', NULL)
) AS r (kind, entity, name, state, problem, failed_at)"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [6, 1, 2, 3, 4, 5, 8]),
        ({"ids": ["1", "7"]}, [1]),
        ({"event_type": "paid"}, [4]),
        ({"aggregate_type": "offer"}, [2]),
        ({"aggregate_id": str(_TWO)}, [3]),
        ({"error": "large"}, [6, 1, 2, 3, 4, 8]),
        ({"error": "small"}, []),
        ({"since": _NOON}, [6, 1, 2, 3, 4, 5]),
        ({"since": _NOON + _US}, [6]),
        ({"until": _NOON}, [1, 2, 3, 4, 5]),
        ({"until": _NOON - _US}, []),
    ],
)
def test_a_filter_means_these(make_table: Make, given: dict[str, Any], expected: list[int]) -> None:
    """Guards against a replay of what the operator has not named."""
    table = make_table(textbook.STATUS, textbook.STATUS_MAPPING)
    owner = TableOwnership(table.settings, "a test")
    try:
        with table.connect() as connection:
            connection.execute(_DEAD, {"noon": _NOON, "one": str(_ONE), "two": str(_TWO)})
            statements = owner.statements
            values = dict.fromkeys(CONDITIONS) | given
            listed = connection.execute(statements(existing_sql.LIST_DEAD_LETTERS), values | {"limit": 99})
            found = [int(row[0]) for row in listed]
            assert found[:1] == expected[:1] or 6 not in expected
            assert sorted(found) == sorted(expected)
            assert found[-1:] == [8] or 8 not in expected
            first = connection.execute(statements(existing_sql.LIST_DEAD_LETTERS), values | {"limit": 1})
            assert len(first.fetchall()) == min(1, len(expected))
            reasons = connection.execute(statements(existing_sql.REASONS), {"cap": 99}).fetchall()
            assert reasons == [("too large", 6), ("no reason", 1)]
            counted = connection.execute(statements(existing_sql.COUNT_DEAD_LETTERS), values).fetchall()
            without = sum(seq == 5 for seq in expected)
            rest = len(expected) - without
            assert sorted(counted) == [row for row in (("no reason", without), ("too large", rest)) if row[1]]
            assert [count for _, count in counted] == sorted((count for _, count in counted), reverse=True)
            connection.execute(statements(existing_sql.REPLAY), values)
            left = connection.execute("SELECT id FROM events WHERE state = 'broken'").fetchall()
            assert {seq for (seq,) in left} == {1, 2, 3, 4, 5, 6, 8} - set(expected)
    finally:
        owner.close()
