"""The metrics of a fleet for Prometheus: those of a relay, for several outboxes.

Invariants:
- Each process reports every outbox, also one that other processes relay: these may serve no metrics.
- It also reports of one that it cannot load that it is configured.
- A scrape asks a part of the databases, in turn, and waits `PATIENCE` for them together. Answers of earlier
  scrapes are reported until they are `OLDEST`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outbox_pipelines.core import metrics_server
from outbox_pipelines.relay.telemetry.exporter import (
    FRESH,
    PATIENCE,
    Families,
    Reading,
    Registered,
    configured,
    families,
)
from outbox_pipelines.relay.telemetry.metrics import Metrics
from outbox_pipelines.settings import ProcessSettings

OLDEST: Final = 300.0
_AT_LEAST: Final = 8
_PART: Final = 4
# A read takes some 50 ms of CPU here and in the database: each of 100 outboxes is read once in 50 s at most.
_PACE_SECONDS: Final = 0.5


class Databases(Collector):
    """Metrics that are read from the databases.

    Args:
        errors: by name, why further outboxes cannot be loaded.
    """

    def __init__(self, outboxes: Sequence[ProcessSettings], errors: Iterable[str]) -> None:
        self._configured = {settings.name: True for settings in outboxes} | dict.fromkeys(errors, False)
        self._readings = [Reading(settings) for settings in outboxes]

    def describe(self) -> Iterable[Metric]:
        return [configured({}), *families([])]

    def collect(self) -> Iterable[Metric]:
        until = time.monotonic() + PATIENCE
        most = max(_AT_LEAST, math.ceil(len(self._readings) / _PART))
        asked = sorted(self._readings, key=lambda reading: reading.asked_at)[:most]
        fresh = max(FRESH, _PACE_SECONDS * len(self._readings))
        for reading in asked:
            reading.begin(fresh)
        for reading in asked:
            reading.wait(until - time.monotonic())
        known = [reading for reading in self._readings if reading.asked_at > -math.inf]
        measured = families((reading.settings, reading.latest(OLDEST)) for reading in known)
        return [configured(self._configured), *measured]


@contextmanager
def serving(
    outboxes: Sequence[ProcessSettings],
    errors: Iterable[str],
    is_ready: Callable[[], bool],
    on_serve: Callable[[str], None],
) -> Iterator[Callable[[ProcessSettings], Metrics]]:
    """Serve metrics while the block runs, on the port of the first outbox; yield what makes a relay's.

    Args:
        errors: by name, why further outboxes cannot be loaded.
        is_ready: whether the process has reached one of the outboxes.
        on_serve: called with the URL.

    Raises:
        SetupError: the port cannot be opened.
    """
    registry = CollectorRegistry()
    to = Families(registry)
    registry.register(Databases(outboxes, errors))
    port = outboxes[0].metrics_port
    assert port is not None
    with metrics_server.serving(registry, outboxes[0].metrics_address, port, is_ready) as url:
        on_serve(url)
        yield lambda settings: Registered(to, settings.name)
