"""What is read of a service's own table of processed events: its columns, and what makes a value unique."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import consumer_sql as queries
from tests.consumer.place import Place


class _Catalog:
    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def __call__(self, statement: str, **given: object) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(statement.encode(), given)
        return cursor.fetchall() if cursor.description else []

    def oid(self, table: str) -> int:
        return int(self("SELECT CAST(CAST(%(table)s AS regclass) AS oid)::bigint", table=table)[0][0])


@pytest.fixture
def catalog(place: Place) -> Iterator[_Catalog]:
    with psycopg.connect(place.dsn) as connection:
        yield _Catalog(connection)
        connection.rollback()


def test_columns(catalog: _Catalog) -> None:
    """Guards against an INSERT that lacks a column, or a value that is longer than the column."""
    catalog("CREATE TABLE other (another text NOT NULL)")
    catalog(
        "CREATE TABLE seen (gone text, given text NOT NULL, made int NOT NULL DEFAULT 1, "
        "counted int NOT NULL GENERATED ALWAYS AS IDENTITY, short varchar(7), fixed char(5), long varchar, "
        "number numeric(9, 2))"
    )
    catalog("ALTER TABLE seen DROP gone")
    found = catalog(queries.DEDUPE_COLUMNS, oid=catalog.oid("seen"))
    assert [(name, length, is_required) for name, _, length, is_required, *_ in found] == [
        ("given", None, True),
        ("made", None, False),
        ("counted", None, False),
        ("short", 7, False),
        ("fixed", 5, False),
        ("long", None, False),
        ("number", None, False),
    ]


def test_what_is_unique(catalog: _Catalog) -> None:
    """Guards against a conflict that the table does not notice, so that an event is handled twice."""
    catalog("CREATE TABLE other (another int PRIMARY KEY)")
    catalog("CREATE TABLE seen (a int PRIMARY KEY, b text, c text, d text, e text, f text, g text, h text)")
    for index in (
        "UNIQUE INDEX ON seen (c, b)",
        "UNIQUE INDEX ON seen (d) INCLUDE (e)",
        "INDEX ON seen (e)",
        "UNIQUE INDEX ON seen (f) WHERE a > 0",
        "UNIQUE INDEX ON seen (g, lower(a::text))",
        "UNIQUE INDEX invalid ON seen (h)",
    ):
        catalog(f"CREATE {index}")
    catalog("UPDATE pg_index SET indisvalid = false WHERE indexrelid = CAST('invalid' AS regclass)")
    catalog("ALTER TABLE seen ADD UNIQUE (e, f) DEFERRABLE")
    found = [json.loads(columns) for (columns,) in catalog(queries.DEDUPE_UNIQUES, oid=catalog.oid("seen"))]
    assert sorted(found) == [["a"], ["b", "c"], ["d"]]


def test_which_table_is_meant(catalog: _Catalog) -> None:
    """Guards against a table of the same name in another schema, and against our own one."""
    catalog("CREATE SCHEMA elsewhere CREATE TABLE seen (a int)")

    def found(table: str, schema: str | None = None) -> list[tuple[Any, ...]]:
        return [row[1:4] for row in catalog(queries.DEDUPE_TABLE, table=table, schema=schema)]

    assert found("seen") == []
    catalog("CREATE TABLE seen (a int)")
    catalog("CREATE INDEX of_seen ON seen (a)")
    catalog("CREATE VIEW shown AS SELECT 1")
    assert found("seen") == [("public.seen", True, False)]
    assert found("seen", "elsewhere") == [("elsewhere.seen", True, False)]
    assert found("of_seen") == []
    assert found("shown") == [("public.shown", False, False)]
    assert found("inbox") == [("public.inbox", True, True)]
    # A table of the application that has the trigger's name alone, and one of ours without its trigger.
    catalog("CREATE TRIGGER handled_guard AFTER INSERT ON seen EXECUTE FUNCTION handled_guard()")
    assert found("seen") == [("public.seen", True, False)]
    catalog("DROP TRIGGER handled_guard ON inbox")
    assert found("inbox") == [("public.inbox", True, False)]
    catalog("CREATE TRIGGER another AFTER INSERT ON inbox EXECUTE FUNCTION handled_guard()")
    assert found("inbox") == [("public.inbox", True, False)]


def test_tables_that_lack_their_guard(catalog: _Catalog) -> None:
    """Guards against tables of an application that are taken for ours, and a table that is missing."""
    assert catalog(queries.TABLES) == [(True,)]
    assert catalog(queries.FOREIGN) == [(False,)]
    with catalog.connection.transaction(force_rollback=True):
        catalog("DROP TABLE consumer_migrations")
        assert catalog(queries.TABLES) == [(False,)]
        catalog("DROP TABLE inbox")
        assert catalog(queries.FOREIGN) == [(False,)]
    catalog("CREATE TABLE other (a int)")
    catalog("DROP TRIGGER handled_guard ON inbox")
    catalog("CREATE TRIGGER handled_guard AFTER INSERT ON other EXECUTE FUNCTION handled_guard()")
    catalog("CREATE TRIGGER another AFTER INSERT ON inbox EXECUTE FUNCTION handled_guard()")
    assert catalog(queries.TABLES) == [(False,)]
    assert catalog(queries.FOREIGN) == [(True,)]
