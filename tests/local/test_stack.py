"""The shared stack: who starts it, who finds it, and what survives which crash."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import kafka, lease, postgres, stack, stack_client
from outbox_pipelines.local.stack_state import POSTGRES, Home
from outbox_pipelines.settings import Settings
from tests.kafka_clients import AdminClient
from tests.local.waiting import eventually, lives

# Takes the stack, prints where it is, and holds it until its standard input ends.
HOLDER = """
import sys
from outbox_pipelines.local import stack
from outbox_pipelines.settings import load_settings
with stack(load_settings()) as servers:
    print(servers.dsn, flush=True)
    sys.stdin.read()
"""


@contextmanager
def _holders(count: int) -> Iterator[list[str]]:
    """Processes that ask for the stack at the same time; yields what each of them got."""
    command = [sys.executable, "-c", HOLDER]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        yield [process.stdout.readline().strip() for process in processes if process.stdout]
    finally:
        for process in processes:
            process.communicate()
            assert process.returncode == 0


def _postmaster(home: Home) -> int:
    return int(next(home.path.glob("postgres-*/cluster/data/postmaster.pid")).read_text().split()[0])


def _parent(pid: int) -> int:
    return int(subprocess.check_output(["ps", "-o", "ppid=", "-p", str(pid)]))


def _broker(supervisor: int) -> int:
    lines = subprocess.check_output(["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], text=True).splitlines()
    mine = [line.split() for line in lines if line.split()[1] == str(supervisor)]
    return int(next(parts[0] for parts in mine if "kafka.Kafka" in parts))


def _starts(home: Home) -> int:
    log = next(home.path.glob("postgres-*/postgres.log"))
    return log.read_text().count("ready to accept connections")


def test_both_servers_and_their_crashes(settings: Settings, database_only: Settings) -> None:
    """One stack through all of it, since a broker takes its time to start."""
    home = stack_client.home_of(settings)
    with stack(database_only) as half, stack(settings) as servers:
        # The second wish joined the supervisor of the first.
        assert servers.dsn == half.dsn
        assert _starts(home) == 1
        with psycopg.connect(servers.dsn) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS a")
        assert AdminClient({"bootstrap.servers": servers.kafka}).list_topics(timeout=60).brokers

        supervisor = _parent(_postmaster(home))
        broker = _broker(supervisor)
        os.kill(broker, signal.SIGKILL)
        eventually(lambda: not lives(broker))
        with stack(settings) as found:
            assert found == servers
            assert kafka.answers(found.kafka)
        assert _parent(_postmaster(home)) == supervisor

        postmaster, broker = _postmaster(home), _broker(supervisor)
        os.kill(supervisor, signal.SIGKILL)
        eventually(lambda: not any(map(lives, (supervisor, postmaster, broker))))
        with stack(settings) as found:
            assert found == servers
            assert kafka.answers(found.kafka)
            with psycopg.connect(found.dsn) as connection:
                assert connection.execute("SELECT a FROM kept").fetchall() == [(1,)]


def test_what_is_given_is_taken(settings: Settings) -> None:
    given = settings.model_copy(update={"dsn": "postgresql://db.invalid/app", "kafka": "kafka.invalid:9092"})
    with stack(given) as servers:
        assert servers == stack_client.Stack("postgresql://db.invalid/app", "kafka.invalid:9092")
    assert not stack_client.home_of(settings).path.exists()


def test_only_what_is_missing_is_started(database_only: Settings) -> None:
    with stack(database_only) as servers:
        assert servers.kafka == "kafka.invalid:9092"
        assert postgres.answers(servers.dsn)
        assert stack_client.home_of(database_only).read().kafka == ""


def test_many_at_once_share_one(database_only: Settings) -> None:
    with _holders(4) as found:
        assert len(set(found)) == 1
        assert found[0].startswith("postgresql://")
        assert _starts(stack_client.home_of(database_only)) == 1


def test_many_at_once_after_the_supervisor_was_killed(database_only: Settings) -> None:
    home = stack_client.home_of(database_only)
    with stack(database_only) as first:
        supervisor = _parent(_postmaster(home))
    os.kill(supervisor, signal.SIGKILL)
    with _holders(4) as found:
        assert set(found) == {first.dsn}
        assert _starts(home) == 2


def test_a_killed_postgres_is_started_again(database_only: Settings) -> None:
    home = stack_client.home_of(database_only)
    with stack(database_only) as servers:
        postmaster = _postmaster(home)
        os.kill(postmaster, signal.SIGKILL)
        with stack(database_only) as found:
            assert found == servers
        eventually(lambda: postgres.answers(servers.dsn))
        assert _postmaster(home) != postmaster


def test_it_stops_when_no_process_has_the_lease(database_only: Settings) -> None:
    brief = database_only.model_copy(update={"local_grace_seconds": 0.0})
    home = stack_client.home_of(brief)
    with stack(brief) as servers:
        with stack(brief):
            pass
        assert postgres.answers(servers.dsn)
    eventually(lambda: not lease.is_held(home.lock))
    assert not postgres.answers(servers.dsn)


def test_the_grace_period_lets_the_next_one_in(database_only: Settings) -> None:
    for _ in range(3):
        with stack(database_only):
            pass
    assert _starts(stack_client.home_of(database_only)) == 1


def test_a_state_of_the_past_is_not_believed(database_only: Settings) -> None:
    """After a reboot the ports may belong to any process, and no lock is held."""
    home = stack_client.home_of(database_only)
    home.make()
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        past = {
            "dsn": f"postgresql://postgres@127.0.0.1:{port}/postgres",
            "kafka": "",
            "error": "of the past",
        }
        (home.path / "state.json").write_text(json.dumps(past))
        (home.path / f"{POSTGRES}.port").write_text(str(port))
        (home.path / "control" / "stop").touch()
        assert stack_client.running(home) is None
        with stack(database_only) as servers:
            assert servers.dsn != past["dsn"]
            assert postgres.answers(servers.dsn)


def test_a_failure_is_reported_to_all_who_wait_and_not_to_the_next(
    database_only: Settings, tmp_path: Path
) -> None:
    broken = database_only.model_copy(update={"local_postgres": tmp_path})
    problems: list[str] = []

    def ask() -> None:
        with pytest.raises(SetupError) as caught, stack(broken):
            pass
        problems.append(str(caught.value))

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(problems) == 3
    assert [problem for problem in problems if "no initdb in" not in problem] == []
    with stack(database_only) as servers:
        assert postgres.answers(servers.dsn)


def test_the_supervisor_ends_with_its_directory(database_only: Settings, tmp_path: Path) -> None:
    home = stack_client.home_of(database_only)
    with stack(database_only) as servers:
        supervisor = _parent(_postmaster(home))
        home.path.rename(tmp_path / "away")
        eventually(lambda: not lives(supervisor))
        assert not postgres.answers(servers.dsn)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = Settings(kafka="kafka.invalid:9092", local_dir=tmp_path / "file" / "local")
    with pytest.raises(SetupError, match="OUTBOX_LOCAL_DIR"), stack(settings):
        pass


ORDINARY = """
import os
from outbox_pipelines.local import postgres, stack
from outbox_pipelines.local import stack_client
from outbox_pipelines.settings import load_settings
settings = load_settings()
with stack(settings) as servers:
    assert os.geteuid() != 0 and postgres.answers(servers.dsn)
assert stack_client.stop(stack_client.home_of(settings))
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can become somebody else"
)
def test_as_an_ordinary_user(database_only: Settings) -> None:
    """The whole path once more without root's rights; the other tests have them, where root runs them."""
    # The virtual environment, or its Python, may be closed to others: reading is the one right left.
    leave = ["setpriv", "--reuid=nobody", "--clear-groups", "--inh-caps=+dac_read_search"]
    command = [*leave, "--ambient-caps=+dac_read_search", sys.executable, "-c", ORDINARY]
    uid, gid = postgres.identity()
    with tempfile.TemporaryDirectory() as directory:
        os.chown(directory, uid, gid)
        environment = {**os.environ, "OUTBOX_LOCAL_DIR": f"{directory}/local"}
        subprocess.run(command, env=environment, cwd=directory, check=True)
        assert Path(directory, "local", "lease").stat().st_uid == uid
