"""What the known libraries make: connections, sessions, transactions, producers; and what their methods do.

Invariants:
- A thing is known by the import that made or annotates it, never by what it is called. The name of a method
  counts only on such a thing.
- `autocommit` is None where the caller, or code out of sight, decides; nothing is concluded from that.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from outbox_pipelines.lint.syntax import keyword


class Role(Enum):
    """What a thing is for."""

    CONNECTION = auto()
    CURSOR = auto()
    SESSION = auto()
    MAKER = auto()
    TRANSACTION = auto()
    PRODUCER = auto()
    OUTBOX_ROW = auto()
    EXTENSION = auto()
    """Flask-SQLAlchemy's object, which has a session."""
    OBJECT = auto()
    """Of a class of the application."""
    CLASS = auto()
    FUNCTION = auto()
    MANAGER = auto()
    """Django's `Model.objects`, and the query sets made of it."""


class Library(Enum):
    """Whose rules for transactions hold."""

    PSYCOPG = auto()
    ASYNCPG = auto()
    SQLALCHEMY = auto()
    DJANGO = auto()
    CELERY = auto()
    OTHER = auto()


TARGETS: Final = {Role.CONNECTION, Role.CURSOR, Role.SESSION}
# What the application defines itself: no connection, and no producer of messages.
APPLICATION: Final = {Role.OBJECT, Role.CLASS, Role.FUNCTION, Role.MANAGER, Role.EXTENSION}


@dataclass(frozen=True)
class Thing:
    """A value whose behaviour is known. Things of one `origin` are, or work through, one connection."""

    role: Role
    library: Library = Library.OTHER
    is_async: bool = False
    autocommit: bool | None = None
    origin: str = ""
    shared: bool = False
    """Reached by several functions: an attribute, a global, a name of an enclosing function."""
    makes: Role = Role.CONNECTION
    """Of a maker: what it makes."""
    yields: Thing | None = None
    """Of a transaction: what `with … as` gives."""
    commits: bool = False
    """Of a transaction: its end is certainly a commit."""
    key: str = ""
    """Of what the application defines: ``path::Class.method``."""

    @property
    def is_signature(self) -> bool:
        """Whether it is a task of Celery with its arguments, which a call queues."""
        return self.role is Role.PRODUCER and self.key == _SIGNED

    @property
    def is_target(self) -> bool:
        """Whether `emit` takes it."""
        return self.role in TARGETS


_SIGNED: Final = "signature"
_PSYCOPG = Thing(Role.CONNECTION, Library.PSYCOPG)
_ASYNC_PSYCOPG = replace(_PSYCOPG, is_async=True)
_PSYCOPG_POOL = Thing(Role.MAKER, Library.PSYCOPG)
_ASYNCPG = Thing(Role.CONNECTION, Library.ASYNCPG, is_async=True)
_ASYNCPG_POOL = replace(_ASYNCPG, role=Role.MAKER)
_CONNECTION = Thing(Role.CONNECTION, Library.SQLALCHEMY)
_SESSION = Thing(Role.SESSION, Library.SQLALCHEMY)
_ENGINE = Thing(Role.MAKER, Library.SQLALCHEMY)
_SESSIONS = replace(_ENGINE, makes=Role.SESSION)
_PRODUCER = Thing(Role.PRODUCER)
_CELERY = Thing(Role.PRODUCER, Library.CELERY)
_SIGNATURE = replace(_CELERY, key=_SIGNED)
_FLASK = Thing(Role.EXTENSION, Library.SQLALCHEMY, origin="flask_sqlalchemy", shared=True)
DJANGO_CONNECTION: Final = Thing(Role.CONNECTION, Library.DJANGO, origin="django")


def _is_async(thing: Thing) -> Thing:
    return replace(thing, is_async=True)


