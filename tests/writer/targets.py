"""Every kind of object that events are written through, on one database, and each kind with autocommit.

Invariants:
- A target is a context manager: its transaction commits at the end, and is rolled back where the block fails.
- Asynchronous targets are awaited in an event loop of their own, so that one test serves both kinds.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import Any
from uuid import UUID

import asyncpg
import django
import django.conf
import psycopg
import psycopg2.extras
import sqlalchemy
from django.db import connections, transaction
from django.utils.connection import ConnectionProxy
from psycopg.rows import dict_row
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sqlalchemy_asyncio

from outbox_pipelines.settings import Settings
from outbox_pipelines.writer import Emitted, NewEvent, cancel, emit, emit_many
from outbox_pipelines.writer.testing import WrittenEvent, events_of
from tests.schema.servers import Database


class Through:
    """A target, and the calls on it; `target` is the object that an application has."""

    def __init__(self, target: Any, runner: asyncio.Runner | None = None) -> None:
        self.target = target
        self._runner = runner

    def emit(self, *arguments: Any, **options: Any) -> Emitted:
        emitted: Emitted = self._done(emit(self.target, *arguments, **options))
        return emitted

    def emit_many(self, events: list[NewEvent]) -> list[Emitted]:
        emitted: list[Emitted] = self._done(emit_many(self.target, events))
        return emitted

    def cancel(self, id: UUID) -> bool:
        canceled: bool = self._done(cancel(self.target, id))
        return canceled

    def events_of(self) -> list[WrittenEvent]:
        found: list[WrittenEvent] = self._done(events_of(self.target))
        return found

    def _done(self, answer: Any) -> Any:
        return self._runner.run(answer) if self._runner else answer


Target = Callable[[Database], AbstractContextManager[Through]]


def _at_once(make: Callable[[Database], Iterator[Any]]) -> Target:
    opened = contextmanager(make)

    @contextmanager
    @functools.wraps(make)
    def target(database: Database) -> Iterator[Through]:
        with opened(database) as made:
            yield Through(made)

    return target


def _awaited(make: Callable[[Database], AsyncIterator[Any]]) -> Target:
    opened = asynccontextmanager(make)

    @contextmanager
    @functools.wraps(make)
    def target(database: Database) -> Iterator[Through]:
        with asyncio.Runner() as runner, _run(opened(database), runner) as made:
            yield Through(made, runner)

    return target


@contextmanager
def _run(manager: AbstractAsyncContextManager[Any], runner: asyncio.Runner) -> Iterator[Any]:
    made = runner.run(_call(manager.__aenter__))
    try:
        yield made
    except BaseException as error:
        if not runner.run(_call(manager.__aexit__, type(error), error, error.__traceback__)):
            raise
    else:
        runner.run(_call(manager.__aexit__, None, None, None))


async def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    return await method(*arguments)


# psycopg


@_at_once
def psycopg_connection(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection:
        yield connection


@_at_once
def dict_rows(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn, row_factory=dict_row) as connection:
        yield connection


@_at_once
def client_cursors(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn, cursor_factory=psycopg.ClientCursor) as connection:
        yield connection


@_at_once
def raw_cursors(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn, cursor_factory=psycopg.RawCursor) as connection:
        yield connection


@_at_once
def pipeline(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection, connection.pipeline():
        yield connection


@_at_once
def transaction_block(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn, autocommit=True) as connection, connection.transaction():
        yield connection


@_at_once
def transaction_by_hand(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        yield connection
        connection.execute("COMMIT")


@_at_once
def pipeline_in_transaction_block(database: Database) -> Iterator[Any]:
    with (
        psycopg.connect(database.dsn, autocommit=True) as connection,
        connection.pipeline(),
        connection.transaction(),
    ):
        connection.execute("SELECT 1")
        yield connection


@_at_once
def cursor(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection, connection.cursor() as made:
        yield made


@_at_once
def dict_cursor(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection, connection.cursor(row_factory=dict_row) as made:
        yield made


@_at_once
def client_cursor(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection, psycopg.ClientCursor(connection) as made:
        yield made


@_at_once
def raw_cursor(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection, psycopg.RawCursor(connection) as made:
        yield made


@_at_once
def server_cursor(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn) as connection, connection.cursor("named") as made:
        yield made


@_at_once
def psycopg2_connection(database: Database) -> Iterator[Any]:
    with psycopg2.connect(database.dsn) as connection:
        yield connection


@_at_once
def psycopg2_dict_cursor(database: Database) -> Iterator[Any]:
    factory = psycopg2.extras.RealDictCursor
    with psycopg2.connect(database.dsn) as connection, connection.cursor(cursor_factory=factory) as made:
        yield made


@_at_once
def psycopg2_server_cursor(database: Database) -> Iterator[Any]:
    with psycopg2.connect(database.dsn) as connection:
        yield connection.cursor("named")


@_at_once
def psycopg2_begun_by_hand(database: Database) -> Iterator[Any]:
    connection = psycopg2.connect(database.dsn)
    connection.autocommit = True
    connection.cursor().execute("BEGIN")
    yield connection
    connection.cursor().execute("COMMIT")


@_awaited
async def async_connection(database: Database) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(database.dsn) as connection:
        yield connection


@_awaited
async def async_dict_cursor(database: Database) -> AsyncIterator[Any]:
    async with (
        await psycopg.AsyncConnection.connect(database.dsn) as connection,
        connection.cursor(row_factory=dict_row) as made,
    ):
        yield made


@_awaited
async def async_pipeline_in_transaction_block(database: Database) -> AsyncIterator[Any]:
    async with (
        await psycopg.AsyncConnection.connect(database.dsn, autocommit=True) as connection,
        connection.pipeline(),
        connection.transaction(),
    ):
        await connection.execute("SELECT 1")
        yield connection


# SQLAlchemy


def engine(database: Database | Settings, **options: Any) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(url("psycopg", database), poolclass=sqlalchemy.NullPool, **options)


def async_engine(driver: str, database: Database, **options: Any) -> sqlalchemy_asyncio.AsyncEngine:
    return sqlalchemy_asyncio.create_async_engine(
        url(driver, database), poolclass=sqlalchemy.NullPool, **options
    )


def url(driver: str, database: Database | Settings) -> sqlalchemy.URL:
    at = psycopg.conninfo.conninfo_to_dict(database.dsn)
    return sqlalchemy.URL.create(
        f"postgresql+{driver}",
        username=str(at["user"]),
        host=str(at["host"]),
        port=int(at["port"] or 0),
        database=str(at["dbname"]),
        query={"passfile": str(at["passfile"])},
    )


@_at_once
def session(database: Database) -> Iterator[Any]:
    with orm.Session(engine(database)) as made, made.begin():
        yield made


@_at_once
def scoped_session(database: Database) -> Iterator[Any]:
    made = orm.scoped_session(orm.sessionmaker(engine(database)))
    with made.begin():
        yield made
    made.remove()


@_at_once
def sqlalchemy_connection(database: Database) -> Iterator[Any]:
    with engine(database).begin() as made:
        yield made


@_awaited
async def async_session_psycopg(database: Database) -> AsyncIterator[Any]:
    async with (
        sqlalchemy_asyncio.AsyncSession(async_engine("psycopg", database)) as made,
        made.begin(),
    ):
        yield made


@_awaited
async def async_session_asyncpg(database: Database) -> AsyncIterator[Any]:
    async with (
        sqlalchemy_asyncio.AsyncSession(async_engine("asyncpg", database)) as made,
        made.begin(),
    ):
        yield made


@_awaited
async def async_scoped_session(database: Database) -> AsyncIterator[Any]:
    factory = sqlalchemy_asyncio.async_sessionmaker(async_engine("asyncpg", database))
    made = sqlalchemy_asyncio.async_scoped_session(factory, scopefunc=lambda: "the one request")
    async with made.begin():
        yield made
    await made.remove()


@_awaited
async def async_sqlalchemy_connection_psycopg(database: Database) -> AsyncIterator[Any]:
    async with async_engine("psycopg", database).begin() as made:
        yield made


@_awaited
async def async_sqlalchemy_connection_asyncpg(database: Database) -> AsyncIterator[Any]:
    async with async_engine("asyncpg", database).begin() as made:
        yield made


# asyncpg


def _address(database: Database) -> dict[str, Any]:
    at = psycopg.conninfo.conninfo_to_dict(database.dsn)
    return {"database": at["dbname"], **{name: at[name] for name in ("host", "port", "user", "passfile")}}


@asynccontextmanager
async def _asyncpg(database: Database) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(**_address(database))
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def _asyncpg_pool(database: Database) -> AsyncIterator[Any]:
    async with (
        asyncpg.create_pool(**_address(database), min_size=1, max_size=1) as pool,
        pool.acquire() as connection,
    ):
        yield connection


@_awaited
async def asyncpg_connection(database: Database) -> AsyncIterator[Any]:
    async with _asyncpg(database) as connection, connection.transaction():
        yield connection


@_awaited
async def asyncpg_pool(database: Database) -> AsyncIterator[Any]:
    async with _asyncpg_pool(database) as connection, connection.transaction():
        yield connection


@_awaited
async def asyncpg_codecs(database: Database) -> AsyncIterator[Any]:
    """As applications set it up that want dicts of jsonb, and text of uuid."""
    async with _asyncpg(database) as connection:
        for kind in ("json", "jsonb", "uuid"):
            await connection.set_type_codec(kind, encoder=repr, decoder=str, schema="pg_catalog")
        async with connection.transaction():
            yield connection


# Django


@contextmanager
def django_wrapper(database: Database) -> Iterator[str]:
    """The alias of a database of Django's."""
    if not django.conf.settings.configured:
        django.conf.settings.configure()
        django.setup()
    at = psycopg.conninfo.conninfo_to_dict(database.dsn)
    alias = str(at["dbname"])
    connections.settings[alias] = {
        **connections.settings["default"],
        **{"ENGINE": "django.db.backends.postgresql", "NAME": alias, "USER": at["user"]},
        **{"HOST": at["host"], "PORT": at["port"], "OPTIONS": {"passfile": at["passfile"]}},
    }
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias], connections.settings[alias]


