"""The guarantees under violence: kill -9 and SIGSTOP of relay, writers and servers, judged by a history."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.relay import service
from tests.conftest import Outbox, wait_until
from tests.history import business
from tests.history.writers import APPLICATION, Writers
from tests.relay import faults
from tests.relay.threads import owners


def test_kill_9_of_the_relay_again_and_again_under_load(outbox: Outbox, is_short: bool) -> None:
    """Guards G1, G2 and G5: a position ahead of Kafka, a successor that skips, reorders or never starts."""
    seed = faults.seed()
    chance = random.Random(seed)
    with outbox.connect() as connection:
        business.prepare(connection)
    writers = Writers(outbox.settings.dsn, seed, 4)
    published = faults.published(outbox)
    for _ in range(3 if is_short else 10):
        with faults.relay(outbox) as relay:
            faults.wait_for_more(published)
            with suppress(subprocess.TimeoutExpired):
                relay.wait(chance.random() * 0.3)
            assert relay.poll() is None, relay.communicate()
    writers.stop()
    faults.verify(outbox)


def test_kill_9_of_the_writing_application(outbox: Outbox, is_short: bool) -> None:
    """Guards G1: an event without its business row, or the row without its event."""
    seed = faults.seed()
    chance = random.Random(seed)
    with outbox.connect() as connection:
        business.prepare(connection)
        stop, taken = threading.Event(), threading.Event()
        relay = threading.Thread(
            target=lambda: service.relay(outbox.settings, stop=stop, on_take=lambda _: taken.set())
        )
        relay.start()
        assert taken.wait(600)
        arguments = [sys.executable, "-m", "tests.history.writers", outbox.settings.dsn]
        for n in range(3 if is_short else 10):
            with faults.process([*arguments, str(seed + n), "3"], {}) as application:
                assert application.stdout is not None
                assert application.stdout.readline() == "writing\n"
                with suppress(subprocess.TimeoutExpired):
                    application.wait(0.1 + chance.random() * 0.2)
        wait_until(lambda: _running_writers(outbox) == 0, what="the killed writers' transactions to end")
        stop.set()
        relay.join(600)
        row = connection.execute("SELECT count(*), (SELECT sum(n) FROM account) FROM outbox").fetchone()
    assert row is not None
    assert row[0] == row[1]
    assert faults.verify(outbox).redelivered == 0


def _running_writers(outbox: Outbox) -> int:
    with outbox.connect() as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = %s",
            [APPLICATION],
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_frozen_relay_is_succeeded_and_harms_nothing_when_it_wakes(outbox: Outbox) -> None:
    """Guards against a stopped owner that keeps its lock, and a zombie that moves the position."""
    seed = faults.seed()
    with outbox.connect() as connection:
        business.prepare(connection)
    writers = Writers(outbox.settings.dsn, seed, 3)
    published = faults.published(outbox)
    quick = {"OUTBOX_LEASE_SECONDS": "1"}
    with faults.relay(outbox, **quick) as frozen:
        faults.wait_for_more(published)
        first = owners(outbox)[0]
        with faults.relay(outbox, **quick) as successor:
            frozen.send_signal(signal.SIGSTOP)
            wait_until(lambda: owners(outbox)[0] not in (None, first), what="a successor")
            faults.wait_for_more(published)
            frozen.send_signal(signal.SIGCONT)
            faults.wait_for_more(published, 100)
            assert successor.poll() is None
            assert owners(outbox)[0] not in (None, first)
    writers.stop()
    faults.verify(outbox)


def test_kill_9_of_postgres(own_servers: tuple[Postgres, Kafka, Outbox]) -> None:
    """Guards against a position that survives in memory only: ids are given out again after a crash; and
    against a relay that does not recover automatically (G4)."""
    postgres, _, outbox = own_servers
    seed = faults.seed()
    with outbox.connect() as connection:
        business.prepare(connection)
    with faults.relay(outbox) as relay:
        for n in range(2):
            writers = Writers(outbox.settings.dsn, seed + n, 3)
            faults.wait_for_more(faults.published(outbox))
            postgres.kill()
            postgres.start()
            writers.stop()
        wait_until(lambda: not outbox_measurements.read(outbox.settings).unpublished, what="no backlog")
        assert relay.poll() is None
    faults.verify(outbox)