TYPES: Final = {
    "psycopg.Connection": _PSYCOPG,
    "psycopg.AsyncConnection": _ASYNC_PSYCOPG,
    "psycopg.Cursor": replace(_PSYCOPG, role=Role.CURSOR),
    "psycopg.AsyncCursor": replace(_ASYNC_PSYCOPG, role=Role.CURSOR),
    "psycopg_pool.ConnectionPool": _PSYCOPG_POOL,
    "psycopg_pool.NullConnectionPool": _PSYCOPG_POOL,
    "psycopg_pool.AsyncConnectionPool": _is_async(_PSYCOPG_POOL),
    "psycopg_pool.AsyncNullConnectionPool": _is_async(_PSYCOPG_POOL),
    "asyncpg.Connection": _ASYNCPG,
    "asyncpg.connection.Connection": _ASYNCPG,
    "asyncpg.pool.PoolConnectionProxy": _ASYNCPG,
    "asyncpg.Pool": _ASYNCPG_POOL,
    "asyncpg.pool.Pool": _ASYNCPG_POOL,
    "sqlalchemy.Connection": _CONNECTION,
    "sqlalchemy.engine.Connection": _CONNECTION,
    "sqlalchemy.ext.asyncio.AsyncConnection": _is_async(_CONNECTION),
    "sqlalchemy.Engine": _ENGINE,
    "sqlalchemy.engine.Engine": _ENGINE,
    "sqlalchemy.ext.asyncio.AsyncEngine": _is_async(_ENGINE),
    "sqlalchemy.orm.Session": _SESSION,
    "sqlalchemy.orm.session.Session": _SESSION,
    "sqlalchemy.orm.scoped_session": _SESSION,
    "sqlmodel.Session": _SESSION,
    "sqlalchemy.ext.asyncio.AsyncSession": _is_async(_SESSION),
    "sqlalchemy.ext.asyncio.async_scoped_session": _is_async(_SESSION),
    "sqlmodel.ext.asyncio.session.AsyncSession": _is_async(_SESSION),
    "sqlalchemy.orm.sessionmaker": _SESSIONS,
    "sqlalchemy.ext.asyncio.async_sessionmaker": _is_async(_SESSIONS),
    "psycopg2.extensions.connection": _PSYCOPG,
    "psycopg2.extensions.cursor": replace(_PSYCOPG, role=Role.CURSOR),
    "psycopg2.pool.SimpleConnectionPool": _PSYCOPG_POOL,
    "psycopg2.pool.ThreadedConnectionPool": _PSYCOPG_POOL,
    "flask_sqlalchemy.SQLAlchemy": _FLASK,
    "flask_sqlalchemy.session.Session": _SESSION,
    "confluent_kafka.Producer": _PRODUCER,
    "confluent_kafka.cimpl.Producer": _PRODUCER,
    "confluent_kafka.SerializingProducer": _PRODUCER,
    "confluent_kafka.avro.AvroProducer": _PRODUCER,
    "confluent_kafka.aio.AIOProducer": _PRODUCER,
    "confluent_kafka.experimental.aio.AIOProducer": _PRODUCER,
    "kafka.KafkaProducer": _PRODUCER,
    "kafka.producer.KafkaProducer": _PRODUCER,
    "aiokafka.AIOKafkaProducer": _PRODUCER,
    "aiokafka.producer.AIOKafkaProducer": _PRODUCER,
    "faust.App": _PRODUCER,
    "pika.BlockingConnection": _PRODUCER,
    "pika.SelectConnection": _PRODUCER,
    "pika.adapters.blocking_connection.BlockingConnection": _PRODUCER,
    "pika.adapters.blocking_connection.BlockingChannel": _PRODUCER,
    "pika.channel.Channel": _PRODUCER,
    "kombu.Connection": _PRODUCER,
    "kombu.Producer": _PRODUCER,
    "celery.Celery": _CELERY,
    **{
        f"aio_pika.{module}{prefix}{kind}": _PRODUCER
        for module, prefixes in (("", ("", "Robust")), ("abc.", ("Abstract", "AbstractRobust")))
        for prefix in prefixes
        for kind in ("Connection", "Channel", "Exchange")
    },
    # Every broker and router of FastStream, from the places where it was and is.
    **{
        f"faststream.{library}{module}.{prefix}{kind}": _PRODUCER
        for library, prefix in (
            ("kafka", "Kafka"),
            ("confluent", "Kafka"),
            ("rabbit", "Rabbit"),
            ("nats", "Nats"),
        )
        for module in ("", ".broker", ".fastapi", ".router")
        for kind in ("Broker", "Router")
    },
}
# Calls that make a thing, in addition to those of the types themselves.
CALLS: Final = {
    "psycopg.connect": replace(_PSYCOPG, autocommit=False),
    "psycopg.Connection.connect": replace(_PSYCOPG, autocommit=False),
    "psycopg.AsyncConnection.connect": replace(_ASYNC_PSYCOPG, autocommit=False),
    "psycopg2.connect": replace(_PSYCOPG, autocommit=False),
    **{
        f"{module}.{name}": _SIGNATURE
        for module in ("celery", "celery.canvas")
        for name in ("chain", "group", "chord", "chunks", "signature")
    },
    "aio_pika.connect": _PRODUCER,
    "aio_pika.connect_robust": _PRODUCER,
    "asyncpg.connect": replace(_ASYNCPG, autocommit=True),
    "asyncpg.create_pool": _ASYNCPG_POOL,
    "sqlalchemy.create_engine": _ENGINE,
    "sqlmodel.create_engine": _ENGINE,
    "sqlalchemy.ext.asyncio.create_async_engine": _is_async(_ENGINE),
    "django.db.transaction.get_connection": DJANGO_CONNECTION,
    "django.db.transaction.atomic": Thing(Role.TRANSACTION, Library.DJANGO, origin="django"),
}
OBJECTS: Final = {
    "django.db.connection": CALLS["django.db.transaction.get_connection"],
    "django.db.connections": CALLS["django.db.transaction.get_connection"],
}
# Methods of a producer whose result publishes too: `app.topic("orders").send(…)`.
_PUBLISHERS: Final = {"topic", "publisher", "channel", "get_exchange", "declare_exchange", "Producer"}
# Attributes of a producer which are one.
_PARTS: Final = {"broker", "default_exchange"}
# Methods of Celery's tasks that make a signature, and of signatures that give one back.
_SIGNING: Final = {"s", "si", "signature", "subtask"}
_KEEPING: Final = {"set", "clone", "on_error", "__call__"}
_MAKING: Final = {"connect", "connection", "acquire", "getconn"}
_SAME_CONNECTION: Final = {"cursor", "connection", "execution_options"}


