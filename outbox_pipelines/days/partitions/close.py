"""Close past days: from then on they never change. Purge what is no longer needed of them; attach one again.

Invariants:
- Sealing waits at most 50 ms for the partition's lock, because writers queue behind it.
- A day is sealed when no transaction that began before its end still runs, and closed when every event in it
  is published, a dead letter or discarded. Each step is durable: the next run continues from there.
- The partition's lock proves that no session writes into it. The check of pg_stat_activity is not needed for
  correctness: it avoids rejecting the late insert of a running transaction.
- A purge deletes rows in batches, each in its own transaction: other sessions wait only briefly, and an
  interrupted purge keeps what it has done.
- To attach a day, which a killed process or a long query during a drop left detached, changes no row, and no
  writer waits for it.
- The rows that show when an event was published stay until its day is archived. Dead letters stay, however
  old: they can be replayed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Final

import psycopg
from psycopg import sql

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.text import counted
from outbox_pipelines.database import Connection, locks
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.days.partitions import partitions_sql
from outbox_pipelines.days.partitions.calendar import (
    attachment_of,
    bounds_of,
    leaf_of,
    require_day,
    working_at,
)
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.settings import NO_ARCHIVE, DaySettings, OutboxSettings

_LOG = logging.getLogger(__name__)
# A longer lock request would make writers wait. If all tries fail, a transaction with rows in the day owns
# the lock.
_TRIES: Final = 20
_PAUSE_SECONDS: Final = 0.1
# Sessions of other roles hide when their transaction began: wait this long for those that run now.
_HIDDEN_SECONDS: Final = 10.0
# Allowed difference between the clocks: a clock that is ahead would close a day too early.
_CLOCKS_MINUTES: Final = 10


@dataclass(frozen=True, slots=True)
class Closing:
    """The result of closing one day."""

    day: date
    closed: bool
    why_not: str = ""
    """Why the day stays open, and what to do."""


def close(settings: DaySettings, day: date | None = None) -> list[Closing]:
    """Close the past days that are still open, the oldest first, or only `day`.

    A day that cannot be closed yet is not an error: the next call tries again.

    Raises:
        SetupError: this role does not own the outbox; the clocks differ; the outbox has no such day.
        UnavailableError: the database does not answer.
    """
    with connect_to_outbox(settings, name="outbox partitions close") as connection:
        compare_clocks(connection)
        wait = {"minutes": settings.close_after_minutes}
        over = [found for (found,) in connection.execute(partitions_sql.OVER, wait)]
        if day is not None:
            if day not in over:
                return [_not_over(connection, day, settings)]
            over = [day]
        return [_close(connection, day) for day in over]


def require_reopenable(settings: OutboxSettings, day: date) -> None:
    """Raise `SetupError` if the day is archived or dropped, or was never closed."""
    with connect_to_outbox(settings, name="outbox partitions reopen") as connection:
        _require_sealed(connection, day)


def _require_sealed(connection: Connection, day: date) -> None:
    row = require_day(connection, day)
    if row.state not in ("open", "closed") or row.sealed_at is None:
        raise SetupError(f"{day} is {row.state}: only a closed day that is not archived can be reopened")


def reopen(settings: OutboxSettings, day: date) -> None:
    """Reopen a closed day that is not archived yet, such as one that a fast clock closed too early.

    Relays restart, because they no longer read the day. They then publish rows that bypassed the guards.

    Raises:
        SetupError: the day is archived or dropped, or was never closed.
    """
    with working_at(settings, day) as connection, connection.transaction():
        connection.execute(partitions_sql.LOCK_CALENDAR)
        _require_sealed(connection, day)
        # No writer waits behind this lock: the closed day rejects inserts.
        connection.execute("SET LOCAL lock_timeout = '2s'")
        connection.execute(partitions_sql.DECLARE_REBASE)
        connection.execute(partitions_sql.named(partitions_sql.TO_BE_PUBLISHED, leaf_of(day)), {"day": day})
        connection.execute(partitions_sql.named(partitions_sql.UNSEAL, leaf_of(day)))
        connection.execute(partitions_sql.REOPEN, {"day": day})


def require_published(connection: Connection, day: date) -> None:
    """Raise `NotReadyError` if a closed day has unpublished rows that bypassed the guards."""
    try:
        query = partitions_sql.named(partitions_sql.PAST_GUARDS, leaf_of(day))
        ((rows, id),) = connection.execute(query, {"day": day}).fetchall()
    except psycopg.errors.InsufficientPrivilege as error:
        raise SetupError(
            f"{first_line(error)}: only the role that owns the outbox can archive and drop days"
        ) from None
    if not rows:
        return
    if require_day(connection, day).state == "closed":
        remedy = f"to publish what is in it, run `outbox partitions reopen {day}`"
    else:
        remedy = f"insert them as new events, and delete them from {leaf_of(day)}: see docs/days.md"
    raise NotReadyError(
        f"{day} has {counted(rows, 'unpublished row')} that bypassed the guards after the day was closed "
        f"(event {id}): {remedy}"
    )


def _close(connection: Connection, day: date) -> Closing:
    try:
        why_not = _seal(connection, day)
        ((committed,),) = connection.execute(partitions_sql.COMMITTED)
        why_not = why_not or _unpublished(connection, day)
        if not why_not:
            with connection.transaction():
                connection.execute(partitions_sql.LOCK_CALENDAR)
                connection.execute(partitions_sql.CLOSED, {"day": day, "committed": committed})
    except psycopg.errors.UndefinedTable:
        why_not = (
            "its partition does not exist (it was dropped manually): to remove the day, run "
            f"DELETE FROM outbox_days WHERE day = '{day}'"
        )
    except psycopg.errors.InsufficientPrivilege as error:
        raise SetupError(f"{first_line(error)}: only the role that owns the outbox can close days") from None
    if why_not:
        _LOG.info("%s stays open: %s", day, why_not)
    return Closing(day, not why_not, why_not)


def _seal(connection: Connection, day: date) -> str:
    """Make the day reject inserts; return an empty string, or the reason if that is not possible yet."""
    ((_, sealed_at, *_),) = connection.execute(partitions_sql.DAY, {"day": day})
    if sealed_at is not None:
        return ""
    if why_not := still_running(connection, day):
        return why_not
    for attempt in locks.briefly(times=_TRIES, pause=(_PAUSE_SECONDS, _PAUSE_SECONDS)):
        with attempt:
            with connection.transaction():
                connection.execute(partitions_sql.SHORT_LOCK)
                connection.execute(partitions_sql.named(partitions_sql.SEAL, leaf_of(day)))
                connection.execute(partitions_sql.SEALED, {"day": day})
            return ""
    return _who_locks(connection, day)


def still_running(connection: Connection, day: date) -> str:
    """Return why a transaction from before the day's end still runs; wait for those with a hidden start."""
    deadline = time.monotonic() + _HIDDEN_SECONDS
    hidden: set[str] | None = None
    while True:
        rows = connection.execute(partitions_sql.RUNNING, {"day": day}).fetchall()
        if old := [row for row in rows if row[1] is not None]:
            _, since, pid, user = old[0]
            return (
                f"a transaction of {user} (pid {pid}) runs since {since:%Y-%m-%d %H:%M:%S} UTC and can still "
                f"write into it: end it, or run SELECT pg_terminate_backend({pid})"
            )
        now = {row[0] for row in rows}
        hidden = now if hidden is None else hidden & now
        if not hidden:
            return ""
        if time.monotonic() > deadline:
            pids = ", ".join(str(row[2]) for row in rows if row[0] in hidden)
            return (
                f"this role cannot see when transactions of other roles began (pid {pids}): "
                "GRANT pg_read_all_stats to it, or end them"
            )
        time.sleep(_PAUSE_SECONDS)


