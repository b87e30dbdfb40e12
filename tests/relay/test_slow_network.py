"""A network to Kafka that is slow, or that nothing comes through: taking over, and ending."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import psycopg
import pytest

from outbox_pipelines.database import schema
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.relay import service
from outbox_pipelines.relay.kafka import client, producer
from outbox_pipelines.relay.kafka.topic_admin import TopicAdmin
from outbox_pipelines.settings import load_settings
from tests.conftest import EITHER_DELIVERY, Lasting, Outbox, patience, read_topic, topic_prefix, wait_until
from tests.history import servers as own
from tests.history.proxy import Proxy
from tests.relay import faults
from tests.relay.threads import running
from tests.relay.topic import create_topic


@pytest.fixture
def servers(lasting: Lasting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[own.Servers]:
    with own.lasting_servers(lasting, tmp_path_factory) as servers:
        yield servers


@pytest.fixture
def network(servers: own.Servers) -> Iterator[Proxy]:
    """Between the relay and Kafka."""
    try:
        yield servers.kafka_proxy
    finally:
        servers.kafka_proxy.heal()


@pytest.fixture
def distant(servers: own.Servers, network: Proxy) -> Outbox:
    """An outbox whose relay reaches Kafka by that network."""
    name = topic_prefix().replace("-", "_")
    with psycopg.connect(servers.postgres.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    settings = load_settings(
        dsn=psycopg.conninfo.make_conninfo(servers.postgres.dsn, dbname=name),
        kafka=f"127.0.0.1:{network.port}",
        topic=f"{name}-{{aggregate_type}}",
        lease_seconds=1.0,
        breaker_seconds=0.5,
    )
    schema.migrate(settings)
    return Outbox(settings)


def _crashes(outbox: Outbox) -> tuple[str | None, int]:
    """Who owns the shard, and what a successor would count."""
    with outbox.connect() as connection:
        row = connection.execute("SELECT owner, crashes FROM outbox_shards").fetchone()
    assert row is not None
    return row[0], row[1]


@pytest.mark.extended
def test_a_takeover_that_is_slower_than_the_lease(distant: Outbox, network: Proxy) -> None:
    """Guards against a relay that recovers a transaction in silence: the session ends, and it starts over."""
    create_topic(distant)
    network.delay(0.2)
    distant.write(1, 2, 3)
    # In a process: a relay that starts over again and again is ended there.
    done = distant.process("relay", "--until-empty", OUTBOX_DELIVERY="exactly_once")
    assert "published 3 events" in done.stderr
    assert done.returncode == 0
    with distant.connect() as connection:
        epochs = connection.execute("SELECT epoch FROM outbox_shards").fetchall()
    assert epochs == [(1,)], "the relay lost the shard while it took it over"
    assert _crashes(distant) == (None, 0)


@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_sigterm_ends_a_relay_whose_breaker_is_open(distant: Outbox, network: Proxy, delivery: str) -> None:
    """Guards against a stop that waits for Kafka: the manager kills the relay, which counts as a crash."""
    create_topic(distant)
    environment = {"OUTBOX_DELIVERY": delivery, "OUTBOX_BREAKER_SECONDS": "0.5"}
    with faults.relay(distant, **environment) as relay:
        published = faults.published(distant)
        distant.fill(1000)
        wait_until(lambda: published() == 1000, seconds=60)
        network.swallow()
        # More than the relay reads ahead: whatever it holds, something is left in its queue.
        distant.fill(40_000)
        with distant.connect() as connection:
            wait_until(lambda: _notices(connection), what="the relay to notice")
        relay.send_signal(signal.SIGTERM)
        # Half of the least patience in deploy/, on a quiet machine.
        assert relay.wait(patience(15)) == 0
    assert _crashes(distant) == (None, 0)
    network.heal()
    assert service.relay(distant.settings, until_empty=True).events > 0


def _notices(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
    """Whether the relay knows that Kafka is unavailable; a transaction in doubt makes it start over."""
    row = connection.execute("SELECT breaker = 'open' OR owner IS NULL FROM outbox_shards").fetchone()
    return row == (True,)


@pytest.mark.extended
@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_a_client_that_has_lost_all_brokers_is_replaced(
    distant: Outbox, servers: own.Servers, network: Proxy, delivery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a relay that stands still until an operator restarts it.

    A client that was told of no broker never finds one again, while new ones do. Here new ones go around
    the network that the old ones cannot pass.
    """
    create_topic(distant)
    around = {"bootstrap.servers": servers.kafka.bootstrap}
    monkeypatch.setattr(producer, "_MOST_UNANSWERED", 2)
    found: dict[str, str] = {}
    for name in ("config", "consumer_config"):
        usual = getattr(client, name)
        monkeypatch.setattr(client, name, lambda *given, _usual=usual, **own: _usual(*given, **own) | found)
    with running(distant.settings.model_copy(update={"delivery": delivery})):
        distant.write(1)
        wait_until(lambda: _backlog(distant) == 0, what="the first event published")
        found |= around
        network.refuse()
        network.cut()
        distant.write(2, 3)
        wait_until(lambda: _backlog(distant) == 0, seconds=60, what="a new client")
    # Of the events in flight at that moment, some may be there twice.
    there = read_topic(servers.kafka.bootstrap, distant.topic())
    assert {message.key for message in there} == {"1", "2", "3"}


def _backlog(outbox: Outbox) -> int:
    return outbox_measurements.read(outbox.settings).shards[0].backlog


@pytest.mark.extended
def test_a_question_ends_although_its_client_is_replaced(distant: Outbox, network: Proxy) -> None:
    """Guards against a thread that waits for ever, because another one has replaced the client it asked."""
    brokers = TopicAdmin(distant.settings)
    brokers.connect()
    network.swallow()
    answers: list[object] = []

    def ask() -> None:
        try:
            answers.append(brokers.describe([distant.topic()]))
        except UnavailableError as error:
            answers.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert not brokers.answers()
    asking.join(600)
    assert len(answers) == 1
    network.heal()
    assert brokers.answers()
