"""Deletes published rows in batches so small that no lock is held for long; with an archive, after a proof.

Invariants:
- A statement that takes more than 40 ms is canceled and tried with fewer rows, so that no lock is held for
  more than 50 ms. Between two of them is a pause as long as the last one.
- A batch is one statement, and so one transaction: if this process or the network stops, no lock is held.
- Only versions of rows that were found published are deleted, and only if they still are.
- One file at a time waits for its rows to be deleted. After a kill, the next run continues with it, so no row
  is in two files.
- A file has the place and the transaction of each row: a row that was changed since is not deleted.
- A file gets its name only when the deletion of its rows is on disk: after a crash of the server, the rows
  that are back are those of the file that waits.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import psycopg
from psycopg import sql

from outbox_pipelines.core.outages import is_outage
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.text import counted
from outbox_pipelines.database import Connection
from outbox_pipelines.days.archive import rows as archive
from outbox_pipelines.days.archive.store import Store
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.cleaning import cleaning_sql
from outbox_pipelines.existing.cleaning.target import Target

MOST_SECONDS: Final = 0.05
"""How long a batch may hold its locks."""
# Half of it: a statement that is canceled was for nothing.
_WANTED_SECONDS: Final = MOST_SECONDS / 2
# The rest is for what comes after the statement: its cancellation, or its commit.
CANCEL_MS: Final = 40
"""After how many milliseconds the server cancels a statement."""
BRIEFLY: Final = f"SET statement_timeout = {CANCEL_MS}; SET lock_timeout = {CANCEL_MS // 2}"
"""Limits of a statement: how long it may take, and how much of that it may wait for a lock."""
_WINDOW_BLOCKS: Final = 256
_FIRST_ROWS: Final = 200
_MOST_ROWS: Final = 5_000
_ATTEMPTS_OF_ONE: Final = 5
ATTEMPTS: Final = 100
"""How often a lock is tried."""
PAUSE: Final = (0.02, 0.2)
"""Seconds between two attempts: from, to."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of rows: places, transactions and ids, as texts."""

    places: list[str]
    transactions: list[str]
    ids: list[str]

    def __len__(self) -> int:
        return len(self.places)


