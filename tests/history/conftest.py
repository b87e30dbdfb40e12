"""What the tests of histories share: servers for runs, and an outbox with the business tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Outbox
from tests.history import business, verify
from tests.history.servers import Servers, own_servers


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Servers that may be killed."""
    with own_servers(tmp_path_factory.mktemp("servers")) as servers:
        yield servers


@pytest.fixture
def shop(outbox: Outbox) -> Outbox:
    """An outbox with the business tables."""
    with outbox.connect() as connection:
        business.prepare(connection)
    return outbox


@pytest.fixture(scope="session")
def seed() -> int:
    """One for all, so that the halves of the faults are halves of the same."""
    return verify.seed()
