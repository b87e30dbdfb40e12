"""Chooses what observes each event: a log line, a span, both, or nothing.

Invariants:
- Decided once per worker: without an observer, an event costs one comparison.
"""

from __future__ import annotations

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.kafka.encoding import Headers
from outbox_pipelines.relay.telemetry import event_log, tracing
from outbox_pipelines.relay.telemetry.observer import Observe, Report
from outbox_pipelines.settings import Settings


def observer(settings: Settings) -> Observe | None:
    """Return the observer of each event; None without one.

    Raises:
        SetupError: what the settings ask for is not installed.
    """
    observers: list[Observe] = []
    if settings.tracing:
        observers.append(tracing.observer(settings))
    if event_log.is_on():
        observers.append(event_log.observe)
    if len(observers) < 2:
        return observers[0] if observers else None

    def all_of_them(event: Event, topic: str, headers: Headers, report: Report) -> tuple[Report, Headers]:
        for observe in observers:
            report, headers = observe(event, topic, headers, report)
        return report, headers

    return all_of_them
