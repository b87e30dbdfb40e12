"""What the guide writes about `synchronous_commit = off`, on a server that is killed."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.database import schema
from outbox_pipelines.local import postgres
from outbox_pipelines.settings import load_settings
from outbox_pipelines.writer import emit

pytestmark = pytest.mark.slow


def test_an_event_that_was_seen_is_gone(tmp_path: Path) -> None:
    """Guards against a warning of what cannot happen, or a durability that the guide denies."""
    # The moment within which a crash loses commits, made long enough to hit it.
    with postgres.Postgres(tmp_path, {"wal_writer_delay": "10s"}) as server:
        schema.migrate(load_settings(dsn=server.dsn))
        with psycopg.connect(server.dsn) as durable:
            emit(durable, "order", "durable", "e", {})
        with psycopg.connect(server.dsn, options="-c synchronous_commit=off") as hasty:
            emit(hasty, "order", "hasty", "e", {})
        seen = _events(server.dsn)
        server.kill()
        server.start()
        assert (seen, _events(server.dsn)) == (["durable", "hasty"], ["durable"])


def _events(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute("SELECT aggregate_id FROM outbox ORDER BY seq")]
