"""Relays many outboxes until it is stopped.

Invariants:
- An outbox that cannot be relayed is one line in the log and is tried again; the others go on.
- Only if none of them can be reached at the start is that an error.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.fleet.member import Member, Shared
from outbox_pipelines.relay.memory import return_large_blocks
from outbox_pipelines.relay.telemetry.metrics import Metrics
from outbox_pipelines.relay.totals import Totals
from outbox_pipelines.settings import Settings

_LOG = logging.getLogger(__name__)
# A thread that computes lets others go on after so long: a busy outbox delays each step of all others by it.
_SWITCH_SECONDS: Final = 0.001


def relay_all(
    outboxes: Sequence[Settings],
    *,
    stop: threading.Event,
    errors: Mapping[str, str] | None = None,
    on_take: Callable[[str, int], None] = lambda outbox, shard: None,
    metrics: Callable[[Settings], Metrics] = lambda settings: Metrics(),
) -> Totals:
    """Relay these outboxes until `stop` is set.

    Args:
        errors: by name, why further outboxes cannot be loaded.
        on_take: called with an outbox and the number of its shard that this process has taken.
        metrics: makes what counts the relay of an outbox.

    Raises:
        SetupError: none of the outboxes can be reached at the start.
    """
    for name, why in (errors or {}).items():
        _LOG.error("outbox %s: %s", name, why)
    if not outboxes:
        raise SetupError("no outbox can be relayed: see the lines above")
    return_large_blocks()
    sys.setswitchinterval(_SWITCH_SECONDS)
    states = _States(len(outboxes), stop)
    shared = Shared(len(outboxes), stop)
    members = [
        Member(
            settings,
            shared,
            lambda settings=settings: metrics(settings),  # type: ignore[misc]
            on_take=on_take,
            on_state=lambda why, name=settings.name: states.report(name, why),  # type: ignore[misc]
        )
        for settings in outboxes
    ]
    with shared.watcher:
        for member in members:
            member.start()
        stop.wait()
        for member in members:
            member.wake()
        for member in members:
            member.join()
    if states.none_works:
        raise SetupError("none of the outboxes can be relayed: see the lines above")
    totals = Totals()
    for member in members:
        totals += member.totals
    return totals


class _States:
    """What became of the first attempts; stops all if none succeeded."""

    def __init__(self, outboxes: int, stop: threading.Event) -> None:
        self._left = outboxes
        self._stop = stop
        self._lock = threading.Lock()
        self._failed: set[str] = set()
        self._is_decided = False
        self.none_works = False

    def report(self, name: str, why: str | None) -> None:
        with self._lock:
            if self._is_decided:
                return
            if why is None:
                self._is_decided = True
                return
            self._failed.add(name)
            if len(self._failed) == self._left:
                self._is_decided = self.none_works = True
                self._stop.set()
