"""Delayed events for an operator: `outbox delayed list`, `cancel` and `move`."""

from __future__ import annotations

import json
from functools import partial
from uuid import uuid4

import psycopg
import pytest

from outbox_pipelines.errors import LockedError, SetupError
from outbox_pipelines.relay.parking import delayed_events
from tests.conftest import Outbox, may_log_in
from tests.relay.delayed import delay


def test_the_commands(outbox: Outbox) -> None:
    """Guards against an operator who cannot see, cancel or move delayed events."""
    assert outbox.outbox("delayed", "list").stdout == "none\n"
    delay(outbox, "1", later_events_wait=True)
    delay(outbox, "2", is_due=False)
    outbox.write("1")
    shown = outbox.outbox("delayed", "list", "--limit", "2").stdout.splitlines()
    assert shown[0].endswith("  e  order 1  later events wait")
    assert shown[2] == "… and 1 more (--limit)"
    found = json.loads(outbox.outbox("delayed", "list", "--overdue", "--json").stdout)
    assert found["total"] == 2
    assert [row["last_error"] for row in found["rows"]] == [None, None]
    with outbox.connect() as connection:
        connection.execute("ALTER TABLE outbox ADD CONSTRAINT not_this CHECK (event_type <> 'e')")
        with outbox.connect(autocommit=False) as other:
            # Not the reason why events are left.
            other.execute("SELECT FROM outbox_delayed WHERE due > clock_timestamp() FOR UPDATE")
            moved = outbox.outbox("delayed", "move")
        assert (moved.returncode, moved.stdout) == (1, "0 events moved, 2 left: see `outbox delayed list`\n")
        listed = outbox.outbox("delayed", "list").stdout
        assert "not_this" in listed
        assert listed.endswith("  e  order 2\n")
        connection.execute("ALTER TABLE outbox DROP CONSTRAINT not_this")
    moved = outbox.outbox("delayed", "move")
    assert (moved.returncode, moved.stdout) == (0, "2 events moved\n")
    [row] = json.loads(outbox.outbox("delayed", "list", "--json").stdout)["rows"]
    assert outbox.outbox("delayed", "cancel", row["id"]).returncode == 2
    for status, said in ((0, "1 delayed event canceled\n"), (1, "0 delayed events canceled\n")):
        canceled = outbox.outbox("delayed", "cancel", row["id"], row["id"], "--reason", "not wanted")
        assert (canceled.returncode, canceled.stdout) == (status, said)
    with outbox.connect() as connection:
        [(reason, about)] = connection.execute(
            "SELECT reason, filter -> 0 ->> 'id' FROM outbox_audit WHERE action = 'cancel'"
        ).fetchall()
    assert (reason, about) == ("not wanted", row["id"])


@pytest.mark.parametrize("is_prepared", [False, True])
def test_who_holds_an_event_is_named(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, is_prepared: bool
) -> None:
    """Guards against a command that waits without a word, and an event that is left without a reason."""
    monkeypatch.setattr(delayed_events, "LOCK_PATIENCE", 0.2)
    delay(outbox, "1")
    gid = f"holder-{outbox.topic()}"
    with outbox.connect(autocommit=False) as holder, outbox.connect() as connection:
        [(id,)] = holder.execute("SELECT id FROM outbox_delayed").fetchall()
        holder.execute("DELETE FROM outbox_delayed")
        who = f"session {holder.info.backend_pid} of role"
        if is_prepared:
            holder.execute(f"PREPARE TRANSACTION '{gid}'".encode())
            who = f"prepared transaction {gid}: COMMIT PREPARED or"
        try:
            assert f"  in {'the ' if is_prepared else 'a transaction of '}{who}" in (
                outbox.outbox("delayed", "list", "--overdue").stdout
            )
            moved = outbox.outbox("delayed", "move")
            assert moved.returncode == 1
            assert f"0 events moved, 1 left: see `outbox delayed list`; {id} is in" in moved.stdout
            assert who in moved.stdout
            with pytest.raises(LockedError, match=rf"waited 0.2 s: {id} is in .*{who}.*Nothing was"):
                delayed_events.cancel(outbox.settings, [id], reason="why", actor="me")
        finally:
            if is_prepared:
                connection.execute(f"ROLLBACK PREPARED '{gid}'".encode())
            else:
                holder.rollback()


def test_a_move_ends_while_events_are_left(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a command that tries what cannot be moved without end, or ends too early."""
    monkeypatch.setattr(delayed_events, "_MOST", 1)
    delay(outbox, "1", "2")
    with outbox.connect() as connection:
        connection.execute("ALTER TABLE outbox ADD CONSTRAINT not_this CHECK (event_type <> 'e')")
        assert delayed_events.move(outbox.settings) == (0, 2)
        connection.execute("ALTER TABLE outbox DROP CONSTRAINT not_this")
    assert delayed_events.move(outbox.settings) == (2, 0)


def test_a_locked_table_and_a_role_without_the_right(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback of psycopg, and a session named with what its role may not see."""
    monkeypatch.setattr(delayed_events, "LOCK_PATIENCE", 0.2)
    delay(outbox, "1")
    role = f"r_{uuid4().hex}"
    settings = outbox.settings.model_copy(
        update={"dsn": psycopg.conninfo.make_conninfo(outbox.settings.dsn, user=role)}
    )
    with outbox.connect(autocommit=False) as holder, outbox.connect() as connection:
        [(id,)] = holder.execute("SELECT id FROM outbox_delayed").fetchall()
        cancel = partial(delayed_events.cancel, ids=[id], reason="why", actor="me")
        holder.execute("LOCK TABLE outbox_delayed IN SHARE MODE")
        with pytest.raises(LockedError, match=r"waited 0.2 s: canceling .* lock timeout. Nothing was"):
            cancel(outbox.settings)
        connection.execute(
            f"CREATE ROLE {role} {may_log_in(outbox.settings.dsn)};"
            f"SELECT outbox_grant_relay('{role}')".encode()
        )
        try:
            holder.execute("SET application_name = ''; DELETE FROM outbox_delayed")
            [row] = delayed_events.find(settings, overdue=True, limit=1).rows
            assert "(unnamed): wait for its end" in (row.held_by or "")
            holder.rollback()
            with pytest.raises(SetupError, match=r"permission denied .* run it as an operator"):
                cancel(settings)
        finally:
            holder.rollback()
            connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())
