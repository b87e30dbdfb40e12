"""Closes days that are over: from then on they never change.

Invariants:
- Sealing waits 50 ms for the partition's lock, never longer: writers queue behind it.
- A day is sealed when no transaction that began before its end still runs, and closed when every event in it
  is published, a dead letter or discarded. Each step stands by itself: whoever comes next goes on from there.
- The partition's lock is the proof that nobody writes into it. What sessions say of themselves is courtesy:
  it spares a transaction the refusal of its late insert.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Final

import psycopg

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.partitions import queries
from outbox_pipelines.partitions.calendar import leaf_of, require_day, working_at
from outbox_pipelines.schema import require_schema
from outbox_pipelines.secret import first_line
from outbox_pipelines.settings import Settings

_LOG = logging.getLogger(__name__)
# A lock that is asked for longer makes writers wait; one that is not had by then belongs to a transaction
# with rows in the day.
_TRIES: Final = 20
_PAUSE_SECONDS: Final = 0.1
# Sessions of other roles do not show when their transaction began: those that run now are waited for so long.
_HIDDEN_SECONDS: Final = 10.0
# The clocks of database and maintenance. A clock that is ahead would close a day that is not over.
_CLOCKS_MINUTES: Final = 10


@dataclass(frozen=True, slots=True)
class Closing:
    """What came of a day that is over."""

    day: date
    closed: bool
    why_not: str = ""
    """What stands against it, and what helps."""


def close(settings: Settings, day: date | None = None) -> list[Closing]:
    """Closes the days that are over and still open, or this one; the oldest first.

    A day that cannot be closed yet is no error: the next call tries again.

    Raises:
        SetupError: this role does not own the outbox; the clocks differ; there is no such day.
        UnavailableError: the database does not answer.
    """
    require_schema(settings)
    with connect(settings, name="outbox partitions close") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        compare_clocks(connection)
        wait = {"minutes": settings.close_after_minutes}
        over = [found for (found,) in connection.execute(queries.OVER, wait)]
        if day is not None:
            if day not in over:
                return [_not_over(connection, day, settings)]
            over = [day]
        return [_close(connection, each) for each in over]


def reopen(settings: Settings, day: date) -> None:
    """Takes the seal off a closed day that is not archived yet: a clock that was ahead had closed it.

    Relays start over, since they have stopped looking at the day. What was written into it past the guards is
    published then.

    Raises:
        SetupError: the day is archived or dropped, or was never closed.
    """
    require_schema(settings)
    with working_at(settings, day) as connection, connection.transaction():
        connection.execute(queries.LOCK_CALENDAR)
        row = require_day(connection, day)
        state, sealed_at = row.state, row.sealed_at
        if state not in ("open", "closed") or sealed_at is None:
            raise SetupError(f"{day} is {state}: only a closed day that is not archived can be opened again")
        # No writer waits behind it: the day refuses them.
        connection.execute("SET LOCAL lock_timeout = '2s'")
        connection.execute(queries.DECLARE_REBASE)
        connection.execute(queries.named(queries.TO_BE_PUBLISHED, leaf_of(day)), {"day": day})
        connection.execute(queries.named(queries.UNSEAL, leaf_of(day)))
        connection.execute(queries.REOPEN, {"day": day})


def require_published(connection: Connection, day: date) -> None:
    """`NotReadyError` where rows came into a closed day past the guards: they are not published."""
    try:
        query = queries.named(queries.PAST_GUARDS, leaf_of(day))
        ((rows, id),) = connection.execute(query, {"day": day}).fetchall()
    except psycopg.errors.InsufficientPrivilege as error:
        raise SetupError(
            f"{first_line(error)}: days are archived and dropped by the role that owns the outbox"
        ) from None
    if not rows:
        return
    if require_day(connection, day).state == "closed":
        remedy = f"`outbox partitions reopen {day}` publishes them"
    else:
        remedy = f"write them again, as new events, and remove them from {leaf_of(day)}: see docs/days.md"
    raise NotReadyError(
        f"{day} has {rows} rows that were written past the guards after it was closed, and are not published "
        f"(event {id}): {remedy}"
    )


def _close(connection: Connection, day: date) -> Closing:
    try:
        why_not = _seal(connection, day)
        ((committed,),) = connection.execute(queries.COMMITTED)
        why_not = why_not or _unpublished(connection, day)
        if not why_not:
            with connection.transaction():
                connection.execute(queries.LOCK_CALENDAR)
                connection.execute(queries.CLOSED, {"day": day, "committed": committed})
    except psycopg.errors.UndefinedTable:
        why_not = (
            "its partition is gone, somebody has dropped it by hand: to forget the day, "
            f"DELETE FROM outbox_days WHERE day = '{day}'"
        )
    except psycopg.errors.InsufficientPrivilege as error:
        raise SetupError(f"{first_line(error)}: days are closed by the role that owns the outbox") from None
    if why_not:
        _LOG.info("%s stays open: %s", day, why_not)
    return Closing(day, not why_not, why_not)


def _seal(connection: Connection, day: date) -> str:
    """Makes the day refuse inserts; else why not."""
    row = connection.execute(queries.DAY, {"day": day}).fetchone()
    assert row is not None
    if row[1] is not None:
        return ""
    if why_not := _still_running(connection, day):
        return why_not
    for tries_left in reversed(range(_TRIES)):
        try:
            with connection.transaction():
                connection.execute(queries.SHORT_LOCK)
                connection.execute(queries.named(queries.SEAL, leaf_of(day)))
                connection.execute(queries.SEALED, {"day": day})
            return ""
        except psycopg.errors.LockNotAvailable:
            if not tries_left:
                return _who_locks(connection, day)
            time.sleep(_PAUSE_SECONDS)
    raise AssertionError


def _still_running(connection: Connection, day: date) -> str:
    """Which transactions began before the day's end; those that do not show their age are waited for."""
    deadline = time.monotonic() + _HIDDEN_SECONDS
    hidden: set[str] | None = None
    while True:
        rows = connection.execute(queries.RUNNING, {"day": day}).fetchall()
        if old := [row for row in rows if row[1] is not None]:
            _, since, pid, user = old[0]
            return (
                f"a transaction of {user} (pid {pid}) runs since {since:%Y-%m-%d %H:%M:%S} UTC and may still "
                f"write into it: end it, or SELECT pg_terminate_backend({pid})"
            )
        now = {row[0] for row in rows}
        hidden = now if hidden is None else hidden & now
        if not hidden:
            return ""
        if time.monotonic() > deadline:
            pids = ", ".join(str(row[2]) for row in rows if row[0] in hidden)
            return (
                f"transactions of other roles run whose age this role may not see (pid {pids}): "
                "GRANT pg_read_all_stats to it, or end them"
            )
        time.sleep(_PAUSE_SECONDS)


