"""Every kind of thing that `emit` writes through, on one database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psycopg
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy import orm

from tests.schema.servers import Database

Target = Callable[[Database], AbstractContextManager[Any]]


def engine(database: Database, **options: Any) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(
        "postgresql+psycopg://",
        creator=lambda: psycopg.connect(database.dsn),
        poolclass=sqlalchemy.NullPool,
        **options,
    )


@contextmanager
def psycopg_connection(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection:
        yield connection


@contextmanager
def dict_rows(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn, row_factory=dict_row) as connection:
        yield connection


@contextmanager
def client_cursors(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn, cursor_factory=psycopg.ClientCursor) as connection:
        yield connection


@contextmanager
def raw_cursors(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn, cursor_factory=psycopg.RawCursor) as connection:
        yield connection


@contextmanager
def pipeline(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection, connection.pipeline():
        yield connection


@contextmanager
def transaction_block(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn, autocommit=True) as connection, connection.transaction():
        yield connection


@contextmanager
def pipeline_in_transaction_block(database: Database) -> Iterator[Any]:
    with (
        psycopg.connect(database.dsn, autocommit=True) as connection,
        connection.pipeline(),
        connection.transaction(),
    ):
        yield connection


@contextmanager
def cursor(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection, connection.cursor() as made:
        yield made


@contextmanager
def dict_cursor(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection, connection.cursor(row_factory=dict_row) as made:
        yield made


@contextmanager
def client_cursor(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection, psycopg.ClientCursor(connection) as made:
        yield made


@contextmanager
def raw_cursor(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection, psycopg.RawCursor(connection) as made:
        yield made


@contextmanager
def server_cursor(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection, connection.cursor("named") as made:
        yield made


@contextmanager
def session(database: Database) -> Iterator[Any]:
    with orm.Session(engine(database)) as made, made.begin():
        yield made


@contextmanager
def scoped_session(database: Database) -> Iterator[Any]:
    made = orm.scoped_session(orm.sessionmaker(engine(database)))
    with made.begin():
        yield made
    made.remove()


@contextmanager
def sqlalchemy_connection(database: Database) -> Iterator[Any]:
    with engine(database).begin() as made:
        yield made


PSYCOPG: list[Target] = [
    psycopg_connection,
    dict_rows,
    client_cursors,
    raw_cursors,
    pipeline,
    transaction_block,
    pipeline_in_transaction_block,
    cursor,
    dict_cursor,
    client_cursor,
    raw_cursor,
    server_cursor,
]
SQLALCHEMY: list[Target] = [session, scoped_session, sqlalchemy_connection]
