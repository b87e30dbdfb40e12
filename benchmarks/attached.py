"""Whether the relay feels how many days are kept: its rate and its latency beside 16, 100 and 400 of them."""

from __future__ import annotations

from statistics import median, quantiles

import psycopg

from benchmarks import latency, programs
from benchmarks.past import ago, publish
from benchmarks.servers import fill, fresh_outbox, rewind
from benchmarks.table import Row
from outbox_pipelines.partitions import ahead
from outbox_pipelines.settings import Settings

_EVENTS = 400_000
_AHEAD = 14
_DAYS = (16, 100, 400)
_ROUNDS = 3


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    rows: list[Row] = []
    first = 0.0
    for days in _DAYS:
        with fresh_outbox(servers) as settings:
            _keep(settings, days)
            fill(settings, _EVENTS)
            rates = []
            for _ in range(_ROUNDS):
                rewind(settings)
                rates.append(programs.drain(settings).rate)
            with (
                latency.running(settings, "relay"),
                programs.running(settings, "benchmarks.load", settings.dsn, 1, 100),
            ):
                found = latency.listen(settings)
        rate = median(rates)
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
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        # Sealed they would be too; here it is about what is planned and read.
        connection.execute(
            "UPDATE outbox_days SET state = 'closed', sealed_at = now(), closed_at = now() "
            "WHERE day < current_date"
        )
