"""The core repeats what it did in a real relay if it is given the same input again."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_pipelines.relay import publishing, service, worker
from outbox_pipelines.relay.core.publisher import Publisher
from tests.conftest import Outbox, wait_until
from tests.model.relay.tape import DifferentError, Recording
from tests.relay.parked import parked_rows, write
from tests.relay.threads import quick, running, wait_until_relayed
from tests.relay.topic import NOISE, change_topic, create_topic


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    found: list[Recording] = []

    def flow(
        publisher: Publisher,
        *ports: Any,
        until_empty: bool,
        on_complete: Any,
        report_poll: float,
        **more: Any,
    ) -> Any:
        recording = Recording(publisher, until_empty=until_empty)
        if hasattr(publisher, "_tick"):
            recording.begins_at = starts.pop()
        found.append(recording)
        names = ("batches", "ledger", "blocked", "retries", "crash_guard")
        real = dict(zip(names, ports, strict=True)) | more
        flags = {"until_empty": until_empty, "on_complete": on_complete, "report_poll": report_poll}
        return recording.flow(publisher, real, flags)

    starts: list[Any] = []
    made = publishing.make_publisher

    def publisher(settings: Any, place: Any, producer: Any, blocked: Any) -> Publisher:
        starts.append((place.position, place.tick_id))
        return made(settings, place, producer, blocked)

    monkeypatch.setattr(publishing, "make_publisher", publisher)
    monkeypatch.setattr(worker, "Flow", flow)
    return found


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_a_real_relay_and_the_core_agree(outbox: Outbox, recordings: list[Recording], delivery: str) -> None:
    """Guards against a model whose drivers behave in another way than the real ones."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    settings = quick(outbox, delivery=delivery, max_attempts=1000, batch_events=50)
    with running(settings):
        write(outbox, *[(str(n % 7), {"n": n}) for n in range(300)])
        write(outbox, ("3", {"n": 300, "noise": NOISE}), *[("3", {"n": n}) for n in range(301, 320)])
        wait_until(lambda: len(parked_rows(outbox)) == 20, seconds=60, what="the refused and those behind it")
        change_topic(outbox, **{"max.message.bytes": "2000000"})
        wait_until(lambda: parked_rows(outbox) == [], seconds=60, what="all to be published")
        wait_until_relayed(outbox)
    service.relay(settings, until_empty=True)
    assert len(recordings) == 2
    for recording in recordings:
        assert len(recording.tape.entries) > 10
        recording.play()
        assert recording.tape.at == len(recording.tape.entries)


def test_another_core_does_not_agree(
    outbox: Outbox, recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a comparison that sees nothing."""
    outbox.fill(300)
    service.relay(quick(outbox, batch_events=50), until_empty=True)
    monkeypatch.setattr(Publisher, "has_room", property(lambda self: not self._deliveries))
    with pytest.raises(DifferentError):
        recordings[0].play()
