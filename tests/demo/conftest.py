"""An airline to test with: its tables next to a new outbox, and topics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.airline.airline import TABLES
from outbox_pipelines.database import connect
from outbox_pipelines.local import Stack
from outbox_pipelines.settings import Settings
from tests.conftest import Outbox, fresh_database


@pytest.fixture
def airline(outbox: Outbox) -> Settings:
    """The settings of an outbox with the airline's tables, all empty."""
    with connect(outbox.settings, name="test") as connection:
        connection.execute(TABLES)
    return outbox.settings


@pytest.fixture
def database(stack: Stack) -> Iterator[dict[str, str]]:
    """The environment of a demo that does not share its database."""
    with fresh_database(stack.dsn) as dsn:
        yield {"OUTBOX_DSN": dsn, "OUTBOX_KAFKA": stack.kafka}


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a short name: Dagster makes sockets below it, of at most 107 bytes."""
    return tmp_path_factory.mktemp("d")
