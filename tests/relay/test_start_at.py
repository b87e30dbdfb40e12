"""First start of a relay next to another one: skip what is already published, publish everything later."""

from __future__ import annotations

import psycopg
import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import relay_sql, service
from outbox_pipelines.relay.start import start_at
from outbox_pipelines.writer import emit
from tests.conftest import Outbox


def _keys(outbox: Outbox) -> list[str]:
    service.relay(outbox.settings, until_empty=True)
    return sorted(message.key for message in outbox.messages())


def _snapshot(outbox: Outbox) -> str:
    with outbox.connect() as connection:
        row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
    assert row is not None
    return str(row[0])


def test_now(outbox: Outbox) -> None:
    """Guards against all rows published again next to Debezium, and an event lost that commits while the
    relay starts."""
    outbox.write("old-1", "old-2")
    with outbox.connect(autocommit=False) as slow:
        emit(slow, "order", "slow", "order.placed", {})
        outbox.write("old-3")
        start = start_at(outbox.settings, "now")
        assert start is not None
        assert start.skipped == 3
    outbox.write("new")
    assert _keys(outbox) == ["new", "slow"]


def test_a_snapshot(outbox: Outbox) -> None:
    """Guards against a handover that loses what committed between the snapshot and the start."""
    outbox.write("old")
    with outbox.connect(autocommit=False) as slow:
        emit(slow, "order", "slow", "order.placed", {})
        snapshot = _snapshot(outbox)
        outbox.write("new")
    start = start_at(outbox.settings, snapshot)
    assert start is not None
    assert (start.snapshot, start.skipped) == (snapshot, 1)
    assert _keys(outbox) == ["new", "slow"]


def test_a_snapshot_of_this_moment(outbox: Outbox) -> None:
    """Guards against a snapshot that counts as unknown because nothing, or a slow transaction, came since."""
    with outbox.connect() as connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        ((now,),) = connection.execute("SELECT pg_current_snapshot()::text").fetchall()
        assert connection.execute(relay_sql.IS_KNOWN, {"at": now}).fetchall() == [(True,)]
    with outbox.connect(autocommit=False) as slow:
        emit(slow, "order", "slow", "order.placed", {})
        outbox.write("old")
        assert start_at(outbox.settings, _snapshot(outbox)) is not None
    assert _keys(outbox) == ["slow"]


def test_a_time(outbox: Outbox) -> None:
    """Guards against newer events that are lost; old ones published because of a slow session elsewhere."""
    with psycopg.connect(outbox.settings.dsn) as elsewhere:
        elsewhere.execute("SELECT pg_current_xact_id()")
        _since_a_time(outbox)


def _since_a_time(outbox: Outbox) -> None:
    outbox.write("old")
    with outbox.connect(autocommit=False) as slow, outbox.connect(autocommit=False) as later:
        emit(slow, "order", "slow", "order.placed", {})
        outbox.write("first")
        emit(later, "order", "later", "order.placed", {})
        outbox.write("second")
        with outbox.connect() as connection:
            row = connection.execute("SELECT created_at FROM outbox WHERE aggregate_id = 'first'").fetchone()
        assert row is not None
        start_at(outbox.settings, row[0].isoformat())
    assert _keys(outbox) == ["first", "later", "second", "slow"]


def test_a_time_after_all_events(outbox: Outbox) -> None:
    """Guards against a start in the future that loses a transaction which is open now, or repeats others."""
    outbox.write("old")
    with outbox.connect(autocommit=False) as slow:
        emit(slow, "order", "slow", "order.placed", {})
        outbox.write("younger")
        start_at(outbox.settings, "2100-01-01T00:00:00Z")
    assert _keys(outbox) == ["slow"]


def test_the_beginning(outbox: Outbox) -> None:
    """Guards against a default that skips something when it is given explicitly."""
    outbox.write("old")
    assert start_at(outbox.settings, "beginning") is None
    assert _keys(outbox) == ["old"]


def test_refused_once_it_was_relayed(outbox: Outbox) -> None:
    """Guards against a unit file with --start-at now, which loses the backlog at every restart."""
    outbox.write("old")
    first = outbox.outbox("relay", "--start-at", "now", "--until-empty")
    assert first.returncode == 0
    assert "1 event before it counted as published" in first.stderr
    outbox.write("waiting")
    again = outbox.outbox("relay", "--start-at", "now", "--until-empty")
    assert again.returncode == 2
    assert "has been relayed already" in again.stderr
    assert _keys(outbox) == ["waiting"]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("yesterday", "none of: now, beginning"),
        ("2026-11-20T06:00:00", "no time zone"),
        ("7:5:", "not a snapshot of this database"),
        ("0:0:", "not a snapshot of this database"),
        ("900000000000:900000000001:", "not a snapshot of this database"),
        ("3:900000000001:", "not a snapshot of this database"),
        ("99999999999999999999:99999999999999999999:", "not a snapshot of this database"),
    ],
)
def test_other_starts(outbox: Outbox, start: str, said: str) -> None:
    """Guards against a typing error that skips the backlog, or all events for a long time."""
    outbox.write("old")
    with pytest.raises(SetupError, match=said):
        start_at(outbox.settings, start)
    assert _keys(outbox) == ["old"]


def test_a_table_with_marks(outbox: Outbox) -> None:
    """Guards against an option that is silently without effect."""
    settings = outbox.settings.model_copy(update={"table": {"name": "events"}})
    with pytest.raises(SetupError, match="OUTBOX_TABLE"):
        start_at(settings, "now")
