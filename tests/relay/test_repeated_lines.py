"""Dead letters that are alike, their copies and their commands are not a line each."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.core.parked import Attempt, DeadLetter, Tried, Verdict
from outbox_pipelines.relay.kafka.topic_lookups import TopicLookups
from outbox_pipelines.relay.kafka.topic_state import TopicUnavailableError
from outbox_pipelines.relay.parking import notify
from outbox_pipelines.relay.parking.notify import DeadLetterRuns
from outbox_pipelines.relay.parking.prober import Prober
from outbox_pipelines.relay.telemetry.metrics import Metrics
from outbox_pipelines.settings import load_settings
from tests.conftest import wait_until


def _event(n: int, aggregate_type: str = "order") -> Event:
    given: dict[str, Any] = dict.fromkeys(Event._fields)
    given |= {"seq": n, "id": str(n), "aggregate_type": aggregate_type, "aggregate_id": str(n)}
    return Event(**{**given, "event_type": "order.placed", "payload": "{}"})


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_dead_letters_that_are_alike(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a line for each event of a topic that refuses them all."""
    counted: list[int] = []
    report = notify.reporter(cast("Metrics", SimpleNamespace(dead_lettered=lambda: counted.append(1))))
    for n in range(100):
        report(DeadLetter(_event(n), 5, "too large"))
    report(DeadLetter(_event(1), 5, "another error"))
    report(DeadLetter(_event(1, "invoice"), 5, "too large"))
    assert len(counted) == 102
    assert len(_lines(caplog)) == 3
    assert {getattr(each, "aggregate_id", None) for each in caplog.records} == {"0", "1"}


class _Topics:
    is_missing = True

    def find_for_trial(self, name: str, _seconds: float) -> SimpleNamespace:
        if self.is_missing:
            raise TopicUnavailableError(name, "does not exist")
        return SimpleNamespace(name=name)


def test_copies_that_cannot_be_sent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = _Topics()
    settings = load_settings(kafka="127.0.0.1:1", dead_letter_topics=True)
    prober = Prober(settings, cast("TopicLookups", topics))

    def copy(n: int) -> None:
        attempt = Attempt(_event(n), 4, is_last=True, is_replay=False)
        prober._copied(Tried(attempt, Verdict.REFUSED, "too large"))

    def produce(*given: Any) -> None:
        given[-1].args[1][given[-1].args[0].event.seq] = Tried(given[-1].args[0], Verdict.PUBLISHED)

    monkeypatch.setattr(prober, "_produce", produce)
    for n in range(100):
        copy(n)
    topics.is_missing = False
    copy(100)
    copy(101)
    first, last = _lines(caplog)
    assert "could not be copied to a dead letter topic: " in first
    assert last.startswith("dead letters are copied to order-events.dlq again after ")


def test_commands_that_fail(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    corrected = tmp_path / "corrected"
    runs = DeadLetterRuns(f"cat >/dev/null; test -e {corrected}", most=20)
    for n in range(20):
        runs.submit(n, "{}")
    wait_until(lambda: len(runs.under_way()) == 20 and runs.wait(0), what="the failed runs")
    corrected.touch()
    runs.submit(20, "{}")
    wait_until(lambda: runs.wait(0), what="the last run")
    runs.close()
    assert [each.partition(" after")[0] for each in _lines(caplog)] == [
        "OUTBOX_DEAD_LETTER_COMMAND failed with exit code 1",
        "OUTBOX_DEAD_LETTER_COMMAND succeeds again",
    ]
