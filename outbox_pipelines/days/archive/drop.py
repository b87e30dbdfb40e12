"""Drop days that are archived and proven equal to their files; no other day is ever dropped.

Invariants:
- Proof and drop are one transaction, on a detached and locked partition: nothing changes in between.
- Every check that can fail, including the proof, runs before the partition is detached. If anything fails
  afterwards, the partition is attached again. Only OUTBOX_ARCHIVE=none, which means retention without an
  archive, skips the proof.
- It can crash after any statement: the next run continues with an attached, half detached or detached
  partition.
- Writers do not wait: the detach is concurrent, and a detached partition no longer belongs to the outbox.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import date

import psycopg

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection, connect, locks
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.days.archive import identity, proof
from outbox_pipelines.days.archive.store import open_store
from outbox_pipelines.days.partitions import close, partitions_sql
from outbox_pipelines.days.partitions.calendar import attachment_of, leaf_of, require_day, working_at
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.settings import NO_ARCHIVE, DaySettings, OutboxSettings

_LOG = logging.getLogger(__name__)


class NotProvenError(NotReadyError):
    """A day is not dropped: its file and its rows differ, or there are no rows and its file has changed."""

    def __init__(self, day: date, differences: tuple[str, ...], *, has_rows: bool = True) -> None:
        found = "; ".join(differences)
        super().__init__(
            f"partition {day} not dropped: archive file and table rows differ: {found}: copy the file, "
            "and find out who changed file or rows. If the rows are correct, run "
            f"`outbox archive day {day} --again`; if the file is correct, keep both"
            if has_rows
            else f"partition {day} not dropped: its table does not exist, and its archive file has changed: "
            f"{found}: restore the archive (OUTBOX_ARCHIVE), then run `outbox archive verify {day}`"
        )
        self.differences = differences


class WithinRetentionError(NotReadyError):
    """A day is within the retention, and an early drop was not requested."""

    def __init__(self, day: date, retention_days: int) -> None:
        self.why = f"{day} is within the retention of {retention_days} days (OUTBOX_RETENTION_DAYS)"
        super().__init__(f"{self.why}: to drop it early, run `outbox partitions drop {day}`")


@dataclass(frozen=True, slots=True)
class Dropped:
    """The result of `drop`."""

    day: date
    rows: int | None
    """Rows proven equal to the file; None without an archive, or if the partition did not exist."""
    now: bool
    """False if the day was already dropped."""


def due(settings: DaySettings) -> list[date]:
    """Return the days that are past OUTBOX_RETENTION_DAYS and can be dropped, the oldest first.

    Raises:
        UnavailableError: the database does not answer, or its clock and this machine's differ.
    """
    states = ["closed", "archived"] if settings.archive == NO_ARCHIVE else ["archived"]
    with connect_to_outbox(settings, name="outbox partitions drop") as connection:
        close.compare_clocks(connection)
        parameters = {"states": states, "retention": settings.retention_days}
        return [day for (day,) in connection.execute(partitions_sql.DUE, parameters)]


def drop(settings: DaySettings, day: date, *, early: bool = True) -> Dropped:
    """Prove and drop a day.

    Args:
        early: drop the day even if it is within the retention.

    Raises:
        NotReadyError: the day is not archived or within the retention; a long transaction uses the outbox.
        NotProvenError: file and rows differ; the day is unchanged.
        SetupError: this role does not own the outbox; OUTBOX_ARCHIVE is not set.
        UnavailableError: the database or the archive does not answer.
    """
    if settings.archive != NO_ARCHIVE:
        open_store(settings)
    with working_at(settings, day) as connection:
        row = require_day(connection, day)
        state, manifest_sha256 = row.state, row.manifest_sha256
        if state == "dropped":
            return Dropped(day, None, False)
        if state == "open":
            raise NotReadyError(f"{day} is open: run `outbox partitions close {day}`")
        if settings.archive != NO_ARCHIVE and manifest_sha256 is None:
            raise NotReadyError(f"{day} is not archived: run `outbox archive day {day}`")
        if not early and day not in due(settings):
            raise WithinRetentionError(day, settings.retention_days)
        if settings.archive != NO_ARCHIVE:
            identity.require(open_store(settings), connection)
        try:
            attachment = attachment_of(connection, day)
            if attachment == "gone":
                return _was_gone(settings, connection, day, manifest_sha256)
            if attachment == "attached":
                _look_first(settings, connection, day, manifest_sha256)
            if settings.archive != NO_ARCHIVE:
                # Remove the temporary files of a crashed run: the day is never written again.
                open_store(settings).clear(day)
            _detach(connection, day)
            return _prove_and_drop(settings, connection, day, manifest_sha256)
        except psycopg.errors.InsufficientPrivilege as error:
            raise SetupError(
                f"{first_line(error)}: only the role that owns the outbox can drop days"
            ) from None
        except psycopg.errors.ForeignKeyViolation as error:
            raise NotReadyError(
                f"{day} not dropped: rows of another table refer to its events: {first_line(error)}: delete "
                "those rows, or drop the foreign key"
            ) from None
        except psycopg.Error as error:
            raise UnavailableError(
                f"{day} is not dropped, the database reports an error: {first_line(error)}"
            ) from None


def _look_first(
    settings: DaySettings, connection: Connection, day: date, manifest_sha256: str | None
) -> None:
    """Raise the errors that prevent a drop, while the partition is still attached."""
    ((dependent,),) = connection.execute(partitions_sql.DEPENDENTS, {"leaf": leaf_of(day)})
    if dependent is not None:
        raise NotReadyError(f"{day} not dropped: {dependent} depends on {leaf_of(day)}: drop it first")
    for (default,) in connection.execute(partitions_sql.DEFAULT_PARTITION).fetchall():
        raise NotReadyError(
            f"{day} not dropped: the outbox has the default partition {default}, and PostgreSQL detaches no "
            f"day beside it: run ALTER TABLE outbox DETACH PARTITION {default}, write its rows again as new "
            "events, then drop it"
        )
    if settings.archive != NO_ARCHIVE:
        result = proof.prove(open_store(settings), day, connection, leaf_of(day), manifest_sha256)
        if not result.equal:
            connection.execute(partitions_sql.UNPROVEN, {"day": day})
            raise NotProvenError(day, result.differences)
    close.require_published(connection, day)
    # DETACH hides the day while it waits for older transactions, so wait for these before it starts.
    users = {user for (user,) in connection.execute(partitions_sql.USERS)}
    deadline = time.monotonic() + close.WAIT_SECONDS
    while users:
        if time.monotonic() > deadline:
            raise NotReadyError(
                f"{day} not dropped: a long transaction uses the outbox: see pg_stat_activity, and run this "
                "again; no other session waits for it"
            )
        time.sleep(close.WAIT_PAUSE[0])
        users &= {user for (user,) in connection.execute(partitions_sql.USERS)}


def _detach(connection: Connection, day: date) -> None:
    """Detach the partition from the outbox."""
    connection.execute(partitions_sql.DETACH_LOCK)
    for attempt in locks.briefly(seconds=close.WAIT_SECONDS, pause=close.WAIT_PAUSE):
        with attempt:
            close.finish_detaching(connection)
            while attachment_of(connection, day) == "attached":
                connection.execute(partitions_sql.named(partitions_sql.DETACH, leaf_of(day)))
            return
    raise NotReadyError(
        f"{day} is half detached, a long transaction uses the outbox: see pg_stat_activity, and run this "
        f"again, or `outbox partitions attach {day}`; until then the day is not visible"
    )


def _prove_and_drop(
    settings: DaySettings, connection: Connection, day: date, manifest_sha256: str | None
) -> Dropped:
    leaf, result = leaf_of(day), None
    try:
        with connection.transaction():
            connection.execute(partitions_sql.named(partitions_sql.LOCK_DETACHED, leaf))
            if settings.archive != NO_ARCHIVE:
                result = proof.prove(open_store(settings), day, connection, leaf, manifest_sha256)
                if not result.equal:
                    raise NotProvenError(day, result.differences)
            close.require_published(connection, day)
            connection.execute(partitions_sql.named(partitions_sql.DROP, leaf))
            connection.execute(partitions_sql.DROPPED, {"day": day, "proven": result is not None})
            return Dropped(day, result.rows if result else None, True)
    except BaseException:
        _put_back(settings, day)
        raise


def _put_back(settings: OutboxSettings, day: date) -> None:
    """Attach the partition again after any error; log an error if that fails too."""
    try:
        # In a new session, since the failed one may be unusable; if it still exists, it keeps the day's lock.
        with connect(settings, name=f"outbox: {day}") as connection:
            close.again(connection, day)
            connection.execute(partitions_sql.UNPROVEN, {"day": day})
    except (psycopg.Error, SetupError) as error:
        _LOG.error(
            "%s is still detached, its events are not visible: run `outbox partitions attach %s` (%s)",
            day,
            day,
            first_line(error),
        )


def _was_gone(
    settings: DaySettings, connection: Connection, day: date, manifest_sha256: str | None
) -> Dropped:
    """Record a partition that was dropped manually as dropped, after verifying its file."""
    if settings.archive != NO_ARCHIVE:
        result = proof.verify(open_store(settings), day, manifest_sha256)
        if not result.equal:
            raise NotProvenError(day, result.differences, has_rows=False)
    _LOG.warning("%s: its partition does not exist: it was dropped manually", day)
    connection.execute(partitions_sql.DROPPED, {"day": day, "proven": False})
    return Dropped(day, None, True)
