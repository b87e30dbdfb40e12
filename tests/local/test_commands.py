"""`outbox local` as a user types it: exit codes, signals, what stays and what is removed."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.local import lease, postgres, stack, stack_client
from outbox_pipelines.settings import Settings
from tests.conftest import patience
from tests.local.waiting import eventually

CLI = "from outbox_pipelines.cli.local import local; local()"


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", CLI, *arguments]


def _local(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(*arguments), capture_output=True, text=True, timeout=600)


def test_run_gives_both_servers_and_leaves_nothing(settings: Settings) -> None:
    done = _local("run", "--", "sh", "-c", "echo $OUTBOX_DSN $OUTBOX_KAFKA; exit 7")
    assert done.returncode == 7
    dsn, bootstrap = done.stdout.split()
    assert dsn.startswith("postgresql://")
    assert bootstrap.startswith("127.0.0.1:")
    assert done.stderr == ""
    assert not lease.is_held(stack_client.home_of(settings).lock)
    assert not postgres.answers(dsn)


def test_run_passes_on_how_the_command_ended(database_only: Settings) -> None:
    assert _local("run", "sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL


def test_run_passes_on_signals(database_only: Settings) -> None:
    script = "trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done"
    with subprocess.Popen(
        _command("run", "--", "sh", "-c", script), stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.terminate()
        assert running.wait(patience(30)) == 5
    assert not lease.is_held(stack_client.home_of(database_only).lock)


def test_ctrl_c_reaches_the_command_once_and_nothing_stays(database_only: Settings, tmp_path: Path) -> None:
    log = tmp_path / "signals"
    script = f"trap 'echo int >> {log}' INT; echo ready; while [ ! -s {log} ]; do sleep 0.01; done; exit 6"
    pid, terminal = pty.fork()
    if pid == 0:
        command = _command("run", "--", "sh", "-c", script)
        os.execv(command[0], command)
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 100)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 6
    assert log.read_text() == "int\n"
    assert not lease.is_held(stack_client.home_of(database_only).lock)


def test_an_end_while_the_servers_start_leaves_nothing(settings: Settings) -> None:
    home = stack_client.home_of(settings)
    with subprocess.Popen(_command("run", "--", "true")) as running:
        eventually(lambda: home.path.exists() and lease.is_held(home.lock))
        running.terminate()
        assert running.wait(patience(30)) == 128 + signal.SIGTERM
    assert not lease.is_held(home.lock)


def test_run_leaves_the_servers_to_others(database_only: Settings) -> None:
    with stack(database_only) as servers:
        assert _local("run", "--", "true").returncode == 0
        assert postgres.answers(servers.dsn)


def test_run_names_a_command_that_is_not_there(database_only: Settings) -> None:
    done = _local("run", "--", "no-such-command")
    assert "command not found: no-such-command" in done.stderr
    assert not stack_client.home_of(database_only).path.exists()


def test_up_env_down(database_only: Settings) -> None:
    nothing = _local("env")
    assert nothing.returncode == 1
    assert "outbox local up" in nothing.stderr

    exports = _local("up").stdout
    assert exports.startswith("export OUTBOX_DSN='postgresql://")
    dsn = json.loads(_local("env", "--json").stdout)["dsn"]
    shell = subprocess.run(
        ["sh", "-c", f"{_local('env').stdout}echo $OUTBOX_DSN"], capture_output=True, text=True
    )
    assert shell.stdout.strip() == dsn
    assert _local("run", "--", "true").returncode == 0
    assert postgres.answers(dsn)

    with stack(database_only):
        refused = _local("down")
        assert refused.returncode == 1
        assert "--force" in refused.stderr
        assert postgres.answers(dsn)
    assert _local("down").returncode == 0
    assert not postgres.answers(dsn)
    assert _local("down").returncode == 0


def test_down_by_force(database_only: Settings) -> None:
    with stack(database_only) as servers:
        assert _local("down", "--force").returncode == 0
        assert not postgres.answers(servers.dsn)


def test_down_may_forget_the_data(database_only: Settings) -> None:
    """Guards against a broken or overfull server that only someone who knows its directory can be rid of."""
    home = stack_client.home_of(database_only)
    assert _local("down", "--forget").returncode == 0
    with stack(database_only) as servers:
        with psycopg.connect(servers.dsn, autocommit=True) as connection:
            connection.execute("CREATE DATABASE kept")
        assert _local("down", "--forget").returncode == 1
        assert postgres.answers(servers.dsn)
    (home.path / "kafka").mkdir()
    assert _local("down", "--forget").returncode == 0
    assert not list(home.path.glob("postgres-*/"))
    assert not (home.path / "kafka").exists()
    with stack(database_only) as servers, psycopg.connect(servers.dsn) as connection:
        query = "SELECT count(*) FROM pg_database WHERE datname = 'kept'"
        assert connection.execute(query).fetchone() == (0,)


@pytest.mark.parametrize("name", ["run", "up", "down", "env"])
def test_help(name: str) -> None:
    shown = _local(name, "--help")
    assert shown.returncode == 0
    assert "Usage:" in shown.stdout
