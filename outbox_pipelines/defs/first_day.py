"""The first day of an outbox, read when the definitions load.

Invariants:
- Definitions load even if the settings or the database are faulty: then no day is left out.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Final

from outbox_pipelines.settings import load_settings

if TYPE_CHECKING:
    from outbox_pipelines.defs.resources import OutboxResource

# No outbox is older than the first release.
_EARLIEST: Final = date(2026, 1, 1)
_LOG: Final = logging.getLogger(__name__)
_given: OutboxResource | None = None


def read_from(resource: OutboxResource) -> None:
    """Read the first day from this outbox. Call this before the definitions are imported."""
    global _given
    if resource.dsn and resource != _given and "outbox_pipelines.defs.events" in sys.modules:
        _LOG.warning(
            "the days of the definitions begin with the first day of another outbox: call outbox_definitions "
            "once per process, before you import other modules of outbox_pipelines.defs"
        )
    _given = resource


def first_day() -> date:
    """Return the outbox's first day; today if it has none yet; the earliest possible day if unknown."""
    # Without settings nothing is read, and no driver is loaded.
    if not (_given and _given.dsn) and not os.environ.keys() & {"OUTBOX_DSN", "OUTBOX_SETTINGS_FILE"}:
        return _EARLIEST
    try:
        from outbox_pipelines.partitions import calendar

        # This replaces the names of variables with their values.
        settings = _given.process_config_and_initialize().settings() if _given else load_settings()
        return calendar.first(settings) or datetime.now(UTC).date()
    except Exception as error:  # noqa: BLE001 - settings, network, rights: sensors and checks report it in full
        _LOG.warning(
            "the outbox's first day is unknown (%s): days start at %s", type(error).__name__, _EARLIEST
        )
        return _EARLIEST
