"""A primary that dies while its slot is read, and a standby that takes over, with the slot or without."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.local import Stack
from outbox_pipelines.relay.read.slot import slot_source
from outbox_pipelines.relay.read.slot.slot_cutover import read
from outbox_pipelines.relay.read.slot.slot_setup import set_up
from outbox_pipelines.settings import Settings
from outbox_pipelines.writer import emit
from tests.conftest import wait_until
from tests.relay.parked import numbers_by_key
from tests.relay.standby import Pair, replicated
from tests.relay.threads import running

_STANDBY_SLOT = "standby"
_COMMITTED_ON_BOTH = {
    "synchronous_standby_names": "*",
    # Nothing is delivered that the standby may not have.
    "synchronized_standby_slots": _STANDBY_SLOT,
}


@contextmanager
def _writing(settings: Settings) -> Iterator[list[int]]:
    """A writer that knows which of its events are committed, whatever happens to the server."""
    stop = threading.Event()
    committed: list[int] = []

    def run() -> None:
        n = 0
        while not stop.is_set():
            try:
                with psycopg.connect(settings.require_dsn(), target_session_attrs="primary") as connection:
                    while not stop.wait(0.002):
                        emit(connection, "order", "a", "order.placed", {"n": n})
                        connection.commit()
                        committed.append(n)
                        n += 1
            except psycopg.OperationalError:
                # Whether the last one is committed is not known.
                n += 1
                stop.wait(0.05)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield committed
    finally:
        stop.set()
        thread.join(600)


def _is_synchronized(pair: Pair, standby: psycopg.Connection[tuple[object, ...]]) -> bool:
    # The slot moves on where the server writes down what runs, which it does every 15 s.
    with psycopg.connect(pair.primary.dsn, autocommit=True) as primary:
        primary.execute("SELECT pg_log_standby_snapshot()")
    query = "SELECT synced AND NOT temporary FROM pg_replication_slots WHERE failover"
    return standby.execute(query).fetchone() == (True,)


# Each mode with one of both, since they do not depend on each other.
@pytest.mark.extended
@pytest.mark.parametrize(
    ("delivery", "has_slot"),
    [("at_least_once", True), pytest.param("exactly_once", False, marks=pytest.mark.extended)],
)
def test_a_standby_takes_over(tmp_path: Path, stack: Stack, delivery: str, has_slot: bool) -> None:
    """Guards against events that a failover loses, repeats without a bound, or waits for the slot with."""
    standby_settings = {"primary_slot_name": _STANDBY_SLOT, "hot_standby_feedback": "on"}
    if has_slot:
        standby_settings["sync_replication_slots"] = "on"
    with replicated(
        tmp_path, stack, primary_settings=_COMMITTED_ON_BOTH, standby_settings=standby_settings
    ) as pair:
        settings = pair.outbox.settings.model_copy(update={"delivery": delivery})
        slot = set_up(pair.straight(pair.primary), seconds=30, say=lambda line: None)
        with running(settings), _writing(settings) as committed:
            wait_until(lambda: len(committed) > 50, what="events")
            wait_until(lambda: read(pair.straight(pair.primary)).reader is not None, what="the slot read")
            if has_slot:
                with psycopg.connect(pair.standby.dsn, autocommit=True) as standby:
                    wait_until(
                        lambda: _is_synchronized(pair, standby), seconds=60, what="the slot on the standby"
                    )
            before = len(committed)
            wait_until(lambda: len(committed) > before + 50, what="more events")
            pair.primary.kill()
            pair.promote()
            before = len(committed)
            wait_until(lambda: len(committed) > before + 50, seconds=60, what="events after the failover")
        with running(settings):
            wait_until(
                lambda: committed[-1] in numbers_by_key(pair.outbox.messages())["a"],
                seconds=60,
                what="the last event in Kafka",
            )
            # Events reach Kafka between snapshots too, before the relay reads the slot of the new primary.
            wait_until(lambda: bool(read(settings).problems) != has_slot, what="the state of the slot")
            state = read(settings)
        assert state.slot == slot
        assert state.exists == has_slot
        _judge(pair, committed, delivery)


def _judge(pair: Pair, committed: list[int], delivery: str) -> None:
    found = numbers_by_key(pair.outbox.messages())["a"]
    with psycopg.connect(pair.standby.dsn) as connection:
        rows = [n for (n,) in connection.execute("SELECT (payload ->> 'n')::int FROM outbox ORDER BY seq")]
    assert set(committed) <= set(rows) == set(found)
    first = list(dict.fromkeys(found))
    assert first == sorted(first)
    repeated = sum(count - 1 for count in Counter(found).values())
    # At least once: what was in flight when the session ended.
    assert repeated == 0 if delivery == "exactly_once" else repeated <= 50


def test_what_the_standby_never_had_is_not_published(
    tmp_path: Path, stack: Stack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an event whose writer never got its commit: the slot has it before the standby (G1)."""
    monkeypatch.setattr(slot_source, "_REPORT_SECONDS", 0.0)
    with replicated(tmp_path, stack, primary_settings={"synchronous_standby_names": "*"}) as pair:
        set_up(pair.straight(pair.primary), seconds=30, say=lambda line: None)
        with running(pair.outbox.settings):
            wait_until(lambda: read(pair.straight(pair.primary)).reader is not None, what="the slot read")
            with psycopg.connect(pair.primary.dsn) as writer, ThreadPoolExecutor() as threads:
                _write(writer, 1)
                wait_until(lambda: _keys(pair) == ["1"], what="the first event")
                pair.standby.kill()
                commit = threads.submit(_write, writer, 2)
                try:
                    text = "waits for a synchronous standby"
                    wait_until(lambda: text in caplog.text, seconds=20, what="the second event")
                    assert not commit.done()
                finally:
                    # As when the machine dies. A server that dies alone ends the session's wait, which shows
                    # its commit to all others until they notice the same.
                    os.kill(writer.info.backend_pid, signal.SIGKILL)
                    pair.primary.kill()
                assert isinstance(commit.exception(60), psycopg.OperationalError)
            pair.standby.start()
            pair.promote()
            with psycopg.connect(pair.standby.dsn) as writer:
                _write(writer, 3)
                rows = writer.execute("SELECT aggregate_id FROM outbox ORDER BY seq").fetchall()
            wait_until(lambda: "3" in _keys(pair), what="an event of the new primary")
        assert rows == [("1",), ("3",)]
        assert set(_keys(pair)) == {"1", "3"}


def _write(connection: psycopg.Connection[tuple[object, ...]], n: int) -> None:
    emit(connection, "order", n, "order.placed", {"n": n})
    connection.commit()


def _keys(pair: Pair) -> list[str | None]:
    return [message.key for message in pair.outbox.messages()]
