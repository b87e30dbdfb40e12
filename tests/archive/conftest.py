"""The servers, databases and archives of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_pipelines.settings import Settings
from tests.schema.servers import Database, database, empty, server, template

__all__ = ["database", "empty", "server", "template"]


@pytest.fixture
def settings(database: Database, tmp_path: Path) -> Settings:
    """Of a database, with an archive in a directory that is not there yet."""
    return database.settings.model_copy(update={"archive": str(tmp_path / "archive")})
