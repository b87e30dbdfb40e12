"""What `emit` costs: one round trip."""

from __future__ import annotations

import tempfile
from typing import IO, Any

import psycopg
import pytest
import sqlalchemy

from outbox_pipelines.writer import emit
from tests.schema.servers import Database
from tests.writer import targets


class Trips:
    """Counts how often a connection sends something and waits for the answer, in libpq's own trace."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._file: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.count = 0

    def __enter__(self) -> Trips:
        self._connection.pgconn.trace(self._file.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.pgconn.untrace()
        self._file.seek(0)
        # A line is `time F|B length message …`: F to the server, B back from it.
        ways = [line.split("\t")[1] for line in self._file if line.count("\t") > 1]
        self.count = sum(before + after == "BF" for before, after in zip(["B", *ways], ways, strict=False))
        self._file.close()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"idempotency_key": "a", "headers": {"h": 1}, "correlation_id": "c", "version": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "key"])
@pytest.mark.parametrize("target", ["psycopg", "sqlalchemy"])
def test_one_round_trip(shared: Database, target: str, options: dict[str, Any]) -> None:
    """A savepoint, a SELECT for the key, a lookup of types: each would cost every business transaction."""
    engine = targets.engine(shared)
    with engine.connect() as connection:
        raw: Any = connection.connection.dbapi_connection
        through: Any = connection if target == "sqlalchemy" else raw
        # The transaction has begun: its BEGIN is not what is counted.
        connection.execute(sqlalchemy.text("SELECT 1"))
        with Trips(raw) as trips:
            emit(through, "order", 42, "order.placed", {"total": 5}, **options)
        connection.rollback()
    assert trips.count == 1


def test_the_counter_counts(shared: Database) -> None:
    """A test of round trips that would not notice a second one."""
    with psycopg.connect(shared.dsn) as connection:
        connection.execute("SELECT 1")
        with Trips(connection) as trips:
            connection.execute("SELECT 1")
            connection.execute("SELECT 2")
    assert trips.count == 2
