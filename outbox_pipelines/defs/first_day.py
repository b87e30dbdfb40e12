"""The day on which an outbox begins, read when the definitions load.

Invariants:
- Definitions load whatever is wrong with the settings or the database: then no day is left out.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, date, datetime
from typing import Final

from outbox_pipelines.settings import load_settings

# No outbox is older than the first release.
_EARLIEST: Final = date(2026, 1, 1)
_LOG: Final = logging.getLogger(__name__)


def first_day() -> date:
    """The outbox's first day; today where it has none yet; the earliest possible one where nothing tells."""
    # Without settings nothing is read, and no driver is loaded.
    if not os.environ.keys() & {"OUTBOX_DSN", "OUTBOX_SETTINGS"}:
        return _EARLIEST
    try:
        from outbox_pipelines.partitions import calendar

        return calendar.first(load_settings()) or datetime.now(UTC).date()
    except Exception as error:  # noqa: BLE001 - settings, network, rights: sensors and checks say it in full
        _LOG.warning(
            "the outbox's first day is not known (%s): days from %s", type(error).__name__, _EARLIEST
        )
        return _EARLIEST
