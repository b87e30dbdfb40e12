"""The core repeats what it did in a real relay, in both threads, if it is given the same input again."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.relay import service
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.core.retries import Retries
from outbox_pipelines.relay.kafka.producer import IdempotentProducer
from tests.conftest import Outbox, either, wait_until
from tests.model.relay.recorder import Recorder
from tests.model.relay.tape import DifferentError
from tests.relay.parked import parked_rows, write
from tests.relay.threads import quick, running, wait_until_relayed
from tests.relay.topic import NOISE, change_topic, create_topic


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch.setattr)


@pytest.mark.parametrize("delivery", either("at_least_once", "exactly_once"))
def test_a_real_relay_and_the_core_agree(outbox: Outbox, recorder: Recorder, delivery: str) -> None:
    """Guards against a model whose drivers behave in another way than the real ones."""
    _refuse_and_publish(outbox, delivery=delivery)
    service.relay(quick(outbox, delivery=delivery), until_empty=True)
    tapes = [each.tape for each in recorder.recordings]
    assert len(tapes) == 4
    assert recorder.play() == sum(len(tape.entries) for tape in tapes)
    assert all(tape.at > 10 for tape in tapes)
    asked = {name for name, _, _ in tapes[2].entries}
    assert asked >= {"released.append", "table.read", "prober.submit", "shard.settle"}


def _refuse_and_publish(outbox: Outbox, **more: Any) -> None:
    create_topic(outbox, **{"max.message.bytes": "2000"})
    settings = quick(outbox, max_attempts=1000, batch_events=50, **more)
    with running(settings):
        write(outbox, *[(str(n % 7), {"n": n}) for n in range(300)])
        write(outbox, ("3", {"n": 300, "noise": NOISE}), *[("3", {"n": n}) for n in range(301, 320)])
        wait_until(lambda: len(parked_rows(outbox)) == 20, seconds=60, what="the refused and those behind it")
        change_topic(outbox, **{"max.message.bytes": "2000000"})
        wait_until(lambda: parked_rows(outbox) == [], seconds=60, what="all to be published")
        wait_until_relayed(outbox)


def test_a_sample_agrees(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a recording that ends within a call of the core."""
    recorder = Recorder(monkeypatch.setattr, limit=100)
    _refuse_and_publish(outbox)
    entries = [len(each.tape.entries) for each in recorder.recordings]
    assert all(100 <= count < 1_000 for count in entries)
    assert recorder.play() == sum(entries)


@pytest.mark.extended
def test_an_outage_agrees(outbox: Outbox, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against calls of the core by its driver that are not about a delivery."""
    route = IdempotentProducer._route
    outages = ["no broker answers"] * 3

    def fails(self: Any, *given: Any) -> Any:
        if outages:
            raise UnavailableError(outages.pop())
        return route(self, *given)

    monkeypatch.setattr(IdempotentProducer, "_route", fails)
    outbox.fill(20)
    service.relay(quick(outbox), until_empty=True)
    assert "gate.unavailable" in {name for name, _, _ in recorder.publishing[0].tape.entries}
    assert recorder.play() > 10


@pytest.mark.parametrize("delivery", either("at_least_once", "exactly_once"))
def test_a_takeover_in_an_outage_agrees(outbox: Outbox, recorder: Recorder, delivery: str) -> None:
    """Guards against a core to which all is played as if Kafka had been available at its start."""
    outbox.fill(20)
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET breaker = 'open', breaker_reason = 'no broker'")
    service.relay(quick(outbox, delivery=delivery), until_empty=True)
    assert recorder.play() > 10


def test_another_core_does_not_agree(
    outbox: Outbox, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a comparison that sees nothing in the publishing thread."""
    outbox.fill(300)
    service.relay(quick(outbox, batch_events=50), until_empty=True)
    monkeypatch.setattr(Publisher, "has_room", property(lambda self: not self._deliveries))
    with pytest.raises(DifferentError):
        recorder.play()


@pytest.mark.parametrize(
    ("change", "name"), [("_clear_marks", "clears nothing"), ("_release_large", "lets nothing go")]
)
def test_another_settling_core_does_not_agree(
    outbox: Outbox, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, change: str, name: str
) -> None:
    """Guards against a comparison that sees nothing in the settling thread."""
    _refuse_and_publish(outbox)
    monkeypatch.setattr(Retries, change, lambda self, *given: self._clock())
    with pytest.raises(DifferentError):
        recorder.play()
