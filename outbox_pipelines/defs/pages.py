"""Text of events on Dagster's pages, which load what it names: an image there can launch a job.

Invariants:
- What may contain text of an event is not Markdown: a description is escaped (`text.markdown`), a report is a
  table.
- Such text is one line in tables, logs and failures (`text.plain`): they are shown on terminals, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from outbox_pipelines.core.text import plain


def report(lines: Iterable[str]) -> dg.TableMetadataValue:
    """Return lines as metadata."""
    return table([{"report": line} for line in lines], "report")


def table(rows: Sequence[Mapping[str, Any]], *columns: str) -> dg.TableMetadataValue:
    """Return rows as metadata.

    Args:
        columns: in their order; those of the first row if none are given.
    """
    names = columns or tuple(next(iter(rows), {"": ""}))
    return dg.MetadataValue.table(
        [
            dg.TableRecord({name: plain(it) if isinstance(it, str) else it for name, it in row.items()})
            for row in rows
        ],
        schema=dg.TableSchema([dg.TableColumn(name) for name in names]),
    )