@dataclass(slots=True)
class Deleter:
    """Deletes batches of one table, each in a transaction of its own."""

    connection: Connection
    target: Target
    stop: threading.Event
    deleted: int = 0
    longest: float = 0.0
    """Seconds of the longest batch, which held its locks for less."""
    _rows: int = field(default=_FIRST_ROWS)
    _round_trip: float | None = None
    """Seconds that each statement takes on the network, without locks."""

    def delete(self, leaf: sql.Identifier, versions: Versions) -> int:
        """Delete these versions; return how many were there and not locked.

        Raises:
            NotReadyError: a single row takes too long; another session locks the table; a foreign key or a
                trigger refuses.
        """
        if self._round_trip is None:
            self._round_trip = min(self._seconds_of_nothing() for _ in range(3))
        self.connection.execute(BRIEFLY)
        deleted = self._delete(self.target.statement(cleaning_sql.DELETE, leaf), versions)
        self.connection.execute(cleaning_sql.AT_LENGTH)
        self.deleted += deleted
        return deleted

    def _delete(self, statement: sql.Composed, versions: Versions) -> int:
        at = deleted = failures = 0
        while at < len(versions) and not self.stop.is_set():
            until = at + self._rows
            given = {
                "places": versions.places[at:until],
                "transactions": versions.transactions[at:until],
                "ids": versions.ids[at:until],
            }
            began = time.monotonic()
            try:
                count = self._execute(statement, given)
            except psycopg.errors.QueryCanceled:
                # One such statement can also be the fault of a machine that is busy for a moment.
                failures += self._rows == 1
                if failures == _ATTEMPTS_OF_ONE:
                    raise NotReadyError(
                        f"deleting one row of {self.target} takes more than {CANCEL_MS} ms: "
                        "look for a trigger, or a foreign key without an index"
                    ) from None
                self._rows = max(1, self._rows // 4)
                self.stop.wait(MOST_SECONDS)
                continue
            except psycopg.errors.LockNotAvailable:
                failures += 1
                if failures == ATTEMPTS:
                    raise NotReadyError(
                        f"another session locks {self.target}, or rows that its rows reference: the next run "
                        "continues"
                    ) from None
                self.stop.wait(random.uniform(*PAUSE))
                continue
            except psycopg.DatabaseError as error:
                if is_outage(error):
                    raise
                raise NotReadyError(
                    f"rows of {self.target} cannot be deleted: {first_line(error)}: remove the rows that "
                    "reference them, or change what refuses the DELETE; the next run continues"
                ) from None
            took = max(0.0, time.monotonic() - began - (self._round_trip or 0.0))
            deleted += count
            at, failures = until, 0
            self.longest = max(self.longest, took)
            self._adapt(took)
            self.stop.wait(took)
        return deleted

    def _execute(self, statement: sql.Composed, given: dict[str, list[str]]) -> int:
        return self.connection.execute(statement, given).rowcount

    def _seconds_of_nothing(self) -> float:
        began = time.monotonic()
        self.connection.execute(cleaning_sql.NOTHING)
        return time.monotonic() - began

    def _adapt(self, took: float) -> None:
        if took > _WANTED_SECONDS:
            self._rows = max(1, self._rows // 2)
        elif took < _WANTED_SECONDS / 4:
            self._rows = min(_MOST_ROWS, self._rows * 2)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A table that contains rows."""

    oid: int
    name: sql.Identifier
    blocks: int


def leaves(connection: Connection, target: Target) -> list[Leaf]:
    """Return the tables that contain the rows: the partitions, or the table itself."""
    found = connection.execute(cleaning_sql.LEAVES, {"oid": target.oid}).fetchall()
    return [Leaf(oid, sql.Identifier(schema, name), blocks) for oid, schema, name, blocks in found]


def _windows(blocks: int) -> Iterator[tuple[int, int]]:
    """Divide a table into ranges of blocks."""
    for start in range(0, blocks, _WINDOW_BLOCKS):
        yield start, min(start + _WINDOW_BLOCKS, blocks)


def place(block: int) -> str:
    """Return the place of a block's beginning."""
    return f"({block},0)"


def delete_all(deleter: Deleter) -> None:
    """Delete all rows that may be removed."""
    connection, target = deleter.connection, deleter.target
    for leaf in leaves(connection, target):
        query = target.statement(cleaning_sql.ROWS, leaf.name)
        for start, end in _windows(leaf.blocks):
            found = connection.execute(query, {"start": place(start), "end": place(end)}).fetchall()
            if found:
                deleter.delete(leaf.name, Versions(*map(list, zip(*found, strict=True))))
            if deleter.stop.is_set():
                return


_FILE_ROWS: Final = 100_000
# The server writes commits that no session waits for within 0.6 s; others within its 15 s.
_MOST_SECONDS_TO_DISK: Final = 60.0
_PAUSE_TO_DISK: Final = 0.05
# Names that no column can have.
_SYSTEM: Final = {"tableoid": "oid", "ctid": "tid", "xmin": "xid"}


def archive_all(deleter: Deleter, store: Store) -> list[str]:
    """Archive and delete all rows that may be removed; return the files. `complete` comes first.

    Raises:
        NotReadyError: rows and file differ; rows that were archived cannot be deleted now.
    """
    target, files = deleter.target, list[str]()
    for leaf in leaves(deleter.connection, target):
        count = target.statement(cleaning_sql.COUNT, leaf.name)
        first = found = 0
        for start, end in _windows(leaf.blocks):
            if deleter.stop.is_set():
                return files
            given = {"start": place(start), "end": place(end)}
            ((more,),) = deleter.connection.execute(count, given).fetchall()
            found += more
            if found >= _FILE_ROWS or (found and end == leaf.blocks):
                _write(deleter.connection, store, target, leaf, (first, end))
                files += complete(deleter, store)
                found = 0
            if not found:
                first = end
    return files


def _write(connection: Connection, store: Store, target: Target, leaf: Leaf, blocks: tuple[int, int]) -> None:
    """Write the rows of some blocks into the file that waits."""
    start, end = (sql.Literal(place(block)) for block in blocks)
    rows = target.statement(cleaning_sql.ARCHIVED, leaf.name, start=start, end=end)
    columns = _SYSTEM | target.columns
    # Its name changes after the proof: a file that waits is a proven one.
    waiting = _waiting(target)
    unproven = f"{waiting}.unproven"
    with store.workplace(datetime.now(UTC).date()) as directory, connection.transaction():
        # The sum is of the rows that were written, whatever changes in between.
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        file = directory / "rows.parquet"
        archive.write(connection, columns, rows, file)
        expected = archive.sum_of_rows(connection, columns, rows)
        store.adopt(file, unproven)
    if archive.sum_of_file(store, unproven, columns) != expected:
        store.remove(unproven)
        raise NotReadyError(f"the rows of {target} and their archive file differ; nothing was deleted")
    store.rename(unproven, waiting)


def _waiting(target: Target) -> str:
    """Return the name of the file whose rows are being deleted. Of this database: another may be alike."""
    return f"_outbox/cleaning/{target.database}/{target.file_name}.parquet"


def complete(deleter: Deleter, store: Store) -> list[str]:
    """Delete the rows of the file that waits, if there is one, and give the file its name.

    Before months are dropped: their rows would be in the file of the month as well.

    Raises:
        NotReadyError: some of the rows cannot be deleted now.
    """
    import pyarrow.parquet as pq

    target, still = deleter.target, 0
    digest = hashlib.sha256(target.database.encode())
    names = ["tableoid", "ctid", "xmin", target.mapping.columns["id"]]
    by_oid = {leaf.oid: leaf for leaf in leaves(deleter.connection, target)}
    try:
        with store.local(_waiting(target)) as path:
            for batch in pq.ParquetFile(path).iter_batches(batch_size=20_000, columns=names):
                oids, places, transactions, ids = (batch.column(name).to_pylist() for name in names)
                digest.update(repr((oids, places, transactions, ids)).encode())
                leaf = by_oid.get(int(oids[0]))
                if leaf is not None:
                    still += _delete(deleter, leaf, Versions(places, transactions, ids))
    except FileNotFoundError:
        return []
    if deleter.stop.is_set():
        return []
    if still:
        raise NotReadyError(
            f"not deleted: {counted(still, 'archived row')} of {target}, locked by other sessions or kept by "
            "a trigger: the next run deletes what is left"
        )
    if not _is_on_disk(deleter):
        return []
    name = f"tables/{target.file_name}/rows-{digest.hexdigest()[:16]}.parquet"
    store.rename(_waiting(target), name)
    return [name]


def _delete(deleter: Deleter, leaf: Leaf, versions: Versions) -> int:
    """Delete these versions; return how many are still there."""
    if deleter.delete(leaf.name, versions) == len(versions):
        return 0
    given = {"places": versions.places, "transactions": versions.transactions, "ids": versions.ids}
    ((still,),) = deleter.connection.execute(
        deleter.target.statement(cleaning_sql.STILL, leaf.name), given
    ).fetchall()
    return int(still)


def _is_on_disk(deleter: Deleter) -> bool:
    """Wait until a crash of the server cannot bring the rows back; return False if it was stopped.

    Raises:
        NotReadyError: the server has not written it for a minute.
    """
    ((written,),) = deleter.connection.execute(cleaning_sql.WRITTEN).fetchall()
    limit = time.monotonic() + _MOST_SECONDS_TO_DISK
    while deleter.connection.execute(cleaning_sql.IS_ON_DISK, {"written": written}).fetchone() != (True,):
        if time.monotonic() > limit:
            raise NotReadyError(
                f"the server has not yet written to disk that rows of {deleter.target} were deleted: the "
                "next run continues"
            )
        if deleter.stop.wait(_PAUSE_TO_DISK):
            return False
    return True
