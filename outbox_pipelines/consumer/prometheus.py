"""Export the metrics of a consumer to Prometheus: in the application's registry, or on a separate port.

    prometheus_client.REGISTRY.register(ConsumerCollector(consumer))    # in the application's registry

    with serving(consumer, 9188):                                       # on a separate port
        consumer.run()

Invariants:
- A scrape reads recorded values: it queries neither Kafka nor the database, and never waits.
- Names, types and meanings are those of the lists in docs/metrics.md. Labels are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outbox_pipelines.consumer.base_consumer import BaseConsumer
from outbox_pipelines.consumer.figures import BOUNDS, Counts, Figures
from outbox_pipelines.core import metrics_server

MOST_TYPES: Final = 20
OTHER: Final = "(other)"
_LONGEST_TYPE: Final = 100
_PLAIN: Final = (
    "handled",
    "duplicates",
    "received",
    "failures",
    "dead_letters",
    "outages",
    "skipped_replays",
)
_RENAMED: Final = {"dead_letters": "dead_lettered"}
# The description, and the labels in addition to `source`.
_COUNTERS: Final = {
    "handled": ["Events whose handler succeeded"],
    "duplicates": ["Events that were already handled or received"],
    "ignored": ["Events of types without a handler; of the first 20 types, and all others", "event_type"],
    "skipped_replays": ["Replayed events that no handler takes"],
    "received": ["Events written to the inbox: failed, behind a failed event, or by receive()"],
    "failures": ["Failed attempts"],
    "dead_lettered": ["Events that became dead letters"],
    "outages": ["Times that a handler was paused because a service it needs was unavailable"],
}
_GAUGES: Final = {
    "running": ["1 while the consumer runs"],
    "progress_age_seconds": ["Time since the consumer last polled for messages or finished one"],
    "breaker_open": ["1 while a handler is paused because a service it needs is unavailable", "handler"],
    "unmatched_type": ["1 for a type with a handler that has received no event in this run", "event_type"],
    "lag_messages": ["Messages of a partition of this process that are not yet read", "topic", "partition"],
    "inbox_waiting_events": ["Events waiting in the inbox, counted up to 100000"],
    "inbox_oldest_age_seconds": ["Age of the oldest event waiting in the inbox"],
    "dead_letters": ["Dead letters not yet replayed or discarded, counted up to 100000"],
}


class ConsumerCollector(Collector):
    """Collects the metrics of this process's consumers: one collector per registry, a `source` for each."""

    def __init__(self, *consumers: BaseConsumer[Any, Any]) -> None:
        self._consumers = consumers
        for each in consumers:
            each.measure()

    def describe(self) -> Iterable[Metric]:
        # Otherwise registration collects all metrics once.
        return []

    def collect(self) -> Iterable[Metric]:
        families = _families()
        for each in self._consumers:
            _count(families, each.source, each.counts)
            _measure(families, each.source, each.figures)
        return families.values()


@contextmanager
def serving(consumer: BaseConsumer[Any, Any], port: int, address: str = "127.0.0.1") -> Iterator[str]:
    """Serve a consumer's metrics during the block, and yield their URL.

    Args:
        port: 0 for any free port.
        address: anyone who reaches it can read the metrics.

    Raises:
        SetupError: the port cannot be opened.
    """
    registry = CollectorRegistry()
    registry.register(ConsumerCollector(consumer))
    with metrics_server.serving(registry, address, port) as url:
        yield url


def _families() -> dict[str, Any]:
    """Return empty metric families by the suffix of their names."""
    made: dict[str, Any] = {
        name: CounterMetricFamily(f"outbox_consumer_{name}_total", meaning, labels=["source", *labels])
        for name, (meaning, *labels) in _COUNTERS.items()
    }
    made["handler_seconds"] = HistogramMetricFamily(
        "outbox_consumer_handler_seconds", "Duration of a handler's calls", labels=["source", "handler"]
    )
    made |= {
        name: GaugeMetricFamily(f"outbox_consumer_{name}", meaning, labels=["source", *labels])
        for name, (meaning, *labels) in _GAUGES.items()
    }
    return made


def _count(families: Mapping[str, Any], source: str, counts: Counts) -> None:
    for name in _PLAIN:
        families[_RENAMED.get(name, name)].add_metric([source], getattr(counts, name))
    for event_type, count in _few(counts.ignored_types, counts.ignored).items():
        families["ignored"].add_metric([source, event_type], count)


def _measure(families: Mapping[str, Any], source: str, figures: Figures) -> None:
    families["running"].add_metric([source], int(figures.is_running))
    for handler, calls in list(figures.calls.items()):
        bounds = [*map(str, BOUNDS), "+Inf"]
        counts = [*map(float, accumulate(calls.counts))]
        families["handler_seconds"].add_metric(
            [source, handler], [*zip(bounds, counts, strict=True)], calls.seconds
        )
    if not figures.is_running:
        # Values of a consumer that does not run are stale.
        return
    families["progress_age_seconds"].add_metric([source], time.monotonic() - figures.progress_at)
    for handler, is_open in list(figures.breakers.items()):
        families["breaker_open"].add_metric([source, handler], int(is_open))
    for event_type in sorted(figures.unseen)[:MOST_TYPES]:
        families["unmatched_type"].add_metric([source, event_type], 1)
    for (topic, partition), behind in figures.lag.items():
        families["lag_messages"].add_metric([source, topic, str(partition)], behind)
    if (backlog := figures.backlog) is not None:
        families["inbox_waiting_events"].add_metric([source], backlog.waiting)
        families["inbox_oldest_age_seconds"].add_metric([source], backlog.oldest_seconds or 0)
        families["dead_letters"].add_metric([source], backlog.dead_letters)


def _few(types: Mapping[str, int], total: int) -> dict[str, int]:
    """Yield the first types that occurred, and the sum of all others."""
    few: dict[str, int] = {}
    for event_type, count in types.items():
        name = event_type[:_LONGEST_TYPE].encode(errors="replace").decode()
        if len(few) < MOST_TYPES or name in few:
            few[name] = few.get(name, 0) + count
    if rest := total - sum(few.values()):
        few[OTHER] = few.get(OTHER, 0) + rest
    return few
