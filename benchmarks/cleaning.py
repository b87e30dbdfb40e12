"""The clean-up of an existing table beside writers: its rate, its longest batch, and what writers feel."""

from __future__ import annotations

import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import psycopg

from benchmarks.servers import fresh_outbox
from benchmarks.table import Row
from outbox_pipelines.existing.cleaning.clean_up import Cleaned, clean
from outbox_pipelines.settings import Settings

_ROWS: Final = 400_000
_CONTROL_SECONDS: Final = 10.0
_WRITERS: Final = 2
_TABLE: Final = """
CREATE TABLE existing (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregate_type text NOT NULL, aggregate_id text NOT NULL,
    event_type text NOT NULL, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),
    published_at timestamptz);
CREATE INDEX ON existing (created_at) WHERE published_at IS NULL;
CREATE INDEX ON existing (aggregate_type, aggregate_id)"""
_PUBLISHED: Final = f"""
INSERT INTO existing (aggregate_type, aggregate_id, event_type, payload, published_at)
SELECT 'order', (i % 20000)::text, 'order.placed',
       jsonb_build_object('number', i, 'note', md5(i::text) || md5((i * 7)::text)), now() - interval '1 day'
FROM generate_series(1, {_ROWS}) i"""
_INSERT: Final = (
    "INSERT INTO existing (aggregate_type, aggregate_id, event_type, payload) "
    "VALUES ('order', %s, 'order.placed', '{\"number\": 5}')"
)
_MAPPING: Final = 'name = "public.existing"\norder = "created_at"\n[columns]\npublished_at = "published_at"\n'


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with fresh_outbox(servers) as fresh, tempfile.TemporaryDirectory(prefix="outbox-bench-") as directory:
        settings = fresh.model_copy(
            update={"table": tomllib.loads(_MAPPING), "clean_after_hours": 1.0, "archive": "none"}
        )
        with psycopg.connect(settings.dsn, autocommit=True) as connection:
            connection.execute(_TABLE.encode())
        with _writing(settings) as alone:
            time.sleep(_CONTROL_SECONDS)
        deleted, seconds, beside = _clean(settings)
        archive = settings.model_copy(update={"archive": str(Path(directory) / "archive")})
        archived, archive_seconds, _ = _clean(archive)
    return [
        Row("clean-up: a writer's INSERT without it, p50, p99, longest", _shown(alone)),
        Row("  beside the clean-up", _shown(beside), f"{_p(beside, 99) / _p(alone, 99):.1f}", "p99 without"),
        Row(
            f"  {deleted.deleted:,} published rows deleted",
            f"{deleted.deleted / seconds:,.0f} rows/s; longest batch {deleted.longest * 1000:.0f} ms",
            "",
            "50 ms at most",
        ),
        Row(
            "  archived, proven and deleted",
            f"{archived.deleted / archive_seconds:,.0f} rows/s; "
            f"longest batch {archived.longest * 1000:.0f} ms",
        ),
    ]


def _clean(settings: Settings) -> tuple[Cleaned, float, list[float]]:
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute(_PUBLISHED.encode())
        connection.execute("VACUUM ANALYZE existing")
    with _writing(settings) as waits:
        started = time.monotonic()
        # A process of its own: its threads must not wait for those of the writers.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            cleaned = process.submit(clean, settings).result()
        seconds = time.monotonic() - started
    return cleaned, seconds, waits


def _p(waits: list[float], percent: int) -> float:
    return quantiles(waits, n=100)[percent - 1]


def _shown(waits: list[float]) -> str:
    return ", ".join(f"{value * 1000:.1f} ms" for value in (_p(waits, 50), _p(waits, 99), max(waits)))


@contextmanager
def _writing(settings: Settings) -> Iterator[list[float]]:
    """Writers; the seconds of each INSERT with its COMMIT."""
    over = threading.Event()
    waits: list[float] = []
    given: tuple[Any, ...] = (settings.dsn, over, waits)
    threads = [threading.Thread(target=_write, args=given) for _ in range(_WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield waits
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _write(dsn: str, over: threading.Event, waits: list[float]) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        n = 0
        while not over.wait(0.002):
            n += 1
            started = time.perf_counter()
            connection.execute(_INSERT.encode(), [str(n % 500)])
            waits.append(time.perf_counter() - started)
