"""Creates the place of the demo: a separate schema and topics, next to other data on the servers.

Invariants:
- Only what an earlier demo made is ever removed: the comment of its schema says so, and names its topics.
- Every run has new topics; the tables keep their place, so that a person finds them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg import sql
from psycopg.conninfo import make_conninfo

from examples.airline import queries
from examples.airline.airline import TABLES
from outbox_pipelines.config import parsed
from outbox_pipelines.database import Connection, connect, schema
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.kafka.topic_lookups import TopicLookups
from outbox_pipelines.settings import Settings

AGGREGATES: Final = ("aircraft", "flight")

_MARK: Final = "Made by the demo of Outbox Pipelines, removed by its next run. Topics: "
_PARTITIONS: Final = 4
_SECONDS: Final = 30.0


@contextmanager
def prepared(servers: Settings, name: str, *, keep: bool, copies: Sequence[str] = ()) -> Iterator[Settings]:
    """An empty outbox, the airline's tables and topics; what the run before left is gone.

    Args:
        servers: names the database and the brokers.
        name: the schema.
        keep: whether the next run removes it all, or already the end of this block.
        copies: suffixes of topics that others create, to be removed with the topics themselves.

    Raises:
        SetupError: a server does not answer, another demo runs there, or the schema was not made by a demo.
    """
    settings = servers.model_copy(
        update={"db_schema": name, "topic": f"demo-{secrets.token_hex(3)}-{{aggregate_type}}"}
    )
    # Before anything is changed.
    TopicLookups(settings).connect()
    with connect(servers, name="outbox demo") as connection:
        row = connection.execute(queries.TRY_LOCK, [name]).fetchone()
        if not (row and row[0]):
            raise SetupError(
                f"a demo already runs in schema {name} of this database: end it, or wait for its end"
            )
        _remove(connection, settings)
        with connection.transaction():
            names = [topic + suffix for suffix in ("", *copies) for topic in topics(settings)]
            comment = _MARK + ", ".join(names)
            connection.execute(_named(queries.CREATE, name))
            connection.execute(_named(queries.SET_COMMENT, name, comment=comment))
        schema.migrate(settings)
        with connect(settings, name="outbox demo: tables") as tables:
            tables.execute(TABLES)
        _create(settings)
        try:
            yield settings
        finally:
            if not keep:
                _remove(connection, settings)


@contextmanager
def database(dsn: str, name: str) -> Iterator[str]:
    """A new database beside the one of `dsn`, which is gone at the end.

    Raises:
        SetupError: another demo has it.
    """
    with psycopg.connect(dsn, autocommit=True) as admin:
        # A lock is one of its database: what another one's demo makes has another name.
        name = f"{name}_{admin.info.dbname}"
        named = sql.Identifier(name)
        row = admin.execute(queries.TRY_LOCK, [name]).fetchone()
        if not (row and row[0]):
            raise SetupError(
                f"a demo already has database {name} of this server: end it, or wait for its end"
            )
        # A demo that was killed has left it.
        admin.execute(sql.SQL(queries.DROP_DATABASE).format(name=named))
        admin.execute(sql.SQL(queries.CREATE_DATABASE).format(name=named))
        try:
            yield make_conninfo(dsn, dbname=name)
        finally:
            admin.execute(sql.SQL(queries.DROP_DATABASE).format(name=named))


def topics(settings: Settings) -> list[str]:
    """The topics that the demo's events go to."""
    return [settings.topic.format(aggregate_type=aggregate) for aggregate in AGGREGATES]


def kafka_client(settings: Settings, **more: Any) -> dict[str, Any]:
    """The configuration of a client of ours: the user's own settings, and where the brokers are."""
    ours = {"bootstrap.servers": settings.require_kafka(), "log_level": 2}
    return parsed.kafka_config(settings) | ours | more


def _remove(connection: Connection, settings: Settings) -> None:
    """What a demo left in its schema, and its topics."""
    row = connection.execute(queries.COMMENT, [settings.db_schema]).fetchone()
    if row is None:
        return
    comment = row[0] or ""
    if not comment.startswith(_MARK):
        raise SetupError(
            f"schema {settings.db_schema} was not made by the demo: rename it, or use another database"
        )
    admin = AdminClient(kafka_client(settings))
    _wait(admin.delete_topics(comment.removeprefix(_MARK).split(", ")), harmless=True)
    connection.execute(_named(queries.DROP, settings.db_schema))


def _create(settings: Settings) -> None:
    admin = AdminClient(kafka_client(settings))
    _wait(admin.create_topics([NewTopic(topic, _PARTITIONS, -1) for topic in topics(settings)]))


def _wait(answers: dict[str, Any], *, harmless: bool = False) -> None:
    for topic, answer in answers.items():
        try:
            answer.result(_SECONDS + 5)
        except TimeoutError:
            raise SetupError(f"Kafka did not respond to a request for topic {topic}") from None
        except KafkaException as error:
            # A topic that is gone already is what was wanted.
            if not harmless:
                raise SetupError(f"Kafka refuses topic {topic}: {error.args[0].str()}") from None


def _named(statement: str, name: str, **literals: str) -> sql.Composed:
    return sql.SQL(statement).format(
        schema=sql.Identifier(name), **{key: sql.Literal(value) for key, value in literals.items()}
    )
