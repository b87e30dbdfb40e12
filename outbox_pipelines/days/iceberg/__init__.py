"""The archive as a table of Apache Iceberg: a catalog knows its days' files, which stay as they are.

Invariants:
- Importing this does not import pyiceberg, and nothing else in the package does.
"""

from __future__ import annotations

from datetime import date
from types import ModuleType
from typing import TYPE_CHECKING

from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from outbox_pipelines.days.iceberg.registered_days import Registration
    from outbox_pipelines.settings import DaySettings


def register(settings: DaySettings, *, again: bool = False) -> Registration:
    """Register each archived day that the table lacks: see `registered_days`."""
    done: Registration = _installed().register(settings, again=again)
    return done


def compare(settings: DaySettings, day: date) -> tuple[str, ...]:
    """Return how the table differs from the archive's day: see `registered_days`."""
    differences: tuple[str, ...] = _installed().compare(settings, day)
    return differences


def _installed() -> ModuleType:
    try:
        from outbox_pipelines.days.iceberg import registered_days
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("outbox_pipelines"):
            raise
        raise SetupError(f"{error.name} is not installed: pip install 'outbox-pipelines[iceberg]'") from None
    return registered_days
