"""`emit` refuses a connection that would commit the event apart from the business rows."""

from __future__ import annotations

import uuid

import psycopg
import pytest
from sqlalchemy import orm

from outbox_pipelines.writer import AutocommitError, emit
from tests.schema.servers import Database
from tests.writer import targets


def count(database: Database, order: str) -> int:
    return int(database.value("SELECT count(*) FROM outbox WHERE aggregate_id = %s", order))


def test_psycopg_without_a_transaction(kept: Database) -> None:
    """Event and order in two transactions: a crash between them loses one."""
    order = uuid.uuid4().hex
    with psycopg.connect(kept.dsn, autocommit=True) as connection:
        for target in (connection, connection.cursor()):
            with pytest.raises(AutocommitError, match=r"with connection\.transaction\(\)"):
                emit(target, "order", order, "e", {})
    assert count(kept, order) == 0


def test_psycopg_pipeline_without_a_transaction(kept: Database) -> None:
    """A pipeline in autocommit looks busy, not idle; it commits at each of its syncs."""
    order = uuid.uuid4().hex
    with psycopg.connect(kept.dsn, autocommit=True) as connection, connection.pipeline():
        connection.execute("SELECT 1")
        with pytest.raises(AutocommitError, match=r"with connection\.transaction\(\)"):
            emit(connection, "order", order, "e", {})
    assert count(kept, order) == 0


def test_psycopg_with_an_open_transaction(kept: Database) -> None:
    """A refusal of autocommit connections on which a transaction is open: the way of many web frameworks."""
    order = uuid.uuid4().hex
    with psycopg.connect(kept.dsn, autocommit=True) as connection:
        with connection.transaction():
            emit(connection, "order", order, "e", {})
        connection.execute("BEGIN")
        emit(connection, "order", order, "e", {})
        connection.execute("COMMIT")
        with connection.pipeline(), connection.transaction():
            connection.execute("SELECT 1")
            emit(connection, "order", order, "e", {})
    assert count(kept, order) == 3


def test_sqlalchemy_engine(kept: Database) -> None:
    """SQLAlchemy's AUTOCOMMIT keeps `begin()`, and commits each statement all the same."""
    order = uuid.uuid4().hex
    engine = targets.engine(kept, isolation_level="AUTOCOMMIT")
    with engine.begin() as connection, pytest.raises(AutocommitError, match="isolation_level"):
        emit(connection, "order", order, "e", {})
    with (
        orm.Session(engine) as session,
        session.begin(),
        pytest.raises(AutocommitError, match="isolation_level"),
    ):
        emit(session, "order", order, "e", {})
    assert count(kept, order) == 0


def test_sqlalchemy_connection(kept: Database) -> None:
    """The same where one connection was switched by its execution options."""
    order = uuid.uuid4().hex
    with targets.engine(kept).connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(AutocommitError, match="isolation_level"):
            emit(connection, "order", order, "e", {})
    assert count(kept, order) == 0


def test_sqlalchemy_connection_that_commits_later(kept: Database) -> None:
    """SQLAlchemy's own 'autobegin' taken for autocommit."""
    order = uuid.uuid4().hex
    with targets.engine(kept).connect() as connection:
        emit(connection, "order", order, "e", {})
        assert count(kept, order) == 0
        connection.commit()
    assert count(kept, order) == 1
