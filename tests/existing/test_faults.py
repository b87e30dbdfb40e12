"""An existing table under violence: kill -9 and SIGSTOP of its relay, judged by a history."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from outbox_pipelines.existing import table_measurements
from tests.conftest import command, wait_until
from tests.existing import textbook
from tests.existing.textbook import Table
from tests.history import business
from tests.history.verify import verdict
from tests.history.writers import Writers
from tests.relay import faults


def _prepare(table: Table) -> None:
    textbook.copy_of_outbox(table)
    with table.connect() as connection:
        business.prepare(connection)


def _published(table: Table) -> Callable[[], int]:
    connection = table.connect()

    def read() -> int:
        row = connection.execute("SELECT count(*) FROM events WHERE published_at IS NOT NULL").fetchone()
        assert row is not None
        return int(row[0])

    return read


def _verify(table: Table) -> None:
    table.drain()
    found = verdict(table.outbox)
    print(found)
    assert found.wrong == []
    assert found.committed > 0
    assert table.pending() == []


def _ownership(table: Table) -> str | None:
    return table_measurements.read(table.settings).shards[0].owner


def test_kill_9_of_the_relay_ten_times_under_load(table: Table, is_short: bool) -> None:
    """Guards G1, G2, G5: rows marked that Kafka does not have, a successor that overtakes or never starts."""
    seed = faults.seed()
    chance = random.Random(seed)
    _prepare(table)
    writers = Writers(table.settings.dsn, seed, 4)
    published = _published(table)
    for _ in range(3 if is_short else 10):
        with faults.process(command("relay"), table.environment) as relay:
            faults.wait_for_more(published)
            with suppress(subprocess.TimeoutExpired):
                relay.wait(chance.random() * 0.3)
            assert relay.poll() is None, relay.communicate()
    writers.stop()
    _verify(table)


@pytest.mark.extended
def test_sessions_of_the_relay_that_end_one_by_one(table: Table, is_short: bool) -> None:
    """Guards against a relay that goes on without its lock, or a new owner that goes ahead of its claims."""
    seed = faults.seed()
    chance = random.Random(seed)
    _prepare(table)
    with table.connect() as connection:
        writers = Writers(table.settings.dsn, seed, 3)
        published = _published(table)
        with table.relayed(batch_events=20), table.relayed(is_standby=True, batch_events=20):
            for _ in range(4 if is_short else 12):
                faults.wait_for_more(published)
                # Any one of them: locks, claims.
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity "
                    "WHERE datname = current_database() AND application_name LIKE 'outbox relay%%' "
                    "ORDER BY pid OFFSET %s LIMIT 1) AS victim",
                    [chance.randrange(5)],
                )
            faults.wait_for_more(published, 50)
        writers.stop()
    _verify(table)


@pytest.mark.extended
def test_a_frozen_relay_is_succeeded_and_harms_nothing_when_it_wakes(table: Table) -> None:
    """Guards against a stopped owner that keeps its lock or its claims, and a zombie that claims again."""
    seed = faults.seed()
    _prepare(table)
    writers = Writers(table.settings.dsn, seed, 3)
    published = _published(table)
    quick = table.environment | {"OUTBOX_LEASE_SECONDS": "1"}
    with faults.process(command("relay"), quick) as frozen:
        faults.wait_for_more(published)
        first = _ownership(table)
        with faults.process(command("relay"), quick) as successor:
            frozen.send_signal(signal.SIGSTOP)
            wait_until(lambda: _ownership(table) not in (None, first), what="a successor")
            faults.wait_for_more(published)
            frozen.send_signal(signal.SIGCONT)
            faults.wait_for_more(published, 100)
            assert successor.poll() is None
            assert _ownership(table) not in (None, first)
    writers.stop()
    _verify(table)


def test_an_orderly_stop_duplicates_nothing(table: Table) -> None:
    """Guards against a stop that forgets to mark what Kafka has."""
    table.fill(20_000)
    published = _published(table)
    with table.relayed(batch_events=500):
        faults.wait_for_more(published, 1000)
    assert 0 < published() < 20_000
    assert len(table.messages()) == published()
    table.drain()
    assert len(table.messages()) == 20_000


def test_the_commands(table: Table) -> None:
    """Guards against a relay that cannot be looked at, needs tables of ours, or leaves threads behind."""
    threads = set(threading.enumerate())
    table.write(("a", {"n": 1}), ("or/der", {"n": 2}))
    with table.connect() as connection:
        connection.execute(
            "UPDATE events SET aggregate_type = 'or/der', retry_count = 5, "
            "last_error = 'outbox: dead letter: x' WHERE seq = 2"
        )
        file = {"OUTBOX_TABLE": json.dumps(table.settings.table)}
        before = table.outbox.outbox("status", **file).stdout
        assert "table public.events" in before
        assert "no active relay; start `outbox relay`" in before
        assert "backlog     1 event, oldest" in before
        assert "dead letters  1" in before
        drained = table.outbox.outbox("relay", "--until-empty", **file)
        assert (drained.returncode, drained.stderr.count("published 1 event ")) == (1, 1)
        with table.relayed():
            shown = json.loads(table.outbox.outbox("status", "--json", **file).stdout)
        (shard,) = shown["shards"]
        assert f":{os.getpid()}:" in shard["owner"]
        assert (shard["backlog"], shard["oldest_seconds"], shown["dead_letters"]) == (0, 0, 1)
        row = connection.execute("SELECT to_regclass('outbox_shards')").fetchone()
        assert row == (None,)
    # Look-ups end on their own.
    wait_until(lambda: set(threading.enumerate()) <= threads, what="the threads of the relay to end")
