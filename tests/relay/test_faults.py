"""The guarantees under violence: kill -9 and SIGSTOP of relay, writers and servers, judged by a history."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from outbox_pipelines import schema
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.relay import service, status
from outbox_pipelines.settings import load_settings
from tests.conftest import Outbox, clean_environment, command, wait_until
from tests.relay import history


@contextmanager
def _process(arguments: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        arguments,
        env=clean_environment() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def _relay(outbox: Outbox, **environment: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return _process(command("relay"), outbox.environment | environment)


def _published(outbox: Outbox) -> Callable[[], int]:
    """Reads where the relay is: changes with every settle of events."""
    connection = outbox.connect()

    def read() -> int:
        row = connection.execute("SELECT coalesce(sum(events), 0)::bigint FROM outbox_progress").fetchone()
        assert row is not None
        return int(row[0])

    return read


def _wait_for_more(published: Callable[[], int], more: int = 1, seconds: float = 20.0) -> None:
    goal = published() + more
    wait_until(lambda: published() >= goal, seconds=seconds, what=f"the relay to publish {more} more")


def _holder(outbox: Outbox) -> str | None:
    return status.read(outbox.settings).shards[0].owner


def _verify(outbox: Outbox) -> history.Findings:
    service.relay(outbox.settings, until_empty=True)
    with outbox.connect() as connection:
        findings = history.check(connection, outbox.messages())
    print(f"{findings.committed} committed, {findings.duplicates} duplicates")
    assert findings.wrong == []
    assert findings.committed > 0
    return findings


def _seed() -> int:
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print("SEED", seed)
    return seed


def test_kill_9_of_the_relay_ten_times_under_load(outbox: Outbox) -> None:
    """Guards G1, G2 and G5: a position ahead of Kafka, a successor that skips, reorders or never starts."""
    seed = _seed()
    chance = random.Random(seed)
    with outbox.connect() as connection:
        history.prepare(connection)
    writers = history.Writers(outbox.settings.dsn, seed, 4)
    published = _published(outbox)
    for _ in range(10):
        with _relay(outbox) as relay:
            _wait_for_more(published)
            with suppress(subprocess.TimeoutExpired):
                relay.wait(chance.random() * 0.3)
            assert relay.poll() is None, relay.communicate()
    writers.stop()
    _verify(outbox)


def test_kill_9_of_the_writing_application(outbox: Outbox) -> None:
    """Guards G1: an event without its business row, or the row without its event."""
    seed = _seed()
    chance = random.Random(seed)
    with outbox.connect() as connection:
        history.prepare(connection)
        stop, taken = threading.Event(), threading.Event()
        relay = threading.Thread(target=lambda: service.relay(outbox.settings, stop=stop, on_take=taken.set))
        relay.start()
        assert taken.wait(10)
        arguments = [sys.executable, "-m", "tests.relay.history", outbox.settings.dsn]
        for n in range(10):
            with _process([*arguments, str(seed + n), "3"], {}) as application:
                assert application.stdout is not None
                assert application.stdout.readline() == "writing\n"
                with suppress(subprocess.TimeoutExpired):
                    application.wait(0.1 + chance.random() * 0.2)
        wait_until(lambda: _running_writers(outbox) == 0, what="the killed writers' transactions to end")
        stop.set()
        relay.join(20)
        row = connection.execute("SELECT count(*), (SELECT sum(n) FROM account) FROM outbox").fetchone()
    assert row is not None
    assert row[0] == row[1]
    assert _verify(outbox).duplicates == 0


def _running_writers(outbox: Outbox) -> int:
    with outbox.connect() as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = 'history'"
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_frozen_relay_is_succeeded_and_harms_nothing_when_it_wakes(outbox: Outbox) -> None:
    """Guards against a stopped holder that keeps its lock, and a zombie that moves the position."""
    seed = _seed()
    with outbox.connect() as connection:
        history.prepare(connection)
    writers = history.Writers(outbox.settings.dsn, seed, 3)
    published = _published(outbox)
    quick = {"OUTBOX_LEASE_SECONDS": "1"}
    with _relay(outbox, **quick) as frozen:
        _wait_for_more(published)
        first = _holder(outbox)
        with _relay(outbox, **quick) as successor:
            os.kill(frozen.pid, signal.SIGSTOP)
            wait_until(lambda: _holder(outbox) not in (None, first), what="a successor")
            _wait_for_more(published)
            os.kill(frozen.pid, signal.SIGCONT)
            _wait_for_more(published, 100)
            assert successor.poll() is None
            assert _holder(outbox) not in (None, first)
    writers.stop()
    _verify(outbox)


@pytest.fixture
def own_servers(tmp_path: Path) -> Iterator[tuple[Postgres, Kafka, Outbox]]:
    """Servers that a test may kill."""
    postgres, kafka = Postgres(tmp_path / "postgres"), Kafka(tmp_path / "kafka")
    try:
        postgres.start()
        kafka.start()
        settings = load_settings(dsn=postgres.dsn, kafka=kafka.bootstrap, topic="{aggregate_type}-events")
        schema.migrate(settings)
        yield postgres, kafka, Outbox(settings)
    finally:
        postgres.stop()
        kafka.stop()


def test_kill_9_of_kafka(own_servers: tuple[Postgres, Kafka, Outbox]) -> None:
    """Guards against a relay that loses, reorders or gives up when its broker dies: it waits and goes on."""
    _, kafka, outbox = own_servers
    seed = _seed()
    with outbox.connect() as connection:
        history.prepare(connection)
    writers = history.Writers(outbox.settings.dsn, seed, 3)
    published = _published(outbox)
    with _relay(outbox) as relay:
        for _ in range(2):
            _wait_for_more(published, 50)
            kafka.kill()
            kafka.start()
        _wait_for_more(published, seconds=40)
        assert relay.poll() is None
    writers.stop()
    _verify(outbox)


def test_kill_9_of_postgres(own_servers: tuple[Postgres, Kafka, Outbox]) -> None:
    """Guards against a position that survives in memory only: ids are given out again after a crash."""
    postgres, _, outbox = own_servers
    seed = _seed()
    with outbox.connect() as connection:
        history.prepare(connection)
    for n in range(2):
        writers = history.Writers(outbox.settings.dsn, seed + n, 3)
        published = _published(outbox)
        with _relay(outbox) as relay:
            _wait_for_more(published)
            postgres.kill()
            assert relay.wait(20) == 2
            assert "no entry to the database" in relay.communicate()[1]
        with pytest.raises(Exception, match=r"(?i)connection|terminat|closed"):
            writers.stop()
        postgres.start()
    _verify(outbox)
