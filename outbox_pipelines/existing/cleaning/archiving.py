"""Archives published rows, proves the file, and deletes exactly the rows that it has.

Invariants:
- One file at a time waits for its rows to be deleted. After a kill, the next run continues with it, so no row
  is in two files.
- A file has the place and the transaction of each row: a row that was changed since is not deleted.
- A file gets its name only when the deletion of its rows is on disk: after a crash of the server, the rows
  that are back are those of the file that waits.
"""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Final

from psycopg import sql

from outbox_pipelines.database import Connection
from outbox_pipelines.days.archive import rows as archive
from outbox_pipelines.days.archive.store import Store
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.cleaning import queries
from outbox_pipelines.existing.cleaning.rows import Deleter, Leaf, Versions, leaves, place, windows
from outbox_pipelines.existing.cleaning.target import Target

_FILE_ROWS: Final = 100_000
# The server writes commits that nobody waits for within 0.6 s; others within its 15 s.
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
        count = target.statement(queries.COUNT, leaf.name)
        first = found = 0
        for start, end in windows(leaf.blocks):
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
    rows = target.statement(queries.ARCHIVED, leaf.name, start=start, end=end)
    columns = _SYSTEM | target.columns
    # Its name changes after the proof: a file that waits is a proven one.
    waiting = _waiting(target)
    unproven = f"{waiting}.unproven"
    with store.workplace(datetime.now(UTC).date()) as directory, connection.transaction():
        # The sum is of the rows that were written, whatever changes meanwhile.
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
            f"{still:,} archived rows of {target} are locked by other sessions, or kept by a trigger: the "
            "next run deletes them"
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
        deleter.target.statement(queries.STILL, leaf.name), given
    ).fetchall()
    return int(still)


def _is_on_disk(deleter: Deleter) -> bool:
    """Wait until a crash of the server cannot bring the rows back; return False if it was stopped.

    Raises:
        NotReadyError: the server has not written it for a minute.
    """
    ((written,),) = deleter.connection.execute(queries.WRITTEN).fetchall()
    limit = time.monotonic() + _MOST_SECONDS_TO_DISK
    while deleter.connection.execute(queries.IS_ON_DISK, {"written": written}).fetchone() != (True,):
        if time.monotonic() > limit:
            raise NotReadyError(
                f"the server has not yet written to disk that rows of {deleter.target} were deleted: the "
                "next run continues"
            )
        if deleter.stop.wait(_PAUSE_TO_DISK):
            return False
    return True
