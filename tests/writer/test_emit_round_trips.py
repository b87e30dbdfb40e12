"""What an event costs, and what a hundred do: one round trip."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import IO, Any

import psycopg
import pytest
from sqlalchemy import orm

from outbox_pipelines.writer import NewEvent
from tests.schema.servers import Database
from tests.writer import targets
from tests.writer.targets import Target, Through


class Trips:
    """Counts how often a connection sends something and waits for the answer, in libpq's own trace."""

    def __init__(self, connection: Any) -> None:
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
MANY = [NewEvent("order", n, "e", {"n": n}, idempotency_key="k" if n % 7 == 0 else None) for n in range(100)]


class Undone(Exception):  # noqa: N818
    """Rolls a test's events back."""


def ways(options: dict[str, Any]) -> list[Callable[[Through], object]]:
    return [
        lambda through: through.emit("order", 42, "order.placed", {"total": 5}, **options),
        lambda through: through.emit_many([event._replace(**options) for event in MANY]),
        lambda through: through.emit_many([event._replace(idempotency_key=None) for event in MANY]),
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "key"])
@pytest.mark.parametrize("target", [targets.psycopg_connection, targets.async_connection])
def test_one_round_trip(shared: Database, target: Target, options: dict[str, Any]) -> None:
    """Guards against a savepoint, a SELECT for the key, an event a statement: a cost of every transaction."""
    for write in ways(options):
        with contextlib.suppress(Undone), target(shared) as through:
            # The transaction has begun: its BEGIN is not what is counted.
            through.emit("order", 1, "e", {})
            with Trips(through.target) as trips:
                write(through)
            assert trips.count == 1
            raise Undone


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "key"])
@pytest.mark.parametrize("target", [targets.sqlalchemy_connection, targets.session])
def test_one_round_trip_through_sqlalchemy(shared: Database, target: Target, options: dict[str, Any]) -> None:
    """Guards against a flush that queries the database, and a savepoint."""
    for write in ways(options):
        with contextlib.suppress(Undone), target(shared) as through:
            through.emit("order", 1, "e", {})
            connection = through.target
            if isinstance(connection, orm.Session):
                connection = connection.connection()
            with Trips(connection.connection.dbapi_connection) as trips:
                write(through)
            assert trips.count == 1
            raise Undone


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "key"])
def test_one_query_of_asyncpg(shared: Database, options: dict[str, Any]) -> None:
    """Guards against the same; asyncpg reports each query that it sends."""
    with contextlib.suppress(Undone), targets.asyncpg_connection(shared) as through:
        sent: list[object] = []
        through.target.add_query_logger(sent.append)
        for write in ways(options):
            write(through)
        assert len(sent) == len(ways(options))
        raise Undone


@pytest.mark.parametrize("target", [targets.psycopg_connection, targets.async_connection, targets.pipeline])
def test_no_events_cost_nothing(shared: Database, target: Target) -> None:
    """Guards against a round trip, or even a BEGIN, for a list that happens to be empty."""
    with target(shared) as through:
        with Trips(through.target) as trips:
            assert through.emit_many([]) == []
        assert trips.count == 0
        assert through.target.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_the_counter_counts(shared: Database) -> None:
    """Guards against a test of round trips that would not notice a second one."""
    with psycopg.connect(shared.dsn) as connection:
        connection.execute("SELECT 1")
        with Trips(connection) as trips:
            connection.execute("SELECT 1")
            connection.execute("SELECT 2")
    assert trips.count == 2
