"""A database that answers on the connections it has, and on no new one: large rows are read without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.local import Stack
from outbox_pipelines.settings import Settings
from tests.conftest import Outbox, either, fresh_database, topic_prefix, wait_until
from tests.existing import textbook
from tests.history.proxy import Proxy
from tests.relay.sizes import WIDE, insert
from tests.relay.threads import running


class Stalling(Proxy):
    """A proxy that can accept new connections without passing anything on."""

    stalls = False

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        if not (self.stalls and arguments):
            super()._start(run, *arguments)


@pytest.fixture
def proxy(stack: Stack) -> Iterator[Stalling]:
    with psycopg.connect(stack.dsn) as connection:
        proxy = Stalling(connection.info.port)
    with proxy:
        yield proxy


def _through(outbox: Outbox, proxy: Proxy, **more: object) -> Settings:
    dsn = psycopg.conninfo.make_conninfo(outbox.settings.require_dsn(), host="127.0.0.1", port=proxy.port)
    return outbox.settings.model_copy(update={"dsn": type(outbox.settings.dsn)(dsn), **more})


def _rows(characters: int) -> dict[str, str]:
    return {"payload": f"to_jsonb(left(repeat(md5(i::text), {characters // 32 + 1}), {characters}))"}


# Each with more bytes in all than several batches of 200 kB have.
@pytest.mark.parametrize(
    ("events", "columns"),
    either((60, _rows(40_000)), (5_000, _rows(3_000)), (4, {"payload": WIDE})),
    ids=["of 40 kB", "of 3 kB", "of the largest size"],
)
def test_large_rows_are_read(outbox: Outbox, proxy: Stalling, events: int, columns: dict[str, str]) -> None:
    """Guards against a statement that is left half read, which psycopg ends on a connection of its own."""
    published = _published(outbox)
    with running(_through(outbox, proxy, batch_bytes=200_000)):
        outbox.write("first")
        wait_until(lambda: published() == 1, what="the first event")
        proxy.stalls = True
        with outbox.connect() as connection:
            connection.execute("ALTER TABLE outbox DISABLE TRIGGER USER")
            insert(connection, "large", events, **columns)
        wait_until(lambda: published() == 1 + events, seconds=30, what="the large events")


@pytest.mark.extended
def test_large_rows_of_a_marked_table_are_read(stack: Stack, tmp_path: Path, proxy: Stalling) -> None:
    """Guards against the same where rows are claimed."""
    shape = textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING
    with fresh_database(stack.dsn) as dsn:
        table = textbook.make(dsn, stack.kafka, f"{topic_prefix()}-events", *shape)
        with running(_through(table.outbox, proxy)):
            table.write(("a", {"n": 1}))
            wait_until(lambda: not table.pending(), what="the first event")
            proxy.stalls = True
            table.write(*((key, {"text": "x" * 5_000_000}) for key in "bcdef"))
            wait_until(lambda: not table.pending(), seconds=30, what="the large events")


def _published(outbox: Outbox) -> Callable[[], int]:
    """How many events are in no table any more: settled as published, or parked."""

    def published() -> Any:
        with outbox.connect() as connection:
            return connection.execute(
                "SELECT (SELECT count(*) FROM outbox_events WHERE status <> 'PENDING')"
            ).fetchone()[0]  # type: ignore[index]

    return published
