"""Servers that a test may kill."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime

import psycopg
import pytest

from outbox_pipelines.database import schema
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.settings import load_settings
from tests.conftest import ADOPT, Lasting, Outbox, create_database, topic_prefix
from tests.history import business
from tests.history.servers import awake, lasting_servers
from tests.registry import registry
from tests.relay.topic import create_topic

__all__ = ["registry"]


@pytest.fixture
def killable(lasting: Lasting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Postgres, Kafka]]:
    """Servers that a test may kill, stop and freeze; started once, and alive when a test begins."""
    with lasting_servers(lasting, tmp_path_factory) as servers:
        yield servers.postgres, servers.kafka


def new_database(postgres: Postgres, template: str = "template1") -> str:
    """The DSN of a new database; it stays, since a test may leave the server stopped."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        create_database(admin, name, template)
    return psycopg.conninfo.make_conninfo(postgres.dsn, dbname=name)


def _template(postgres: Postgres) -> str:
    """The name of a new database that is migrated."""
    dsn = new_database(postgres)
    schema.migrate(load_settings(dsn=dsn))
    return str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])


@pytest.fixture
def own_servers(killable: tuple[Postgres, Kafka], lasting: Lasting) -> tuple[Postgres, Kafka, Outbox]:
    """Servers that a test may kill, and an outbox on them."""
    postgres, kafka = killable
    today = ("migrated on killable servers", datetime.now(UTC).date())
    dsn = new_database(postgres, lasting.once(today, lambda: nullcontext(_template(postgres))))
    with psycopg.connect(dsn) as connection:
        connection.execute(ADOPT)
    settings = load_settings(
        dsn=dsn,
        kafka=kafka.bootstrap,
        topic=f"{topic_prefix()}-{{aggregate_type}}-events",
    )
    outbox = Outbox(settings)
    for kind in business.KINDS:
        create_topic(outbox, 8, of=kind)
    return postgres, kafka, outbox


@pytest.fixture
def strict(lasting: Lasting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A broker that creates no topics itself and has access rules; what none speaks of is allowed."""
    settings = {
        "auto.create.topics.enable": "false",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
        "transaction.max.timeout.ms": "20000",
    }
    made: Kafka = lasting.once("strict", lambda: Kafka(tmp_path_factory.mktemp("strict"), settings))
    with awake(made):
        yield made
