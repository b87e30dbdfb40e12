"""Tables with published rows, and their clean-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import psycopg
import pytest

from outbox_pipelines.core.secret import Secret
from outbox_pipelines.existing.cleaning.clean_up import Cleaned, clean
from outbox_pipelines.local import Stack
from outbox_pipelines.settings import Settings
from tests.conftest import fresh_database, topic_prefix
from tests.existing import textbook
from tests.existing.textbook import Table

MONTHS: Final = """
CREATE TABLE events (
    id uuid NOT NULL DEFAULT gen_random_uuid(), aggregate_type text NOT NULL DEFAULT 'order',
    aggregate_id text NOT NULL DEFAULT 'a', event_type text NOT NULL DEFAULT 'order.placed',
    payload jsonb NOT NULL DEFAULT '{}', created_at timestamptz NOT NULL, published_at timestamptz
) PARTITION BY RANGE (created_at);
CREATE TABLE events_01 PARTITION OF events FOR VALUES FROM ('2026-01-01Z') TO ('2026-02-01Z');
CREATE TABLE events_02 PARTITION OF events FOR VALUES FROM ('2026-02-01Z') TO ('2026-03-01Z');
CREATE TABLE events_03 PARTITION OF events FOR VALUES FROM ('2026-03-01Z') TO ('2126-03-01Z');
CREATE INDEX ON events (created_at) WHERE published_at IS NULL;
CREATE INDEX ON events (id)"""
MONTHS_MAPPING: Final = """
name = "public.events"
order = "created_at"

[columns]
published_at = "published_at"
"""
# Ten rows were published two hours ago, five a moment ago, five are pending, two are dead letters.
SOME: Final = """
INSERT INTO events (aggregate_type, aggregate_id, event_type, payload, published_at, retry_count)
SELECT 'order', 'a', 'order.placed', jsonb_build_object('n', n),
       CASE WHEN n <= 10 THEN now() - interval '2 hours' WHEN n <= 15 THEN now() END,
       CASE WHEN n > 20 THEN 5 ELSE 0 END
FROM generate_series(1, 22) n"""


@dataclass(frozen=True)
class Cleaning:
    """A table that is cleaned after an hour."""

    table: Table
    archive: Path

    @property
    def settings(self) -> Settings:
        return self.table.settings

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        return self.table.connect(autocommit=autocommit)

    def execute(self, statement: str, *given: Any) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            cursor = connection.execute(statement.encode(), given or None)
            return cursor.fetchall() if cursor.description else []

    def clean(self, **settings: Any) -> Cleaned:
        return clean(self.settings.model_copy(update=settings))

    def archived(self, what: str) -> list[tuple[Any, ...]]:
        """Of all files, which have different columns if months are dropped."""
        files = str(self.archive / "tables" / "*" / "*.parquet")
        query = f"SELECT {what} FROM read_parquet('{files}', union_by_name = true) ORDER BY 1"
        return duckdb.execute(query).fetchall()

    @contextmanager
    def role(self, right: str) -> Iterator[Secret]:
        """The DSN of a role that has only these rights."""
        name = "cleaner_" + self.execute("SELECT current_database()")[0][0]
        self.execute(f"CREATE ROLE {name}; GRANT {name} TO CURRENT_USER; GRANT {right} TO {name}")
        try:
            yield Secret(f"{self.settings.dsn.reveal()} options='-c role={name}'")
        finally:
            self.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")

    @property
    def environment(self) -> dict[str, str]:
        return self.table.environment | {
            "OUTBOX_CLEAN_AFTER_HOURS": "1",
            "OUTBOX_ARCHIVE": self.settings.archive,
        }


Make = Callable[..., Cleaning]


@pytest.fixture
def make(stack: Stack, tmp_path: Path) -> Iterator[Make]:
    with fresh_database(stack.dsn) as dsn:
        topic = f"{topic_prefix()}-{{aggregate_type}}-events"
        archive = tmp_path / "archive"

        def made(ddl: str, mapping: str, **settings: Any) -> Cleaning:
            table = textbook.make(dsn, stack.kafka, topic, ddl, mapping)
            given = {"clean_after_hours": 1.0, "archive": "none"} | settings
            return Cleaning(table.with_(**given), archive)

        yield made


@pytest.fixture(params=["none", "archived"])
def cleaning(make: Make, request: pytest.FixtureRequest, tmp_path: Path) -> Cleaning:
    """With rows of every kind, without and with an archive."""
    archive = "none" if request.param == "none" else str(tmp_path / "archive")
    made = make(textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING, archive=archive)
    made.execute(SOME)
    return made
