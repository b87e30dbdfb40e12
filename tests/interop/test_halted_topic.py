"""A cluster of three brokers in which one topic accepts nothing, since its broker is away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from confluent_kafka.admin import NewTopic

from tests.conftest import Outbox, wait_until
from tests.history.servers import Servers, own_servers
from tests.kafka_clients import AdminClient
from tests.relay.parked import numbers_by_key
from tests.relay.threads import quick, running

MIN = {"min.insync.replicas": "2"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with own_servers(tmp_path_factory.mktemp("c"), brokers=3) as servers:
        yield servers


@pytest.mark.parametrize(
    ("replicas", "reason"),
    [
        ([3], "partition 0 has no leader"),
        ([2, 3], "partition 0 has 1 replica in sync, and min.insync.replicas is 2"),
    ],
)
def test_others_flow(outbox: Outbox, cluster: Servers, replicas: list[int], reason: str) -> None:
    """Guards against one topic in an outage that everybody's events wait for, with Kafka's own brokers."""
    shop = replace(outbox, settings=outbox.settings.model_copy(update={"kafka": cluster.bootstrap}))
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    topics = {"order": [1, 2], "bill": replicas}
    made = admin.create_topics(
        [
            NewTopic(shop.topic(kind), 2, replica_assignment=[place, place], config=MIN)
            for kind, place in topics.items()
        ]
    )
    for answer in made.values():
        answer.result(60)
    with running(quick(shop, max_attempts=1)):
        _write(shop, 0)
        wait_until(lambda: _is_there(shop, 1, "order", "bill"), seconds=120, what="the first events")
        away = cluster.brokers[2]
        away.kill()
        for n in range(1, 6):
            _write(shop, n)
        wait_until(lambda: _is_there(shop, 6, "order"), seconds=120, what="the others")
        wait_until(lambda: _reasons(shop), seconds=120, what="events to be parked")
        assert _reasons(shop) == [(f"topic {shop.topic('bill')} accepts nothing: {reason}", 0)]
        _write(shop, 6)
        wait_until(lambda: _is_there(shop, 7, "order"), seconds=10, what="the next ones, without a wait")
        away.start()
        wait_until(lambda: _is_there(shop, 7, "bill"), seconds=120, what="all bills")
    for kind in topics:
        found = numbers_by_key(shop.messages(kind))
        assert [list(dict.fromkeys(numbers)) for numbers in found.values()] == [list(range(7))] * 40


def _write(outbox: Outbox, n: int) -> None:
    """An order and a bill of each of 40 aggregates, with this number."""
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT t, i::text, 'placed', jsonb_build_object('n', %s::int) "
            "FROM generate_series(1, 40) i, unnest('{order,bill}'::text[]) t",
            [n],
        )


def _is_there(outbox: Outbox, numbers: int, *kinds: str) -> bool:
    return all(len(outbox.messages(kind)) >= 40 * numbers for kind in kinds)


def _reasons(outbox: Outbox) -> list[tuple[str, int]]:
    """Why the first event of each aggregate is parked, and its attempts."""
    with outbox.connect() as connection:
        return connection.execute(
            "SELECT DISTINCT last_error, attempts FROM outbox_parked WHERE state = 'retrying'"
        ).fetchall()
