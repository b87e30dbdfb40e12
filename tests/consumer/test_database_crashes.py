"""The database ends without a checkpoint while a handler is at work.

What a transaction has not committed then leaves nothing, not even its number: another one gets it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import migrate
from outbox_pipelines.local import Stack, postgres
from outbox_pipelines.local.postgres import Postgres
from tests.conftest import topic_prefix, wait_until
from tests.consumer.place import Place, at_work, effect, running, uuid7

Connection = psycopg.Connection[Any]
# Nothing is written out in the background: what is not committed is certainly lost.
LAZY = {"wal_writer_delay": "10s", "bgwriter_lru_maxpages": 0}
_NUMBER = "SELECT CAST(pg_current_xact_id() AS text)"
_BECAME = "SELECT pg_xact_status(CAST(%s AS xid8))"


@pytest.fixture
def own(stack: Stack, tmp_path: Path) -> Iterator[tuple[Place, Postgres]]:
    """A place whose database may be killed."""
    with postgres.Postgres(tmp_path, LAZY) as server:
        with psycopg.connect(server.dsn) as connection:
            migrate(connection)
            connection.execute("CREATE TABLE effects (seq bigserial, event_id text, key text, n int)")
        place = Place(server.dsn, stack.kafka, f"{topic_prefix()}-order-events")
        yield replace(place, topic=place.beside("own").topic), server


class Handler:
    """Waits in its first call, after its work, for what happens in the meantime."""

    def __init__(self) -> None:
        self.number = ""
        """Of its first transaction."""
        self.is_over = threading.Event()

    def __call__(self, given: Any, connection: Connection) -> None:
        for event in given if isinstance(given, list) else [given]:
            effect(event, connection)
        if not self.is_over.is_set():
            [(self.number,)] = connection.execute(_NUMBER).fetchall()
            assert self.is_over.wait(600)
            connection.execute("SELECT 1")

    def meanwhile(self, place: Place, server: Postgres, others: int) -> None:
        """The database crashes, and so many other transactions are committed."""
        wait_until(lambda: self.number, what="a handler at work")
        server.kill()
        server.start()
        for _ in range(others):
            place.rows(_NUMBER)


@pytest.mark.parametrize(
    ("batch", "others"),
    [
        (None, 0),
        (10, 100),
        pytest.param(10, 0, marks=pytest.mark.extended),
        pytest.param(None, 100, marks=pytest.mark.extended),
    ],
)
def test_an_event_is_handled_whichever_transaction_has_its_number_now(
    own: tuple[Place, Postgres], batch: int | None, others: int
) -> None:
    """Guards against a dead letter for what another transaction has committed, and against a consumer that
    ends because the number is that of no transaction so far."""
    place, server = own
    place.send(uuid7(), uuid7(), keys=1)
    consumer = place.bare()
    handler = Handler()
    consumer.on("order.placed", batch=batch)(handler)
    with running(consumer) as run:
        handler.meanwhile(place, server, others)
        if others:
            assert place.value(_BECAME, handler.number) == "committed"
        handler.is_over.set()
        wait_until(lambda: place.effects() == 2, seconds=60, what="both effects")
        assert run.end().dead_letters == 0
    assert place.rows("SELECT n FROM effects ORDER BY seq") == [(0,), (1,)]
    assert "failed" not in place.inbox()


@pytest.mark.extended
def test_a_message_of_the_inbox_is_handled_too(own: tuple[Place, Postgres]) -> None:
    place, server = own
    place.send(uuid7())
    consumer = place.bare()
    handler = Handler()
    consumer.on("order.placed")(handler)
    with at_work(consumer, "receive"):
        wait_until(lambda: place.uncommitted() == 0, what="its offset")
    with at_work(consumer, "drain") as run:
        handler.meanwhile(place, server, 0)
        handler.is_over.set()
        wait_until(lambda: place.effects() == 1, seconds=60, what="its effect")
        assert run.end().dead_letters == 0
    assert place.inbox() == {"processed": 1}
