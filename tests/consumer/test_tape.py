"""The consumer's code repeats what it did with a real PostgreSQL and Kafka if it gets their answers again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import Consumer
from outbox_pipelines.consumer.membership import Member
from outbox_pipelines.relay import service
from tests.conftest import Outbox, wait_until
from tests.history import business, effects
from tests.history.consumers import CONSUMERS
from tests.model.consumer.tape import ConsumerRecording
from tests.model.relay.tape import DifferentError

_EVENTS = 40


@pytest.fixture
def shop(outbox: Outbox) -> Outbox:
    with outbox.connect() as connection:
        business.prepare(connection)
        effects.prepare(connection)
    with outbox.connect(autocommit=False) as connection:
        for n in range(_EVENTS):
            business.count(connection, "order", n % 3)
    service.relay(outbox.settings, until_empty=True)
    return outbox


def _recorded(
    shop: Outbox, way: str, until: Callable[[], bool] | None = None, limit: int | None = None
) -> ConsumerRecording:
    def make() -> Consumer:
        consumer = CONSUMERS[way](shop.settings)
        assert isinstance(consumer, Consumer)
        return consumer

    def count() -> bool:
        with shop.connect() as connection:
            return effects.count(connection) == _EVENTS

    recording = ConsumerRecording(make, (effects, "make"), limit)

    def end() -> None:
        try:
            wait_until(until or count, what="the end of the topic")
        finally:
            recording.stop.set()

    ending = threading.Thread(target=end)
    ending.start()
    recording.run()
    ending.join(60)
    return recording


@pytest.mark.parametrize("way", ["idempotent", "shared"])
def test_a_real_consumer_and_its_code_agree(shop: Outbox, way: str) -> None:
    """Guards against a model whose PostgreSQL or Kafka behave in another way than the real ones."""
    recording = _recorded(shop, way)
    assert recording.play() == len(recording.tape.entries)
    asked = {name for name, _, _ in recording.tape.entries}
    assert asked >= {"effect", "rows", "client 1.poll", "client 1.commit", "callback 1 on_assign"}


@pytest.mark.extended
def test_a_sample_of_one_that_fails_and_loses_its_connection_agrees(
    shop: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against errors that are not repeated as they were."""
    make, calls = effects.make, 0

    def fails(connection: psycopg.Connection[Any], *given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("the third call")
        if calls == 7:
            with shop.connect() as other:
                other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
        make(connection, *given)

    monkeypatch.setattr(effects, "make", fails)
    recording = _recorded(shop, "idempotent")
    assert recording.play() == len(recording.tape.entries)
    short = _recorded(shop, "idempotent", lambda: True, limit=20)
    assert 20 <= len(short.tape.entries) < 100
    assert short.play() == short.tape.at >= 20


@pytest.mark.parametrize("change", ["done", "changes"])
def test_another_consumer_does_not_agree(shop: Outbox, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Guards against a comparison that sees nothing."""
    recording = _recorded(shop, "idempotent")
    nothing: Any = None if change == "done" else (set(), set())
    monkeypatch.setattr(Member, change, lambda self, *given: nothing)
    with pytest.raises(DifferentError):
        recording.play()
