"""Whether the relay feels how many days are kept: its rate and its latency beside 16, 100 and 400 of them."""

from __future__ import annotations

from statistics import median, quantiles

from benchmarks import latency, programs
from benchmarks.past import ago, count_as_closed, publish
from benchmarks.servers import fill, fresh_outbox
from benchmarks.table import Row
from outbox_pipelines.days.partitions import ahead
from outbox_pipelines.settings import Settings

_EVENTS = 400_000
_AHEAD = 14
_DAYS = (16, 100, 400)


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    rows: list[Row] = []
    first = 0.0
    for days in _DAYS:
        with fresh_outbox(servers) as settings:
            _keep(settings, days)
            fill(settings, _EVENTS)
            rate = programs.drain_rate(settings)
            with (
                latency.running(settings, "relay"),
                programs.running(settings, "benchmarks.load", settings.dsn, 1, 100),
            ):
                found = latency.listen(settings)
        first = first or rate
        rows.append(
            Row(
                f"relay beside {days} days",
                f"{rate:,.0f} events/s; at 100/s p50 {median(found) * 1000:.1f} ms, "
                f"p99 {quantiles(found, n=100)[98] * 1000:.1f} ms",
                f"{rate / first:.2f} ×",
                "flat within 10 %",
            )
        )
    return rows


def _keep(settings: Settings, days: int) -> None:
    """So many days attached, today's and those ahead included; those that are over closed."""
    past = days - 1 - _AHEAD
    ahead.ensure(settings, _AHEAD, ago(past))
    publish(settings)
    count_as_closed(settings)
