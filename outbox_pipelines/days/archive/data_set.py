"""An archive for analysts: its events as a DuckDB relation, a pandas DataFrame or a pyarrow dataset.

Invariants:
- Only files that a manifest names are read: incomplete and superseded files are ignored.
- Only files of the requested days are opened, and only the needed row groups and columns are read. The first
  file of a query is always opened, for the names of its columns.
- Files of all versions form one table, with the columns added by users (see `Layouts`).
- A day whose manifest cannot be read is never left out in silence: what reads it fails, other days are read.
- With the keys of data subjects, queries have the function `decrypted`; what was erased is null there, and
  what cannot be decrypted stays encrypted, since one event must not fail the query of a day.
- The archive is read-only, and a query reads only the archive's files.
"""

from __future__ import annotations

import json
import shutil
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Final, Protocol, TypedDict, Unpack

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq
from duckdb.func import ARROW

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.days.archive import question
from outbox_pipelines.days.archive.layouts import Layout, Layouts, layout
from outbox_pipelines.days.archive.manifest import EVENT_DATE, Manifest, read_manifest
from outbox_pipelines.days.archive.rendering import literal, quoted
from outbox_pipelines.days.archive.store import Files, Store, key
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from outbox_pipelines.catalog.document import Catalog

_FILTERS: Final = ("aggregate_type", "aggregate_id", "event_type")
_JSON: Final = ("payload", "headers")
_ROWS: Final = 10_000
_PROTOCOL: Final = "outbox-archive://"
# A query of the archive must not read other local files, or send rows to another host.
_LOCKED: Final = (
    "SET allowed_paths = [{files}]",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
# The archive's last event of each aggregate.
_LATEST: Final = """
CREATE VIEW latest AS SELECT * FROM events
QUALIFY row_number() OVER (PARTITION BY aggregate_type, aggregate_id ORDER BY seq DESC) = 1"""


class SubjectKeys(Protocol):
    """What decrypts: `outbox_pipelines.subject_keys.SubjectKeys`."""

    def all_decrypted(self, payloads: Sequence[Any], *, is_strict: bool = True) -> list[Any]: ...

    def json_decrypted(self, texts: Sequence[str | None]) -> list[str | None]: ...


class Wanted(TypedDict, total=False):
    """Which events to read; by default all."""

    since: date | str | None
    """The first day, such as 2026-11-21."""
    until: date | str | None
    """The last day, which is included."""
    aggregate_type: str | None
    aggregate_id: str | None
    event_type: str | None


class Archive:
    """One archive, as of the time when it was opened."""

    def __init__(
        self,
        store: Store,
        beside: Sequence[Path] = (),
        catalog: Catalog | None = None,
        memory_bytes: int | None = None,
        threads: int | None = None,
        keys: SubjectKeys | None = None,
    ) -> None:
        self._keys = keys
        self._store = store
        self._beside = beside
        self._catalog = catalog
        self._limits = {"memory_limit": f"{memory_bytes // 1_000_000}MB"} if memory_bytes else {}
        if threads:
            self._limits["threads"] = str(threads)
        self.manifests: dict[date, Manifest] = {}
        """The manifest of each day, in order: rows, size, source."""
        self._damaged: dict[date, str] = {}
        for day, stored in store.manifests().items():
            try:
                self.manifests[day] = read_manifest(stored.content, day)
            except SetupError as error:
                self._damaged[day] = str(error)

    @property
    def days(self) -> list[date]:
        """The archived days, in order."""
        return sorted([*self.manifests, *self._damaged])

    def require_readable(self, days: Iterable[date]) -> None:
        """Raise `SetupError` if the manifest of one of these days cannot be read."""
        for day in days:
            if day in self._damaged:
                raise SetupError(self._damaged[day])

    @cached_property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """A separate in-memory DuckDB connection with the view `events`; you can register further tables.

        It also has `latest`, and a view for each event type of the catalog, by its name; with keys, the
        function `decrypted(payload)`.

        A query can open only the files of the archive, and cannot change that. Use `query` for untrusted SQL:
        it rejects statements that could write to these files.
        """
        # DuckDB may spill payloads to disk: use a directory that only this user can read, and remove it with
        # the connection.
        spilled = mkdtemp(prefix="outbox-query-")
        connection = duckdb.connect(
            config={
                # Names in a query are tables, never this module's variables.
                "python_enable_replacements": False,
                "temp_directory": spilled,
                "autoload_known_extensions": False,
                "autoinstall_known_extensions": False,
                **self._limits,
            }
        )
        weakref.finalize(connection, shutil.rmtree, spilled, ignore_errors=True)
        connection.execute("SET TimeZone = 'UTC'")
        # A file's name is derived from its content, so cached metadata stays valid.
        connection.execute("SET parquet_metadata_cache = true")
        if self._store.root is None:
            connection.register_filesystem(self._files)
        connection.execute(f"CREATE VIEW events AS {self._source(self.days)}")
        connection.execute(_LATEST)
        if self._keys is not None:
            # Of the keys alone: what refers to the connection would keep it.
            decrypt: Any = partial(_decrypted, self._keys)
            connection.create_function("decrypted", decrypt, ["VARCHAR"], "VARCHAR", type=ARROW)
        if self._catalog is not None:
            # Importing it needs the extra `catalog`.
            from outbox_pipelines.days.archive import question

            for view in question.of_catalog(
                self._catalog, self._layouts.schema.names, decrypts=self._keys is not None
            ):
                connection.execute(view)
        paths = [*(self._path(day, _PROTOCOL) for day in self.manifests), *map(str, self._beside)]
        files = ", ".join(map(literal, paths))
        for statement in _LOCKED:
            connection.execute(statement.format(files=files))
        return connection

    def query(self, sql: str) -> duckdb.DuckDBPyRelation:
        """Run one SELECT or PIVOT in DuckDB's SQL over the view `events`, or EXPLAIN of one.

        Raises:
            SetupError: it is another kind of statement.
            duckdb.Error: the query fails.
        """
        question.require(self.connection, sql)
        return self.connection.sql(sql)

    def relation(self, *, columns: Sequence[str] = (), **wanted: Unpack[Wanted]) -> duckdb.DuckDBPyRelation:
        """Return the events as a DuckDB relation; nothing is read before rows are fetched.

        Args:
            columns: only these columns; by default all, with `event_date` last.

        Raises:
            SetupError: a column does not exist.
        """
        return self.of_days(self._days(wanted), columns=columns, **wanted)

    def of_days(
        self, days: Sequence[date], *, columns: Sequence[str] = (), **wanted: Unpack[Wanted]
    ) -> duckdb.DuckDBPyRelation:
        """Return the same as `relation` for these archived days, regardless of `since` and `until`."""
        self.require_readable(days)
        known = self._layouts.schema.names
        if unknown := set(columns) - set(known):
            raise SetupError(f"the archive has no column {min(unknown)}: choose from {', '.join(known)}")
        given = {name: wanted[name] for name in _FILTERS if wanted.get(name) is not None}
        where = " AND ".join(f"{name} = ${name}" for name in given) or "true"
        return self.connection.sql(
            f"SELECT {_listed(columns or known)} FROM ({self._source(days)}) WHERE {where}", params=given
        )

    def dataframe(
        self, *, columns: Sequence[str] = (), parse: bool = False, **wanted: Unpack[Wanted]
    ) -> pd.DataFrame:
        """Return the events as a DataFrame, by day, aggregate and seq.

        Times are UTC, to the microsecond; numbers that can be missing are Int32; `event_date` is a
        datetime at midnight.

        Args:
            columns: only these columns, in this order.
            parse: return `payload` and `headers` as Python objects; by default they are JSON texts. With
                keys, members of payloads are decrypted, and `ERASED` if they were erased.

        Raises:
            SetupError: a column does not exist, or Python cannot parse a payload.
            KeyStoreError: the database of the keys is unavailable, or the master key is not its own.
        """
        names = list(columns or self._layouts.schema.names)
        parsed: dict[str, list[Any]] = {name: [] for name in _JSON if parse and name in names}
        # The error for a payload that cannot be parsed shows id and seq.
        read = self.relation(columns=list(dict.fromkeys([*names, "id", "seq"])), **wanted).to_arrow_reader(
            _ROWS
        )
        kept = list(dict.fromkeys([*(name for name in names if name not in parsed), "seq"]))
        tables = []
        # The texts of one batch at a time are in memory beside what they are parsed to.
        for batch in read:
            tables.append(pa.Table.from_batches([batch]).select(kept))
            for name, values in parsed.items():
                texts = batch.column(name)
                payloads = [
                    _parsed(name, text.as_py(), batch, n) if text.is_valid else None
                    for n, text in enumerate(texts)
                ]
                if self._keys is not None and name == "payload":
                    payloads = self._keys.all_decrypted(payloads, is_strict=False)
                values += payloads
        schema = pa.schema([read.schema.field(name) for name in kept])
        table = pa.concat_tables([schema.empty_table(), *tables])
        del tables
        frame: pd.DataFrame = table.to_pandas(types_mapper=_TYPES.get, date_as_object=False)
        for name, values in parsed.items():
            frame[name] = pd.Series(values, frame.index, dtype=object)
        return frame[names]

    def dataset(self, **wanted: Unpack[Wanted]) -> ds.Dataset:
        """Return the events as a pyarrow dataset; nothing is read before it is scanned.

        A column that was renamed in case only is two columns here.
        """
        self.require_readable(self._days(wanted))
        parquet = ds.ParquetFileFormat()
        fragments = [
            parquet.make_fragment(
                self._path(day),
                filesystem=self._file_system,
                partition_expression=ds.field(EVENT_DATE) == pa.scalar(day),
            )
            for day in self._days(wanted)
        ]
        dataset = ds.FileSystemDataset(fragments, self._layouts.exact_schema, parquet, self._file_system)
        for name in _FILTERS:
            if wanted.get(name) is not None:
                dataset = dataset.filter(ds.field(name) == wanted[name])
        return dataset

    def _days(self, wanted: Wanted) -> list[date]:
        since, until = (_day(wanted.get("since")), _day(wanted.get("until")))
        return [day for day in self.days if (since or day) <= day <= (until or day)]

    def _source(self, days: Sequence[date]) -> str:
        """Return a SELECT of all columns of these days' files."""
        if not days:
            day = next(iter(self.manifests))
            return self._select(layout(self.manifests[day]), [day]) + " WHERE false"
        by_layout = defaultdict(list)
        for day in days:
            if day in self.manifests:
                by_layout[layout(self.manifests[day])].append(day)
        # Not union_by_name: it opens every file before the query starts.
        parts = [self._select(of, each) for of, each in by_layout.items()]
        damaged = [self._layouts.refusal(day, self._damaged[day]) for day in days if day in self._damaged]
        return " UNION ALL ".join(parts + damaged)

    def _select(self, of: Layout, days: Sequence[date]) -> str:
        return self._layouts.select(of, ", ".join(literal(self._path(day, _PROTOCOL)) for day in days))

    def _path(self, day: date, protocol: str = "") -> str:
        name = key(day, self.manifests[day].file)
        return protocol + name if self._store.root is None else str(self._store.root / name)

    @cached_property
    def _layouts(self) -> Layouts:
        return Layouts(
            self.manifests, lambda day: pq.read_schema(self._path(day), filesystem=self._file_system)
        )

    @cached_property
    def _files(self) -> Files:
        return Files(
            self._store, {key(day, manifest.file): manifest.size for day, manifest in self.manifests.items()}
        )

    @cached_property
    def _file_system(self) -> pyarrow.fs.FileSystem:
        if self._store.root is not None:
            return pyarrow.fs.LocalFileSystem()
        return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(self._files))


