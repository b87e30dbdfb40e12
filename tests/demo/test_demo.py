"""The demo as a newcomer starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from examples.airline import run, sessions
from examples.airline.place import prepared
from examples.airline.verify import verify
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.service import relay
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.writer import emit
from tests import forks
from tests.conftest import clean_environment, patience, wait_until
from tests.demo.processes import demo as running
from tests.kafka_clients import AdminClient

END_A_DESK = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = 'airline: JFK' AND datname = current_database()"""
HOLDER = "SELECT owner FROM outbox_demo.outbox_shards WHERE owner IS NOT NULL"


def demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return forks.run(
        [sys.executable, "-m", "examples.airline", *arguments],
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_runs_and_verifies(database: dict[str, str]) -> None:
    done = demo("--flights", "200", **database)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "Verified: nothing missing" in done.stdout
    for word in (
        "written",
        "rolled back",
        "published",
        "consumed",
        "killed 1 time",
        "out of order",
        "make ui",
    ):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.thorough(only=True)),
    ],
)
def test_nothing_goes_on_when_it_is_ended(
    database: dict[str, str], directory: Path, how: signal.Signals, code: int
) -> None:
    with running(directory, database, "--flights", "all") as process:
        with psycopg.connect(database["OUTBOX_DSN"], autocommit=True) as connection:

            def owner() -> object:
                assert process.process.poll() is None, process.output
                with suppress(psycopg.errors.UndefinedTable):
                    return connection.execute(HOLDER).fetchone()
                return None

            wait_until(owner, seconds=60, what="a relay session")
        assert process.descendants()
        process.process.send_signal(how)
        assert process.process.wait(patience(30)) == code, process.output
        wait_until(lambda: not process.descendants(), what="the end of what it started")


def test_a_database_that_fails_is_one_line(database: dict[str, str], directory: Path) -> None:
    with running(directory, database, "--flights", "all") as process:
        with psycopg.connect(database["OUTBOX_DSN"], autocommit=True) as connection:
            wait_until(lambda: connection.execute(END_A_DESK).fetchone(), seconds=60, what="a writer's end")
        assert process.process.wait(600) == 2, process.output
    assert process.output.splitlines()[-1].startswith("demo: database error: ")


def test_no_session_succeeds_one_that_has_published_nothing(
    airline: Settings, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against two processes that make the tables of one new instance, of which one fails."""
    monkeypatch.setattr(sessions, "bound", lambda *_: ["sleep", "600"])
    monkeypatch.setattr(sessions, "_FIRST_SECONDS", 0.0)
    of_demo = sessions.Sessions(airline, directory)
    try:
        for published, living in ((0, 1), (0, 1), (1, 2), (2, 2)):
            of_demo.tend(published)
            assert len(list(directory.glob("session-*.log"))) == living
    finally:
        of_demo.stop()


class _RelayInPlace:
    """Relays in the calling thread, where a Dagster run would take seconds to start."""

    def __init__(self, settings: Settings, home: object) -> None:
        self._settings = settings

    def tend(self, published: int = 0) -> None:
        relay(self._settings, until_empty=True)

    def stop(self) -> None:
        pass


def test_says_what_it_found_and_fails(
    database: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service that reports what it did not do: the event is relayed as any other, and is a phantom. And a
    consumer that counts events it never received."""
    for name, value in database.items():
        monkeypatch.setenv(name, value)

    def verify_with_a_phantom(settings: Settings) -> object:
        with psycopg.connect(settings.dsn, options=f"-c search_path={settings.db_schema}") as connection:
            emit(
                connection,
                "aircraft",
                "N14228",
                "flight.departed",
                {"movement": 99, "flight": 1, "at": "2013-01-01T10:17:00+00:00"},
            )
            connection.execute("UPDATE board_carriers SET departures = departures + 1 WHERE carrier = 'UA'")
        relay(settings, until_empty=True)
        return verify(settings)

    monkeypatch.setattr(run, "Sessions", _RelayInPlace)
    monkeypatch.setattr(run, "verify", verify_with_a_phantom)
    assert run.run(50, seed=1) == 1
    printed = capsys.readouterr().out
    assert "NOT VERIFIED: 2 findings." in printed
    assert "board: carrier UA: the board says " in printed
    assert "phantom: movement 99 of aircraft N14228, flight.departed of flight 1: it made " in printed


def test_runs_again_in_the_same_place_and_removes_what_was_there(database: dict[str, str]) -> None:
    servers = load_settings(dsn=database["OUTBOX_DSN"], kafka=database["OUTBOX_KAFKA"])
    with prepared(servers, "outbox_demo", keep=True) as first:
        pass
    with prepared(servers, "outbox_demo", keep=True) as second:
        assert first.topic != second.topic
        wait_until(lambda: not _topics(servers, first), what="the end of the first one's topics")
        wait_until(lambda: len(_topics(servers, second)) == 2, what="the second one's topics")
        with (
            pytest.raises(SetupError, match="runs in schema outbox_demo of this database"),
            prepared(servers, "outbox_demo", keep=True),
        ):
            pass


def test_leaves_nothing_where_it_is_not_to(database: dict[str, str]) -> None:
    servers = load_settings(dsn=database["OUTBOX_DSN"], kafka=database["OUTBOX_KAFKA"])
    with prepared(servers, "outbox_ui", keep=False) as settings:
        pass
    wait_until(lambda: not _topics(servers, settings), what="the end of the topics")
    with psycopg.connect(servers.dsn) as connection:
        assert connection.execute("SELECT FROM pg_namespace WHERE nspname = 'outbox_ui'").fetchone() is None


def test_does_not_touch_a_foreign_schema(database: dict[str, str]) -> None:
    servers = load_settings(dsn=database["OUTBOX_DSN"], kafka=database["OUTBOX_KAFKA"])
    with psycopg.connect(servers.dsn) as connection:
        connection.execute("CREATE SCHEMA outbox_demo CREATE TABLE precious (n int)")
    done = demo("--flights", "1", **database)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "schema outbox_demo was not made by the demo" in done.stderr
    with psycopg.connect(servers.dsn) as connection:
        connection.execute("SELECT FROM outbox_demo.precious")


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        (["--flights", "0"], {}, "'0' is neither a number from 1 to 336776 nor `all`"),
        (["--flights", "abc"], {}, "'abc' is neither"),
        (["--flights", "336777"], {}, "'336777' is neither"),
        (["--seed", "x"], {}, "--seed"),
        (["ui", "--port", "0"], {}, "'0' is not a port"),
        (["play"], {}, "invalid choice: 'play'"),
        (
            ["--flights", "1"],
            {"OUTBOX_DSN": "host=127.0.0.1 port=1", "OUTBOX_KAFKA": "127.0.0.1:1"},
            "no broker answers at 127.0.0.1:1 (OUTBOX_KAFKA)",
        ),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], environment: dict[str, str], told: str) -> None:
    done = demo(*arguments, **environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("demo: ")
    assert told in done.stderr


def _topics(servers: Settings, demo: Settings) -> set[str]:
    """The demo's topics, as the broker tells it: a moment late."""
    prefix = demo.topic.removesuffix("{aggregate_type}")
    topics = AdminClient({"bootstrap.servers": servers.kafka}).list_topics(timeout=60).topics
    return {topic for topic in topics if topic.startswith(prefix)}
