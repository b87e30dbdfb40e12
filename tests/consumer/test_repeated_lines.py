"""An outage of Kafka or of the database is logged once, counted each minute, and has a line at its end."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import Counts, database_retry, kafka_clients, membership
from outbox_pipelines.local import Stack
from tests.conftest import wait_until
from tests.consumer.place import Place, running, uuid7
from tests.history.proxy import Proxy

Connection = psycopg.Connection[Any]


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.extended
def test_an_outage_of_kafka(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a line for each failed connection: 1,263 a minute, and none at the end."""
    monkeypatch.setattr(membership, "_EVERY_SECONDS", 0.5)
    with Proxy(int(stack.kafka.rpartition(":")[2])) as network:
        network.refuse()
        given = kafka_clients.settings({"bootstrap.servers": f"127.0.0.1:{network.port}"}, "lines")
        with contextlib.closing(membership.Member(given, ["nothing"])) as member:
            for _ in range(30):
                member.poll(seconds=0.1)
            during = _lines(caplog)
            assert len(during) <= 3, during
            assert sum("Kafka is unavailable: " in each for each in during) == 1
            network.heal()
            deadline = time.monotonic() + 120
            while "Kafka is available again" not in caplog.text and time.monotonic() < deadline:
                member.poll(seconds=0.1)
    assert sum("Kafka is available again after " in each for each in _lines(caplog)) == 1


def test_an_outage_of_the_database(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database_retry, "_LONGEST_PAUSE", 0.01)
    calls: list[int] = []

    def connect() -> Connection:
        calls.append(1)
        # The first connection is for the check at the start; it is lost before the first event.
        if 1 < len(calls) < 50:
            raise psycopg.OperationalError("no entry")
        connection: Connection = psycopg.connect(place.dsn)
        if len(calls) == 1:
            first.append(connection)
        return connection

    first: list[Connection] = []
    consumer = place.consumer(connect=connect)
    with running(consumer) as run:
        wait_until(lambda: first, what="a connection")
        wait_until(lambda: consumer.figures.is_running, what="a consumer that has begun")
        place.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s", first[0].info.backend_pid
        )
        place.send(uuid7())
        wait_until(lambda: place.effects() == 1, what="its effect")
        assert run.end() == Counts(handled=1)
    assert len(calls) == 50
    lines = [each for each in _lines(caplog) if "database" in each]
    assert len(lines) == 2, lines
    assert lines[0].startswith("the database is unavailable; waiting for it: ")
    assert lines[1].startswith("the database is available again after ")
