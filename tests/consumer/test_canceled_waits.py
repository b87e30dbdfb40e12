"""A commit whose wait for a synchronous standby is canceled: PostgreSQL reports success, with a warning."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.consumer import limits, migrate
from outbox_pipelines.local import Stack, postgres
from tests.conftest import topic_prefix, wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, at_work, running, uuid7

_WAITING = """
SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name LIKE 'consumer %'"""


class Own:
    """A place whose database can have a synchronous standby that does not answer."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def stand_still(self, *, is_still: bool = True) -> None:
        """No commit ends until it does not; returns when the server has the setting."""
        with psycopg.connect(self.place.dsn, autocommit=True) as admin:
            # Of the session that changes it: its own statements do not wait.
            admin.execute("SET synchronous_commit = local")
            admin.execute(
                f"ALTER SYSTEM SET synchronous_standby_names = '{'missing' if is_still else ''}'".encode()
            )
            admin.execute("SELECT pg_reload_conf()")
        if not is_still:
            return
        with psycopg.connect(self.place.dsn, autocommit=True, application_name="probe") as probe:
            ends = threading.Event()

            def commit() -> None:
                # The server takes a changed setting over a moment after the reload.
                while not ends.is_set():
                    try:
                        probe.execute("SELECT pg_logical_emit_message(true, '', '')")
                    except psycopg.Error:
                        return

            thread = threading.Thread(target=commit)
            thread.start()
            query = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            wait_until(lambda: self.place.rows(query), what="a commit that waits")
            ends.set()
            self.place.rows(f"SELECT pg_cancel_backend(pid) FROM ({query}) AS waiting")
            thread.join(60)
            assert not thread.is_alive()

    def cancels(self) -> bool:
        """End the wait of the consumer's commit, if there is one."""
        self.place.rows(f"SELECT pg_cancel_backend(pid) FROM ({_WAITING}) AS waiting")
        return True

    def cancel(self, how: str = "pg_cancel_backend") -> None:
        """End the wait of the consumer's commit."""
        wait_until(lambda: self.place.rows(_WAITING), what="a commit that waits")
        self.place.rows(f"SELECT {how}(pid) FROM ({_WAITING}) AS waiting")


@pytest.fixture
def own(stack: Stack, tmp_path: Path) -> Iterator[Own]:
    with postgres.Postgres(tmp_path) as server:
        with psycopg.connect(server.dsn) as connection:
            migrate(connection)
            connection.execute("CREATE TABLE effects (seq bigserial, event_id text, key text, n int)")
        dsn = psycopg.conninfo.make_conninfo(server.dsn, application_name="consumer billing")
        place = Place(dsn, stack.kafka, f"{topic_prefix()}-order-events")
        yield Own(replace(place, topic=place.beside("own").topic))


@pytest.mark.parametrize(
    ("part", "how"),
    [
        ("run", "pg_cancel_backend"),
        pytest.param("receive", "pg_terminate_backend", marks=pytest.mark.extended),
        pytest.param("run", "pg_terminate_backend", marks=pytest.mark.extended),
        pytest.param("receive", "pg_cancel_backend", marks=pytest.mark.extended),
    ],
)
def test_the_offset_waits_for_the_standby(own: Own, part: str, how: str) -> None:
    """Guards against an effect that a failover takes back while the offset stays: the event is skipped."""
    place = own.place
    place.send(uuid7())
    with at_work(place.consumer(), part) as run:
        wait_until(lambda: place.uncommitted() == 0, what="the first offset")
        own.stand_still()
        place.send(uuid7())
        own.cancel(how)
        # The next wait is that for what was committed. It can be canceled as well.
        own.cancel()
        wait_until(lambda: place.rows(_WAITING), what="another commit that waits")
        assert place.uncommitted() == 1
        own.stand_still(is_still=False)
        wait_until(lambda: place.uncommitted() == 0, what="the second offset")
        counts = run.end()
    assert counts.handled + counts.received + counts.duplicates >= 2
    assert place.value("SELECT count(DISTINCT event_id) FROM effects") == (2 if part == "run" else 0)


@pytest.mark.extended
@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
def test_the_same_with_each_driver(own: Own, driver: str) -> None:
    place = own.place

    async def scenario() -> None:
        place.send(uuid7())
        async with test_async.running(test_async.consumer(place, driver).run):
            await test_async.until(lambda: place.uncommitted() == 0, "the first offset")
            await asyncio.to_thread(_next, own)
            await test_async.until(lambda: place.uncommitted() == 0, "the second offset")

    asyncio.run(scenario())


def _next(own: Own) -> None:
    place = own.place
    # asyncpg names its sessions otherwise.
    waiting = _WAITING.partition(" AND")[0]
    own.stand_still()
    place.send(uuid7())
    for _ in range(2):
        wait_until(lambda: place.rows(waiting), what="a commit that waits")
        place.rows(f"SELECT pg_cancel_backend(pid) FROM ({waiting}) AS waiting")
    wait_until(lambda: place.rows(waiting), what="another commit that waits")
    assert place.uncommitted() == 1
    own.stand_still(is_still=False)


@pytest.mark.extended
def test_a_start_secures_what_another_process_has_committed(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the same for a consumer that finds the record of one that has ended."""
    monkeypatch.setattr(limits, "PATIENCE", 1.0)
    place = own.place
    place.send(uuid7())
    with running(place.consumer()) as run:
        wait_until(lambda: place.uncommitted() == 0, what="the first offset")
        own.stand_still()
        place.send(uuid7())
        own.cancel()
        wait_until(lambda: place.effects() == 2, what="its effect")
        run.end()
    assert place.uncommitted() == 1
    with running(place.consumer()) as run:
        # The commits of its assignment.
        wait_until(lambda: own.cancels() and run.consumer.counts.duplicates, pace=0.05, what="the event")
        own.cancel()
        wait_until(lambda: place.rows(_WAITING), what="another commit that waits")
        assert place.uncommitted() == 1
        own.stand_still(is_still=False)
        wait_until(lambda: place.uncommitted() == 0, what="the second offset")
        run.end()
    assert place.effects() == 2
