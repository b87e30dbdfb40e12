"""A slot that is read for a while: after the end of its last reader, and free for the next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outbox_pipelines.database import slot_reader
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.relay.read.slot import stream
from outbox_pipelines.relay.read.slot.slot_setup import remove, set_up
from outbox_pipelines.relay.read.slot.stream import InUseError, borrowed
from outbox_pipelines.relay.start import start_at
from tests.conftest import Outbox, wait_until
from tests.relay.slot.readers import NAME, leaving, stuck
from tests.relay.slot.slots import make

_WAITS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'borrower' AND wait_event_type = 'Lock'"""
_ACTIVE = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"


@pytest.fixture
def slot(outbox: Outbox) -> Iterator[str]:
    name = make(outbox)
    yield name
    remove(outbox.settings, seconds=30, say=print)


def test_a_reader_leaves_the_slot_free(outbox: Outbox, slot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a connector that is started after our command, and finds its slot in use."""
    looked: list[str] = []
    with outbox.connect() as connection, stuck(outbox.settings.require_dsn()) as catalog:
        reader = slot_reader.reader

        def look(*given: Any, **named: Any) -> str | None:
            found = reader(*given, **named)
            looked.append(str(found))
            # Now the server's process continues, and notices that nothing reads.
            catalog.close()
            return found

        with borrowed(outbox.settings, connection, slot, slot, name="borrower", seconds=30):
            outbox.write("a")
            wait_until(lambda: connection.execute(_WAITS).fetchone() == (1,), what="a process that is stuck")
            monkeypatch.setattr(slot_reader, "reader", look)
        assert connection.execute(_ACTIVE, [slot]).fetchone() == (False,)
    assert "(borrower, role" in looked[0]


def test_a_reader_waits_for_the_last_one(outbox: Outbox, slot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a command that fails because the connector was stopped just before."""
    with (
        outbox.connect() as connection,
        leaving(outbox.settings, slot, slot, monkeypatch) as waited_for,
        borrowed(outbox.settings, connection, slot, slot, name="borrower", seconds=30) as (_, pid),
    ):
        assert slot_reader.reader(connection, slot, pid=pid) is not None
    assert f"({NAME}, role" in waited_for[0]


def test_a_reader_that_stays_is_named(outbox: Outbox, slot: str) -> None:
    """Guards against a wait without an end, and against an error that does not say what to stop."""
    with (
        outbox.connect() as connection,
        borrowed(outbox.settings, connection, slot, slot, name="borrower", seconds=30) as (_, pid),
        pytest.raises(InUseError, match=rf"^process {pid} \(borrower, role \w+(, from [\w.:]+)?\)$"),
        borrowed(outbox.settings, connection, slot, slot, name="second", seconds=0.1),
    ):
        pytest.fail("two readers")


@pytest.mark.extended
def test_commands_wait_for_a_reader_that_was_stopped(
    outbox: Outbox, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against commands that refuse, or fail, because the server still has a reader that has ended."""
    outbox.write("a")
    with leaving(outbox.settings, slot, slot, monkeypatch) as waited_for:
        start = start_at(outbox.settings, f"slot:{slot}")
    assert start is not None
    assert start.skipped == 0
    with leaving(outbox.settings, slot, slot, monkeypatch) as also:
        assert remove(outbox.settings, seconds=30, say=print)
    assert waited_for
    assert also
    assert set_up(outbox.settings, seconds=30, say=print) == slot


@pytest.mark.extended
def test_commands_name_a_reader_that_stays(
    outbox: Outbox, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an error that names nothing which can be stopped."""
    monkeypatch.setattr(slot_reader, "LEAVE_SECONDS", 0.1)
    start, limits = stream._start, []

    def starting(connection: Any, replication: Any, *more: Any) -> stream.Stream:
        limits.append(replication.execute("SHOW wal_sender_timeout").fetchone())
        return start(connection, replication, *more)

    monkeypatch.setattr(stream, "_start", starting)
    with outbox.connect() as connection:
        given = (outbox.settings, connection, slot, slot)
        with borrowed(*given, name="Debezium Streaming", seconds=30, is_idle=True) as (_, pid):
            # The server would end a session that reads nothing.
            assert limits == [("0",)]
            named = rf"process {pid} \(Debezium Streaming, role \w+.*\) still reads the slot {slot}: "
            with pytest.raises(SetupError, match=named + "stop the program"):
                start_at(outbox.settings, f"slot:{slot}")
            with pytest.raises(NotReadyError, match=named + "is it a relay"):
                remove(outbox.settings, seconds=0.1, say=print)


def test_a_slot_that_is_taken_while_it_is_dropped(
    outbox: Outbox, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the server's own words if a reader begins between the look and the drop."""
    await_end, calls = slot_reader.await_end, []
    with outbox.connect() as connection, outbox.connect() as other:
        late = borrowed(outbox.settings, other, slot, slot, name="late", seconds=30)

        def ended(*given: Any, **named: Any) -> str | None:
            calls.append(given)
            if len(calls) == 2:
                monkeypatch.undo()
                late.__exit__(None, None, None)
            found = await_end(*given, **named)
            if len(calls) == 1:
                late.__enter__()
            return found

        monkeypatch.setattr(slot_reader, "await_end", ended)
        assert slot_reader.drop(connection, slot, seconds=30) is None
        assert len(calls) == 2
        assert connection.execute(_ACTIVE, [slot]).fetchone() is None
