"""How fast a day is exported and proven, in how much memory, beside what people write themselves.

The export counts all that it takes to have an archived day: sorting, the file, its sums and its manifest.
"""

from __future__ import annotations

import tempfile
import time
from statistics import median

import psycopg

from benchmarks import programs
from benchmarks.past import ago, fill_day
from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Figure, Ratio, Row, memory, rate
from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.settings import Settings

_EVENTS = sized(2_000_000, 100_000)
_MANY = sized(6_000_000, 300_000)
_ROUNDS = sized(3, 1)
_NAMES = {
    "ours": "with manifest and sums",
    "csv": "COPY to CSV, pyarrow (the file alone)",
    "pandas": "server-side cursor, pandas (the file alone)",
}


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    rates: dict[str, list[float]] = {way: [] for way in _NAMES}
    peaks: dict[str, float] = dict.fromkeys(_NAMES, 0.0)
    with fresh_outbox(servers) as settings, tempfile.TemporaryDirectory(prefix="outbox-bench-") as directory:
        fill_day(settings, ago(2), _EVENTS)
        for number in range(_ROUNDS):
            for way in _NAMES if number == 0 else ("ours", "csv"):
                rows, seconds, peak = _export(settings, way, 2, directory)
                rates[way].append(rows / seconds)
                peaks[way] = max(peaks[way], peak)
        _forget(settings)
        proving = settings.model_copy(update={"archive": directory})
        archive.archive(proving, ago(2))
        proofs = [_prove(proving) for _ in range(_ROUNDS)]
        _forget(settings)
        fill_day(settings, ago(3), _MANY)
        many = _export(settings, "ours", 3, directory)
    ours = median(rates["ours"])
    return [
        *(
            Row(
                f"export of {_EVENTS:,}: {name}",
                (rate(rates[way]), memory([peaks[way]])),
                () if way == "ours" else (Ratio(ours / median(rates[way]), "as fast as this"),),
                "≥ 200,000, < 500 MB" if way == "ours" else "",
            )
            for way, name in _NAMES.items()
        ),
        Row(
            f"export of {_MANY:,}",
            (rate(many[0] / many[1]), memory([many[2]])),
            (Ratio(many[2] / peaks["ours"], "the memory"),),
            "flat",
        ),
        Row(f"proof of {_EVENTS:,}, both sides", (Figure(median(proofs), "s"),), goal="≤ 10 s"),
    ]


def _export(settings: Settings, way: str, days: int, directory: str) -> list[float]:
    found = programs.run(settings, "exports", way, settings.dsn, ago(days), directory)
    _forget(settings)
    return found


def _forget(settings: Settings) -> None:
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute(
            "UPDATE outbox_days SET state = 'closed', manifest_sha256 = NULL, archive = NULL "
            "WHERE state = 'archived'"
        )


def _prove(settings: Settings) -> float:
    started = time.perf_counter()
    proof = archive.verify(settings, ago(2))
    assert proof.equal, proof.differences
    assert proof.rows == _EVENTS
    return time.perf_counter() - started