def attribute(thing: Thing, name: str) -> Thing | None:
    """What an attribute of a library's object is."""
    if thing.role is Role.EXTENSION and name == "session":
        return replace(_SESSION, origin=thing.origin, shared=True)
    if thing.role is Role.PRODUCER and name in _PARTS:
        return thing
    if thing.is_target and name in ("connection", "sync_session"):
        return thing
    return None


def made(template: Thing, call: ast.Call, origin: str, given: Thing | None) -> Thing:
    """What a call of a library's function or type makes; `given` is its first known argument."""
    if template.role in (Role.PRODUCER, Role.EXTENSION) or template.library is Library.DJANGO:
        return template
    if template.role is Role.MAKER:
        autocommit = _autocommit(call, given.autocommit if given else False)
    elif template.library is Library.SQLALCHEMY:
        autocommit = given.autocommit if given else False
        if given and given.is_target:
            origin = given.origin
    else:
        autocommit = _autocommit(call, template.autocommit)
    return replace(template, autocommit=autocommit, origin=origin)


def of_method(thing: Thing, call: ast.Call, method: str, origin: str) -> Thing | None:
    """What a method of a known thing gives back; `__call__` stands for calling the thing itself."""
    if thing.library is Library.CELERY:
        return _SIGNATURE if method in _SIGNING or (thing.is_signature and method in _KEEPING) else None
    if thing.role is Role.PRODUCER:
        return thing if method in _PUBLISHERS else None
    if thing.role is Role.MAKER:
        return _of_maker(thing, call, method, origin)
    if not thing.is_target:
        return None
    if method in _SAME_CONNECTION:
        role = Role.CURSOR if method == "cursor" else Role.CONNECTION
        return replace(thing, role=role, autocommit=_autocommit(call, thing.autocommit))
    if method == "__call__":
        return thing if thing.role is Role.SESSION else None
    if method in ("begin", "begin_nested") and thing.library is Library.SQLALCHEMY:
        return replace(thing, role=Role.TRANSACTION, commits=method == "begin")
    if method == "transaction" and thing.library in (Library.PSYCOPG, Library.ASYNCPG):
        # On a connection that the caller opened, it may be a savepoint of the caller's transaction.
        return replace(
            thing, role=Role.TRANSACTION, commits=thing.autocommit is not None and not thing.shared
        )
    return None


