"""The metrics of a relay for Prometheus, over HTTP.

Invariants:
- The registry is separate: it contains no other metrics of the process.
- A scrape succeeds in any state of the database, and waits for it `PATIENCE` at most. Metrics that cannot be
  read are absent, never stale.
- Names, types and descriptions are those of the lists in docs/metrics.md.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

import psycopg
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outbox_pipelines.core import metrics_server
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality import rules
from outbox_pipelines.quality.measurements import CAP, Measurements, ShardStatus
from outbox_pipelines.relay import kinds
from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.lease.shard import Settled
from outbox_pipelines.relay.telemetry.metrics import Metrics
from outbox_pipelines.settings import ProcessSettings

# Seconds within which several scrapes share one read.
FRESH: Final = 2.0
# Prometheus allows a scrape ten seconds by default.
PATIENCE: Final = 3.0
_STATES: Final = {State.CLOSED: 0, State.HALF_OPEN: 1, State.OPEN: 2}
_EVENTS: Final = (1, 10, 100, 500, 1_000, 2_500, 5_000, 10_000, 20_000)
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Families:
    """The metrics of a process that are counted, of all its outboxes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.is_ready = False
        """Whether a relay of the process has reached its servers."""
        shard = ["outbox", "shard"]
        self.held = Gauge(
            "outbox_shard_owned", "1 for the shard that this process owns", shard, registry=registry
        )
        self.published = Counter(
            "outbox_published_total", "Events published and settled", shard, registry=registry
        )
        self.rejected = Counter(
            "outbox_rejected_total",
            "Refusals of events that were tried alone (attempts)",
            [*shard, "reason"],
            registry=registry,
        )
        self.dead_lettered = Counter(
            "outbox_dead_lettered_total", "Events that became dead letters", shard, registry=registry
        )
        self.batch = Histogram(
            "outbox_batch_events",
            "Events per batch",
            shard,
            buckets=_EVENTS,
            registry=registry,
        )
        self.publish = Histogram(
            "outbox_publish_seconds",
            "Seconds until a batch is acknowledged",
            shard,
            buckets=_SECONDS,
            registry=registry,
        )
        self.settle = Histogram(
            "outbox_settle_seconds",
            "Seconds to move the position in the database, including heartbeats",
            shard,
            buckets=_SECONDS,
            registry=registry,
        )
        self.latency = Gauge(
            "outbox_latency_seconds",
            "Seconds from commit to settled, for the newest settled event",
            shard,
            registry=registry,
        )
        self.breaker = Gauge(
            "outbox_breaker_state",
            "Circuit breaker to Kafka: 0 closed (normal), 1 half-open, 2 open (Kafka is unavailable)",
            shard,
            registry=registry,
        )


