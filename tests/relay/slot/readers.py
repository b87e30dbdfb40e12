"""Readers of a slot that have ended, and which the server still has: for the moment after an end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

from outbox_pipelines.database import connect, slot_reader
from outbox_pipelines.relay.read.slot.stream import Stream
from outbox_pipelines.settings import Settings

NAME = "stopped connector"


@contextmanager
def leaving(
    settings: Settings, slot: str, publication: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """A session reads the slot until a session waits for its end; yields who was waited for."""
    waited_for: list[str] = []
    with closing(connect(settings, name=NAME, replication=True)) as session, monkeypatch.context() as patch:
        Stream(session, slot, publication)
        reader = slot_reader.reader

        def looked(*given: Any, **named: Any) -> str | None:
            found = reader(*given, **named)
            if found is not None:
                waited_for.append(found)
            session.close()
            return found

        patch.setattr(slot_reader, "reader", looked)
        yield waited_for


@contextmanager
def stuck(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """Every reader that begins now waits in the server at its first event, and does not notice its end.

    Until this connection is closed.
    """
    with psycopg.connect(dsn) as catalog:
        # What it reads before it knows whether a table is published.
        catalog.execute("LOCK TABLE pg_publication_rel IN ACCESS EXCLUSIVE MODE")
        yield catalog
