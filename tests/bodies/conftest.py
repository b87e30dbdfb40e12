"""The servers, databases and stores of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_pipelines.bodies import Bodies
from tests.days.archive import buckets
from tests.schema.servers import connection, database, empty, kept, server, shared, template

__all__ = ["connection", "database", "empty", "kept", "server", "shared", "template"]


@pytest.fixture(scope="session")
def served() -> Iterator[dict[str, str]]:
    with buckets.serving() as environment:
        yield environment


@pytest.fixture
def bucket(served: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that leads to a bucket, which is ours now."""
    for name, value in served.items():
        monkeypatch.setenv(name, value)
    return served


@pytest.fixture(params=["directory", "bucket"])
def bodies(request: pytest.FixtureRequest, tmp_path: Path) -> Bodies:
    """A store of which JSON above 100 bytes becomes an object."""
    if request.param == "bucket":
        request.getfixturevalue("bucket")
        return Bodies(f"s3://{buckets.BUCKET}/{tmp_path.name}", above_bytes=100)
    return Bodies(f"file://{tmp_path}", above_bytes=100)
