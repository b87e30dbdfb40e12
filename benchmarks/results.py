"""`results.json`: what the last run of each part measured, when, with what, and how fast the machine was.

Invariants:
- A run of a part replaces that part and no other.
- A part that was typed in from an earlier page, not written by a run, is marked as `entered`.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psycopg

from benchmarks import debezium
from benchmarks.table import Figure, Ratio, Row
from outbox_pipelines.local.jars import KAFKA
from outbox_pipelines.settings import Settings

RESULTS: Final = Path(__file__).with_name("results.json")
_LOOP: Final = 2_000_000
_LOOPS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a run of one part left."""

    date: str
    """Of the run, as 2026-11-28."""
    rows: tuple[Row, ...]
    loop_ms: float | None = None
    """How long a fixed loop in Python took just before: the speed of the machine."""
    is_busy: bool = False
    """Whether a process burned a core beside it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    entered: bool = False

    def row(self, name: str) -> Row:
        """Return the row of this name. Raises KeyError."""
        found = [row for row in self.rows if row.name == name]
        if not found:
            raise KeyError(name)
        return found[0]


def run(rows: list[Row], loop_ms: float, settings: Settings, *, is_busy: bool) -> Part:
    """Return what was just measured on these servers."""
    names = [row.name for row in rows]
    assert len(names) == len(set(names)), f"two rows have one name: {sorted(names)}"
    with psycopg.connect(settings.dsn) as connection:
        server = connection.info.server_version
    return Part(
        date=datetime.now(UTC).date().isoformat(),
        rows=tuple(rows),
        loop_ms=loop_ms,
        is_busy=is_busy,
        versions={
            "PostgreSQL": f"{server // 10_000}.{server % 10_000}",
            "Kafka": KAFKA[0].rpartition(":")[2],
            "Python": platform.python_version(),
            "Debezium": debezium.VERSION.removesuffix(".Final"),
        },
    )


def loop() -> float:
    """Return the milliseconds of a fixed loop, the best of some: what disturbs it is not the machine."""
    taken = []
    for _ in range(_LOOPS):
        started = time.perf_counter()
        sum(number * number for number in range(_LOOP))
        taken.append(time.perf_counter() - started)
    return round(min(taken) * 1e3, 1)


def load(path: Path = RESULTS) -> dict[str, Part]:
    """Return the parts; none if nothing was measured yet."""
    if not path.exists():
        return {}
    return {name: _part(values) for name, values in json.loads(path.read_text()).items()}


def store(name: str, part: Part, path: Path = RESULTS) -> None:
    """Replace a part."""
    parts = load(path) | {name: part}
    lines = {name: asdict(parts[name]) | {"rows": [_row(row) for row in parts[name].rows]} for name in parts}
    path.write_text(json.dumps(lines, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def _row(row: Row) -> dict[str, Any]:
    figures = [figure._asdict() | {"value": _rounded(figure.value)} for figure in row.figures]
    ratios = [ratio._asdict() | {"value": _rounded(ratio.value)} for ratio in row.ratios]
    return row._asdict() | {"figures": figures, "ratios": ratios}


def _rounded(value: float) -> float:
    """Return a value with more digits than are shown, and without those that are noise."""
    return float(f"{value:.5g}")


def _part(values: dict[str, Any]) -> Part:
    rows = tuple(
        Row(
            row["name"],
            tuple(Figure(**figure) for figure in row["figures"]),
            tuple(Ratio(**ratio) for ratio in row["ratios"]),
            row["goal"],
        )
        for row in values["rows"]
    )
    return Part(**values | {"rows": rows})
