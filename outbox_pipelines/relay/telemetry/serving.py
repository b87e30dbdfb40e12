"""The metrics of a relay, served over HTTP if a port is set; otherwise nothing is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outbox_pipelines.relay.telemetry.metrics import Metrics
from outbox_pipelines.settings import Settings


@contextmanager
def metrics(settings: Settings, on_serve: Callable[[str], None]) -> Iterator[Metrics]:
    """The relay's metrics; served over HTTP as long as the block, if a port is named.

    Args:
        on_serve: called with the URL.

    Raises:
        SetupError: the port cannot be opened.
    """
    if settings.metrics_port is None:
        yield Metrics()
        return
    from outbox_pipelines.relay.telemetry import prometheus

    with prometheus.serving(settings, settings.metrics_port) as (metrics, url):
        on_serve(url)
        yield metrics
