"""The first day of an outbox, read when the definitions load, and once for the runs that load them again.

Invariants:
- Definitions load even if the settings or the database are faulty: then no day is left out.
- A database that does not answer costs the load a few seconds, once for all outboxes on its host.
- A run has the days that the code server shows.
- Without a record, for example in a test or with another version of Dagster, everything is read again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Final

from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from outbox_pipelines.defs.outbox import Outbox
    from outbox_pipelines.settings import Settings


# No outbox is older than the first release.
_EARLIEST: Final = date(2026, 1, 1)
_PATIENCE_SECONDS: Final = 3.0
_LOG: Final = logging.getLogger(__name__)
_silent: set[str] = set()


def first_day(outbox: Outbox) -> date:
    """Return the outbox's first day; today if it has none yet; the earliest possible day if unknown."""
    try:
        settings = outbox.load_settings()
    except SetupError:
        # Reported where the definitions are built.
        return _EARLIEST
    try:
        # Without a database nothing is read, and no driver is loaded.
        return _read(settings) if settings.dsn else _EARLIEST
    except Exception as error:  # noqa: BLE001 - network, rights: sensors and checks report it in full
        # Other errors may repeat a connection string.
        why = str(error) if isinstance(error, SetupError) else type(error).__name__
        _LOG.warning("outbox %s: first day unknown, days start at %s: %s", outbox.name, _EARLIEST, why)
        return _EARLIEST


def _read(settings: Settings) -> date:
    from psycopg.conninfo import conninfo_to_dict

    from outbox_pipelines.days.partitions import calendar

    host = str(conninfo_to_dict(settings.require_dsn()).get("host"))
    if host in _silent:
        raise TimeoutError
    found: list[date | Exception] = []

    def read() -> None:
        try:
            found.append(calendar.first(settings) or datetime.now(UTC).date())
        except Exception as error:  # noqa: BLE001 - raised again below
            found.append(error)

    # In a thread, because a firewall that drops packets would keep the code location from loading.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(_PATIENCE_SECONDS)
    if not found:
        _silent.add(host)
        raise TimeoutError
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def recorded(outbox: str, read: Callable[[], date]) -> date:
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
