"""Servers that a test may kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_pipelines import schema
from outbox_pipelines.local.kafka import Kafka, running
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.settings import load_settings
from tests.conftest import Outbox


@pytest.fixture
def own_servers(tmp_path: Path) -> Iterator[tuple[Postgres, Kafka, Outbox]]:
    """Servers that a test may kill."""
    postgres, kafka = Postgres(tmp_path / "postgres"), Kafka(tmp_path / "kafka")
    try:
        postgres.start()
        kafka.start()
        settings = load_settings(dsn=postgres.dsn, kafka=kafka.bootstrap, topic="{aggregate_type}-events")
        schema.migrate(settings)
        yield postgres, kafka, Outbox(settings)
    finally:
        postgres.stop()
        kafka.stop()


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
