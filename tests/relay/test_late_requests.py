"""exactly_once where Kafka gets a request late, after the client has asked again elsewhere (G1, G5).

The network is a proxy before a real broker: it resets a connection for the client, and passes its last
request on in the next transaction.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from outbox_pipelines.database import schema
from outbox_pipelines.local.server import Server
from outbox_pipelines.relay.core.producers import CommitAnswer
from outbox_pipelines.relay.core.transactions import TransactionalPublisher
from outbox_pipelines.relay.kafka.transactional_producer import FencingProducer, begin, kafka_names
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.parking.prober import Prober
from outbox_pipelines.settings import load_settings
from tests.conftest import Lasting, Outbox, either, topic_prefix, wait_until
from tests.history import servers as own
from tests.history.requests import ABORT, ADD, COMMIT, PRODUCE, KafkaProxy, Late, Requests
from tests.relay.threads import quick, running, wait_until_relayed
from tests.relay.topic import create_topic

PARTITIONS = 8


@pytest.fixture
def servers(lasting: Lasting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[own.Servers]:
    with own.lasting_servers(lasting, tmp_path_factory) as servers:
        yield servers
        servers.requests.heal()


@pytest.fixture
def requests(servers: own.Servers) -> Requests:
    """Those of the relay."""
    return servers.requests


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


@pytest.fixture
def producer(distant: Outbox) -> Iterator[FencingProducer]:
    """The driver alone, with a transaction behind it."""
    shard = cast("Shard", SimpleNamespace(identity=uuid.uuid4().hex, shard=0))
    create_topic(distant)
    errors: list[Any] = []
    made = FencingProducer(
        distant.settings, shard, begin(distant.settings, kafka_names(shard), errors.append)
    )
    made.prepare(1)
    _transaction(made, distant)
    made.commit()
    yield made
    made.close()


def _transaction(producer: FencingProducer, outbox: Outbox) -> None:
    producer.begin()
    producer._producer.produce(outbox.topic(), b"{}")
    producer.flush(30)
    assert producer.record("tick", 1, finished=True, released=[]) is None
    producer.flush(30)


def _assert_each_once(outbox: Outbox, events: int) -> None:
    ids = [message.headers["id"] for message in outbox.messages()]
    assert (len(set(ids)), len(ids)) == (events, events)


def test_a_commit_is_known_to_be_asked_once(producer: FencingProducer, distant: Outbox) -> None:
    """Guards against a new producer for each transaction: on a machine without load none is needed."""

    def is_known() -> bool:
        _transaction(producer, distant)
        return producer.commit() is CommitAnswer.DONE

    wait_until(is_known, seconds=30, what="a commit that a loaded machine did not delay")


@pytest.mark.parametrize("arrives", either(True, False))
def test_a_commit_that_the_client_repeats_is_noticed(
    producer: FencingProducer, distant: Outbox, requests: Requests, arrives: bool
) -> None:
    """Guards against a client that asks again sooner than the driver assumes: its setting is needed.

    The connection breaks before or after the broker has the request.
    """
    for _ in range(3):
        _transaction(producer, distant)
        asked = requests.seen[COMMIT]
        requests.delay(Late(COMMIT, moments=(ABORT,), arrives=arrives))
        answers = [producer.commit()]
        while answers[-1] is CommitAnswer.NONE:
            answers.append(producer.commit())
        assert requests.seen[COMMIT] >= asked + 2
        assert answers[0] is not CommitAnswer.DONE
        requests.heal()


@pytest.mark.extended
def test_the_prober_keeps_no_producer_whose_commit_was_repeated(
    producer: FencingProducer, distant: Outbox, requests: Requests
) -> None:
    """Guards against a late commit that makes visible what the prober only tries."""
    prober = Prober(distant.settings, producer.lookups, uuid.uuid4().hex)

    def copy() -> None:
        prober._produce(distant.topic(), "a", "{}", [], lambda error, message: None)
        prober._flush()
        prober._commit()

    def is_kept() -> bool:
        copy()
        return prober._producer is not None

    wait_until(is_kept, seconds=30, what="a commit that a loaded machine did not delay")
    requests.delay(Late(COMMIT, moments=(ABORT,)))
    copy()
    assert prober._producer is None


def test_a_late_commit_in_the_next_transaction(distant: Outbox, requests: Requests) -> None:
    """Guards against a late commit that makes a half of the next transaction visible: it is sent again."""
    create_topic(distant, PARTITIONS)
    settings = quick(distant, delivery="exactly_once")
    late = Late(COMMIT, moments=(COMMIT, ADD, PRODUCE), seconds=0.05, pause=0.5)
    with running(settings):
        distant.write("a")
        wait_until_relayed(distant)
        requests.delay(late)
        distant.write("b")
        wait_until(lambda: late.is_held, what="the commit that is held")
        distant.fill(500, aggregates=50)
        wait_until(lambda: requests.came_late[COMMIT] > 0, what="the late commit")
        wait_until_relayed(distant)
    _assert_each_once(distant, 502)


@pytest.mark.parametrize("follows", either("at once", "later"))
def test_a_late_addition_of_a_partition(distant: Outbox, requests: Requests, follows: str) -> None:
    """Guards against a partition that joins the next transaction by a request of the last one.

    The broker adds it again, or begins a transaction with it, which the next one is then a part of.
    """
    create_topic(distant, PARTITIONS)
    late = Late(ADD, moments=(COMMIT, ADD) if follows == "at once" else (COMMIT,), seconds=0.05, pause=0.5)
    with running(quick(distant, delivery="exactly_once")):
        distant.write("a")
        wait_until_relayed(distant)
        requests.delay(late)
        distant.write("b")
        wait_until(lambda: late.is_held, what="the addition that is held")
        if follows == "later":
            wait_until(lambda: requests.came_late[ADD] > 0, what="the late addition")
        distant.fill(500, aggregates=50)
        wait_until(lambda: requests.came_late[ADD] > 0, what="the late addition")
        wait_until_relayed(distant)
        distant.write("c")
        wait_until_relayed(distant)
    _assert_each_once(distant, 503)


@pytest.mark.extended
@pytest.mark.parametrize("end", [Server.kill, Server.stop])
def test_a_coordinator_that_is_restarted_while_it_ends_a_transaction(
    distant: Outbox, servers: own.Servers, requests: Requests, end: Callable[[Server], None]
) -> None:
    """Guards against a commit that counts as done, or as not done, by what a broker had no time to answer."""
    create_topic(distant, PARTITIONS)
    ended: list[int] = []

    def stop(_proxy: KafkaProxy) -> None:
        end(servers.kafka)
        ended.append(1)

    with running(quick(distant, delivery="exactly_once")):
        distant.write("a")
        wait_until_relayed(distant)
        with requests.at(COMMIT, stop):
            distant.fill(500, aggregates=50)
            wait_until(lambda: ended, what="a commit")
        servers.kafka.start()
        wait_until_relayed(distant)
        distant.write("b")
        wait_until_relayed(distant)
    _assert_each_once(distant, 502)


@pytest.mark.extended
def test_the_record_is_behind_its_events(
    distant: Outbox, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a record that becomes visible without the events of its transaction."""
    create_topic(distant, PARTITIONS)
    record = FencingProducer.record
    unacknowledged: list[int] = []

    def recorded(self: FencingProducer, *given: Any, **named: Any) -> str | None:
        unacknowledged.append(self.in_flight)
        return record(self, *given, **named)

    monkeypatch.setattr(FencingProducer, "record", recorded)
    monkeypatch.setattr(TransactionalPublisher, "_is_full", lambda self: self._pending_events >= 200)
    requests.slow({PRODUCE: 0.02})
    distant.fill(1_000, aggregates=50)
    with running(quick(distant, delivery="exactly_once", batch_events=100)):
        wait_until_relayed(distant)
    assert len(unacknowledged) >= 5
    assert set(unacknowledged) == {0}
    _assert_each_once(distant, 1_000)
