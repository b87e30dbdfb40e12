"""exactly_once where Kafka is slow: transactions become as large as it can finish in time."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator

import psycopg
import pytest

from outbox_pipelines.database import schema
from outbox_pipelines.relay import service
from outbox_pipelines.relay.core import transaction_size
from outbox_pipelines.relay.core.transaction_size import MOST_BYTES, MOST_EVENTS, TransactionSize
from outbox_pipelines.settings import load_settings
from tests.conftest import Lasting, Outbox, topic_prefix
from tests.history import servers as own
from tests.relay.topic import create_topic


@pytest.fixture
def servers(lasting: Lasting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[own.Servers]:
    with own.lasting_servers(lasting, tmp_path_factory) as servers:
        yield servers
        servers.kafka_proxy.heal()


@pytest.fixture
def distant(servers: own.Servers) -> Outbox:
    """An outbox whose relay reaches Kafka by that network."""
    name = topic_prefix().replace("-", "_")
    with psycopg.connect(servers.postgres.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    settings = load_settings(
        dsn=psycopg.conninfo.make_conninfo(servers.postgres.dsn, dbname=name),
        kafka=servers.bootstrap_of_relays,
        topic=f"{name}-{{aggregate_type}}",
    )
    schema.migrate(settings)
    return Outbox(settings)


def _fill(outbox: Outbox, events: int) -> None:
    """Events of 2 kB that hardly compress."""
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'order', (n %% 50)::text, 'order.placed', jsonb_build_object('n', n, 'noise', "
            "  (SELECT string_agg(md5(n::text || i), '') FROM generate_series(1, 62) i)) "
            "FROM generate_series(1, %s) n",
            [events],
        )


@pytest.mark.extended
def test_a_backlog_behind_a_slow_network(
    servers: own.Servers, distant: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a transaction that never fits into its timeout, and is filled as large again."""
    create_topic(distant, 4)
    _fill(distant, 1_500)
    settings = distant.settings.model_copy(
        update={"delivery": "exactly_once", "transaction_seconds": 3.0, "breaker_seconds": 30.0}
    )
    servers.kafka_proxy.throttle(300_000)
    with caplog.at_level(logging.WARNING):
        service.relay(settings, until_empty=True)
    ids = [message.headers["id"] for message in distant.messages()]
    assert (len(set(ids)), len(ids)) == (1_500, 1_500)
    assert not [record for record in caplog.records if "starting over" in record.message]


@pytest.mark.extended
def test_kafka_becomes_slow(
    servers: own.Servers,
    distant: Outbox,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards the same where transactions were large before, and an error that does not name throughput."""
    create_topic(distant, 4)
    _fill(distant, 1_500)
    settings = distant.settings.model_copy(
        update={"delivery": "exactly_once", "transaction_seconds": 3.0, "breaker_seconds": 30.0}
    )
    firsts = iter([1.0])
    begin = TransactionSize.__init__

    def begun(self: TransactionSize, timeout: float) -> None:
        begin(self, timeout)
        self._share = next(firsts, self._share)

    monkeypatch.setattr(TransactionSize, "__init__", begun)
    servers.kafka_proxy.throttle(300_000)
    service.relay(settings, until_empty=True)
    ids = [message.headers["id"] for message in distant.messages()]
    assert (len(set(ids)), len(ids)) == (1_500, 1_500)
    said = [record.getMessage() for record in caplog.records if "starting over" in record.message]
    assert all("kB/s: smaller transactions follow" in each for each in said), said
    # Once, but on a busy machine, on which Kafka takes less than the proxy lets through.
    sizes = [int(found[1]) for each in said if (found := re.search(r"of the (\d+) events", each))]
    assert sizes[0] == 1_500
    assert all(each < before for before, each in itertools.pairwise(sizes)), said


def test_the_size_follows_what_kafka_takes() -> None:
    """Guards against transactions that stay small, or stay large."""
    size = TransactionSize(10.0)
    while size.events < MOST_EVENTS:
        before = size.events
        # However small, on a slow disk.
        size.committed(size.events, 0, 1.5)
        assert size.events > before
    size.committed(10, 1_000, 0.01)
    assert (size.events, size.bytes) == (MOST_EVENTS, MOST_BYTES)
    # Of 1 MB/s, what is acknowledged in a fifth of the timeout.
    size.committed(4_000, 8_000_000, 8.0)
    assert size.bytes == pytest.approx(2_000_000, rel=0.02)
    for _ in range(20):
        size.committed(1, 100_000, 100.0)
    assert size.bytes == pytest.approx(MOST_BYTES * transaction_size._LEAST, rel=0.01)
    assert size.events > 1
