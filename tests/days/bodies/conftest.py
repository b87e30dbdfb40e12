"""The databases and stores of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.days.archive import buckets
from tests.days.bodies.stored import Stored
from tests.schema.servers import Database, database, server

__all__ = ["database", "server"]


@pytest.fixture(scope="session")
def served() -> Iterator[dict[str, str]]:
    with buckets.serving() as environment:
        yield environment


@pytest.fixture
def stored(database: Database, tmp_path: Path) -> Stored:
    """An outbox with days in the past, its archive, and its store in a directory, which it has adopted."""
    place = tmp_path / "bodies"
    place.mkdir()
    return Stored(database, str(place), tmp_path / "archive")


@pytest.fixture
def in_bucket(
    database: Database, tmp_path: Path, served: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Stored:
    """The same with its store in a bucket."""
    for name, value in served.items():
        monkeypatch.setenv(name, value)
    return Stored(database, f"s3://{buckets.BUCKET}/{tmp_path.name}", tmp_path / "archive")
