"""The relay's counters; the worker updates them per batch, never per event.

Invariants:
- Without OUTBOX_METRICS_PORT, nothing is counted or served, and `prometheus_client` is not imported: decided
  once, when the relay starts.
- Nothing here fails or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.lease.shard import Settled
from outbox_pipelines.settings import ProcessSettings


class Metrics:
    """Counters that count nothing."""

    def reached(self) -> None:
        """Record that database and Kafka have answered: the relay owns its shard, or is a standby for it."""

    def took(self, shard: int) -> None:
        """Record that the process owns this shard: the following calls are about it."""

    def returned(self) -> None:
        """Record that the process no longer owns its shard."""

    def acknowledged(self, complete: Iterable[Complete]) -> None:
        """Count the events of complete batches."""

    def settled(self, events: int, seconds: float, progress: Settled | None) -> None:
        """Record that a settle covered `events` published events in `seconds`."""

    def published(self, events: int) -> None:
        """Count parked events that have been published."""

    def rejected(self, reasons: Iterable[str]) -> None:
        """Count events that were refused when tried alone, by reason."""

    def dead_lettered(self) -> None:
        """Count an event that became a dead letter."""

    def breaker(self, state: State) -> None:
        """Record a new state of the circuit breaker."""


@contextmanager
def serving(settings: ProcessSettings, on_serve: Callable[[str], None]) -> Iterator[Metrics]:
    """Yield the relay's metrics; serve them over HTTP while the block runs, if a port is set.

    Args:
        on_serve: called with the URL.

    Raises:
        SetupError: the port cannot be opened.
    """
    if settings.metrics_port is None:
        yield Metrics()
        return
    from outbox_pipelines.relay.telemetry import exporter

    with exporter.serving(settings, settings.metrics_port) as (counted, url):
        on_serve(url)
        yield counted
