"""Relays many outboxes until it is stopped.

Invariants:
- An outbox that cannot be relayed is logged in one line and tried again; the others continue.
- It is an error only if no outbox can be reached at the start.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.fleet.member import Member, Shared
from outbox_pipelines.relay.memory import return_large_blocks
from outbox_pipelines.relay.run import Totals
from outbox_pipelines.relay.telemetry.metrics import Metrics
from outbox_pipelines.settings import ProcessSettings

_LOG = logging.getLogger(__name__)
# Seconds after which a computing thread lets others run: a busy outbox delays the others' steps by them.
_SWITCH_SECONDS: Final = 0.001


def relay_all(
    outboxes: Sequence[ProcessSettings],
    *,
    stop: threading.Event,
    owner: str | None = None,
    errors: Mapping[str, str] | None = None,
    on_take: Callable[[str, int], None] = lambda outbox, shard: None,
    on_serve: Callable[[str], None] = lambda url: None,
) -> Totals:
    """Relay these outboxes until `stop` is set.

    Args:
        owner: identifies this process; None: host and process id.
        errors: by name, why further outboxes cannot be loaded.
        on_take: called with an outbox and the number of its shard that this process has taken.
        on_serve: called with the URL of the metrics, if the first outbox's settings name a port.

    Raises:
        SetupError: none of the outboxes can be reached at the start.
    """
    for name, why in (errors or {}).items():
        _LOG.error("%s: %s", name, why)
    if not outboxes:
        raise SetupError("no outbox can be relayed: see the lines above")
    return_large_blocks()
    sys.setswitchinterval(_SWITCH_SECONDS)
    states = _States(len(outboxes), stop)
    shared = Shared(len(outboxes), stop, owner)
    members: dict[str, Member] = {}
    with ExitStack() as process:
        metrics = process.enter_context(_metrics(outboxes, errors or {}, states, on_serve))
        process.enter_context(shared.watcher)
        for settings in outboxes:
            members[settings.name] = Member(
                settings,
                shared,
                partial(metrics, settings),
                on_take=on_take,
                on_state=partial(states.report, settings.name),
            )
        for member in members.values():
            member.start()
        stop.wait()
        for member in members.values():
            member.wake()
        for member in members.values():
            member.join()
    if states.none_works:
        raise SetupError("none of the outboxes can be relayed: see the lines above")
    totals = Totals()
    for member in members.values():
        totals += member.totals
    return totals


@contextmanager
def _metrics(
    outboxes: Sequence[ProcessSettings],
    errors: Iterable[str],
    states: _States,
    on_serve: Callable[[str], None],
) -> Iterator[Callable[[ProcessSettings], Metrics]]:
    if outboxes[0].metrics_port is None:
        yield lambda settings: Metrics()
        return
    from outbox_pipelines.relay.fleet import fleet_metrics

    with fleet_metrics.serving(outboxes, errors, lambda: states.has_reached, on_serve) as made:
        yield made


class _States:
    """The results of the first attempts; stops all if none succeeded."""

    def __init__(self, outboxes: int, stop: threading.Event) -> None:
        self._left = outboxes
        self._stop = stop
        self._lock = threading.Lock()
        self._failed: set[str] = set()
        self._is_decided = False
        self.none_works = False
        self.has_reached = False
        """Whether an outbox was reached."""

    def report(self, name: str, why: str | None) -> None:
        with self._lock:
            if self._is_decided:
                return
            if why is None:
                self._is_decided = self.has_reached = True
                return
            self._failed.add(name)
            if len(self._failed) == self._left:
                self._is_decided = self.none_works = True
                self._stop.set()