def _who_locks(connection: Connection, day: date) -> str:
    rows = connection.execute(partitions_sql.HOLDERS, {"leaf": leaf_of(day)}).fetchall()
    prepared = [gid for _, gid in rows if gid]
    if prepared:
        return f"a prepared transaction has written into it: COMMIT or ROLLBACK PREPARED '{prepared[0]}'"
    pids = ", ".join(str(pid) for pid, _ in rows if pid)
    return f"its partition is locked by pid {pids or 'unknown'}, which writes into it or maintains it"


def _unpublished(connection: Connection, day: date) -> str:
    """Return which events of a sealed day are not yet published, dead letters or discarded."""
    for shard, count in connection.execute(partitions_sql.named(partitions_sql.BEHIND, leaf_of(day))):
        return (
            f"shard {shard} has not published {count}{' or more' if count >= 1000 else ''} of its events: "
            "see `outbox status`"
        )
    ((events,),) = connection.execute(partitions_sql.STILL_PARKED, {"day": day})
    if events:
        return f"parked, and to be tried again: {counted(events, 'event')} of it: see `outbox status`"
    return ""


def _not_over(connection: Connection, day: date, settings: DaySettings) -> Closing:
    row = connection.execute(partitions_sql.DAY, {"day": day}).fetchone()
    if row is None:
        raise SetupError(f"{day} is not a day of the outbox: see `outbox partitions list`")
    if row[0] != "open":
        return Closing(day, True)
    return Closing(
        day, False, f"it ends at midnight UTC and can be closed {settings.close_after_minutes:g} min later"
    )


