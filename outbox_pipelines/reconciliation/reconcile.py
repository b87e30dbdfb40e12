"""Reconcile a day: its events, the topics, and each configured consumer.

Invariants:
- The steps run one after the other, so memory and the workspace's disk are those of one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from outbox_pipelines.core.replaced_file import require_replaceable
from outbox_pipelines.reconciliation import exchange as exchanges
from outbox_pipelines.reconciliation import reconciliation_sql, steps
from outbox_pipelines.reconciliation.report import Report
from outbox_pipelines.settings import Settings


def reconcile(
    settings: Settings,
    day: date,
    names: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
    handled: Path | None = None,
    slices: int = 1,
) -> Report:
    """Compare all events of a UTC day with the topics and with the consumers of the settings.

    Args:
        names: only these consumers; without names, all consumers of the settings.
        progress: called with a message about every million rows.
        handled: a Parquet file for when each consumer handled which event of the day.
        slices: compare this share of the ids at once.

    Raises:
        SetupError: a setting is missing or wrong, the outbox has no such day, its events do not exist, or the
            file cannot be written.
        UnavailableError: a database, the archive or Kafka does not answer.
    """
    if handled is not None:
        require_replaceable(handled)
    with exchanges.local() as exchange:
        of = steps.begin(settings, day, names, slices, exchange, progress)
        for step in of.readers:
            steps.read(settings, step, exchange, progress)
        for number in range(slices):
            steps.compare(settings, number, exchange, progress)
            exchange.discard(steps.COMPARED, number)
        for number in range(slices):
            steps.order(number, exchange)
        if handled is not None:
            with steps.handled(exchange) as space:
                space.write(reconciliation_sql.HANDLED, handled)
        return steps.merge(settings, exchange)