def _who_locks(connection: Connection, day: date) -> str:
    rows = connection.execute(queries.HOLDERS, {"leaf": leaf_of(day)}).fetchall()
    prepared = [gid for _, gid in rows if gid]
    if prepared:
        return f"a prepared transaction has written into it: COMMIT or ROLLBACK PREPARED '{prepared[0]}'"
    pids = ", ".join(str(pid) for pid, _ in rows if pid)
    return f"its partition is locked by pid {pids or 'unknown'}, which writes into it or maintains it"


def _unpublished(connection: Connection, day: date) -> str:
    """What of a sealed day has not met its fate yet."""
    for shard, count in connection.execute(queries.named(queries.BEHIND, leaf_of(day))):
        return (
            f"shard {shard} has not published {count}{' or more' if count >= 1000 else ''} of its events: "
            "see `outbox status`"
        )
    row = connection.execute(queries.ON_THEIR_WAY, {"day": day}).fetchone()
    assert row is not None
    if row[0]:
        return f"{row[0]} of its events are parked and will be tried again: see `outbox status`"
    return ""


def _not_over(connection: Connection, day: date, settings: Settings) -> Closing:
    row = connection.execute(queries.DAY, {"day": day}).fetchone()
    if row is None:
        raise SetupError(f"{day} is no day of the outbox: see `outbox partitions list`")
    if row[0] != "open":
        return Closing(day, True)
    return Closing(
        day, False, f"it ends at midnight UTC, and closes {settings.close_after_minutes:g} min later"
    )


def compare_clocks(connection: Connection) -> None:
    """Raise `UnavailableError` if the clocks of the database and this machine differ by over ten minutes."""
    row = connection.execute(queries.CLOCK).fetchone()
    assert row is not None
    apart = abs((row[0] - datetime.now(UTC)).total_seconds()) / 60
    if apart > _CLOCKS_MINUTES:
        raise UnavailableError(
            f"the clocks of the database and of this machine are {apart:.0f} minutes apart: no day is closed "
            "or dropped, and nothing is purged, until they agree"
        )
