"""Servers that a test may kill."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines import schema
from outbox_pipelines.local.kafka import Kafka, running
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.local.server import Server
from outbox_pipelines.settings import load_settings
from tests.conftest import Lasting, Outbox, quicken_logins, topic_prefix


@contextmanager
def _running(directory: Path) -> Iterator[tuple[Postgres, Kafka]]:
    postgres, kafka = Postgres(directory / "postgres"), Kafka(directory / "kafka")
    try:
        postgres.start()
        quicken_logins(postgres.dsn)
        kafka.start()
        yield postgres, kafka
    finally:
        postgres.stop()
        kafka.stop()


def _restore(server: Server) -> None:
    """Undo what a test did to a server."""
    if server.running():
        server.thaw()
    else:
        server.start()


@pytest.fixture
def killable(lasting: Lasting, tmp_path_factory: pytest.TempPathFactory) -> tuple[Postgres, Kafka]:
    """Servers that a test may kill, stop and freeze; started once, and alive when a test begins."""
    postgres, kafka = lasting.once("killable", lambda: _running(tmp_path_factory.mktemp("killable")))
    _restore(postgres)
    _restore(kafka)
    return postgres, kafka


def new_database(postgres: Postgres) -> str:
    """The DSN of a new database; it stays, since a test may leave the server stopped."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    return psycopg.conninfo.make_conninfo(postgres.dsn, dbname=name)


@pytest.fixture
def own_servers(killable: tuple[Postgres, Kafka]) -> tuple[Postgres, Kafka, Outbox]:
    """Servers that a test may kill, and an outbox on them."""
    postgres, kafka = killable
    settings = load_settings(
        dsn=new_database(postgres),
        kafka=kafka.bootstrap,
        topic=f"{topic_prefix()}-{{aggregate_type}}-events",
    )
    schema.migrate(settings)
    return postgres, kafka, Outbox(settings)


@pytest.fixture(scope="session")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A broker that creates no topics itself and has access rules; what none speaks of is allowed."""
    settings = {
        "auto.create.topics.enable": "false",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with running(tmp_path_factory.mktemp("strict"), settings) as broker:
        yield broker
