"""A topic that takes nothing: its events wait at no cost, all others flow, and it goes on when it is back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka.admin import AclOperation

from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.relay import service
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.kafka import topic_lookups
from outbox_pipelines.relay.kafka.topic_admin import TopicAdmin
from tests.conftest import Outbox, wait_until
from tests.kafka_clients import AdminClient
from tests.relay.parked import numbers_by_key
from tests.relay.threads import quick, running
from tests.relay.topic import allow, create_topic, deny


@pytest.fixture
def shop(outbox: Outbox, strict: Kafka) -> Outbox:
    """An outbox whose broker creates no topics."""
    return replace(outbox, settings=outbox.settings.model_copy(update={"kafka": strict.bootstrap}))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that takes nothing is looked at again and again."""
    monkeypatch.setattr(topic_lookups, "_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(topic_lookups, "_TRIAL_SECONDS", 0.2)


def _write(outbox: Outbox, *aggregate_types: str, aggregates: int, each: int = 1) -> None:
    """Events of so many aggregates of each type, one after the other; payload {"n": 0 …}."""
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT t, i::text, 'order.placed', jsonb_build_object('n', n) "
            "FROM generate_series(0, %s - 1) n, generate_series(1, %s) i, unnest(%s::text[]) t",
            [each, aggregates, list(aggregate_types)],
        )


def _parked(outbox: Outbox) -> list[tuple[Any, ...]]:
    """Each parked event with the transaction that wrote it last."""
    with outbox.connect() as connection:
        return connection.execute("SELECT seq, state, attempts, xmin::text FROM outbox_parked").fetchall()


def _create(outbox: Outbox, aggregate_type: str) -> None:
    create_topic(outbox, of=aggregate_type)


def test_unknown_topics_do_not_delay_others(shop: Outbox) -> None:
    """Guards against a writer of made-up types whose topics everybody's events wait for (G9)."""
    _create(shop, "order")
    with running(quick(shop)):
        for n in range(40):
            _write(shop, f"madeup{n}", aggregates=1)
        _write(shop, "order", aggregates=1)
        # One after the other they would take 120 seconds.
        wait_until(lambda: shop.messages(), seconds=30, what="the event of the topic that is there")
    assert len(_parked(shop)) == 40


@pytest.mark.usefixtures("often")
def test_events_of_a_missing_topic_cost_nothing_until_it_is_there(
    shop: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against statements for each parked event, as long as its topic is missing."""
    asked: list[str] = []
    describe = TopicAdmin.describe

    def counting(self: TopicAdmin, names: Any) -> Any:
        names = list(names)
        asked.extend(names)
        return describe(self, names)

    monkeypatch.setattr(TopicAdmin, "describe", counting)
    _write(shop, "order", aggregates=300, each=3)
    missing = shop.topic()
    with running(quick(shop, max_attempts=1)):
        wait_until(lambda: len(_parked(shop)) == 900, what="all to be parked")
        before, looks = _parked(shop), asked.count(missing)
        wait_until(lambda: asked.count(missing) >= looks + 20, seconds=60, what="the topic to be looked for")
        assert _parked(shop) == before
        _create(shop, "order")
        wait_until(lambda: len(shop.messages()) >= 900, seconds=60, what="all to be published")
        wait_until(lambda: not _parked(shop), what="nothing to be parked")
    found = numbers_by_key(shop.messages())
    assert len(found) == 300
    assert all(numbers == [0, 1, 2] for numbers in found.values())
    with shop.connect() as connection:
        assert connection.execute("SELECT max(retry_count) FROM outbox_events").fetchone() == (0,)


@pytest.mark.extended
@pytest.mark.usefixtures("often")
def test_a_topic_that_refuses_everything_disturbs_the_flow_once(
    shop: Outbox, strict: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a refusal, and a new producer, for each batch of a topic that may not be written to."""
    for aggregate_type in ("order", "secret"):
        _create(shop, aggregate_type)
    deny(strict, shop.topic("secret"), AclOperation.WRITE)
    interruptions: list[bool] = []
    recover = Publisher._recover

    def counting(self: Publisher) -> None:
        interruptions.append(True)
        recover(self)

    monkeypatch.setattr(Publisher, "_recover", counting)
    settings = quick(shop, max_attempts=1, batch_events=100)
    with running(settings):
        _write(shop, "order", "secret", aggregates=1000)
        wait_until(lambda: len(shop.messages()) == 1000, seconds=60, what="the others")
        wait_until(
            lambda: len(_parked(shop)) == 1000, seconds=60, what="the events of the topic to be parked"
        )
        assert len(interruptions) <= 5
        _write(shop, "secret", aggregates=1000)
        wait_until(lambda: len(_parked(shop)) == 2000, seconds=60, what="the second ones behind them")
        allow(strict, shop.topic("secret"))
        wait_until(lambda: not _parked(shop), seconds=60, what="all to be published")
    assert len(shop.messages("secret")) == 2000
    with shop.connect() as connection:
        assert connection.execute("SELECT max(retry_count) FROM outbox_events").fetchone() == (0,)


def test_a_run_until_empty_waits_for_a_topic_in_creation(shop: Outbox) -> None:
    """Guards against a run that ends, and leaves events parked, while their topic is being created."""
    _write(shop, "order", aggregates=10)
    totals = service.relay(quick(shop, create_topics=True), until_empty=True)
    assert (totals.events, totals.unpublished) == (10, 0)
    assert len(shop.messages()) == 10


@pytest.mark.extended
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    "delivery", [pytest.param("at_least_once", marks=pytest.mark.thorough(only=True)), "exactly_once"]
)
def test_a_topic_is_deleted_and_created_again_with_fewer_partitions(shop: Outbox, delivery: str) -> None:
    """Guards against a relay that must be restarted, or blames events, when a topic is another one."""
    admin, name = AdminClient({"bootstrap.servers": shop.settings.kafka}), shop.topic()
    create_topic(shop, 4)
    with running(quick(shop, max_attempts=1, delivery=delivery)):
        _write(shop, "order", aggregates=100)
        wait_until(lambda: len(shop.messages()) == 100, seconds=60, what="the first to be published")
        admin.delete_topics([name])[name].result(600)
        _write(shop, "order", aggregates=100)
        wait_until(lambda: len(_parked(shop)) > 0, seconds=60, what="events to be parked")
        create_topic(shop, 2)
        wait_until(lambda: not _parked(shop), seconds=60, what="nothing to be parked")
        _write(shop, "order", aggregates=100)
        wait_until(lambda: len(shop.messages()) >= 200, seconds=60, what="all to be published")