class Registered(Metrics):
    """Counts what one relay does: for one shard at a time.

    Args:
        families: of the process.
        outbox: the outbox's name.
    """

    def __init__(self, families: Families, outbox: str) -> None:
        self._to = families
        self._outbox = outbox
        self._shard = ""

    def reached(self) -> None:
        self._to.is_ready = True

    def took(self, shard: int) -> None:
        self._shard = str(shard)
        self._to.held.labels(self._outbox, self._shard).set(1)
        # From the start, so that the first increase is visible.
        self._to.published.labels(self._outbox, self._shard)
        self._to.dead_lettered.labels(self._outbox, self._shard)
        self.breaker(State.CLOSED)

    def returned(self) -> None:
        if self._shard:
            self._to.held.labels(self._outbox, self._shard).set(0)
            # From now on another relay reports these.
            for gauge in (self._to.breaker, self._to.latency):
                with suppress(KeyError):
                    gauge.remove(self._outbox, self._shard)
            self._shard = ""

    def acknowledged(self, complete: Iterable[Complete]) -> None:
        now = time.monotonic()
        for batch in complete:
            if len(batch.batch.events) > len(batch.parked_events()):
                self._to.batch.labels(self._outbox, self._shard).observe(len(batch.batch.events))
                self._to.publish.labels(self._outbox, self._shard).observe(now - batch.begun_at)

    def settled(self, events: int, seconds: float, progress: Settled | None) -> None:
        self._to.settle.labels(self._outbox, self._shard).observe(seconds)
        self.published(events)
        if progress is not None and progress.latency is not None:
            self._to.latency.labels(self._outbox, self._shard).set(progress.latency)

    def published(self, events: int) -> None:
        self._to.published.labels(self._outbox, self._shard).inc(events)

    def rejected(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            # The text before the colon is a Kafka error code or an exception name: few distinct values.
            self._to.rejected.labels(self._outbox, self._shard, reason.partition(":")[0]).inc()

    def dead_lettered(self) -> None:
        self._to.dead_lettered.labels(self._outbox, self._shard).inc()

    def breaker(self, state: State) -> None:
        self._to.breaker.labels(self._outbox, self._shard).set(_STATES[state])


class Reading:
    """The measurements of one outbox, read again when they are old."""

    def __init__(self, settings: ProcessSettings) -> None:
        self.settings = settings
        self.asked_at = -math.inf
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._found_at = -math.inf
        self._found: Measurements | None = None

    @property
    def is_asking(self) -> bool:
        """Whether an answer of the database is outstanding."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, fresh: float) -> None:
        """Query the database in a thread, unless a query is running or began within `fresh` seconds."""
        with self._lock:
            if not self.is_asking and time.monotonic() - self.asked_at > fresh:
                self.asked_at = time.monotonic()
                # In a thread, because nothing limits the wait for a database that hangs.
                self._thread = threading.Thread(target=self._ask, name="outbox-metrics", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> Measurements | None:
        """Return the answer; None if the database does not answer in time."""
        thread = self._thread
        if thread is not None:
            thread.join(max(0.0, seconds))
        return None if self.is_asking else self._found

    def latest(self, oldest: float) -> Measurements | None:
        """Return the last answer, if it is at most `oldest` seconds old."""
        return self._found if time.monotonic() - self._found_at <= oldest else None

    def _ask(self) -> None:
        found = None
        try:
            with suppress(SetupError, psycopg.Error):
                found = kinds.of(self.settings).measure(self.settings)
        finally:
            # Also after any other error, which the thread reports: an old answer would look like a new one.
            self._found, self._found_at = found, time.monotonic()


class DatabaseCollector(Collector):
    """Metrics of all shards of an outbox, read from the database at each scrape."""

    def __init__(self, settings: ProcessSettings) -> None:
        self._reading = Reading(settings)

    def describe(self) -> Iterable[Metric]:
        return self._families(None)

    def collect(self) -> Iterable[Metric]:
        self._reading.begin(FRESH)
        return self._families(self._reading.wait(PATIENCE))

    def _families(self, found: Measurements | None) -> list[Metric]:
        settings = self._reading.settings
        return [configured({settings.name: True}), *families([(settings, found)])]


_DEAD_LETTERS: Final = "outbox_dead_letters"
# Metrics of the whole outbox: name, description, and how to get the value.
_OF_THE_OUTBOX: Final[tuple[tuple[str, str, Callable[[Measurements], float]], ...]] = (
    (
        "outbox_parked_events",
        "Events that wait for a retry, and later events of their aggregates",
        lambda found: found.parked,
    ),
    (
        "outbox_blocked_aggregates",
        "Aggregates that have parked events",
        lambda found: found.blocked_aggregates,
    ),
    (
        _DEAD_LETTERS,
        "Dead letters that are neither replayed nor discarded",
        lambda found: found.dead_letters,
    ),
    (
        "outbox_delayed_events",
        "Delayed events",
        lambda found: found.delayed,
    ),
    (
        "outbox_delayed_overdue_seconds",
        "Seconds since the oldest delayed event that is not moved yet was due",
        lambda found: found.delayed_overdue_seconds,
    ),
    (
        "outbox_replay_silent_seconds",
        "Seconds for which a running replay has reported nothing",
        lambda found: found.replay_silent_seconds,
    ),
    (
        "outbox_partitions_ahead",
        "Whole days from tomorrow on that have a partition, up to the first that has none",
        lambda found: found.partitions_ahead,
    ),
    (
        "outbox_partitions_detached",
        "Days whose partition is detached: their events are not visible",
        lambda found: found.days_detached,
    ),
    ("outbox_table_bytes", "Size of the outbox's partitions, with indexes", lambda found: found.table_bytes),
    (
        "outbox_idempotency_keys",
        "Idempotency keys stored (approximate)",
        lambda found: found.idempotency_keys,
    ),
    (
        "outbox_idempotency_keys_bytes",
        "Size of the table of idempotency keys",
        lambda found: found.idempotency_keys_bytes,
    ),
    (
        "outbox_slot_log_bytes",
        "Most bytes of its log that the server keeps for a replication slot of the database",
        lambda found: found.slot_log[0],
    ),
    (
        "outbox_slot_problems",
        "Problems with the outbox's replication slot: see `outbox cdc status`",
        lambda found: len(found.slot_problems),
    ),
    (
        "outbox_connector_problems",
        "Problems with Debezium's connector (OUTBOX_CONNECT_URL): see `outbox debezium status`",
        lambda found: len(found.connector_problems),
    ),
    (
        "outbox_connector_unconfirmed_age_seconds",
        "Age of the oldest event that Debezium's connector has not confirmed",
        lambda found: found.unconfirmed_seconds,
    ),
    (
        "outbox_oldest_transaction_age_seconds",
        "Age of the oldest open transaction of this database that the relay's role may see",
        lambda found: found.oldest_transaction_seconds,
    ),
)
_OF_A_SHARD: Final[tuple[tuple[str, str, Callable[[ShardStatus], float]], ...]] = (
    (
        "outbox_unpublished_events",
        f"Committed events that are not published yet, counted up to {CAP}",
        lambda shard: shard.backlog,
    ),
    (
        "outbox_oldest_unpublished_age_seconds",
        "Age of the oldest unpublished event",
        lambda shard: shard.oldest_seconds,
    ),
    (
        "outbox_shard_unowned_seconds",
        "Seconds for which the shard has had no active relay",
        lambda shard: shard.unowned_seconds,
    ),
    (
        "outbox_shard_standby",
        "1 if the shard has a standby",
        lambda shard: shard.successor_waits,
    ),
)


def configured(outboxes: Mapping[str, bool]) -> Metric:
    """Return what is known without a database: by name, whether the outbox's settings can be used."""
    family = GaugeMetricFamily(
        "outbox_configured",
        "1 for an outbox to relay; 0 if its settings cannot be used: see the log",
        labels=["outbox"],
    )
    for name, is_usable in outboxes.items():
        family.add_metric([name], is_usable)
    return family


def families(outboxes: Iterable[tuple[ProcessSettings, Measurements | None]]) -> list[Metric]:
    """Return the metrics of outboxes; of one whose database does not answer only that."""
    up = GaugeMetricFamily(
        "outbox_database_up",
        "1 if the database answered this scrape",
        labels=["outbox"],
    )
    late = GaugeMetricFamily(
        "outbox_partitions_late",
        "Days for which this maintenance step (close, archive, drop) is a day or more overdue",
        labels=["outbox", "step"],
    )
    states = GaugeMetricFamily(
        "outbox_check_status",
        "Result of the check in `outbox status`: 0 ok, 1 warn, 2 error",
        labels=["outbox", "check"],
    )
    of_shards = [
        (GaugeMetricFamily(name, meaning, labels=["outbox", "shard"]), value)
        for name, meaning, value in _OF_A_SHARD
    ]
    of_outboxes = [
        (GaugeMetricFamily(name, meaning, labels=["outbox"]), value)
        for name, meaning, value in _OF_THE_OUTBOX
    ]
    for settings, found in outboxes:
        outbox = settings.name
        up.add_metric([outbox], 1 if found else 0)
        if found is None:
            continue
        for family, of_shard in of_shards:
            for shard in found.shards:
                family.add_metric([outbox, str(shard.shard)], of_shard(shard))
        for family, of_outbox in of_outboxes:
            # A table has no days and no keys: 0 would mean that they are missing.
            if found.has_days or family.name == _DEAD_LETTERS:
                family.add_metric([outbox], of_outbox(found))
        if found.has_days:
            late.add_metric([outbox, "close"], found.days_late.to_close)
            late.add_metric([outbox, "archive"], found.days_late.to_archive)
            late.add_metric([outbox, "drop"], found.days_late.to_drop)
        for result in rules.judge(settings, found):
            states.add_metric([outbox, result.rule.name], result.status)
    of_all = [*of_shards, *of_outboxes]
    return [up, *(family for family, _ in of_all), late, states]


@contextmanager
def serving(settings: ProcessSettings, port: int) -> Iterator[tuple[Metrics, str]]:
    """Serve metrics while the block runs; yield them and their URL.

    Args:
        port: 0 for any free port.

    Raises:
        SetupError: the port cannot be opened.
    """
    registry = CollectorRegistry()
    to = Families(registry)
    registry.register(DatabaseCollector(settings))
    with metrics_server.serving(
        registry, settings.metrics_address, port, is_ready=lambda: to.is_ready
    ) as url:
        yield Registered(to, settings.name), url
