"""The installation of each release, restored."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outbox_pipelines.local import Stack
from outbox_pipelines.settings import load_settings
from tests.conftest import Outbox, fresh_database, session, topic_prefix
from tests.releases import dump
from tests.releases.installation import OPERATOR, WRITER


@pytest.fixture(params=dump.names())
def release(request: pytest.FixtureRequest) -> str:
    """Its name."""
    return str(request.param)


@contextmanager
def restored(release: str, stack: Stack, place: Path, server: str) -> Iterator[Outbox]:
    """A release's installation in a new database of a server, and its archive in a folder of `place`."""
    roles = {name: f"role_{uuid.uuid4().hex[:12]}" for name in (WRITER, OPERATOR)}
    for role in roles.values():
        session(server).execute(f"CREATE ROLE {role}".encode())
    with fresh_database(server) as dsn:
        dump.restore(release, dsn, roles, place / "archive")
        topic = f"{topic_prefix()}-{{aggregate_type}}-events"
        given = load_settings(dsn=dsn, kafka=stack.kafka, topic=topic, archive=str(place / "archive"))
        yield Outbox(given.model_copy(update={"partitions_ahead": 2}))
    session(server).execute(f"DROP ROLE {', '.join(roles.values())}".encode())


@pytest.fixture
def installed(release: str, stack: Stack, tmp_path: Path) -> Iterator[Outbox]:
    """A release's installation, restored, with its archive."""
    with restored(release, stack, tmp_path, stack.dsn) as outbox:
        yield outbox
