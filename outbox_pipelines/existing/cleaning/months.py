"""Drops partitions whose rows are all published, whoever makes them.

Invariants:
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
from outbox_pipelines.database import Connection, locks
from outbox_pipelines.days.archive import rows as archive
from outbox_pipelines.days.archive.store import Store
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.cleaning import queries
from outbox_pipelines.existing.cleaning.rows import ATTEMPTS, BRIEFLY, CANCEL_MS, PAUSE
from outbox_pipelines.existing.cleaning.target import Target

# For a lock that no statement through the table waits behind.
_OWN_SECONDS: Final = 2.0


@dataclass(slots=True)
class Months:
    """What became of the partitions."""

    dropped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Reasons, a line for each partition that has ended and stays."""
    files: list[str] = field(default_factory=list)


def drop_all(connection: Connection, target: Target, store: Store | None, stop: threading.Event) -> Months:
    """Drop the partitions that have ended and whose rows may all be removed.

    Raises:
        NotReadyError: a partition and its archive file differ.
    """
    months = Months()
    if "created_at" not in target.mapping.columns:
        return months
    given = {
        "oid": target.oid,
        "column": target.mapping.columns["created_at"],
        "cutoff": target.cutoff,
        "remark": _remark(target),
    }
    found = connection.execute(queries.MONTHS, given).fetchall()
    ((is_owner, user, owner),) = connection.execute(queries.OWNS, {"oid": target.oid}).fetchall()
    if not is_owner:
        if any(has_ended for _, _, _, has_ended, _, _ in found):
            months.kept.append(
                f"partitions of {target} are not dropped, their rows are deleted: only the owner can drop "
                f"them; run the clean-up as {owner}, or GRANT {owner} TO {user}"
            )
        return months
    for oid, schema, name, has_ended, is_newest, is_ours in found:
        leaf = sql.Identifier(schema, name)
        if is_ours:
            connection.execute(target.statement(queries.FORGET, leaf))
        if has_ended and not stop.is_set():
            reason = _why_kept(connection, target, leaf, oid, is_newest=is_newest)
            if reason := reason or _detach(connection, target, leaf, stop):
                months.kept.append(f"{schema}.{name}: {reason}")
    for schema, name in connection.execute(queries.DETACHED, {"remark": _remark(target)}).fetchall():
        if not stop.is_set():
            _drop(connection, target, store, (schema, name), months, stop)
    return months


def _why_kept(
    connection: Connection, target: Target, leaf: sql.Identifier, oid: int, *, is_newest: bool
) -> str:
    if is_newest:
        return "no later partition exists, and this one stays: make the partitions of now and of later"
    ((unpublished, young),) = connection.execute(target.statement(queries.LEFT, leaf)).fetchall()
    if unpublished:
        return f"{unpublished:,} rows are not published (pending, or dead letters)"
    if young:
        return f"{young:,} rows were published too recently"
    dependent = connection.execute(queries.DEPENDENT, {"leaf": oid}).fetchone()
    return f"{dependent[0]} depends on it: drop that first" if dependent else ""


def _detach(connection: Connection, target: Target, leaf: sql.Identifier, stop: threading.Event) -> str:
    """Take the partition out of the table; return why that was impossible, or nothing."""
    block = target.statement(
        queries.DETACH,
        leaf,
        remark=sql.Literal(_remark(target)),
        unpublished_state=sql.SQL(queries.UNPUBLISHED),
    )
    statement = sql.SQL(queries.DO).format(sql.Literal(block.as_string(connection)))
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
        if error.sqlstate != queries.UNPUBLISHED:
            raise
        return "a row that is not published was written during the clean-up"
    finally:
        connection.execute(queries.AT_LENGTH)
    return f"transactions hold the table, or no index leads to its unpublished rows within {CANCEL_MS} ms"


def _remark(target: Target) -> str:
    return f"outbox table clean: detached from {target}, all rows published; to be dropped"


def _drop(
    connection: Connection,
    target: Target,
    store: Store | None,
    named: tuple[str, str],
    months: Months,
    stop: threading.Event,
) -> None:
    """Archive and drop a detached partition."""
    leaf, name = sql.Identifier(*named), ".".join(named)
    with connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = '{_OWN_SECONDS:.0f}s'")
        try:
            with connection.transaction():
                connection.execute(target.statement(queries.KEEP, leaf))
        except psycopg.errors.LockNotAvailable:
            months.kept.append(f"{name}: detached, and a transaction writes into it: the next run drops it")
            return
        ((unpublished, _),) = connection.execute(target.statement(queries.LEFT, leaf)).fetchall()
        if unpublished:
            # Written into the partition by its own name.
            months.kept.append(
                f"{name}: detached, and {unpublished:,} rows are not published: attach it again"
            )
            return
        file = None if store is None else _archive(connection, target, store, leaf, name)
        # The tables that it references are locked for this, too.
        connection.execute(f"SET LOCAL lock_timeout = {CANCEL_MS}")
        try:
            for attempt in locks.briefly(times=ATTEMPTS, pause=PAUSE, wait=stop.wait):
                with attempt:
                    with connection.transaction():
                        connection.execute(target.statement(queries.DROP, leaf))
                    months.dropped.append(name)
                    months.files += [file] if file else []
                    return
        except psycopg.errors.DependentObjectsStillExist as error:
            months.kept.append(f"{name}: detached, and {first_line(error)}")
            return
        months.kept.append(
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
