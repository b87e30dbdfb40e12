"""A fresh place for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Outbox
from tests.reconciliation.place import Place
from tests.relay.topic import create_topic


@pytest.fixture
def place(outbox: Outbox, tmp_path: Path) -> Place:
    create_topic(outbox, 3)
    return Place(outbox, tmp_path)