def _of_maker(thing: Thing, call: ast.Call, method: str, origin: str) -> Thing | None:
    if method == "execution_options":
        return replace(thing, autocommit=_autocommit(call, thing.autocommit))
    autocommit = True if thing.library is Library.ASYNCPG else thing.autocommit
    one = replace(thing, role=thing.makes, autocommit=autocommit, origin=origin, shared=False)
    if method == "begin" and thing.library is Library.SQLALCHEMY:
        return replace(one, role=Role.TRANSACTION, yields=one, commits=True)
    if method in _MAKING or (method == "__call__" and thing.makes is Role.SESSION):
        return one
    return None


def _autocommit(call: ast.Call, default: bool | None) -> bool | None:
    """What the arguments of a call say, as psycopg, its pool and SQLAlchemy take them."""
    for name in ("autocommit", "isolation_level"):
        if (value := keyword(call, name)) is not None:
            return _is_autocommit(value)
    for name in ("kwargs", "connect_args", "execution_options"):
        if (value := keyword(call, name)) is not None:
            return _in_mapping(value, default)
    return None if any(given.arg is None for given in call.keywords) else default


def _in_mapping(value: ast.expr, default: bool | None) -> bool | None:
    match value:
        case ast.Call(func=ast.Name(id="dict")):
            return _autocommit(value, default)
        case ast.Dict(keys=keys, values=values):
            for key, entry in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and key.value in ("autocommit", "isolation_level"):
                    return _is_autocommit(entry)
            return None if None in keys else default
    return None


def _is_autocommit(value: ast.expr) -> bool | None:
    if not isinstance(value, ast.Constant):
        return None
    return value.value == "AUTOCOMMIT" if isinstance(value.value, str) else bool(value.value)


EXECUTING: Final = {
    "execute",
    "executemany",
    "execute_values",
    "execute_batch",
    "exec_driver_sql",
    "fetch",
    "fetchrow",
    "fetchval",
    "scalar",
    "scalars",
    "exec",
    "stream",
    "copy",
}
SESSION_WRITES: Final = {
    "add",
    "add_all",
    "merge",
    "delete",
    "bulk_save_objects",
    "bulk_insert_mappings",
    "bulk_update_mappings",
}
# Of tests that want an error.
WANTING: Final = {"raises", "assertRaises", "assertRaisesRegex"}
PUBLISHING: Final = {
    "produce",
    "send",
    "send_and_wait",
    "send_batch",
    "send_soon",
    "publish",
    "publish_batch",
    "basic_publish",
}
# Of Celery's tasks and application.
QUEUING: Final = {"delay", "apply_async", "send_task", "delay_on_commit", "apply_async_on_commit"}
# Of Django's managers and query sets.
MANAGER_WRITES: Final = {
    f"{prefix}{name}"
    for prefix in ("", "a")
    for name in (
        "create",
        "bulk_create",
        "bulk_update",
        "get_or_create",
        "update_or_create",
        "update",
        "delete",
    )
} | {"create_user", "create_superuser"}
# Of these a row comes back.
MANAGER_ROWS: Final = {
    f"{prefix}{name}"
    for prefix in ("", "a")
    for name in ("create", "get", "first", "last", "latest", "earliest")
} | {"create_user", "create_superuser"}
ROW_WRITES: Final = {"save", "delete", "asave", "adelete"}
# What the views of the REST framework do with their serializer.
VIEW_WRITES: Final = {
    "create",
    "update",
    "partial_update",
    "destroy",
    "perform_create",
    "perform_update",
    "perform_destroy",
}
# Functions that run another one in a thread, with its place among their arguments.
RUNNING: Final = {"run_in_threadpool": 0, "to_thread": 0, "to_thread.run_sync": 0, "run_in_executor": 1}
# Of exit stacks.
ENTERING: Final = {"enter_context", "enter_async_context"}