# The nullable type for numbers that can be missing; pandas would make them floats.
_TYPES: Final[dict[pa.DataType, Any]] = {pa.int32(): pd.Int32Dtype()}


def open_archive(
    url: str,
    *,
    beside: Sequence[Path] = (),
    catalog: Catalog | None = None,
    memory_bytes: int | None = None,
    threads: int | None = None,
    keys: SubjectKeys | None = None,
) -> Archive:
    """Open the archive in a directory, or in a bucket (s3://bucket/path, gs://, az://).

    Args:
        beside: other files that queries may read, under these paths.
        catalog: the event catalog, as `catalog.document.read_catalog` returns it.
        memory_bytes: for DuckDB; by default most of the machine's.
        threads: of DuckDB; by default one for each core.
        keys: the keys of data subjects, a `SubjectKeys`, to decrypt members of payloads.

    Raises:
        SetupError: there is no archive, it has no days yet, or a manifest cannot be read.
        UnavailableError: the bucket does not answer.
    """
    store = Store(url)
    if store.root is not None and not store.root.is_dir():
        raise SetupError(f"the archive {url} is not a directory: give the location from OUTBOX_ARCHIVE")
    archive = Archive(store, beside, catalog, memory_bytes, threads, keys)
    if not archive.manifests:
        archive.require_readable(archive.days)
        raise SetupError(f"the archive {url} has no days yet: write one with `outbox archive day`")
    return archive


