"""How a relay recovers a shard in exactly_once while Kafka is unavailable: it waits, as the owner."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.relay import worker
from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.run import ALONE, Run
from outbox_pipelines.relay.telemetry.metrics import Metrics
from tests.conftest import Outbox
from tests.relay.threads import quick

_ROW = "SELECT breaker, breaker_reason FROM outbox_shards"


class _Metrics(Metrics):
    def __init__(self) -> None:
        self.states: list[State] = []

    def breaker(self, state: State) -> None:
        self.states.append(state)


class _Kafka:
    """Says why it does not answer, attempt by attempt; None: it answers."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.asked = self.served = 0

    def connect(self) -> None:
        self.asked += 1
        if (reason := self.answers.pop(0)) is not None:
            raise UnavailableError(reason)

    def idle(self) -> None:
        self.served += 1


@pytest.fixture
def shard(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shard]:
    monkeypatch.setattr(worker, "recover", lambda settings, shard, on_error: "a producer")
    monkeypatch.setattr(worker, "FencingProducer", lambda settings, shard, first: first)
    monkeypatch.setattr(worker, "_RECOVERY_PAUSE", 0.0)
    place = Shard(outbox.settings, 0, "a relay")
    assert place.try_take()
    try:
        yield place
    finally:
        place.close()


def _run(**more: Any) -> Run:
    given: dict[str, Any] = {"stop": threading.Event(), "until_empty": False, "hand_over_after": None}
    ports = {"on_progress": lambda _: None, "on_dead_letter": lambda _: None, "host": ALONE}
    return Run(**given | ports | {"metrics": _Metrics()} | more)


def _recover(outbox: Outbox, shard: Shard, kafka: Any, run: Run) -> Any:
    return worker._recovered(quick(outbox, delivery="exactly_once"), shard, kafka, run)


def test_the_owner_shows_that_it_waits(
    outbox: Outbox, shard: Shard, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against an outage that nothing shows, one that stays shown, and a line for each attempt."""
    seen: list[Any] = []

    class Kafka(_Kafka):
        def connect(self) -> None:
            with outbox.connect() as connection:
                seen.append(connection.execute(_ROW).fetchone())
            super().connect()

    run, kafka = _run(), Kafka("first", "first", "second", None)
    with caplog.at_level("WARNING", "outbox_pipelines"):
        assert _recover(outbox, shard, kafka, run) == "a producer"
    # What its client reports would pile up.
    assert kafka.served == 3
    assert seen == [("closed", None), ("open", "first"), ("open", "first"), ("open", "second")]
    assert [record.getMessage() for record in caplog.records] == [
        "Kafka is unavailable: first",
        "Kafka is available again",
    ]
    assert isinstance(run.metrics, _Metrics)
    assert run.metrics.states == [State.CLOSED, State.OPEN, State.OPEN, State.CLOSED]
    with outbox.connect() as connection:
        assert connection.execute(_ROW).fetchone() == ("closed", None)


def test_what_the_owner_before_has_shown_stays(outbox: Outbox, shard: Shard) -> None:
    """Guards against an outage that is over while the next relay recovers the shard."""
    shard.show_breaker(State.OPEN, "an outage")
    successor = Shard(outbox.settings, 0, "another")
    shard.close()
    assert successor.try_take()
    run = _run()
    try:
        assert (successor.breaker, successor.breaker_reason) == (State.OPEN, "an outage")
        assert _recover(outbox, successor, _Kafka(None), run) == "a producer"
        assert successor.breaker is State.CLOSED
    finally:
        successor.close()
    assert isinstance(run.metrics, _Metrics)
    assert run.metrics.states == [State.OPEN, State.CLOSED]


@pytest.mark.parametrize("case", ["is stopped", "runs until empty", "hands over"])
def test_the_wait_ends(outbox: Outbox, shard: Shard, case: str) -> None:
    """Guards against a relay that cannot be stopped in an outage, and a run that never reports one."""
    run = _run(until_empty=case == "runs until empty", hand_over_after=0.0 if case == "hands over" else None)
    kafka = _Kafka("an outage", "an outage")
    successor = Shard(outbox.settings, 0, "another")
    try:
        assert successor.try_wait()
        if case == "is stopped":
            run.stop.set()
        with pytest.raises(UnavailableError, match="an outage"):
            _recover(outbox, shard, kafka, run)
    finally:
        successor.close()
    assert kafka.asked == 1
    assert run.stop.is_set() == (case != "runs until empty")
