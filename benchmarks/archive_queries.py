"""How long an analyst waits for one day's counts, and for one aggregate, in 30 days with 6 million rows."""

from __future__ import annotations

import hashlib
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.table import Figure, Row, milliseconds
from outbox_pipelines import __version__
from outbox_pipelines.days.archive import Archive, open_archive
from outbox_pipelines.days.archive.export import GROUP_ROWS, new_file
from outbox_pipelines.days.archive.manifest import SCHEMA, VERSION, Manifest, Source
from outbox_pipelines.days.archive.store import key, manifest_key
from outbox_pipelines.settings import Settings

_DAYS: Final = 30
_ROWS: Final = 200_000
_AGGREGATES: Final = 20_000
_FIRST: Final = date(2026, 9, 1)
_ROUNDS: Final = 15
_COUNTS: Final = (
    "SELECT event_type, count(*) FROM events WHERE event_date = '2026-09-15' GROUP BY 1 ORDER BY 1"
)
_AGGREGATE: Final = """
SELECT seq, created_at, event_type, payload FROM events
WHERE aggregate_type = 'order' AND aggregate_id = '4711' ORDER BY seq"""


def measure(servers: Settings) -> list[Row]:
    """Rows of the table; no server is needed."""
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder:
        root = Path(folder)
        for number in range(_DAYS):
            write(root, number)
        url = str(root)
        size = sum(path.stat().st_size for path in root.rglob("*.parquet"))
        rows = [
            Row(
                f"archive of {_DAYS} days, {_DAYS * _ROWS / 1e6:.0f} million rows",
                (Figure(size / 1e6, "MB"),),
            )
        ]
        seconds, _ = _timed(lambda: open_archive(url).connection)
        rows.append(Row("archive, opened", (milliseconds(seconds),)))
        archive = open_archive(url)
        for what, sql, goal in (
            ("one day's counts", _COUNTS, 20),
            (f"one aggregate over {_DAYS} days", _AGGREGATE, 60),
        ):
            seconds, read = _timed(partial(_ask, archive, sql))
            figures = (
                milliseconds(seconds),
                Figure(_files(archive, sql), "files"),
                Figure(read / 1e6, "MB read"),
            )
            rows.append(Row(f"archive: {what}", figures, goal=f"≤ {goal} ms"))
        return rows


def _ask(archive: Archive, sql: str) -> list[Any]:
    return archive.query(sql).fetchall()


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Median of seconds, and bytes read in the first round, when DuckDB has nothing of them in memory."""
    before = _read()
    work()
    read = _read() - before
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times), read


def _read() -> int:
    """Bytes that this process has read from files, by the kernel's count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def _files(archive: Archive, sql: str) -> int:
    """How many files DuckDB scans for it."""
    ((_, plan),) = archive.connection.execute(f"EXPLAIN ANALYZE {sql}").fetchall()
    found = re.search(r"Total Files Read: (\d+)", plan)
    assert found is not None, plan
    return int(found[1])


def write(root: Path, number: int, payloads: Sequence[str] = ()) -> None:
    """A day as `export` writes it: its rows by aggregate and seq, in groups of its size.

    Args:
        payloads: of as many of its events; by default it has all events, each with a payload of its own.
    """
    day = _FIRST + timedelta(number)
    table = _day(number, day)
    if payloads:
        place = SCHEMA.get_field_index("payload")
        column = pa.array(payloads, SCHEMA.field(place).type)
        table = table.slice(0, len(payloads)).set_column(place, SCHEMA.field(place), column)
    directory = root / key(day, "")
    directory.mkdir(parents=True)
    file = directory / "events.parquet"
    with new_file(file) as writer:
        writer.write_table(table, row_group_size=GROUP_ROWS)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest = Manifest(
        day=day,
        file=f"events-{sha256[:16]}.parquet",
        size=file.stat().st_size,
        sha256=sha256,
        rows=table.num_rows,
        first_seq=number * _ROWS,
        last_seq=(number + 1) * _ROWS - 1,
        first_created_at=None,
        last_created_at=None,
        first_id=None,
        last_id=None,
        statuses={"PROCESSED": table.num_rows},
        buckets={},
        schema_version=VERSION,
        tool=f"outbox-pipelines {__version__}",
        source=Source(system_identifier=1, database="benchmark", schema="public"),
        written_at=datetime.now(UTC),
    )
    file.rename(directory / manifest.file)
    described = root / manifest_key(day)
    described.parent.mkdir(parents=True, exist_ok=True)
    described.write_bytes(manifest.to_bytes())


def _day(number: int, day: date) -> pa.Table:
    """Events of three types, each aggregate ten times; a payload of 150 B that does not compress well."""
    seq = np.arange(number * _ROWS, (number + 1) * _ROWS, dtype=np.int64)
    chance = np.random.default_rng(number)
    noise = pa.array([chance.bytes(40).hex() for _ in seq])
    text = pa.array(seq).cast(pa.string())
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
    at = (seq - seq[0]) * (86_400_000_000 // _ROWS) + int(midnight.timestamp() * 1_000_000)
    at_column = pa.array(at, pa.int64()).cast(SCHEMA.field("created_at").type)
    payload = pc.binary_join_element_wise(
        '{"number": ', text, ', "state": "placed", "currency": "EUR", "note": "', noise, '"}', ""
    )
    types = np.array(["order.placed", "order.paid", "order.shipped"])
    columns: dict[str, Any] = {
        "id": pc.binary_join_element_wise("0199", pc.utf8_slice_codeunits(noise, 0, 32), ""),
        "seq": seq,
        "aggregate_type": pa.array(np.full(_ROWS, "order")),
        "aggregate_id": pa.array(chance.integers(0, _AGGREGATES, _ROWS)).cast(pa.string()),
        "event_type": pa.array(types[chance.integers(0, 3, _ROWS)]),
        "payload": payload,
        "created_at": at_column,
        "status": pa.array(np.full(_ROWS, "PROCESSED")),
        "published_at": at_column,
        "attempts": pa.array(np.zeros(_ROWS, np.int32)),
    }
    table = pa.table(
        [columns[field.name] if field.name in columns else pa.nulls(_ROWS, field.type) for field in SCHEMA],
        schema=SCHEMA,
    )
    return table.sort_by(
        [("aggregate_type", "ascending"), ("aggregate_id", "ascending"), ("seq", "ascending")]
    )
