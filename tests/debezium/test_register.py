"""`outbox debezium register --replace`: a configuration that does not run is taken back."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from outbox_pipelines.debezium import reading
from outbox_pipelines.debezium.names import slot_name
from outbox_pipelines.debezium.slot import make_slot
from outbox_pipelines.secret import Secret
from tests.conftest import Outbox, wait_until
from tests.relay.cdc.connect import PlayedConnect, played
from tests.relay.cdc.readers import leaving
from tests.relay.parked import numbers_by_key, write
from tests.relay.threads import quick
from tests.relay.topic import create_topic


def _register(
    outbox: Outbox, worker: PlayedConnect, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = ("debezium", "register", "--password", "", "--seconds", "20", *options)
    return outbox.outbox(*command, OUTBOX_CONNECT=worker.url, **environment)


def test_a_replacement_that_does_not_run(outbox: Outbox) -> None:
    """Guards against a connector that keeps a configuration with which nothing is published."""
    create_topic(outbox)
    with played(quick(outbox)) as worker:
        settings = quick(outbox, connect=Secret(worker.url))
        done = _register(outbox, worker)
        assert done.returncode == 0, done.stderr
        (connector,) = worker.connectors.values()
        before = connector.config
        done = _register(outbox, worker, "--replace", "--port", "1")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert "has failed on a: connection refused" in done.stderr
        assert done.stdout == f"connector {settings.name}: has its earlier configuration again\n"
        assert connector.config == before
        write(outbox, ("a", {"n": 0}))
        wait_until(lambda: len(outbox.messages()) == 1, what="the event")
        assert reading.read(settings).problems == []

        def refuses(method: str, what: str, body: Any) -> bool:
            return (method, what) == ("PUT", "config") and body["database.port"] != "1"

        worker.refuses = refuses
        done = _register(outbox, worker, "--replace", "--port", "1")
        assert done.returncode == 1
        assert f"connector {settings.name}: not restored (" in done.stdout
        assert "Run this command with the earlier options" in done.stdout
        worker.refuses = lambda *_: False
        done = _register(outbox, worker, "--replace")
        assert done.returncode == 0, done.stderr
        write(outbox, ("a", {"n": 1}))
        wait_until(lambda: len(outbox.messages()) == 2, what="the next event")
        assert numbers_by_key(outbox.messages()) == {"a": [0, 1]}
        done = outbox.outbox("debezium", "delete", "--yes", OUTBOX_CONNECT=worker.url)
        assert done.returncode == 0, done.stderr
        assert worker.connectors == {}


def test_a_slot_without_its_connector(outbox: Outbox) -> None:
    """Guards against a slot that keeps the log after a command that was killed, and that no command names."""
    with played(quick(outbox)) as worker, outbox.connect() as admin:
        slot = slot_name(outbox.settings, admin.info.dbname)
        make_slot(admin, slot)
        shown = outbox.outbox("debezium", "status", OUTBOX_CONNECT=worker.url)
        assert f"keeps its log for the slot {slot}: run `outbox debezium register`, or" in shown.stdout
        done = outbox.outbox("debezium", "delete", "--yes", OUTBOX_CONNECT=worker.url)
        assert done.stdout == f"slot {slot}: dropped\n"


def test_a_slot_whose_reader_was_just_stopped(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a connector that is not registered, or a slot that stays, after its reader has ended."""
    with played(quick(outbox)) as worker, outbox.connect() as admin:
        slot = slot_name(outbox.settings, admin.info.dbname)
        make_slot(admin, slot)
        with leaving(outbox.settings, slot, slot, monkeypatch) as waited_for:
            done = _register(outbox, worker)
        assert (done.returncode, bool(waited_for)) == (0, True), done.stderr
        other = f"{slot}_other"
        done = _register(outbox, worker, "--slot", other, OUTBOX_CONNECTOR="second")
        assert done.returncode == 0, done.stderr
        named = {"OUTBOX_CONNECT": worker.url, "OUTBOX_CONNECTOR": "second"}
        worker.connectors["second"].stop()
        with leaving(outbox.settings, other, slot, monkeypatch) as waited_for:
            done = outbox.outbox("debezium", "delete", "--yes", **named)
        assert (done.returncode, bool(waited_for)) == (0, True), done.stderr
