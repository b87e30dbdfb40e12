"""Read the selected events of the table and the archive, in the order of `seq`.

Invariants:
- An attached day is read from the table, a dropped one from its file, which is compared with its manifest
  before it is read. A day that is dropped in between is read again from its file: no gap, no overlap.
- Only events that were published are read.
- Days whose ranges of `seq` overlap are read together: a transaction around midnight breaks no order.
- A condition can read the selected rows, and nothing else: no file, no extension, no other table.
- No transaction stays open between two reads of the table.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from tempfile import mkdtemp
from typing import Any, Final

import duckdb
import pyarrow as pa
from psycopg import sql

from outbox_pipelines.database import Connection
from outbox_pipelines.days.archive import identity, proof
from outbox_pipelines.days.archive.manifest import SCHEMA, Manifest
from outbox_pipelines.days.archive.store import Store, key, open_store
from outbox_pipelines.days.partitions.calendar import bounds_of
from outbox_pipelines.errors import SetupError
from outbox_pipelines.replay import replay_sql
from outbox_pipelines.replay.selection import Selection, quoted, rejected
from outbox_pipelines.settings import DaySettings

# How many numbers one statement covers in the table.
_TABLE_STEP: Final = 5_000
_ROWS: Final = 1_000
_CONFIG: Final[dict[str, Any]] = {
    "threads": 2,
    "memory_limit": "160MB",
    "python_enable_replacements": False,
    "autoload_known_extensions": False,
    "autoinstall_known_extensions": False,
}
Rows = list[tuple[Any, ...]]


class _MovedError(Exception):
    """A day has left the table while it was read."""


@dataclass(frozen=True, slots=True)
class Part:
    """A day's events, in one place."""

    day: date
    first: int
    last: int
    manifest: Manifest | None
    """None: in the table."""