@_at_once
def django_connection(database: Database) -> Iterator[Any]:
    with django_wrapper(database) as alias, transaction.atomic(using=alias):
        yield connections[alias]


@_at_once
def django_proxy(database: Database) -> Iterator[Any]:
    """Of the class of `django.db.connection`."""
    with django_wrapper(database) as alias, transaction.atomic(using=alias):
        yield ConnectionProxy(connections, alias)


@_at_once
def django_without_autocommit(database: Database) -> Iterator[Any]:
    with django_wrapper(database) as alias:
        transaction.set_autocommit(False, using=alias)
        yield connections[alias]
        transaction.commit(using=alias)


TARGETS: list[Target] = [
    psycopg_connection,
    dict_rows,
    client_cursors,
    raw_cursors,
    pipeline,
    transaction_block,
    transaction_by_hand,
    pipeline_in_transaction_block,
    cursor,
    dict_cursor,
    client_cursor,
    raw_cursor,
    server_cursor,
    psycopg2_connection,
    psycopg2_dict_cursor,
    psycopg2_server_cursor,
    psycopg2_begun_by_hand,
    async_connection,
    async_dict_cursor,
    async_pipeline_in_transaction_block,
    session,
    scoped_session,
    sqlalchemy_connection,
    async_session_psycopg,
    async_session_asyncpg,
    async_scoped_session,
    async_sqlalchemy_connection_psycopg,
    async_sqlalchemy_connection_asyncpg,
    asyncpg_connection,
    asyncpg_pool,
    asyncpg_codecs,
    django_connection,
    django_proxy,
    django_without_autocommit,
]


