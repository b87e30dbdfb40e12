"""Create the partitions of the coming days.

Invariants:
- No writer waits for it, and it waits for no writer.
- Each day is created once, even if it runs twice or concurrently; again only if its partition was dropped
  manually while the day is open and not over.
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
# Other maintenance (VACUUM, DDL) may lock the table for a while.
_TRIES: Final = 5
_PAUSE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Ensured:
    """The result of `ensure`."""

    made: int
    """Partitions created by this call."""
    ahead: int
    """Days from tomorrow on that have a partition, without a gap."""


def ensure(settings: Settings, days: int | None = None, since: date | None = None) -> Ensured:
    """Create the missing partitions of the coming days.

    Args:
        days: the number of days ahead; by default `partitions_ahead` of the settings.
        since: also create past days, from this one on, for a backfill by the owner.

    Raises:
        SetupError: this role does not own the table, another table has the name of a partition, or a day
            since then is closed.
        UnavailableError: the database does not answer, or its table stayed locked through all tries.
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
                    reason = f"the outbox is locked by other maintenance: {first_line(error)}"
                    raise UnavailableError(f"{reason}; try again") from None
                time.sleep(_PAUSE_SECONDS)
            except psycopg.errors.InsufficientPrivilege as error:
                raise SetupError(
                    f"{first_line(error)}: only the role that owns the outbox can create partitions"
                ) from None
            except psycopg.errors.ObjectNotInPrerequisiteState as error:
                raise SetupError(f"{first_line(error)}: a closed day cannot change") from None
            except psycopg.errors.DuplicateTable as error:
                raise SetupError(
                    f"{first_line(error)}, and does not belong to the outbox: rename or drop it"
                ) from None
    raise AssertionError


def top_up(connection: Connection, days: int) -> str | None:
    """Create missing partitions without waiting, if this role owns the table.

    Called by the relay. A failure is returned, not raised: enough days ahead still have a partition, and
    publishing must continue.

    Returns:
        The reason of a failure, None on success.
    """
    try:
        connection.execute(queries.ENSURE_IF_OWNER, {"days": days})
    except psycopg.Error as error:
        if connection.closed:
            raise
        reason = first_line(error)
        _LOG.warning("cannot create the partitions of the coming days, the relay continues: %s", reason)
        return reason
    return None
