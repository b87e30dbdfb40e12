"""Write a closed day to a Parquet file: a batch of rows is compressed while the next one is read.

Invariants:
- Memory usage is a few batches, regardless of the day's size.
- A file exists only if it is complete: a writer that fails leaves no file.
- Positions only grow: an event was published with the first row of its shard's progress that covers it. A
  position covers the events visible in its `done`, and those visible in its `target` up to its `last_seq`.
- To find when a row was published, no row is looked up: binary searches in arrays do.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any, Final

import adbc_driver_manager
import adbc_driver_postgresql
import adbc_driver_postgresql.dbapi
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from psycopg import sql

from outbox_pipelines import __version__
from outbox_pipelines.core import session
from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection, reading_dsn
from outbox_pipelines.days.archive import archive_sql, proof
from outbox_pipelines.days.archive.manifest import SCHEMA, Column, now, schema_with
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.settings import OutboxSettings

_NEVER = np.iinfo(np.int64).max
Ints = NDArray[np.int64]
_BATCH_BYTES: Final = 16_000_000
GROUP_ROWS: Final = 25_000
"""Maximum rows of a row group, the smallest unit that is read for one aggregate. With 100,000, four times as
much is read and files are no smaller; with 5,000, a file's footer costs more than its rows."""
# A limit for large payloads: the writer and each thread of a reader keep a whole group in memory.
_GROUP_BYTES: Final = 16_000_000
# A page of 1 MB ends at a multiple of this many rows; a reader keeps a whole page in memory.
_PAGE_ROWS: Final = 16
_PROGRESS_ROWS: Final = 500_000
# Batches queued for the file.
_AHEAD: Final = 2
_STATUS: Final = SCHEMA.get_field_index("status")


class _Sight:
    """Finds the first of a series of snapshots in which a transaction is visible."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._ends = np.array([snapshot.xmax for snapshot in snapshots], np.int64)
        last_seen_running: dict[int, int] = {}
        for number, snapshot in enumerate(snapshots):
            for tx in snapshot.xip:
                last_seen_running[tx] = number
        late = sorted(last_seen_running.items())
        self._late = np.array([tx for tx, _ in late], np.int64)
        self._late_first = np.array([number + 1 for _, number in late], np.int64)

    def first(self, tx: Ints) -> Ints:
        """Return that snapshot's number for each transaction; the length of the series if there is none."""
        numbers = np.searchsorted(self._ends, tx, side="right").astype(np.int64)
        if len(self._late):
            place = np.minimum(np.searchsorted(self._late, tx), len(self._late) - 1)
            numbers = np.where(self._late[place] == tx, self._late_first[place], numbers)
        return numbers


class Published:
    """The publishing times of one shard, from its progress in order of time."""

    def __init__(self, rows: Sequence[tuple[datetime, str, str | None, int | None]]) -> None:
        """
        Args:
            rows: time, done, target and last_seq of each row of progress.
        """
        self._at = np.array([int(at.timestamp() * 1_000_000) for at, *_ in rows] + [_NEVER], np.int64)
        self._done = _Sight([Snapshot.parse(done) for _, done, _, _ in rows])
        # Rows inside a tick that took longer than a second.
        within = [(number, row) for number, row in enumerate(rows) if row[2] is not None]
        self._within = np.array([number for number, _ in within], np.int64)
        self._within_seq = np.array([row[3] for _, row in within], np.int64)
        self._target = _Sight([Snapshot.parse(row[2] or "") for _, row in within])

    def at(self, tx: Ints, seq: Ints) -> Ints:
        """Return µs since 1970 for each event; the largest number if no row covers it."""
        row = self._done.first(tx)
        first = self._target.first(tx)
        for start in np.unique(first[first < len(self._within_seq)]):
            of_tick = np.flatnonzero(first == start)
            numbers, seqs = self._tick(int(start), int(row[of_tick].max()))
            place = np.searchsorted(seqs, seq[of_tick])
            row[of_tick] = np.minimum(row[of_tick], numbers[place])
        return self._at[row]

    def _tick(self, start: int, end: int) -> tuple[Ints, Ints]:
        """Return the numbers of the rows inside the tick that row `end` finishes, and the seq of each."""
        stop = int(np.searchsorted(self._within, end))
        return np.append(self._within[start:stop], len(self._at) - 1), self._within_seq[start:stop]


