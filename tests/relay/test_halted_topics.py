"""A topic of which a partition accepts nothing while others do: its events wait, all others flow."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from outbox_pipelines.relay.core import breaker
from outbox_pipelines.relay.kafka import topic_lookups
from outbox_pipelines.relay.kafka.topic_lookups import TopicLookups
from tests.conftest import Outbox, wait_until
from tests.history import mock
from tests.history.mock import Mock
from tests.relay.parked import numbers_by_key
from tests.relay.threads import quick, running

KINDS = ("order", "bill")
_NO_BROKER = -1


@pytest.fixture
def cluster() -> Iterator[Mock]:
    with mock.running(2) as found:
        yield found


@pytest.fixture
def shop(outbox: Outbox, cluster: Mock, monkeypatch: pytest.MonkeyPatch) -> Outbox:
    """An outbox with a topic for orders and one for bills, of two partitions each."""
    monkeypatch.setattr(topic_lookups, "_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(topic_lookups, "_REFRESH_SECONDS", 3600.0)
    monkeypatch.setattr(breaker, "_LONGEST_PAUSE", 0.5)
    found = replace(outbox, settings=outbox.settings.model_copy(update={"kafka": cluster.bootstrap}))
    cluster.create({kind: found.topic(kind) for kind in KINDS}, 2)
    _lead(found, cluster, 1, "order")
    _lead(found, cluster, 2, "bill")
    return found


def _lead(outbox: Outbox, cluster: Mock, broker: int, *kinds: str) -> None:
    """This broker leads the partitions of these topics."""
    for kind in kinds:
        for partition in (0, 1):
            cluster.lead(outbox.topic(kind), partition, broker)


def _halt(outbox: Outbox, cluster: Mock, *kinds: str) -> None:
    """No broker leads these topics, which the second one has led. The mock breaks if it gets their events."""
    cluster.stop_broker(2)
    _lead(outbox, cluster, _NO_BROKER, *kinds)


def _write(outbox: Outbox, *kinds: str, first: int, numbers: int, aggregates: int = 40) -> None:
    """Events of each kind and aggregate, with the numbers from `first`, in one transaction."""
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT t, i::text, 'placed', jsonb_build_object('n', n) "
            "FROM generate_series(%s::int, %s) n, generate_series(1, %s) i, unnest(%s::text[]) t",
            [first, first + numbers - 1, aggregates, list(kinds)],
        )


def _parked(outbox: Outbox) -> int:
    with outbox.connect() as connection:
        ((count,),) = connection.execute("SELECT count(*) FROM outbox_parked")
    return int(count)


def test_others_flow_while_a_topic_has_no_leader(
    shop: Outbox, cluster: Mock, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against one topic in an outage that everybody's events wait for (G9)."""
    with running(quick(shop, max_attempts=1, breaker_seconds=0.5)):
        _write(shop, "order", "bill", first=0, numbers=1)
        wait_until(lambda: len(shop.messages("bill")) == 40, seconds=60, what="the first events")
        _halt(shop, cluster, "bill")
        _write(shop, "order", "bill", first=1, numbers=5)
        wait_until(lambda: len(shop.messages("order")) == 240, seconds=60, what="the others")
        wait_until(lambda: _parked(shop) > 0, seconds=60, what="events to be parked")
        _write(shop, "order", "bill", first=6, numbers=1)
        wait_until(lambda: len(shop.messages("order")) == 280, seconds=60, what="the next ones")
        with shop.connect() as connection:
            ((reason, attempts),) = connection.execute(
                "SELECT DISTINCT last_error, attempts FROM outbox_parked WHERE state = 'retrying'"
            )
        assert reason == f"topic {shop.topic('bill')} accepts nothing: partition 0 has no leader"
        assert attempts == 0
        _lead(shop, cluster, 1, "bill")
        wait_until(lambda: not _parked(shop), seconds=60, what="nothing to be parked")
        wait_until(lambda: len(shop.messages("bill")) >= 280, seconds=60, what="all bills")
    for kind in ("order", "bill"):
        found = numbers_by_key(shop.messages(kind))
        assert len(found) == 40
        assert all(list(dict.fromkeys(numbers)) == list(range(7)) for numbers in found.values())
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert sum("has no leader" in line for line in said) == 1
    assert sum("accepts messages again" in line for line in said) == 1


@pytest.mark.extended
def test_kafka_is_unavailable_if_no_topic_accepts_anything(
    shop: Outbox, cluster: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an outage of Kafka for which every event is parked, one after the other."""
    asked: list[bool] = []
    refuse_halted = TopicLookups.refuse_halted

    def counting(self: TopicLookups) -> bool:
        asked.append(refuse_halted(self))
        return asked[-1]

    monkeypatch.setattr(TopicLookups, "refuse_halted", counting)
    _lead(shop, cluster, 2, *KINDS)
    with running(quick(shop, breaker_seconds=0.5)):
        _write(shop, "order", "bill", first=0, numbers=1)
        wait_until(lambda: len(shop.messages("bill")) == 40, seconds=60, what="the first events")
        _halt(shop, cluster, *KINDS)
        _write(shop, "order", "bill", first=1, numbers=1)
        wait_until(lambda: len(asked) >= 3, seconds=60, what="three probes")
        assert not any(asked)
        assert _parked(shop) == 0
        _lead(shop, cluster, 1, *KINDS)
        wait_until(lambda: all(len(shop.messages(k)) >= 80 for k in KINDS), seconds=60, what="all events")
    assert _parked(shop) == 0


@pytest.mark.extended
def test_a_relay_that_knows_only_the_topic_looks_at_others(shop: Outbox, cluster: Mock) -> None:
    """Guards against a relay that starts in the outage of a topic and reads nothing else."""
    _halt(shop, cluster, "bill")
    # Of each aggregate, the second one waits for the acknowledgment of the first.
    _write(shop, "bill", first=0, numbers=5)
    with running(quick(shop, breaker_seconds=0.5)):
        wait_until(lambda: _state(shop) == "open", seconds=60, what="the breaker to open")
        _write(shop, "order", first=0, numbers=1)
        wait_until(lambda: len(shop.messages("order")) == 40, seconds=60, what="the others")
        _lead(shop, cluster, 1, "bill")
        wait_until(lambda: len(shop.messages("bill")) >= 200, seconds=60, what="all bills")


def _state(outbox: Outbox) -> str:
    with outbox.connect() as connection:
        ((state,),) = connection.execute("SELECT breaker FROM outbox_shards")
    return str(state)
