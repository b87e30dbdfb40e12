"""One clean-up: the partitions that can be dropped, whatever makes them, then the rows that remain.

Invariants:
- At most one runs for a table. It can be killed anywhere, and the next one continues.
- A partition leaves the table only if, under the lock, none of its rows is unpublished. Waiting for the lock
  and holding it take at most 50 ms together, in one statement.
- It is dropped after that, when no statement through the table can reach it, under a lock against those that
  name it: with an archive, after its file was proven. Its comment says so, so that a run that is killed in
  between is continued.
- A default partition stays, and so does the newest one: pg_partman derives the next from it.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

import psycopg
from psycopg import sql

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.text import counted
from outbox_pipelines.database import Connection, connect, locks, refuse_standby
from outbox_pipelines.days.archive import rows as archive
from outbox_pipelines.days.archive.store import Store, open_store
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.cleaning import cleaning_sql, published_rows
from outbox_pipelines.existing.cleaning.published_rows import ATTEMPTS, BRIEFLY, CANCEL_MS, PAUSE
from outbox_pipelines.existing.cleaning.target import Target, find_target
from outbox_pipelines.existing.existing_sql import PARTMAN
from outbox_pipelines.settings import NO_ARCHIVE, DaySettings

_LOCK: Final = 0x6F62_7805
# For a lock that no statement through the table waits behind.
_OWN_SECONDS: Final = 2.0


@dataclass(slots=True)
class Cleaned:
    """What a clean-up did."""

    table: str
    deleted: int = 0
    """Rows, without those of dropped partitions."""
    dropped: list[str] = field(default_factory=list)
    """Partitions."""
    files: list[str] = field(default_factory=list)
    """Files of the archive."""
    notes: list[str] = field(default_factory=list)
    """What stays and why, and what should be corrected; a line each."""
    longest: float = 0.0
    """Seconds of the longest batch."""


def clean(settings: DaySettings, stop: threading.Event | None = None) -> Cleaned:
    """Remove the rows of OUTBOX_TABLE's table that were published OUTBOX_CLEAN_AFTER_HOURS ago.

    Raises:
        SetupError: the table cannot be cleaned, or the clean-up is not configured.
        NotReadyError: another clean-up of the table runs; rows and archive differ.
    """
    stop = stop or threading.Event()
    with connect(settings, name="outbox table clean") as connection:
        connection.execute(cleaning_sql.TUNE)
        refuse_standby(connection)
        found = find_target(connection, settings)
        _lock(connection, found)
        store = None if settings.archive == NO_ARCHIVE else open_store(settings)
        cleaned = Cleaned(str(found), notes=_partman(connection, found))
        deleter = published_rows.Deleter(connection, found, stop)
        if store is not None:
            cleaned.files += published_rows.complete(deleter, store)
        _drop_months(connection, found, store, stop, cleaned)
        if store is None:
            published_rows.delete_all(deleter)
        else:
            cleaned.files += published_rows.archive_all(deleter, store)
        cleaned.deleted, cleaned.longest = deleter.deleted, deleter.longest
        return cleaned


def _lock(connection: Connection, found: Target) -> None:
    if (who := cleaning_sql.LOCK.take(connection, {"key": _LOCK << 32 | found.oid})) is not None:
        raise NotReadyError(f"{found} is being cleaned by {who}: wait for its end")


def _partman(connection: Connection, found: Target) -> list[str]:
    """Return what in the settings of pg_partman would lose events."""
    notes = []
    ((children,),) = connection.execute(cleaning_sql.CHILDREN, {"oid": found.oid}).fetchall()
    if children:
        notes.append(
            f"rows stay in {counted(children, 'table')} that inherit from {found}: only declarative "
            "partitions are cleaned (pg_partman: the type native)"
        )
    row = connection.execute(PARTMAN).fetchone()
    if row is None:
        return notes
    if not row[1]:
        return [*notes, f"this role may not read {row[0]}: make sure that {found} has no retention there"]
    config = sql.SQL(row[0])
    name = sql.Literal(str(found)).as_string()
    for retention, is_infinite in connection.execute(
        sql.SQL(cleaning_sql.RETENTION).format(config=config), {"table": str(found)}
    ).fetchall():
        if retention is not None:
            notes.append(
                f"pg_partman drops months of {found} by its retention ({retention}), also with rows that are "
                f"not published: UPDATE {row[0]} SET retention = NULL WHERE parent_table = {name}"
            )
        if not is_infinite:
            notes.append(
                f"pg_partman makes no months of {found} while no rows arrive, and later rows would go to the "
                f"default partition: UPDATE {row[0]} SET infinite_time_partitions = true "
                f"WHERE parent_table = {name}"
            )
    return notes


def _drop_months(
    connection: Connection, target: Target, store: Store | None, stop: threading.Event, cleaned: Cleaned
) -> None:
    """Drop the partitions that have ended and whose rows may all be removed.

    Raises:
        NotReadyError: a partition and its archive file differ.
    """
    if "created_at" not in target.mapping.columns:
        return
    given = {
        "oid": target.oid,
        "column": target.mapping.columns["created_at"],
        "cutoff": target.cutoff,
        "remark": _remark(target),
    }
    found = connection.execute(cleaning_sql.MONTHS, given).fetchall()
    ((is_owner, user, owner),) = connection.execute(cleaning_sql.OWNS, {"oid": target.oid}).fetchall()
    if not is_owner:
        if any(has_ended for _, _, _, has_ended, _, _ in found):
            cleaned.notes.append(
                f"partitions of {target} are not dropped, their rows are deleted: only the owner can drop "
                f"them; run the clean-up as {owner}, or GRANT {owner} TO {user}"
            )
        return
    for oid, schema, name, has_ended, is_newest, is_ours in found:
        leaf = sql.Identifier(schema, name)
        if is_ours:
            connection.execute(target.statement(cleaning_sql.FORGET, leaf))
        if has_ended and not stop.is_set():
            reason = _why_kept(connection, target, leaf, oid, is_newest=is_newest)
            if reason := reason or _detach(connection, target, leaf, stop):
                cleaned.notes.append(f"{schema}.{name}: {reason}")
    for schema, name in connection.execute(cleaning_sql.DETACHED, {"remark": _remark(target)}).fetchall():
        if not stop.is_set():
            _drop(connection, target, store, (schema, name), cleaned, stop)


def _why_kept(
    connection: Connection, target: Target, leaf: sql.Identifier, oid: int, *, is_newest: bool
) -> str:
    if is_newest:
        return "no later partition exists, and this one stays: make the partitions of now and of later"
    ((unpublished, young),) = connection.execute(target.statement(cleaning_sql.LEFT, leaf)).fetchall()
    if unpublished:
        return f"{counted(unpublished, 'row')} not published (pending, or dead letters)"
    if young:
        return f"{counted(young, 'row')} published too recently"
    dependent = connection.execute(cleaning_sql.DEPENDENT, {"leaf": oid}).fetchone()
    return f"{dependent[0]} depends on it: drop that first" if dependent else ""


def _detach(connection: Connection, target: Target, leaf: sql.Identifier, stop: threading.Event) -> str:
    """Take the partition out of the table; return why that was impossible, or nothing."""
    block = target.statement(
        cleaning_sql.DETACH,
        leaf,
        remark=sql.Literal(_remark(target)),
        unpublished_state=sql.SQL(cleaning_sql.UNPUBLISHED),
    )
    statement = sql.SQL(cleaning_sql.DO).format(sql.Literal(block.as_string(connection)))
    connection.execute(BRIEFLY)
    try:
        for attempt in locks.briefly(times=ATTEMPTS, pause=PAUSE, wait=stop.wait, is_cut=True):
            with attempt:
                connection.execute(statement)
                return ""
    except psycopg.errors.ForeignKeyViolation as error:
        return f"{first_line(error)}: its rows are deleted when no row of that table references them"
    except psycopg.errors.InsufficientPrivilege as error:
        return first_line(error)
    except psycopg.Error as error:
        if error.sqlstate != cleaning_sql.UNPUBLISHED:
            raise
        return "a row that is not published was written during the clean-up"
    finally:
        connection.execute(cleaning_sql.AT_LENGTH)
    return f"transactions hold the table, or no index leads to its unpublished rows within {CANCEL_MS} ms"


def _remark(target: Target) -> str:
    return f"outbox table clean: detached from {target}, all rows published; to be dropped"


def _drop(
    connection: Connection,
    target: Target,
    store: Store | None,
    named: tuple[str, str],
    cleaned: Cleaned,
    stop: threading.Event,
) -> None:
    """Archive and drop a detached partition."""
    leaf, name = sql.Identifier(*named), ".".join(named)
    with connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = '{_OWN_SECONDS:.0f}s'")
        try:
            with connection.transaction():
                connection.execute(target.statement(cleaning_sql.KEEP, leaf))
        except psycopg.errors.LockNotAvailable:
            cleaned.notes.append(f"{name}: detached, and a transaction writes into it: the next run drops it")
            return
        ((unpublished, _),) = connection.execute(target.statement(cleaning_sql.LEFT, leaf)).fetchall()
        if unpublished:
            # Written into the partition by its own name.
            cleaned.notes.append(
                f"{name}: detached, with {counted(unpublished, 'row')} not published: attach it again"
            )
            return
        file = None if store is None else _archive(connection, target, store, leaf, name)
        # The tables that it references are locked for this, too.
        connection.execute(f"SET LOCAL lock_timeout = {CANCEL_MS}")
        try:
            for attempt in locks.briefly(times=ATTEMPTS, pause=PAUSE, wait=stop.wait):
                with attempt:
                    with connection.transaction():
                        connection.execute(target.statement(cleaning_sql.DROP, leaf))
                    cleaned.dropped.append(name)
                    cleaned.files += [file] if file else []
                    return
        except psycopg.errors.DependentObjectsStillExist as error:
            cleaned.notes.append(f"{name}: detached, and {first_line(error)}")
            return
        cleaned.notes.append(
            f"{name}: detached, and transactions hold it or a table that it references: the next run drops it"
        )


def _archive(connection: Connection, target: Target, store: Store, leaf: sql.Identifier, name: str) -> str:
    """Return the proven file of a table that is no longer written; a run that was killed may have made it."""
    expected = archive.sum_of_rows(connection, target.columns, leaf)
    # By its content: the file of a partition with other rows keeps its name.
    digest = hashlib.sha256(f"{target.database} {name} {expected}".encode()).hexdigest()[:16]
    known_as = f"{quote(name, safe='')}-{digest}.parquet"
    file = f"tables/{target.file_name}/{known_as}"
    if archive.sum_of_file(store, file, target.columns) == expected:
        return file
    unproven = f"_outbox/cleaning/{target.database}/{known_as}.unproven"
    with store.workplace(target.cutoff.date()) as directory:
        local = directory / "rows.parquet"
        archive.write(connection, target.columns, leaf, local)
        store.adopt(local, unproven)
    if archive.sum_of_file(store, unproven, target.columns) != expected:
        store.remove(unproven)
        raise NotReadyError(f"the rows of {name} and their archive file differ: run it again")
    store.rename(unproven, file)
    return file
