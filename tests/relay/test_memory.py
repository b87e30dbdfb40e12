"""How seldom a relay is searched for garbage."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from outbox_pipelines.relay import service
from outbox_pipelines.relay.memory import collecting_rarely
from tests.conftest import Outbox


def _state() -> tuple[tuple[int, int, int], int]:
    return gc.get_threshold(), gc.get_freeze_count()


def test_a_running_relay_is_searched_rarely(outbox: Outbox) -> None:
    """Guards against an eighth of a drain, and pauses of 100 ms, spent on a search that finds nothing."""
    before, seen = _state(), []

    def note(_: Any) -> None:
        seen.append(_state())

    outbox.write("a", "b")
    service.relay(outbox.settings, until_empty=True, on_progress=note)
    thresholds, frozen = seen[-1]
    assert thresholds[0] >= 20_000
    assert frozen > 10_000
    assert _state() == before


def test_the_last_relay_of_a_process_restores_the_collector() -> None:
    """Guards against an application that keeps the settings of a relay which it has run."""
    before, entered, leave = _state(), threading.Event(), threading.Event()

    def other() -> None:
        with collecting_rarely():
            entered.set()
            leave.wait(600)

    thread = threading.Thread(target=other)
    with collecting_rarely():
        thread.start()
        assert entered.wait(600)
    assert gc.get_threshold() != before[0]
    assert gc.get_freeze_count() > 0
    leave.set()
    thread.join()
    assert _state() == before


def test_a_relay_that_starts_beside_others_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against relays that all stand still for 30 ms whenever one of them starts."""
    counts: list[int] = []
    count = gc.get_freeze_count

    def counted() -> int:
        counts.append(count())
        return counts[-1]

    monkeypatch.setattr(gc, "get_freeze_count", counted)
    with collecting_rarely(), collecting_rarely(), collecting_rarely():
        assert len(counts) == 1


def test_what_the_process_froze_stays_frozen() -> None:
    """Guards against an application whose own frozen objects are searched after a relay which it has run."""
    gc.freeze()
    with collecting_rarely():
        pass
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert frozen > 10_000
