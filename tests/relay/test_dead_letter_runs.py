"""The operator's command for dead letters: run for each, few at a time, whatever happens to the relay."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from outbox_pipelines.relay import service
from outbox_pipelines.relay.parking import notify
from outbox_pipelines.relay.parking.notify import DeadLetterRuns
from tests.conftest import Outbox, either, wait_until
from tests.relay import faults
from tests.relay.parked import parked_rows
from tests.relay.threads import quick, running


def _write(outbox: Outbox, events: int) -> None:
    """Events that no topic can be named for: each is a dead letter after its first attempt."""
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'no/topic', i::text, 'order.placed', '{}' FROM generate_series(1, %s) i",
            [events],
        )


def _due(outbox: Outbox) -> int:
    with outbox.connect() as connection:
        row = connection.execute("SELECT count(*) FROM outbox_parked WHERE command_due").fetchone()
    assert row is not None
    return int(row[0])


def _told(heard: Path) -> list[str]:
    return [json.loads(file.read_text())["id"] for file in heard.glob("*.json")]


def _ids(outbox: Outbox) -> list[str]:
    return sorted(row[1] for row in parked_rows(outbox))


def _says(heard: Path) -> str:
    """A command that leaves a file for each dead letter."""
    heard.mkdir()
    return f"cat > {heard}/$$ && mv {heard}/$$ {heard}/$$.json"


@pytest.mark.extended
def test_many_dead_letters_have_few_threads(outbox: Outbox, tmp_path: Path) -> None:
    """Guards against a thread for each of thousands of dead letters."""
    heard = tmp_path / "heard"
    _write(outbox, 100)
    most = 0

    def all_are_told() -> bool:
        nonlocal most
        most = max(most, sum(1 for t in threading.enumerate() if t.name == "outbox-dead-letter"))
        return len(_told(heard)) == 100

    with running(quick(outbox, max_attempts=1, dead_letter_command=_says(heard))):
        wait_until(all_are_told, pace=0.01, what="all to be told")
        wait_until(lambda: _due(outbox) == 0, what="all to be written down as run")
    assert 1 <= most <= notify._WORKERS
    assert sorted(_told(heard)) == _ids(outbox)


def test_the_command_gets_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a program that learns the passwords of the database and the cloud."""
    for name in ("OUTBOX_DSN", "OUTBOX_ALERTS", "PGPASSWORD", "PGPASSFILE", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"canary-{name}")
    monkeypatch.setenv("TZ", "Europe/Oslo")
    runs = DeadLetterRuns(f"env > {tmp_path}/seen", most=1)
    runs.submit(1, "{}")
    assert runs.wait(600)
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "seen").read_text().splitlines())
    assert "canary" not in str(seen)
    # What the shell adds automatically.
    names = {name for name in seen if not name.startswith("LC_")} - {"PWD", "OLDPWD", "SHLVL", "_"}
    assert names <= notify._INHERITED
    assert (seen["TZ"], seen["PATH"]) == ("Europe/Oslo", os.environ["PATH"])
    runs.close()


@pytest.mark.parametrize("ending", either("kill", "terminate"))
def test_what_was_not_run_is_run_later(outbox: Outbox, tmp_path: Path, ending: str) -> None:
    """Guards against alarms that are lost with the process that was to give them."""
    heard, gate = tmp_path / "heard", tmp_path / "gate"
    _write(outbox, 12)
    given = {
        "OUTBOX_MAX_ATTEMPTS": "1",
        "OUTBOX_LEASE_SECONDS": "1",
        "OUTBOX_DEAD_LETTER_COMMAND": f"touch {tmp_path}/begun; test -e {gate} || sleep 600; {_says(heard)}",
    }
    with faults.relay(outbox, **given) as relay:
        wait_until((tmp_path / "begun").exists, seconds=60, what="a command to begin")
        wait_until(lambda: _due(outbox) == 12, what="12 dead letters")
        getattr(relay, ending)()
        relay.wait(600)
    assert (_told(heard), _due(outbox)) == ([], 12)
    gate.touch()
    with faults.relay(outbox, **given):
        wait_until(lambda: _due(outbox) == 0, seconds=60, what="all commands to run")
    # A shell of the killed relay that comes to the gate only now is another run.
    assert sorted(set(_told(heard))) == _ids(outbox)


def test_the_input_is_complete_before_the_command_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a command with an empty input, because the relay was killed after it had begun."""
    start, seen = subprocess.Popen, list[bytes]()

    def starting(*given: Any, **named: Any) -> Any:
        seen.append(os.pread(named["stdin"].fileno(), 100_000, 0))
        return start(*given, **named)

    monkeypatch.setattr(subprocess, "Popen", starting)
    text = json.dumps({"error": "é" * 40_000}, ensure_ascii=False)
    runs = DeadLetterRuns(f"cat > {tmp_path}/seen", most=1)
    runs.submit(1, text)
    assert runs.wait(600)
    runs.close()
    assert [*seen, (tmp_path / "seen").read_bytes()] == [text.encode()] * 2


@pytest.mark.extended
def test_without_a_command_nothing_is_due(outbox: Outbox, tmp_path: Path) -> None:
    """Guards against a command that is run for a year's dead letters on the day it is set."""
    _write(outbox, 3)
    service.relay(quick(outbox, max_attempts=1), until_empty=True)
    assert _due(outbox) == 0
    heard = tmp_path / "heard"
    service.relay(quick(outbox, max_attempts=1, dead_letter_command=_says(heard)), until_empty=True)
    assert _told(heard) == []


def test_a_command_that_hangs_is_ended_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against four hanging commands that stop all others."""
    monkeypatch.setattr(notify, "_COMMAND_SECONDS", 0.2)
    runs = DeadLetterRuns("sleep 600 | sleep 600", most=10)
    for n in range(6):
        runs.submit(n, "{}")
    done: list[Any] = []

    def are_ended() -> bool:
        done.extend(runs.done())
        return len(done) == 6

    wait_until(are_ended, what="all to be ended")
    # Of equal lines the first, and a count each minute.
    assert caplog.text.count("took more than") == 1
    assert runs.close() == 0
