"""The servers, databases and archives of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_pipelines.database import schema
from outbox_pipelines.local import postgres
from outbox_pipelines.settings import Settings, load_settings
from tests.days.archive import flights
from tests.schema.servers import Database, database, empty, server

__all__ = ["database", "empty", "server"]


@pytest.fixture
def settings(database: Database, tmp_path: Path) -> Settings:
    """Of a database, with an archive in a directory that is not there yet."""
    return database.settings.model_copy(update={"archive": str(tmp_path / "archive")})


@pytest.fixture(scope="session")
def flights_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of docs/queries.md; no test writes into it."""
    place = tmp_path_factory.mktemp("flights")
    with postgres.Postgres(place / "postgres") as server:
        settings = load_settings(dsn=server.dsn, archive=str(place / "archive"))
        schema.migrate(settings)
        flights.build(settings)
    return place / "archive"
