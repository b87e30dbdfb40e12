"""Put rows into the order of `seq`, in limited memory.

Invariants:
- Memory does not depend on how many rows there are, nor on how large one is: what does not fit is distributed
  to files by ranges of `seq`, again and again until each fits.
- DuckDB's own sort is not used: three million events, or a few of 1 MB, need more memory than it may take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_BYTES: Final = 2_000_000
# As many tables of that size are sorted in memory: distributing them costs more than reading them.
_TABLES: Final = 3
_WAYS: Final = 64
# Arrow's own keeps tens of megabytes of what was freed.
_POOL: Final = pa.system_memory_pool()


def in_order(batches: Iterable[pa.RecordBatch], first: int, last: int, folder: Path) -> Iterator[pa.Table]:
    """Yield all rows in order of `seq`, as tables of at most about 6 MB.

    Args:
        first: the lowest `seq` that can occur, as `last` is the highest.
        folder: for temporary files; they are removed as the rows are yielded.

    Raises:
        OSError: a file cannot be written.
    """
    tables = _tables(batches)
    start = list(islice(tables, _TABLES + 1))
    if first == last:
        yield from chain(start, tables)
        return
    if len(start) <= _TABLES:
        if start:
            yield _sorted(pa.concat_tables(start))
        return
    step = -(-(last - first + 1) // _WAYS)
    with TemporaryDirectory(dir=folder) as below:
        files = _distribute(chain(start, tables), first, step, Path(below))
        del start
        for low in sorted(files):
            with pa.OSFile(str(files[low])) as file, pa.ipc.open_stream(file, memory_pool=_POOL) as rows:
                yield from in_order(rows, low, min(low + step - 1, last), Path(below))
            files[low].unlink()


def _distribute(tables: Iterable[pa.Table], first: int, step: int, folder: Path) -> dict[int, Path]:
    """Write rows to a file for each `step` numbers; return the files by their first number."""
    writers: dict[int, pa.RecordBatchStreamWriter] = {}
    files: dict[int, Path] = {}
    try:
        for table in tables:
            ordered = _sorted(table)
            ranges = (ordered.column("seq").to_numpy() - first) // step
            cuts = [0, *(np.flatnonzero(np.diff(ranges)) + 1), len(ranges)]
            for start, end in pairwise(map(int, cuts)):
                low = first + int(ranges[start]) * step
                if low not in writers:
                    files[low] = folder / str(low)
                    writers[low] = pa.ipc.new_stream(str(files[low]), ordered.schema)
                writers[low].write_table(ordered.slice(start, end - start))
    finally:
        for writer in writers.values():
            writer.close()
    return files


def _sorted(table: pa.Table) -> pa.Table:
    order = pc.sort_indices(table.column("seq"), memory_pool=_POOL)
    return pc.take(table, order, memory_pool=_POOL)


def _tables(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        size += batch.nbytes
        if size >= _BYTES:
            yield pa.Table.from_batches(held)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held)
