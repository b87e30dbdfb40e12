"""What a relay counts, and when: the worker calls this, per batch and never per event.

Invariants:
- Where nobody asked for metrics, this class counts nothing and `prometheus_client` is not imported: decided
  once, when the relay starts.
- Nothing here fails or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.shards.ownership import Settled
from outbox_pipelines.settings import Settings


class Metrics:
    """Counts nothing."""

    def took(self, shard: int) -> None:
        """The process relays this shard from now on; what follows is about it."""

    def released(self) -> None:
        """It does not any more."""

    def acknowledged(self, complete: Iterable[Complete]) -> None:
        """BatchQueue have become complete."""

    def settled(self, events: int, seconds: float, progress: Settled | None) -> None:
        """The position has moved over so many published events, which took the database so long."""

    def published(self, events: int) -> None:
        """So many parked events have been published, and their rows deleted."""

    def rejected(self, reasons: Iterable[str]) -> None:
        """Events were refused that were tried alone, each for one of these reasons."""

    def dead_lettered(self) -> None:
        """An event was given up."""

    def breaker(self, state: State) -> None:
        """The way to Kafka is in another state."""


@contextmanager
def serving(settings: Settings, on_serve: Callable[[str], None]) -> Iterator[Metrics]:
    """The relay's metrics; served over HTTP as long as the block, if a port is named.

    Args:
        on_serve: told the URL.

    Raises:
        SetupError: the port cannot be had.
    """
    if settings.metrics_port is None:
        yield Metrics()
        return
    from outbox_pipelines.relay.telemetry import prometheus

    with prometheus.serving(settings, settings.metrics_port) as (metrics, url):
        on_serve(url)
        yield metrics
