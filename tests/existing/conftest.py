"""A textbook table for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from outbox_pipelines.local import Stack
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from tests.conftest import either, fresh_database, topic_prefix
from tests.existing import guides, textbook
from tests.existing.textbook import Table
from tests.registry import registry as registry
from tests.relay.conftest import killable as killable
from tests.relay.conftest import new_database
from tests.relay.topic import create_topic

FEW_GUIDES: Final = either(guides.E, *(guide for guide in guides.ALL if guide is not guides.E))
"""For a test of what all guides' tables have: `make test` runs it with what differs most from ours."""

Make = Callable[[str, str], Table]


@pytest.fixture
def make_table(stack: Stack, tmp_path: Path) -> Iterator[Make]:
    """Makes a table of statements and mapping in a fresh database."""
    with fresh_database(stack.dsn) as dsn:
        topic = f"{topic_prefix()}-{{aggregate_type}}-events"
        yield lambda ddl, mapping: textbook.make(dsn, stack.kafka, topic, ddl, mapping)


@pytest.fixture
def table(make_table: Make) -> Table:
    """A table of the shape with published_at."""
    return make_table(textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING)


@pytest.fixture
def own_table(killable: tuple[Postgres, Kafka], tmp_path: Path) -> tuple[Postgres, Kafka, Table]:
    """The same on servers that a test may kill."""
    postgres, kafka = killable
    topic = f"{topic_prefix()}-{{aggregate_type}}-events"
    table = textbook.make(
        *(new_database(postgres), kafka.bootstrap, topic),
        *(textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING),
    )
    create_topic(table.outbox, 8)
    return postgres, kafka, table