def earliest(times: Sequence[Ints]) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the earliest of several series (one per number of shards), and where no series has a time."""
    best = times[0]
    for other in times[1:]:
        best = np.minimum(best, other)
    return best, best == _NEVER


@dataclass(slots=True)
class Exported:
    """Counts and ranges of the rows in the file."""

    rows: int = 0
    first_seq: int | None = None
    last_seq: int | None = None
    first_created_at: datetime | None = None
    last_created_at: datetime | None = None
    first_id: str | None = None
    last_id: str | None = None
    statuses: dict[str, int] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the counts and ranges of these rows."""
        self.rows += batch.num_rows
        self.first_seq, self.last_seq = _ends(batch.column("seq"), self.first_seq, self.last_seq)
        self.first_created_at, self.last_created_at = _ends(
            batch.column("created_at"), self.first_created_at, self.last_created_at
        )
        # Ids of version 7 contain the time when they were generated.
        ids = batch.column("id").filter(pc.match_substring_regex(batch.column("id"), "^.{14}7"))
        if len(ids):
            self.first_id, self.last_id = _ends(ids, self.first_id, self.last_id)
        for counted in pc.value_counts(batch.column("status")):
            status = counted["values"].as_py()
            self.statuses[status] = self.statuses.get(status, 0) + counted["counts"].as_py()


def export(
    settings: OutboxSettings,
    connection: Connection,
    day: date,
    leaf: str,
    columns: Sequence[Column],
    file: Path,
    progress: Callable[[int], None],
) -> Exported:
    """Write the rows of a partition to a new file, ordered by aggregate and seq.

    Args:
        columns: the columns added by users, which are also written.
        progress: called about every 500,000 rows with the number of rows written.

    Raises:
        UnavailableError: the database is unavailable or reports an error.
        OSError: the file cannot be written.
    """
    published = _published(connection, day)
    exported = Exported()
    most = sql.Literal(archive_sql.MOST_TYPES)
    ((types, count),) = connection.execute(archive_sql.of_leaf(archive_sql.TYPES, leaf, most=most))
    order = archive_sql.BY_FEW_TYPES if count <= archive_sql.MOST_TYPES else archive_sql.BY_MANY_TYPES
    aggregate = sql.SQL(order).format(types=sql.Literal(types or []))
    schema = schema_with(columns)
    with (
        closing(_batches(settings, leaf, aggregate, list(published), columns)) as batches,
        _Writer(file, schema) as writer,
    ):
        for batch in batches:
            if not batch.num_rows:
                continue
            whole = _complete(batch, published, schema)
            writer.write(whole)
            before = exported.rows
            exported.add(whole)
            if before // _PROGRESS_ROWS < exported.rows // _PROGRESS_ROWS:
                progress(exported.rows)
    return exported


def described(file: Path, exported: Exported, columns: Sequence[Column]) -> dict[str, Any]:
    """Return the fields of a manifest that a new file determines; its name follows from its content."""
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return {
        **asdict(exported),
        "file": f"events-{sha256[:16]}.parquet",
        "size": file.stat().st_size,
        "sha256": sha256,
        "buckets": proof.sums_of_file(file, columns),
        "tool": f"outbox-pipelines {__version__}",
        "written_at": now(),
    }


def _published(connection: Connection, day: date) -> dict[int, dict[int, Published]]:
    """Return the publishing times, by number of shards and shard."""
    published: dict[int, dict[int, Published]] = {}
    for (shards,) in connection.execute(archive_sql.DIVISIONS).fetchall():
        rows: dict[int, list[Any]] = {}
        for shard, *row in connection.execute(archive_sql.PROGRESS, {"shards": shards, "day": day}):
            rows.setdefault(shard, []).append(row)
        published[shards] = {shard: Published(each) for shard, each in rows.items()}
    return published


def _batches(
    settings: OutboxSettings,
    leaf: str,
    aggregate: sql.Composable,
    divisions: list[int],
    columns: Sequence[Column],
) -> Generator[pa.RecordBatch, None, None]:
    shards = sql.SQL("").join(
        sql.SQL(archive_sql.SHARD).format(shards=sql.Literal(shards)) for shards in divisions if shards > 1
    )
    parts = {"shards": shards, "aggregate": aggregate, "extra": archive_sql.values(columns)}
    rows = archive_sql.of_leaf(archive_sql.ROWS, leaf, **parts).as_string()
    dsn = reading_dsn(settings.require_dsn())
    hint = {adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
    try:
        with (
            adbc_driver_postgresql.dbapi.connect(dsn, autocommit=True) as connection,
            connection.cursor(adbc_stmt_kwargs=hint) as cursor,
        ):
            tune = f"{archive_sql.PRINT};{archive_sql.TUNE}".split(";")
            for statement in [*session.pin_own(settings.db_schema), *tune]:
                cursor.execute(statement)
            cursor.execute(rows)
            yield from cursor.fetch_record_batch()
    # A server that ends the connection between two batches is an OSError.
    except (adbc_driver_manager.Error, OSError) as error:
        raise UnavailableError(f"the database ended the export: {first_line(error)}") from None


def _complete(
    batch: pa.RecordBatch, published: Mapping[int, Mapping[int, Published]], schema: pa.Schema
) -> pa.RecordBatch:
    """Return the columns of the file, with the publishing times that the relay's progress shows."""
    columns = batch.columns
    width = len(schema)
    tx, seq = (columns[n].to_numpy() for n in (width, SCHEMA.get_field_index("seq")))
    place = SCHEMA.get_field_index("published_at")
    if times := _times(tx, seq, columns[width + 1 :], published):
        at, unknown = earliest(times)
        released = columns[place]
        # A parked event was published when it was released, after the position had passed it. An event that
        # was never published has no time.
        processed = pc.equal(columns[_STATUS], "PROCESSED")
        of_position = pa.array(at, pa.timestamp("us", tz="UTC"), mask=unknown)
        # Current positions do not show when the events of a restored day were published.
        known = pc.and_(processed, pa.array(tx != archive_sql.RESTORED_TX))
        of_position = pc.if_else(known, of_position, None)
        columns[place] = pc.coalesce(released, of_position)
    return pa.RecordBatch.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, schema, strict=False)], schema=schema
    )


