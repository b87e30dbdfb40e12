"""One outbox of a fleet, without a server: which shards count as relayed by this process."""

from __future__ import annotations

import threading
from contextvars import copy_context

import pytest

from outbox_pipelines.relay.fleet.division import SETTLE_SECONDS, Division, Unit
from outbox_pipelines.relay.fleet.member import Member, Shared
from outbox_pipelines.relay.telemetry.metrics import Metrics
from outbox_pipelines.settings import load_settings


def test_a_relay_that_cannot_begin_leaves_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a shard that nothing relays because no thread could be started, and a raw end."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    now = [0.0]
    shared, unit = Shared(1, threading.Event()), Unit("orders", 0)
    shared.division = Division(1, lambda: now[0])
    now[0] = SETTLE_SECONDS
    assert shared.division.take(unit)
    settings = load_settings(name="orders")
    member = Member(settings, shared, Metrics, on_take=print, on_state=print)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError):
        member._start(unit)
    assert shared.division.take(unit)
    shared.stop.set()
    # As in a thread of its own: the name of the outbox in later lines of the log.
    copy_context().run(member._run)