def differing(archive: Archive, days: Iterable[date]) -> Iterator[str]:
    """Yield what is wrong with the files of these days, as far as their sizes tell.

    In a bucket nothing is asked: a file of another size cannot be read there.
    """
    for day in days if archive._store.root is not None else ():
        manifest = archive.manifests[day]
        size = archive._store.size(key(day, manifest.file))
        if size != manifest.size:
            difference = "is missing" if size is None else f"has {size:,} bytes, not {manifest.size:,}"
            yield f"{manifest.file} of {day} {difference}: run `outbox archive verify {day}`"


def doubts(archive: Archive) -> Iterator[str]:
    """Yield why queries may return wrong or too few events, as far as sizes and names of files tell."""
    yield from differing(archive, archive.manifests)
    for day in sorted(archive._store.days_of_files() - {*archive.days}):
        said = f"{day} has a file and no manifest, so its events are left out"
        yield f"{said}: run `outbox archive verify {day}`"


def _decrypted(keys: SubjectKeys, payloads: pa.ChunkedArray) -> pa.Array:
    return pa.array(keys.json_decrypted(payloads.to_pylist()), pa.string())


def _parsed(name: str, text: str, events: pa.RecordBatch, row: int) -> Any:
    """Parse the payload or headers of this row."""
    try:
        return json.loads(text)
    # PostgreSQL writes 1e5000 with all its digits; or the JSON is nested too deeply.
    except (ValueError, RecursionError) as error:
        id, seq = (events.column(name)[row].as_py() for name in ("id", "seq"))
        raise SetupError(
            f"the {name} of event {id} (seq {seq}) is JSON that Python cannot parse ({first_line(error)}): "
            "omit parse, or extract the members that you need in SQL"
        ) from None


def _day(day: date | str | None) -> date | None:
    if not isinstance(day, str):
        return day
    try:
        return date.fromisoformat(day)
    except ValueError:
        raise SetupError(f"{day!r} is not a day: write a date such as 2026-11-21") from None


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(map(quoted, columns))