def compare_clocks(connection: Connection) -> None:
    """Raise `UnavailableError` if the clocks of the database and this machine differ by over ten minutes."""
    ((there,),) = connection.execute(partitions_sql.CLOCK)
    apart = abs((there - datetime.now(UTC)).total_seconds()) / 60
    if apart > _CLOCKS_MINUTES:
        raise UnavailableError(
            f"the clocks of the database and of this machine differ by {apart:.0f} minutes: no day is closed "
            "or dropped, and nothing is purged, until the clocks are synchronized"
        )


@dataclass(frozen=True, slots=True)
class Purged:
    """Numbers of deleted rows."""

    keys: int
    progress: int
    released: int
    discarded: int


def purge(settings: DaySettings) -> Purged:
    """Delete keys older than OUTBOX_IDEMPOTENCY_KEY_RETENTION_DAYS, and other rows together with their days.

    Raises:
        SetupError: this role does not own the outbox.
        UnavailableError: the database does not answer, or its clock and this machine's differ.
    """
    with connect_to_outbox(settings, name="outbox partitions purge") as connection:
        compare_clocks(connection)
        parameters = {"archives": settings.archive != NO_ARCHIVE, "retention": settings.retention_days}
        ((before,),) = connection.execute(partitions_sql.PURGE_BEFORE, parameters)
        return Purged(
            keys=_keys(connection, settings.idempotency_key_retention_days),
            progress=_all(connection, partitions_sql.PURGE_PROGRESS, {"before": before}),
            released=_all(connection, partitions_sql.PURGE_RELEASED, {"before": before}),
            discarded=_all(connection, partitions_sql.PURGE_DISCARDED, {"before": before}),
        )


def _keys(connection: Connection, days: int) -> int:
    ((pages,),) = connection.execute(partitions_sql.KEY_PAGES)
    removed = 0
    for start in range(0, pages, partitions_sql.PAGES):
        parameters = {"from": start, "to": start + partitions_sql.PAGES, "days": days}
        removed += connection.execute(partitions_sql.PURGE_KEYS, parameters).rowcount
    return removed


def _all(connection: Connection, query: str, parameters: dict[str, object]) -> int:
    removed = 0
    while count := connection.execute(query.encode(), parameters).rowcount:
        removed += count
    return removed


WAIT_SECONDS: Final = 60.0
"""How long to wait for transactions that use the outbox; no other session queues behind this wait."""
WAIT_PAUSE: Final = (0.5, 0.5)


def attach(settings: OutboxSettings, day: date) -> bool:
    """Attach the partition of a day to the outbox; return False if it was attached already.

    Raises:
        NotReadyError: the day is dropped, or a long transaction uses the outbox.
        SetupError: the partition does not exist, or this role does not own it.
    """
    with working_at(settings, day) as connection:
        state = require_day(connection, day).state
        if state == "dropped":
            raise NotReadyError(
                f"{day} is dropped: to bring it back, run `outbox archive restore {day} --attach`"
            )
        attachment = attachment_of(connection, day)
        if attachment == "attached":
            return False
        if attachment == "gone":
            raise SetupError(
                f"{day} has no partition: {leaf_of(day)} was dropped manually. If the day is not over, "
                "`outbox partitions ensure` creates it again"
            )
        try:
            again(connection, day)
        except psycopg.errors.InsufficientPrivilege as error:
            raise SetupError(
                f"{first_line(error)}: only the role that owns the outbox can attach days"
            ) from None
        return True


def again(connection: Connection, day: date) -> None:
    """Attach a partition that is detached or half detached.

    Raises:
        NotReadyError: a long transaction uses the outbox.
    """
    start, stop = map(sql.Literal, bounds_of(day))
    connection.execute(partitions_sql.DETACH_LOCK)
    for attempt in locks.briefly(seconds=WAIT_SECONDS, pause=WAIT_PAUSE):
        with attempt:
            finish_detaching(connection)
            if attachment_of(connection, day) == "detached":
                connection.execute(
                    partitions_sql.named(partitions_sql.ATTACH, leaf_of(day), start=start, stop=stop)
                )
            return
    raise NotReadyError(
        f"{day} is not attached, a long transaction uses the outbox: see pg_stat_activity, then run `outbox "
        f"partitions attach {day}`"
    )


def finish_detaching(connection: Connection) -> None:
    """Finish an interrupted detach: until then no other partition can be detached or attached."""
    for (unfinished,) in connection.execute(partitions_sql.DETACHING).fetchall():
        connection.execute(partitions_sql.named(partitions_sql.FINISH_DETACH, unfinished))
