"""The files that the steps of a reconciliation pass on: rows divided into slices, and a note of each step.

A step writes its rows to one Parquet file for each slice, and reads the files of one slice that other steps
have written. Steps of one process share a directory; steps on several machines share the archive.

Invariants:
- A row is in exactly one slice, by a hash of its event's id or of its aggregate.
- A step's note is written last and counts its rows: a file that is missing or incomplete is an error, and so
  is a step without a note. Nothing is compared with a part of the rows.
- A step that is repeated replaces its own files and no others.
- Memory for writing is one batch of rows, whatever their number.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from outbox_pipelines.days.archive.store import Store, open_store
from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation.workspace import Workspace, room
from outbox_pipelines.settings import DaySettings

# Outside the data set, so that no reader of the archive sees these files.
_SHARED: Final = "_outbox/reconciling"
_BATCH: Final = 100_000


@dataclass(slots=True)
class Exchange:
    """The files of one reconciliation."""

    directory: Path
    """Of this process, or shared by all."""
    store: Store | None = None
    """If the directory is not shared: the bucket that is."""
    prefix: str = ""
    """Of the keys in the bucket."""
    _counts: dict[str, list[int]] = field(default_factory=dict)

    @contextmanager
    def writing(self, space: Workspace, step: str, kind: str, query: str, slices: int) -> Iterator[Scattered]:
        """Open the files of a kind of rows that a step writes.

        Args:
            query: returns the rows of `batch`, with their number {slice}, which {slices} bounds.
            slices: 1 if each slice reads all of them.
        """
        paths = [self.directory / _file(kind, number, step) for number in range(slices)]
        out = Scattered(space, query.format(slices=slices), paths)
        try:
            yield out
            out.flush()
        finally:
            out.close()
        for number in range(slices):
            if out.counts[number]:
                self._share(_file(kind, number, step))
        self._counts[kind] = out.counts

    def rows(self, kind: str) -> int:
        """Return how many rows of a kind the current step has written."""
        return sum(self._counts[kind])

    def finish(self, step: str, **note: Any) -> None:
        """Record that a step has written everything, with what later steps need."""
        path = self.directory / _note(step)
        with room():
            path.parent.mkdir(parents=True, exist_ok=True)
            writing = path.with_suffix(".writing")
            writing.write_text(json.dumps({**note, "rows": self._counts}))
            writing.replace(path)
        self._share(_note(step))
        self._counts = {}

    def note(self, step: str) -> dict[str, Any]:
        """Return the note of a step.

        Raises:
            SetupError: the step has not written one.
        """
        try:
            with self._local(_note(step)) as path:
                found: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise _missing(step) from None
        return found

    @contextmanager
    def reading(self, kind: str, number: int, steps: Sequence[str]) -> Iterator[list[Path]]:
        """Provide a slice's files of some steps.

        Raises:
            SetupError: a file is missing or incomplete, or a step has written no note.
        """
        with ExitStack() as stack:
            found = []
            for step in steps:
                rows = self.note(step)["rows"][kind][number]
                if rows:
                    try:
                        path = stack.enter_context(self._local(_file(kind, number, step)))
                    except FileNotFoundError:
                        raise _missing(step) from None
                    if pq.read_metadata(path).num_rows != rows:
                        raise _missing(step)
                    found.append(path)
            yield found

    def discard(self, kinds: Iterable[str], number: int) -> None:
        """Remove a slice's files of these kinds from the directory."""
        for kind in kinds:
            shutil.rmtree(self.directory / kind / str(number), ignore_errors=True)

    def remove(self) -> None:
        """Remove all files."""
        if self.store is not None:
            self.store.remove_all(self.prefix)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _share(self, name: str) -> None:
        if self.store is not None:
            self.store.adopt(self.directory / name, f"{self.prefix}/{name}")

    @contextmanager
    def _local(self, name: str) -> Iterator[Path]:
        if self.store is not None:
            with self.store.local(f"{self.prefix}/{name}") as path:
                yield path
            return
        path = self.directory / name
        if not path.is_file():
            raise FileNotFoundError(name)
        yield path


class Scattered:
    """Rows of one kind, divided into the files of their slices."""

    def __init__(self, space: Workspace, query: str, paths: Sequence[Path]) -> None:
        self.counts = [0] * len(paths)
        """Rows of each slice."""
        self._paths = paths
        self._space, self._query = space, query
        self._writers: dict[int, pq.ParquetWriter] = {}
        self._waiting: list[pa.Table] = []

    def add(self, batch: pa.Table | pa.RecordBatch) -> None:
        """Take the rows of a batch."""
        self._waiting.append(pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch)
        if sum(each.num_rows for each in self._waiting) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Write the rows that were taken."""
        if not self._waiting:
            return
        rows = self._space.table(self._query, pa.concat_tables(self._waiting))
        self._waiting = []
        start = 0
        # In order of their slices.
        for found in pc.value_counts(rows.column("slice")):
            number, count = found["values"].as_py(), found["counts"].as_py()
            self._write(number, rows.slice(start, count).drop_columns("slice"))
            start += count

    def _write(self, number: int, rows: pa.Table) -> None:
        with room():
            if number not in self._writers:
                self._paths[number].parent.mkdir(parents=True, exist_ok=True)
                self._writers[number] = pq.ParquetWriter(self._paths[number], rows.schema, compression="zstd")
            self._writers[number].write_table(rows)
        self.counts[number] += rows.num_rows

    def close(self) -> None:
        """Complete the files."""
        with room():
            for writer in self._writers.values():
                writer.close()


@contextmanager
def local() -> Iterator[Exchange]:
    """Create the exchange of steps that run in one process, in a temporary directory."""
    with _temporary() as directory:
        yield Exchange(directory)


@contextmanager
def shared(settings: DaySettings, name: str) -> Iterator[Exchange]:
    """Open the exchange of steps on several machines, in the archive.

    Args:
        name: distinguishes reconciliations.

    Raises:
        SetupError: OUTBOX_ARCHIVE is not set.
    """
    if not settings.archives:
        raise SetupError(
            "slices pass on their rows in the archive, and none is configured: set OUTBOX_ARCHIVE to a "
            "location that all steps reach, or slices to 1"
        )
    store, prefix = open_store(settings), f"{_SHARED}/{name}"
    if store.root is not None:
        yield Exchange(store.directory(prefix))
        return
    with _temporary() as directory:
        yield Exchange(directory, store, prefix)


@contextmanager
def _temporary() -> Iterator[Path]:
    with room():
        directory = TemporaryDirectory(prefix="outbox-reconcile-")
    with directory as path:
        yield Path(path)


def _file(kind: str, number: int, step: str) -> str:
    return f"{kind}/{number}/{step}.parquet"


def _note(step: str) -> str:
    return f"steps/{step}.json"


def _missing(step: str) -> SetupError:
    return SetupError(
        f"the rows of step {step} are missing or incomplete: all steps need the same OUTBOX_ARCHIVE, in an "
        "object store or a shared directory; reconcile the day again"
    )
