"""Attach a day's partition that was left detached, by a killed process or by a long query during a drop.

Invariants:
- It changes no row, and no writer waits for it.
"""

from __future__ import annotations

from datetime import date
from typing import Final

import psycopg
from psycopg import sql

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection, locks
from outbox_pipelines.database.schema import require_schema
from outbox_pipelines.days.partitions import partitions_sql
from outbox_pipelines.days.partitions.calendar import bounds_of, leaf_of, place_of, require_day, working_at
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.settings import OutboxSettings

SECONDS: Final = 60.0
"""How long to wait for transactions that use the outbox; no other session queues behind this wait."""
PAUSE: Final = (0.5, 0.5)


def attach(settings: OutboxSettings, day: date) -> bool:
    """Attach the partition of a day to the outbox; return False if it was attached already.

    Raises:
        NotReadyError: the day is dropped, or a long transaction uses the outbox.
        SetupError: the partition does not exist, or this role does not own it.
    """
    require_schema(settings)
    with working_at(settings, day) as connection:
        state = require_day(connection, day).state
        if state == "dropped":
            raise NotReadyError(
                f"{day} is dropped: to bring it back, run `outbox archive restore {day} --attach`"
            )
        place = place_of(connection, day)
        if place == "attached":
            return False
        if place == "gone":
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
    for attempt in locks.briefly(seconds=SECONDS, pause=PAUSE):
        with attempt:
            finish_detaching(connection)
            if place_of(connection, day) == "detached":
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
