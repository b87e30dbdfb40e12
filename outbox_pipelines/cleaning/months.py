"""Drops partitions whose rows are all published, whoever makes them.

Invariants:
- A partition leaves the table only if, under the lock, none of its rows is unpublished. The lock is waited
  for and held for at most 50 ms at a time.
- It is dropped after that, when no statement can reach it: with an archive, after its file was proven. Its
  comment says so, so that a run that is killed in between is continued.
- A default partition stays.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import psycopg
from psycopg import sql

from outbox_pipelines.archive import rows as archive
from outbox_pipelines.archive.store import Store
from outbox_pipelines.cleaning import queries
from outbox_pipelines.cleaning.rows import MOST_SECONDS
from outbox_pipelines.cleaning.target import Target
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.secret import first_line

_ATTEMPTS: Final = 100
_PAUSE: Final = (0.02, 0.2)


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
    given = {"oid": target.oid, "column": target.mapping.columns["created_at"]}
    for _, schema, name, end in connection.execute(queries.MONTHS, given).fetchall():
        leaf = sql.Identifier(schema, name)
        if stop.is_set() or end is None or not _has_ended(connection, target, end):
            continue
        if reason := _why_kept(connection, target, leaf):
            months.kept.append(f"{schema}.{name}: {reason}")
            continue
        try:
            if not _detach(connection, target, leaf, stop):
                reason = "transactions hold the table, or its rows are being written"
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.IntegrityError) as error:
            reason = f"it cannot be detached: {first_line(error)}"
        if reason:
            months.kept.append(f"{schema}.{name}: {reason}")
    _drop_detached(connection, target, store, months, stop)
    return months


def _has_ended(connection: Connection, target: Target, end: str) -> bool:
    # Times without a zone are UTC, like the session.
    query = sql.SQL(queries.ENDED).format(end=sql.Literal(end))
    return connection.execute(query, {"cutoff": target.cutoff}).fetchone() == (True,)


def _why_kept(connection: Connection, target: Target, leaf: sql.Identifier) -> str:
    ((unpublished, young),) = connection.execute(target.statement(queries.LEFT, leaf)).fetchall()
    if unpublished:
        return f"{unpublished:,} rows are not published (pending, or dead letters)"
    return f"{young:,} rows were published too recently" if young else ""


def _detach(connection: Connection, target: Target, leaf: sql.Identifier, stop: threading.Event) -> bool:
    """Take the partition out of the table; return False if that was impossible."""
    remark = sql.SQL(queries.REMARK).format(leaf=leaf, remark=sql.Literal(_remark(target)))

    def attempt() -> bool:
        connection.execute(target.statement(queries.LOCK, leaf))
        if connection.execute(target.statement(queries.UNPUBLISHED, leaf)).fetchone() != (False,):
            return False
        connection.execute(target.statement(queries.DETACH, leaf))
        connection.execute(remark)
        return True

    return _briefly(connection, attempt, stop)


def _drop(connection: Connection, target: Target, leaf: sql.Identifier, stop: threading.Event) -> bool:
    # A table to which its foreign keys refer is locked as well.
    def attempt() -> bool:
        connection.execute(target.statement(queries.DROP, leaf))
        return True

    return _briefly(connection, attempt, stop)


def _briefly(connection: Connection, attempt: Callable[[], bool], stop: threading.Event) -> bool:
    """Run a transaction until it gets its locks, 50 ms at most each time; return False if it never did."""
    limit = f"'{MOST_SECONDS * 1000:.0f}ms'"
    for _ in range(_ATTEMPTS):
        try:
            with connection.transaction():
                connection.execute(f"SET LOCAL lock_timeout = {limit}; SET LOCAL statement_timeout = {limit}")
                return attempt()
        except (
            psycopg.errors.LockNotAvailable,
            psycopg.errors.QueryCanceled,
            psycopg.errors.DeadlockDetected,
        ):
            if stop.wait(random.uniform(*_PAUSE)):
                break
    return False


def _remark(target: Target) -> str:
    return f"outbox table clean: detached from {target}, all rows published; to be dropped"


def _drop_detached(
    connection: Connection, target: Target, store: Store | None, months: Months, stop: threading.Event
) -> None:
    found = connection.execute(queries.DETACHED, {"remark": _remark(target)}).fetchall()
    for oid, schema, name in found:
        leaf = sql.Identifier(schema, name)
        ((unpublished, _),) = connection.execute(target.statement(queries.LEFT, leaf)).fetchall()
        if unpublished:
            # Written into the partition by its own name.
            months.kept.append(
                f"{schema}.{name}: detached, and {unpublished:,} rows are not published: attach it again"
            )
            continue
        if store is not None:
            months.files.append(_archive(connection, target, store, leaf, f"{schema}.{name}-{oid}"))
        try:
            reason = (
                "" if _drop(connection, target, leaf, stop) else "transactions hold it, or what it refers to"
            )
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.DependentObjectsStillExist) as error:
            reason = first_line(error)
        if reason:
            months.kept.append(f"{schema}.{name}: detached, and cannot be dropped: {reason}")
        else:
            months.dropped.append(f"{schema}.{name}")


def _archive(
    connection: Connection, target: Target, store: Store, leaf: sql.Identifier, known_as: str
) -> str:
    """Return the proven file of a table that is no longer written; a run that was killed may have made it."""
    name = f"tables/{target}/{known_as}.parquet"
    expected = archive.sum_of_rows(connection, target.columns, leaf)
    if archive.sum_of_file(store, name, target.columns) == expected:
        return name
    unproven = f"_outbox/cleaning/{known_as}.parquet.unproven"
    with store.workplace(target.cutoff.date()) as directory:
        file = directory / "rows.parquet"
        archive.write(connection, target.columns, leaf, file)
        store.adopt(file, unproven)
    if archive.sum_of_file(store, unproven, target.columns) != expected:
        store.remove(unproven)
        raise NotReadyError(f"the rows of {leaf.as_string()} and their archive file differ: run it again")
    store.rename(unproven, name)
    return name
