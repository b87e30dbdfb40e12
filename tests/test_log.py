"""A line that repeats is logged once, then as a count each minute, and once more when its cause has ended."""

from __future__ import annotations

import logging

import pytest

from outbox_pipelines.core import log
from outbox_pipelines.core.log import RepeatedLines


class Clock:
    """A time that tests set."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    return clock


def test_a_repeated_line_is_counted_each_minute(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    lines = RepeatedLines(logging.getLogger("outbox_pipelines.test"))
    for _ in range(1263):
        lines.log("broker", "Kafka: broker %d refused", 1)
        clock.now += 0.125
    lines.log("other", "Kafka: other")
    clock.now += 1
    lines.end("broker", "Kafka is available")
    lines.end("broker", "Kafka is available")
    lines.log("broker", "Kafka: broker %d refused", 2)
    assert [each.getMessage() for each in caplog.records] == [
        "Kafka: broker 1 refused",
        "Kafka: broker 1 refused (480 times in 60 s)",
        "Kafka: broker 1 refused (480 times in 60 s)",
        "Kafka: other",
        "Kafka is available after 158.9 s",
        "Kafka: broker 2 refused",
    ]


def test_a_kind_that_never_began_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    lines = RepeatedLines(logging.getLogger("outbox_pipelines.test"))
    lines.end("broker", "Kafka is available")
    assert "broker" not in lines
    assert not caplog.records


def test_old_kinds_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    lines = RepeatedLines(logging.getLogger("outbox_pipelines.test"))
    for n in range(1000):
        lines.log(n, "%d", n)
    assert len(caplog.records) == 1000
    assert [n for n in range(1000) if n in lines] == list(range(900, 1000))
