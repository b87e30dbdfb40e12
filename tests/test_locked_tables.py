"""Commands that read, while another session has locked a table: none waits without end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from outbox_pipelines.cli.main import READING, cli
from outbox_pipelines.core import table_locks
from tests.conftest import Outbox, patience, wait_until
from tests.existing import textbook

# What changes something, runs until it is stopped, or opens no session of this kind.
_OTHERS = """
adopt back, adopt drain, adopt finish, adopt prepare, adopt switch, alerts test, archive adopt,
archive day, archive expire, archive redact, archive register, archive restore, bodies adopt, bodies sweep,
catalog classes, catalog diff, catalog register, catalog schemas, cdc drop,
cdc setup, config check,
config schema, config show, consumer dead-letters discard, consumer
dead-letters replay, consumer drain, consumer migrate, consumer prune,
consumer receive, consumer run, cutover, dead-letters discard, dead-letters replay,
delayed cancel, delayed move, forget, init, keys generate, keys list, keys migrate, keys rewrap,
lint-writes,
local down, local run, local env, local up, migrate, partitions attach, partitions
close, partitions drop, partitions ensure, partitions purge, partitions reopen, quality day, relay,
replay cancel,
shards set,
table clean, table months
"""
_ARGUMENTS = {
    "archive history": ["order", "1"],
    "archive query": ["SELECT 1"],
    "archive verify": ["2026-01-01"],
    "dead-letters show": ["01a21924-ba13-760e-85c0-7786a622b10b"],
    "reconcile": ["2026-01-01"],
}


def _leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield " ".join(path)
        return
    for name, each in command.commands.items():
        yield from _leaves(each, (*path, name))


@contextmanager
def _locked(outbox: Outbox, *tables: str) -> Iterator[None]:
    with outbox.connect(autocommit=False) as other:
        for table in tables:
            other.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE".encode())
        yield


def test_each_command_is_known() -> None:
    """Guards against a new command that waits without end."""
    others = {name.strip() for name in _OTHERS.replace("\n", " ").split(",")}
    assert set(_leaves(cli)) == others | set(READING) - {"shards"}


@pytest.mark.parametrize("table", ["outbox", "outbox_shards"])
def test_status(outbox: Outbox, monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    """Guards against a status that shows nothing while a table is locked."""
    monkeypatch.setattr(table_locks, "LOCK_PATIENCE", 0.5)
    with _locked(outbox, table):
        began = time.monotonic()
        shown = outbox.outbox("status")
        assert time.monotonic() - began < patience(30)
        as_json = json.loads(outbox.outbox("status", "--json").stdout)
    assert shown.returncode == 2
    assert f"has locked {table}, in a transaction since" in shown.stderr
    assert "pg_terminate_backend(" in shown.stderr
    assert "dead_letters: 0\n" in shown.stdout
    assert not {"{", "["} & set(shown.stdout)
    assert as_json["dead_letters"]["dead_letters"] == 0
    assert ("shards" in as_json) == (table == "outbox")
    assert outbox.outbox("status").returncode == 0


@pytest.mark.extended
def test_status_of_an_existing_table(outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a script that gets no JSON while a table is locked."""
    monkeypatch.setattr(table_locks, "LOCK_PATIENCE", 0.5)
    given = outbox.settings
    shape = textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING
    table = textbook.make(given.dsn.reveal(), given.kafka, given.topic, *shape).outbox
    file = {"OUTBOX_TABLE": json.dumps(table.settings.table)}
    with _locked(table, "events"):
        shown = table.outbox("status", "--json", **file)
    assert shown.returncode == 2
    assert "has locked events, in a transaction since" in shown.stderr
    assert set(json.loads(shown.stdout)) == {"version", "error"}


def test_a_session_that_waits_for_the_table(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an ALTER TABLE behind a long transaction, behind which each reader waits."""
    monkeypatch.setattr(table_locks, "LOCK_PATIENCE", 0.5)
    with outbox.connect(autocommit=False) as reader, outbox.connect() as waiting:
        reader.execute("SELECT FROM outbox LIMIT 1")
        pid = waiting.info.backend_pid
        lock = "DO $$ BEGIN LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE; END $$"
        change = threading.Thread(target=waiting.execute, args=[lock])
        change.start()
        queued = "SELECT FROM pg_locks WHERE pid = %s AND NOT granted"
        with outbox.connect() as looking:
            wait_until(lambda: looking.execute(queued, [pid]).fetchone() is not None)
        shown = outbox.outbox("partitions", "list")
        reader.rollback()
        change.join(60)
    assert shown.returncode == 2
    assert f"session {pid} of role" in shown.stderr
    assert "waits for a lock on outbox" in shown.stderr


@pytest.mark.parametrize("path", [*READING, "migrate --check", "migrate --print"])
def test_each_command_ends(outbox: Outbox, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Guards against a reading command that waits for a lock without end."""
    monkeypatch.setattr(table_locks, "LOCK_PATIENCE", 0.2)
    with outbox.connect() as connection:
        rows = connection.execute(
            "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace "
            "AND c.relkind IN ('r', 'p') AND NOT c.relispartition"
        ).fetchall()
    with _locked(outbox, *(name for (name,) in rows)):
        began = time.monotonic()
        outbox.outbox(*path.split(), *_ARGUMENTS.get(path, []), OUTBOX_ARCHIVE="/tmp/none")
        assert time.monotonic() - began < patience(60)
