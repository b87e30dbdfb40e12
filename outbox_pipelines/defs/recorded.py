"""What the code server has read, for the processes of runs, which load all definitions again.

Invariants:
- A run has the days that the code server shows.
- Without a record, for example in a test or with another version of Dagster, everything is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date


def day(outbox: str, read: Callable[[], date]) -> date:
    """Return the first day of an outbox: in the code server, what `read` returns; in a run, the same."""
    # Imported here so that a version of Dagster that moves them costs time, and no definitions.
    try:
        from outbox_pipelines.defs.dagster_internals import DefinitionsLoadContext, DefinitionsLoadType
    except ImportError:
        return read()
    context, key = DefinitionsLoadContext.get(), f"outbox_pipelines/first_day/{outbox}"
    if context.load_type is DefinitionsLoadType.INITIALIZATION:
        found = read()
        context.add_to_pending_reconstruction_metadata(key, str(found))
        return found
    known = context.reconstruction_metadata.get(key)
    return date.fromisoformat(known) if known else read()
