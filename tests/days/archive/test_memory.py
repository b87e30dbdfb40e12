"""Large payloads: summed within memory whatever the threads, and too little of it is no difference."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from outbox_pipelines.days.archive import export, proof
from outbox_pipelines.days.archive.manifest import SCHEMA
from tests.days.archive.reading import ONE, event

pytestmark = pytest.mark.slow


def written(path: Path, events: int, size: int) -> Path:
    """A file as `export` writes it, of events with payloads of so many bytes that do not compress."""
    with export._Writer(path, SCHEMA) as writer:
        for start in range(0, events, 40):
            rows = [event(ONE, seq, payload=f"{seq:08}" * (size // 8)) for seq in range(start, start + 40)]
            writer.write(pa.RecordBatch.from_pylist(rows, SCHEMA))
    return path


@pytest.mark.parametrize(
    "threads", [pytest.param(1, marks=pytest.mark.extended), pytest.param(2, marks=pytest.mark.extended), 8]
)
@pytest.mark.parametrize(("events", "size"), [(1600, 40_000), (80, 880_000)])
def test_large_payloads_are_summed(tmp_path: Path, events: int, size: int, threads: int) -> None:
    """Guards against days that cannot be archived where payloads are large, or cores many."""
    file = written(tmp_path / "events.parquet", events, size)
    memory = proof._LEAST + threads * proof._TIMES * export._GROUP_BYTES
    found = proof.sums_of_file(file, threads=threads, memory=memory)
    assert {bucket: each.rows for bucket, each in found.items()} == {0: events}
    assert proof.sums_of_file(file, threads=threads) == found


def test_too_little_memory_is_no_difference(tmp_path: Path) -> None:
    """Guards against a file that is called unreadable because DuckDB ran out of memory."""
    file = written(tmp_path / "events.parquet", 40, 880_000)
    with pytest.raises(proof.NoMemoryError, match="more"):
        proof.sums_of_file(file, memory=8_000_000)
