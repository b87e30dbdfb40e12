"""What a relay counts, and when: the worker calls this, per batch and never per event.

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
    """Counts nothing."""

    def reached(self) -> None:
        """Database and Kafka have answered: the relay takes its shard, or stands by for it."""

    def took(self, shard: int) -> None:
        """The process relays this shard from now on; what follows is about it."""

    def released(self) -> None:
        """It does not any more."""

    def acknowledged(self, complete: Iterable[Complete]) -> None:
        """Batches have become complete."""

    def settled(self, events: int, seconds: float, progress: Settled | None) -> None:
        """The position has moved over so many published events, which took the database so long."""

    def published(self, events: int) -> None:
        """So many parked events have been published, and their rows deleted."""

    def rejected(self, reasons: Iterable[str]) -> None:
        """Events were refused that were tried alone, each for one of these reasons."""

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
