"""Create the partitions of the coming days.

Invariants:
- No writer waits for it, and it waits for no writer.
- Each day is created once, even if it runs twice or concurrently; again only if its partition was dropped
  manually while the day is open and not over.
- Days of a backfill are created from the newest to the oldest, so many in a transaction: what was created
  before an interruption stays.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Final

import psycopg

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.days.partitions import calendar, partitions_sql
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.settings import DaySettings

_LOG = logging.getLogger(__name__)
# Other maintenance (VACUUM, DDL) may lock the table for a while.
_TRIES: Final = 5
_PAUSE_SECONDS: Final = 1.0
# Each takes some locks until the end of the transaction, and the server has 6,400 by default.
_DAYS_AT_ONCE: Final = 100
_MOST_DAYS: Final = 3_660


@dataclass(frozen=True, slots=True)
class Ensured:
    """The result of `ensure`."""

    made: int
    """Partitions created by this call."""
    ahead: int
    """Days from tomorrow on that have a partition, without a gap."""


def ensure(settings: DaySettings, days: int | None = None, since: date | None = None) -> Ensured:
    """Create the missing partitions of the coming days.

    Args:
        days: the number of days ahead; by default `partitions_ahead` of the settings.
        since: also create past days, from this one on, for a backfill by the owner.

    Raises:
        SetupError: this role does not own the table, another table has the name of a partition, a day
            since then is closed, or it is in the future or more than ten years ago.
        UnavailableError: the database does not answer, or its table stayed locked through all tries.
    """
    wanted = settings.partitions_ahead if days is None else days
    with connect_to_outbox(settings, name="outbox partitions ensure") as connection:
        made = sum(_made(connection, wanted, first) for first in _steps(connection, since))
        return Ensured(made, calendar.ahead(connection))


def _steps(connection: Connection, since: date | None) -> list[date | None]:
    """Return the first day of each transaction."""
    if since is None:
        return [None]
    ((age, first, is_closed),) = connection.execute(partitions_sql.BACKFILL, {"since": since}).fetchall()
    if age < 0:
        raise SetupError(f"{since} is in the future: give a past day; --days creates days ahead")
    if age > _MOST_DAYS:
        raise SetupError(
            f"{since} is {age:,} days ago, and each day since then would have a partition: the earliest is "
            f"{_MOST_DAYS:,} days ago; correct the year, or write older events with the time of now"
        )
    if is_closed:
        raise SetupError(f"days before {first} are closed: a closed day cannot change")
    today = since + timedelta(days=age)
    return [*(today - timedelta(days=ago) for ago in range(_DAYS_AT_ONCE, age, _DAYS_AT_ONCE)), since]


def _made(connection: Connection, wanted: int, since: date | None) -> int:
    for tries_left in reversed(range(_TRIES)):
        try:
            ((made,),) = connection.execute(partitions_sql.ENSURE, {"days": wanted, "since": since})
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
            reason = first_line(error)
            raise SetupError(
                f"{reason}: a closed day cannot change" if "are closed" in reason else reason
            ) from None
        except psycopg.errors.DuplicateTable as error:
            raise SetupError(
                f"{first_line(error)}, and does not belong to the outbox: rename or drop it"
            ) from None
        except psycopg.errors.CheckViolation as error:
            # Only a default partition is looked through when a day is attached.
            raise SetupError(
                f"{first_line(error)}: detach that partition, write its rows again as new events, then drop "
                "it"
            ) from None
        else:
            return int(made)
    raise AssertionError


def top_up(connection: Connection, days: int) -> str | None:
    """Create missing partitions without waiting, if this role owns the table.

    Called by the relay. A failure is returned, not raised: enough days ahead still have a partition, and
    publishing must continue.

    Returns:
        The reason of a failure, None on success.
    """
    try:
        connection.execute(partitions_sql.ENSURE_IF_OWNER, {"days": days})
    except psycopg.Error as error:
        if connection.closed:
            raise
        reason = first_line(error)
        _LOG.warning("cannot create the partitions of the coming days, the relay continues: %s", reason)
        return reason
    return None