# What commits each statement automatically.


@_at_once
def psycopg_autocommit(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        yield connection


@_at_once
def psycopg_cursor_autocommit(database: Database) -> Iterator[Any]:
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        yield connection.cursor()


@_at_once
def pipeline_autocommit(database: Database) -> Iterator[Any]:
    """It looks busy, not idle; it commits at each of its syncs."""
    with psycopg.connect(database.dsn, autocommit=True) as connection, connection.pipeline():
        connection.execute("SELECT 1")
        yield connection


@_at_once
def psycopg2_autocommit(database: Database) -> Iterator[Any]:
    connection = psycopg2.connect(database.dsn)
    connection.autocommit = True
    yield connection


@_awaited
async def async_autocommit(database: Database) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(database.dsn, autocommit=True) as connection:
        yield connection


@_awaited
async def async_cursor_autocommit(database: Database) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(database.dsn, autocommit=True) as connection:
        yield connection.cursor()


@_awaited
async def async_pipeline_autocommit(database: Database) -> AsyncIterator[Any]:
    async with (
        await psycopg.AsyncConnection.connect(database.dsn, autocommit=True) as connection,
        connection.pipeline(),
    ):
        await connection.execute("SELECT 1")
        yield connection


@_at_once
def sqlalchemy_autocommit(database: Database) -> Iterator[Any]:
    """SQLAlchemy's AUTOCOMMIT keeps `begin()`, and commits each statement all the same."""
    with engine(database, isolation_level="AUTOCOMMIT").begin() as made:
        yield made


@_at_once
def sqlalchemy_options_autocommit(database: Database) -> Iterator[Any]:
    with engine(database).connect() as made:
        yield made.execution_options(isolation_level="AUTOCOMMIT")


@_at_once
def session_autocommit(database: Database) -> Iterator[Any]:
    with orm.Session(engine(database, isolation_level="AUTOCOMMIT")) as made, made.begin():
        yield made


@_awaited
async def async_sqlalchemy_psycopg_autocommit(database: Database) -> AsyncIterator[Any]:
    async with async_engine("psycopg", database, isolation_level="AUTOCOMMIT").begin() as made:
        yield made


@_awaited
async def async_sqlalchemy_asyncpg_autocommit(database: Database) -> AsyncIterator[Any]:
    async with async_engine("asyncpg", database, isolation_level="AUTOCOMMIT").begin() as made:
        yield made


@_awaited
async def async_session_autocommit(database: Database) -> AsyncIterator[Any]:
    made = async_engine("asyncpg", database, isolation_level="AUTOCOMMIT")
    async with sqlalchemy_asyncio.AsyncSession(made) as opened, opened.begin():
        yield opened


@_awaited
async def asyncpg_without_transaction(database: Database) -> AsyncIterator[Any]:
    async with _asyncpg(database) as connection:
        yield connection


@_awaited
async def asyncpg_pool_without_transaction(database: Database) -> AsyncIterator[Any]:
    async with _asyncpg_pool(database) as connection:
        yield connection


@_at_once
def django_without_atomic(database: Database) -> Iterator[Any]:
    with django_wrapper(database) as alias:
        yield connections[alias]


@_at_once
def django_proxy_without_atomic(database: Database) -> Iterator[Any]:
    with django_wrapper(database) as alias:
        yield ConnectionProxy(connections, alias)


AUTOCOMMIT: dict[Target, str] = {
    psycopg_autocommit: r"with connection\.transaction\(\)",
    psycopg_cursor_autocommit: r"with connection\.transaction\(\)",
    pipeline_autocommit: r"with connection\.transaction\(\)",
    psycopg2_autocommit: r"connection\.autocommit = False",
    async_autocommit: r"async with connection\.transaction\(\)",
    async_cursor_autocommit: r"async with connection\.transaction\(\)",
    async_pipeline_autocommit: r"async with connection\.transaction\(\)",
    sqlalchemy_autocommit: "isolation_level",
    sqlalchemy_options_autocommit: "isolation_level",
    session_autocommit: "isolation_level",
    async_sqlalchemy_psycopg_autocommit: "isolation_level",
    async_sqlalchemy_asyncpg_autocommit: "isolation_level",
    async_session_autocommit: "isolation_level",
    asyncpg_without_transaction: r"async with connection\.transaction\(\)",
    asyncpg_pool_without_transaction: r"async with connection\.transaction\(\)",
    django_without_atomic: r"transaction\.atomic\(\)",
    django_proxy_without_atomic: r"transaction\.atomic\(\)",
}
"""Each with what the message must advise."""
