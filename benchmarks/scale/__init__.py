"""How the relay behaves as things grow: backlog, days, blocked aggregates, an open transaction, a high rate.

Invariants:
- Each factor has sizes ten apart; a figure has its ratio to the same figure one size smaller.
- Rows are written by the outbox's own table, in transactions of its own database: ids and positions are real.
"""

from __future__ import annotations

from benchmarks.quick import sized
from benchmarks.scale import backlog, blocked, days, late, steady
from benchmarks.scale.sizes import FULL, SMALL
from benchmarks.table import Row
from outbox_pipelines.settings import Settings


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    sizes = sized(FULL, SMALL)
    return [row for part in (backlog, days, blocked, late, steady) for row in part.measure(servers, sizes)]