@dataclass
class Reader:
    """Reads the events of one selection; must be used by one thread."""

    settings: DaySettings
    connection: Connection
    selection: Selection
    _manifests: dict[str, Manifest] = field(default_factory=dict)
    """Those whose files were compared, by the digest in the database."""

    def parts(self) -> list[Part]:
        """Return where the selected days are.

        Raises:
            SetupError: a day is neither in the table nor in the archive, or its file has changed.
            UnavailableError: the archive does not answer.
        """
        parts = []
        store: Store | None = None
        for day, is_attached, manifest_sha256, exists in self.connection.execute(replay_sql.DAYS).fetchall():
            if not self.selection.has(day):
                continue
            if is_attached:
                start, stop = bounds_of(day)
                given = {"start": start, "stop": stop}
                ((first, last),) = self.connection.execute(replay_sql.RANGE, given)
                if first is not None:
                    parts.append(Part(day, first, last, None))
                continue
            if manifest_sha256 is None:
                what = f"run `outbox partitions attach {day}`" if exists else "leave it out of the selection"
                raise SetupError(f"{day} is not in the table and was not archived: {what}")
            if store is None:
                store = open_store(self.settings)
                identity.require(store, self.connection)
            manifest = self._manifest(store, day, manifest_sha256)
            if manifest.first_seq is not None and manifest.last_seq is not None:
                parts.append(Part(day, manifest.first_seq, manifest.last_seq, manifest))
        return parts

    def count(self) -> Rows:
        """Return day, aggregate type, event type, number and first id of the selected events, by day."""
        found: dict[tuple[Any, ...], list[Any]] = {}
        for rows in self._read(replay_sql.COUNT, 0, None):
            for *kind, number, example in rows:
                found.setdefault(tuple(kind), [0, example])[0] += number
        return [(*kind, *counted) for kind, counted in sorted(found.items())]

    def events(self, after: int, last: int) -> Iterator[Rows]:
        """Yield the events behind `after`, up to `last`: the columns of `SELECTED`."""
        yield from self._read(replay_sql.SELECTED, after, last)

    def _read(self, query: str, after: int, last: int | None) -> Iterator[Rows]:
        is_read = False
        while not is_read:
            is_read = True
            for start, end, parts in _windows(self.parts(), after, last):
                try:
                    yield from self._window(query, start, end, parts)
                except _MovedError:
                    is_read = False
                    break
                after = end

    def _window(self, query: str, first: int, last: int, parts: Sequence[Part]) -> Iterator[Rows]:
        """Yield the rows of days in a range of `seq`; those of the table before any of them is used."""
        table = self._table(first, last, [each.day for each in parts if each.manifest is None])
        with ExitStack() as stack:
            files = []
            for each in parts:
                if each.manifest is not None:
                    name = key(each.day, each.manifest.file)
                    files.append(str(stack.enter_context(open_store(self.settings).local(name))))
            connection = stack.enter_context(_duckdb(files))
            sources = []
            if table is not None:
                connection.register("outbox_rows", table)
                sources.append("SELECT * FROM outbox_rows")
            if files:
                listed = ", ".join(map(quoted, files))
                sources.append(f"SELECT * FROM read_parquet([{listed}], union_by_name = true)")
            asked = query.format(
                source=" UNION ALL BY NAME ".join(sources),
                first=first,
                last=last,
                condition=self.selection.condition,
            )
            try:
                reader = connection.sql(asked).to_arrow_reader(_ROWS)
                for batch in reader:
                    yield list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
            except duckdb.Error as error:
                raise rejected(error) from None

    def _table(self, first: int, last: int, days: Sequence[date]) -> pa.Table | None:
        """Return the rows of attached days as an archive file has them."""
        if not days:
            return None
        is_asked = "published_at" in self.selection.where.lower()
        published_at = sql.SQL("processed_at" if is_asked else "NULL::timestamptz")
        query = sql.SQL(replay_sql.ROWS).format(published_at=published_at)
        rows: Rows = []
        for day in days:
            start, stop = bounds_of(day)
            given = {"start": start, "stop": stop, "first": first, "last": last}
            rows += self.connection.execute(query, given).fetchall()
        attached = {day for day, is_there, *_ in self.connection.execute(replay_sql.DAYS) if is_there}
        if not attached.issuperset(days):
            raise _MovedError
        columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
        arrays = [pa.array(values, each.type) for values, each in zip(columns, SCHEMA, strict=True)]
        return pa.table(arrays, names=SCHEMA.names)

    def _manifest(self, store: Store, day: date, manifest_sha256: str) -> Manifest:
        if manifest_sha256 not in self._manifests:
            self._manifests[manifest_sha256] = proof.require_unchanged(store, day, manifest_sha256)
        return self._manifests[manifest_sha256]


def _windows(parts: Sequence[Part], after: int, last: int | None) -> Iterator[tuple[int, int, list[Part]]]:
    """Yield ranges of `seq` in order, each with the days that have events in it."""
    cuts = sorted({each.first for each in parts} | {each.last + 1 for each in parts})
    for start, end in pairwise(cuts):
        within = [each for each in parts if each.first <= start and each.last >= end - 1]
        start = max(start, after + 1)
        end = end if last is None else min(end, last + 1)
        is_archived = all(each.manifest is not None for each in within)
        step = max(1, end - start) if is_archived else _TABLE_STEP
        for low in range(start, end, step) if within else ():
            yield low, min(low + step, end) - 1, within


@contextmanager
def _duckdb(files: Sequence[str]) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a DuckDB that can read these files and nothing else."""
    spilled = mkdtemp(prefix="outbox-replay-")
    try:
        with duckdb.connect(config={**_CONFIG, "temp_directory": spilled}) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute(f"SET allowed_paths = [{', '.join(map(quoted, files))}]")
            connection.execute("SET enable_external_access = false")
            connection.execute("SET lock_configuration = true")
            yield connection
    finally:
        shutil.rmtree(spilled, ignore_errors=True)
