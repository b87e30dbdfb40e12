"""Text of events on Dagster's pages, which load what it names: an image there can launch a job.

Invariants:
- What may contain text of an event is not Markdown: a description is escaped (`text.markdown`), a report is a
  table.
"""

from __future__ import annotations

from collections.abc import Iterable

import dagster as dg


def report(lines: Iterable[str]) -> dg.TableMetadataValue:
    """Return lines as metadata."""
    return dg.MetadataValue.table(
        [dg.TableRecord({"report": line}) for line in lines],
        schema=dg.TableSchema([dg.TableColumn("report")]),
    )