def _times(
    tx: Any, seq: Any, shard_columns: list[pa.Array], published: Mapping[int, Mapping[int, Published]]
) -> list[Any]:
    times = []
    columns = iter(shard_columns)
    for shards, by_shard in published.items():
        shard_of = np.zeros(len(tx), np.int64) if shards == 1 else next(columns).to_numpy()
        at = np.full(len(tx), np.iinfo(np.int64).max)
        for shard, series in by_shard.items():
            mine = shard_of == shard
            at[mine] = series.at(tx[mine], seq[mine])
        times.append(at)
    return times


def _ends(column: pa.Array, first: Any, last: Any) -> tuple[Any, Any]:
    """Return the least and the greatest value of a column and the previous ends."""
    ends = pc.min_max(column)
    least, greatest = ends["min"].as_py(), ends["max"].as_py()
    return (least if first is None else min(least, first)), (
        greatest if last is None else max(greatest, last)
    )


def new_file(file: Path, schema: pa.Schema = SCHEMA) -> pq.ParquetWriter:
    """Create a Parquet file of the archive; write rows in order of aggregates, `GROUP_ROWS` at a time."""
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=1,
        write_page_index=True,
        write_page_checksum=True,
        write_batch_size=_PAGE_ROWS,
        # In the other columns every value is different.
        use_dictionary=[
            field.name for field in schema if field.name not in ("id", "seq", "payload", "idempotency_key")
        ],
        sorting_columns=pq.SortingColumn.from_ordering(
            schema, [("aggregate_type", "ascending"), ("aggregate_id", "ascending"), ("seq", "ascending")]
        ),
    )


class _Writer:
    """A Parquet file that is compressed in its own thread."""

    def __init__(self, file: Path, schema: pa.Schema) -> None:
        self._file = file
        self._schema = schema
        self._queue: queue.Queue[pa.RecordBatch | None] = queue.Queue(_AHEAD)
        self._error: BaseException | None = None
        self._writer = new_file(file, schema)
        self._thread = threading.Thread(target=self._run, name="outbox archive", daemon=True)

    def __enter__(self) -> _Writer:
        self._thread.start()
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Queue a batch; wait while the queue is full."""
        while True:
            if self._error is not None:
                raise self._error
            try:
                self._queue.put(batch, timeout=0.5)
                return
            except queue.Full:
                continue

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._put_end()
        self._thread.join()
        try:
            self._writer.close()
        except BaseException as error:  # noqa: BLE001  (raised below, behind what came first)
            self._error = self._error or error
        # A closed writer has written a footer, so even an incomplete file is valid Parquet: remove it.
        if kind is not None or self._error is not None:
            self._file.unlink()
        if kind is None and self._error is not None:
            raise self._error

    def _put_end(self) -> None:
        while self._thread.is_alive():
            try:
                self._queue.put(None, timeout=0.5)
                return
            except queue.Full:
                continue

    def _run(self) -> None:
        waiting: list[pa.RecordBatch] = []
        try:
            while (batch := self._queue.get()) is not None:
                waiting.append(batch)
                rows, size = (sum(getattr(each, of) for each in waiting) for of in ("num_rows", "nbytes"))
                if rows >= GROUP_ROWS or size >= _GROUP_BYTES:
                    self._group(waiting)
            self._group(waiting)
        except BaseException as error:  # noqa: BLE001  (raised in the writing thread)
            self._error = error

    def _group(self, batches: list[pa.RecordBatch]) -> None:
        if batches:
            table = pa.Table.from_batches(batches, self._schema)
            # Groups of equal size, rather than full ones and a small rest.
            groups = -(-table.num_rows // GROUP_ROWS)
            self._writer.write_table(table, row_group_size=-(-table.num_rows // groups))
            batches.clear()
