"""What the tests of histories share: servers for runs, and an outbox with the business tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Lasting, Outbox
from tests.history import business, verify
from tests.history.servers import Servers, lasting_servers


@pytest.fixture
def servers(lasting: Lasting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Servers that may be killed."""
    with lasting_servers(lasting, tmp_path_factory) as servers:
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
