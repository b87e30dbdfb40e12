"""The measurements of what the settings name: the append-only outbox, or a marked table."""

from __future__ import annotations

from outbox_pipelines.quality import measurements
from outbox_pipelines.quality.measured import Measurements
from outbox_pipelines.relay.marked_table import measurements as of_table
from outbox_pipelines.settings import Settings


def read(settings: Settings) -> Measurements:
    """Return the measurements.

    Raises:
        SetupError: the database is unavailable, or has no outbox; the table does not match OUTBOX_TABLE_FILE.
    """
    read_it = measurements.read if settings.table_file is None else of_table.read
    return read_it(settings)
