"""Broken consumers, killed between their two commits: the judge finds them, every time.

The same crashes of the real consumer are in order, so that it is the consumer which is judged.
"""

from __future__ import annotations

from typing import Any

import pytest

from outbox_pipelines.consumer import Consumer
from outbox_pipelines.consumer.membership import Member
from outbox_pipelines.relay import service
from tests.conftest import Outbox, wait_until
from tests.consumer.place import Place, running
from tests.history import business, effects
from tests.history.consumers import CONSUMERS, Broken, CommitsFirst, KeepsNoRecord
from tests.history.verify import verdict


@pytest.fixture
def place(shop: Outbox) -> Place:
    """Three events of one account in Kafka, and no consumer of them."""
    with shop.connect() as connection:
        effects.prepare(connection)
    with shop.connect(autocommit=False) as connection:
        for _ in range(3):
            business.count(connection, "order", 1)
    service.relay(shop.settings, until_empty=True)
    return Place(shop.settings.dsn, shop.settings.kafka, shop.topic())


def _dies_between_the_steps(shop: Outbox, place: Place, kind: type[Broken]) -> None:
    consumer = kind(shop.settings)
    try:
        consumer.steps[0](consumer, _next(consumer))
    finally:
        consumer.close()
    successor = kind(shop.settings)
    try:
        while place.uncommitted("history"):
            message = _next(successor)
            for step in successor.steps:
                step(successor, message)
    finally:
        successor.close()


def _next(consumer: Broken) -> Any:
    found: list[Any] = []

    def has_come() -> bool:
        if message := consumer.poll():
            found.append(message)
        return bool(found)

    wait_until(has_come, what="a message")
    return found[0]


def test_an_offset_before_the_database_loses_an_effect(shop: Outbox, place: Place) -> None:
    _dies_between_the_steps(shop, place, CommitsFirst)
    assert verdict(shop, consumer="broken").wrong == ["lost effect (1): order/1/1"]


def test_no_record_of_what_was_handled_doubles_an_effect(shop: Outbox, place: Place) -> None:
    _dies_between_the_steps(shop, place, KeepsNoRecord)
    assert verdict(shop, consumer="broken").wrong == ["duplicate effect (1): order/1/1"]


def _consumer(shop: Outbox, way: str) -> Consumer:
    consumer = CONSUMERS[way](shop.settings)
    assert isinstance(consumer, Consumer)
    return consumer


class _KilledError(BaseException):
    """Nothing catches it, as nothing catches a kill -9."""


@pytest.mark.parametrize(
    ("dies_in", "step"), [(effects, "make"), (Member, "done")], ids=["database", "offset"]
)
def test_the_real_consumer_crashes_before_either_commit(
    shop: Outbox, place: Place, monkeypatch: pytest.MonkeyPatch, dies_in: Any, step: str
) -> None:
    """Guards against interleavings that no consumer could get right."""
    make = effects.make

    def dies(*given: Any) -> None:
        if dies_in is effects:
            make(*given)
        raise _KilledError

    with monkeypatch.context() as patched:
        patched.setattr(dies_in, step, dies)
        with running(_consumer(shop, "idempotent")) as first, pytest.raises(_KilledError):
            first.wait()
    with running(_consumer(shop, "idempotent")) as successor:
        wait_until(lambda: place.uncommitted("history") == 0, what="the end of the topic")
        wait_until(lambda: place.value("SELECT count(DISTINCT token) FROM effect") == 3, what="all effects")
        # The first one comes again, either way: as a new one if its effect was taken back.
        assert successor.end().duplicates == (0 if dies_in is effects else 1)
    assert verdict(shop, consumer="idempotent").wrong == []
