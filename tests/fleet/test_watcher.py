"""The thread that waits for events on behalf of all readers, without a server."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from outbox_pipelines.relay.fleet.watcher import Watcher


def _reader(every: Any) -> Any:
    ending = {"until": 0.0, "ending": lambda: True, "connection": None, "sequence": None}
    return SimpleNamespace(database="orders", every=every, woken=threading.Event(), error=None, **ending)


def test_a_failure_is_that_of_the_readers_of_its_round() -> None:
    """Guards against a process that lives, answers probes, and never relays again after one failure."""

    def fails(now: float) -> float:
        raise KeyError("unexpected")

    failing, next_one = _reader(fails), _reader(lambda now: 0.01)
    with Watcher() as watcher:
        for reader in (failing, next_one):
            watcher.lend(reader)
            assert reader.woken.wait(60)
    assert isinstance(failing.error, KeyError)
    assert next_one.error is None
    late = _reader(lambda now: 0.01)
    watcher.lend(late)
    assert isinstance(late.error, RuntimeError)
