"""Makes the partitions of the coming days.

Invariants:
- No writer waits for it, and it waits for no writer.
- Run twice, or by two at once, it makes each day once.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import date
from typing import Final

import psycopg

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.partitions import calendar, queries
from outbox_pipelines.schema import require_schema
from outbox_pipelines.secret import first_line
from outbox_pipelines.settings import Settings

_LOG = logging.getLogger(__name__)
# Maintenance of somebody else (VACUUM, another DDL) may hold the table for a while.
_TRIES: Final = 5
_PAUSE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Ensured:
    """What came of it."""

    made: int
    """Partitions made now."""
    ahead: int
    """Days from tomorrow that have one."""


def ensure(settings: Settings, days: int | None = None, since: date | None = None) -> Ensured:
    """Sees to it that so many days ahead have a partition; `partitions_ahead` of the settings by default.

    Args:
        since: days of the past too, from this one, for the owner's backfill.

    Raises:
        SetupError: this role does not own the table, something stands in the way, or days then are closed.
        UnavailableError: the database does not answer, or its table was locked all the time.
    """
    require_schema(settings)
    wanted = settings.partitions_ahead if days is None else days
    with connect(settings, name="outbox partitions ensure") as connection:
        for tries_left in reversed(range(_TRIES)):
            try:
                ((made,),) = connection.execute(queries.ENSURE, {"days": wanted, "since": since})
                return Ensured(made, calendar.ahead(connection))
            except psycopg.errors.LockNotAvailable as error:
                if not tries_left:
                    reason = f"the outbox is locked by somebody else's maintenance: {first_line(error)}"
                    raise UnavailableError(f"{reason}; try again") from None
                time.sleep(_PAUSE_SECONDS)
            except psycopg.errors.InsufficientPrivilege as error:
                raise SetupError(
                    f"{first_line(error)}: partitions are made by the role that owns the outbox"
                ) from None
            except psycopg.errors.ObjectNotInPrerequisiteState as error:
                raise SetupError(f"{first_line(error)}: a closed day never changes") from None
            except psycopg.errors.DuplicateTable as error:
                raise SetupError(
                    f"{first_line(error)}, and is none of the outbox's days: rename or drop it"
                ) from None
    raise AssertionError


def top_up(connection: Connection, days: int) -> str | None:
    """Do the same beside other work: where this role owns the table, and without waiting.

    Returns:
        Why it failed, None if it did not. There are days ahead still, and events must flow meanwhile.
    """
    try:
        connection.execute(queries.ENSURE_IF_OWNER, {"days": days})
    except psycopg.Error as error:
        if connection.closed:
            raise
        reason = first_line(error)
        _LOG.warning("partitions of the coming days could not be created, the relay goes on: %s", reason)
        return reason
    return None
