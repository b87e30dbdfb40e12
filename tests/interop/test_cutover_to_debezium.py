"""From the relay to Debezium in Kafka Connect and back while events are written: nothing is repeated."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from outbox_pipelines import schema
from outbox_pipelines.relay.cdc.status import read
from tests.conftest import Outbox, wait_until
from tests.interop.test_debezium_on_connect import Place, Shop, a_shop, place
from tests.relay.cdc.test_switch import writing
from tests.relay.parked import numbers_by_key
from tests.relay.threads import quick, running, wait_until_relayed
from tests.relay.topic import create_topic

__all__ = ["place"]


@pytest.fixture
def shop(place: Place) -> Iterator[Shop]:
    with a_shop(place) as made:
        schema.migrate(made.settings)
        yield made
        made.run("cutover", "--to", "polling")


def _to(shop: Shop, target: str) -> str:
    done = shop.run("cutover", "--to", target, "--password", shop.password, "--seconds", "40")
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_there_and_back_while_events_are_written(shop: Shop, delivery: str) -> None:
    """Guards against a gap, a repetition or another order where the publisher changes (G1, G2, G5)."""
    outbox = Outbox(shop.settings)
    create_topic(outbox)
    settings = quick(outbox, delivery=delivery)

    def more(count: int) -> None:
        wait_until(lambda: len(outbox.messages()) > count, seconds=60, what="more events")

    with running(settings), writing(outbox) as counts:
        more(50)
        for _ in range(2):
            assert "the relay has left the slot" in _to(shop, "debezium")
            assert read(settings).source == "debezium"
            more(len(outbox.messages()) + 100)
            assert "the relay continues where the connector has stopped" in _to(shop, "cdc")
            more(len(outbox.messages()) + 100)
        _to(shop, "debezium")
        before = _position(shop)
        more(len(outbox.messages()) + 100)
        wait_until(lambda: _position(shop) != before, seconds=60, what="a position that follows")
        _to(shop, "polling")
        assert read(settings).source == "polling"
        more(len(outbox.messages()) + 100)
    with running(settings):
        wait_until_relayed(outbox)
    found = numbers_by_key(outbox.messages())
    assert found == {key: list(range(count)) for key, count in counts.items()}


def _position(shop: Shop) -> object:
    with psycopg.connect(shop.settings.dsn.reveal()) as connection:
        return connection.execute("SELECT done::text FROM outbox_shards").fetchone()
