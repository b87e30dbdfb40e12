"""A key store in a database of its own for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from outbox_pipelines.local import Stack
from outbox_pipelines.settings import Settings, make_settings
from outbox_pipelines.subject_keys import SubjectKeys, erasures
from tests.conftest import Lasting, fresh_database

MASTER = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
OTHER = "eHl6MzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="


@contextmanager
def _template(stack: Stack) -> Iterator[str]:
    with fresh_database(stack.dsn) as dsn:
        erasures.migrate(make_settings(keys_dsn=dsn, master_key=MASTER))
        yield str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])


@pytest.fixture
def keys_dsn(stack: Stack, lasting: Lasting) -> Iterator[str]:
    """The database of a key store, made with `MASTER`."""
    template = lasting.once("keys", lambda: _template(stack))
    with fresh_database(stack.dsn, template) as dsn:
        yield dsn


@pytest.fixture
def settings(keys_dsn: str) -> Settings:
    return make_settings(keys_dsn=keys_dsn, master_key=MASTER)


@pytest.fixture
def keys(keys_dsn: str) -> SubjectKeys:
    return SubjectKeys(keys_dsn, master_key=MASTER)


@pytest.fixture
def forget(settings: Settings) -> Callable[[object], Any]:
    """Forgets a subject."""
    return lambda subject: erasures.forget(settings, str(subject), actor="test", reason="asked for")
