"""Read the selected events of the table and the archive, in the order of `seq`.

Invariants:
- An attached day is read from the table, a dropped one from its file, which is compared with its manifest
  before it is read. A day that is dropped in between is read again from its file: no gap, no overlap.
- Only events that were published are read.
- Days whose ranges of `seq` overlap are read together: a transaction around midnight breaks no order.
- A condition can read the selected rows, and nothing else: no file, no extension, no other table.
- No transaction stays open between two reads of the table.
- Memory does not depend on how many events there are, nor on how large one is.
- A dead letter that was published after its day was archived counts as published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg import sql

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.text import counted
from outbox_pipelines.database import Connection
from outbox_pipelines.days.archive import identity, proof
from outbox_pipelines.days.archive.manifest import SCHEMA, Change, Manifest
from outbox_pipelines.days.archive.question import locked, rejected_condition
from outbox_pipelines.days.archive.rendering import literal
from outbox_pipelines.days.archive.store import Store, key, open_store
from outbox_pipelines.days.partitions.calendar import bounds_of
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.kafka.message import needs_time
from outbox_pipelines.replay import replay_sql
from outbox_pipelines.replay.selection import Selection
from outbox_pipelines.replay.seq_order import in_order
from outbox_pipelines.settings import ProcessSettings

# How many numbers are read at once in the table, and how many bytes of text, about.
_TABLE_STEP: Final = 20_000
_TABLE_BYTES: Final = 8_000_000
# How many events are Python objects at a time, and how many bytes of text, about.
_ROWS: Final = 1_000
_BYTES: Final = 1_000_000
# Of a batch of DuckDB, if all of its rows were as large as those of the largest row group.
_BATCH_BYTES: Final = 8_000_000
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

    settings: ProcessSettings
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

    def notes(self) -> list[str]:
        """Return what retention and redaction have changed in the archived days that were read."""
        changes = [(each.day, change) for each in self._manifests.values() for change in each.changes]
        expired = [each for each in changes if each[1].kind == "expired"]
        redacted = [each for each in changes if each[1].kind == "redacted"]
        notes = []
        if expired:
            removed = sum(change.events for _, change in expired)
            was = "was" if removed == 1 else "were"
            notes.append(f"{counted(removed, 'event')} of {_when(expired, f'{was} removed by retention')}")
        if redacted:
            notes.append(f"events of {_when(redacted, 'were redacted')}")
        return notes

    def count(self, last: int | None = None) -> Rows:
        """Return day, aggregate type, event type, number and first id of the selected events, by day.

        Args:
            last: only up to this `seq`.
        """
        found: dict[tuple[Any, ...], list[Any]] = {}
        for batch in self._read(replay_sql.COUNT, 0, last):
            for *kind, number, example in _rows(batch):
                found.setdefault(tuple(kind), [0, example])[0] += number
        return [(*kind, *counted) for kind, counted in sorted(found.items())]

    def events(self, after: int, last: int) -> Iterator[list[Event]]:
        """Yield the events behind `after`, up to `last`."""
        time = replay_sql.TIME if needs_time(self.settings) else ""
        for table in self._read(replay_sql.SELECTED.replace("{time}", time), after, last, ordered=True):
            most = max(1, min(_ROWS, table.num_rows * _BYTES // max(1, table.nbytes)))
            for batch in table.to_batches(most):
                yield list(map(Event._make, _rows(batch)))

    def _read(self, query: str, after: int, last: int | None, *, ordered: bool = False) -> Iterator[Any]:
        is_read = False
        while not is_read:
            is_read = True
            for start, end, parts in self._windows(after, last):
                with ExitStack() as stack:
                    try:
                        batches, folder = stack.enter_context(self._window(query, start, end, parts))
                    except _MovedError:
                        self._manifests.clear()
                        is_read = False
                        break
                    if not ordered:
                        yield from batches
                        continue
                    try:
                        yield from in_order(batches, start, end, folder)
                    except OSError as error:
                        raise SetupError(
                            f"events cannot be put in order in {folder.parent}: {first_line(error)}: free "
                            "space there, or set TMPDIR"
                        ) from None
                after = end

    def _windows(self, after: int, last: int | None) -> Iterator[tuple[int, int, list[Part]]]:
        """Yield ranges of `seq` in order, each with the days that have events in it.

        Those of the table have a limited size.
        """
        for start, end, parts in _ranges(self.parts(), after, last):
            days = [part.day for part in parts if part.manifest is None]
            if not days:
                yield start, end, parts
                continue
            limits = {"start": bounds_of(days[0])[0], "stop": bounds_of(days[-1])[1], "most": _TABLE_BYTES}
            for low in range(start, end + 1, _TABLE_STEP):
                high = min(low + _TABLE_STEP - 1, end)
                cuts = self.connection.execute(replay_sql.CUTS, {**limits, "first": low, "last": high})
                for cut in [*(cut for (cut,) in cuts.fetchall()[:-1]), high]:
                    yield low, cut, parts
                    low = cut + 1

    @contextmanager
    def _window(
        self, query: str, first: int, last: int, parts: Sequence[Part]
    ) -> Iterator[tuple[Iterator[pa.RecordBatch], Path]]:
        """Give the rows of days in a range of `seq`, and a folder; all is found before any row is used."""
        table = self._table(first, last, [each.day for each in parts if each.manifest is None])
        with ExitStack() as stack:
            files = []
            for each in parts:
                if each.manifest is not None:
                    name = key(each.day, each.manifest.file)
                    try:
                        files.append(str(stack.enter_context(open_store(self.settings).local(name))))
                    except FileNotFoundError:
                        raise _MovedError from None
            folder = stack.enter_context(TemporaryDirectory(prefix="outbox-replay-"))
            connection = stack.enter_context(locked(files, folder))
            given = {"first": first, "last": last, "condition": self.selection.condition}
            sources = []
            if table is not None:
                connection.register("outbox_rows", table)
                sources.append("SELECT * FROM outbox_rows")
            try:
                if files:
                    listed = ", ".join(map(literal, files))
                    source = (
                        f"SELECT * FROM read_parquet([{listed}], union_by_name = true, "
                        "hive_partitioning = false)"
                    )
                    if any(
                        each.manifest is not None and each.manifest.statuses.get("FAILED") for each in parts
                    ):
                        asked = replay_sql.DEAD.format(source=source, **given)
                        source = self._revived(source, connection.sql(asked).fetchall())
                    sources.append(source)
                source = replay_sql.DATED.format(source=" UNION ALL BY NAME ".join(sources))
                asked = query.format(source=source, **given)
                batches = _checked(connection.sql(asked).to_arrow_reader(_rows_at_once(files)))
            except duckdb.Error as error:
                raise rejected_condition(error) from None
            yield batches, Path(folder)

    def _revived(self, source: str, dead: Rows) -> str:
        """Return a source whose dead letters count as published if they were published since."""
        given = dict(zip(("seqs", "ids"), map(list, zip(*dead, strict=True)), strict=False))
        found = self.connection.execute(replay_sql.PUBLISHED_SINCE, given).fetchall() if dead else []
        if not found:
            return source
        return replay_sql.REVIVED.format(source=source, seqs=", ".join(str(seq) for (seq,) in found))

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


def _ranges(parts: Sequence[Part], after: int, last: int | None) -> Iterator[tuple[int, int, list[Part]]]:
    """Yield ranges of `seq` in order, each with the days that have events in it."""
    cuts = sorted({each.first for each in parts} | {each.last + 1 for each in parts})
    for start, end in pairwise(cuts):
        within = [each for each in parts if each.first <= start and each.last >= end - 1]
        first, final = max(start, after + 1), end - 1 if last is None else min(end - 1, last)
        if within and first <= final:
            yield first, final, within


def _when(changes: Sequence[tuple[date, Change]], what: str) -> str:
    """Return which days were changed, and when."""
    days = sorted({day for day, _ in changes})
    which = f"{days[0]}" if len(days) == 1 else f"{len(days):,} days from {days[0]} to {days[-1]}"
    last = max(change.at for _, change in changes)
    return f"{which} {what}{' on' if len(changes) == 1 else ', last on'} {last:%Y-%m-%d}"


def _rows_at_once(files: Sequence[str]) -> int:
    """Return how many rows DuckDB may have in one batch: a row group of a file has a limited size."""
    sizes = [1]
    for file in files:
        found = pq.read_metadata(file)
        groups = (found.row_group(number) for number in range(found.num_row_groups))
        sizes += [group.total_byte_size // max(1, group.num_rows) for group in groups]
    return max(1, min(_ROWS, _BATCH_BYTES // max(sizes)))


def _checked(batches: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """The same; what DuckDB finds while rows are read is an error of pyarrow."""
    try:
        yield from batches
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise rejected_condition(error) from None


def _rows(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)
