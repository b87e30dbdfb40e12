"""A database with an archive, and another one for the Iceberg catalog."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from sqlalchemy import URL

from outbox_pipelines.core.secret import Secret
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.settings import Settings
from tests.schema.servers import Database, database, empty, fresh, server

__all__ = ["database", "empty", "server"]


@pytest.fixture
def lake(server: Postgres) -> Iterator[str]:
    """The database of a catalog, without tables."""
    with fresh(server) as found:
        yield found.dsn


@pytest.fixture
def settings(database: Database, lake: str, tmp_path: Path) -> Settings:
    """Of an outbox with an archive and a catalog that do not exist yet."""
    place = str(tmp_path / "an archive")
    return database.settings.model_copy(update={"archive": place, "iceberg": Secret(lake)})


def engine(lake: str, **options: str) -> Catalog:
    """Another program that uses the catalog, with pyiceberg's own access to files."""
    given = {name: str(value) for name, value in psycopg.conninfo.conninfo_to_dict(lake).items()}
    address = URL.create("postgresql+psycopg", query=given).render_as_string(hide_password=False)
    return load_catalog("outbox", type="sql", uri=address, **options)


def table(lake: str) -> Table:
    return engine(lake).load_table("outbox.events")
