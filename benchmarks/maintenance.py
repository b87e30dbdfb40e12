"""What writers feel when a day goes: of our way, of none, of a plain DETACH and DROP, of a DELETE.

Invariants:
- Four clients write all the time, and a report reads the outbox in transactions of two seconds: without a
  reader, no lock is ever waited for.
- A wait is a writer's on a relation, as the server tells it, looked at every 2 ms.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from benchmarks import programs
from benchmarks.past import ago, make_day, publish
from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Figure, Row
from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.archive import drop
from outbox_pipelines.days.partitions import ahead
from outbox_pipelines.days.partitions.calendar import leaf_of
from outbox_pipelines.settings import Settings

_EVENTS = sized(2_000_000, 100_000)
_REPORT_SECONDS = 2.0
_CONTROL_SECONDS = sized(20.0, 3.0)
_LEAF = leaf_of(ago(2))

_WAITING = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - waitstart)), 0)::float8
FROM pg_locks WHERE locktype = 'relation' AND NOT granted AND mode = 'RowExclusiveLock'"""


@dataclass
class Found:
    """Of one way."""

    seconds: float
    wait: float
    """The longest, in seconds."""
    wal: int
    """Bytes of WAL of the whole server, the writers' included."""
    dead: int
    """Rows that VACUUM has to remove."""


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    ways: dict[str, Callable[[Settings], None]] = {
        "no maintenance": lambda settings: time.sleep(_CONTROL_SECONDS),
        "days ahead, archive, proof, drop": _ours,
        "plain DETACH and DROP": _plain,
        "DELETE of the same rows": _delete,
    }
    found = {name: _beside_writers(servers, way) for name, way in ways.items()}
    return [
        Row(
            f"a day of {_EVENTS:,}: {name}",
            (
                Figure(each.wait * 1000, "ms", "longest wait"),
                Figure(each.seconds, "s"),
                Figure(each.wal / 1e6, "MB of WAL"),
                Figure(each.dead, "dead rows"),
            ),
            goal="≤ 50 ms" if name.startswith("days ahead") else "",
        )
        for name, each in found.items()
    ]


def _beside_writers(servers: Settings, way: Callable[[Settings], None]) -> Found:
    with (
        fresh_outbox(servers) as fresh,
        tempfile.TemporaryDirectory(prefix="outbox-bench-") as directory,
    ):
        settings = fresh.model_copy(update={"archive": directory})
        make_day(settings, ago(2), _EVENTS)
        publish(settings)
        over = threading.Event()
        waits: list[float] = []
        beside = [
            threading.Thread(target=_watch, args=(settings.dsn, over, waits)),
            threading.Thread(target=_report, args=(settings.dsn, over)),
        ]
        with programs.running(settings, "benchmarks.load", settings.dsn, 4):
            for thread in beside:
                thread.start()
            _await_writers(settings)
            wal, started = _wal(settings), time.monotonic()
            way(settings)
            seconds, wal = time.monotonic() - started, _wal(settings) - wal
            over.set()
            for thread in beside:
                thread.join()
        return Found(seconds, max(waits), wal, _dead(settings))


def _ours(settings: Settings) -> None:
    ahead.ensure(settings, 30)
    archive.archive(settings, ago(2))
    assert drop.drop(settings, ago(2)).rows == _EVENTS


def _plain(settings: Settings) -> None:
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE outbox DETACH PARTITION {_LEAF}".encode())
        connection.execute(f"DROP TABLE {_LEAF}".encode())


def _delete(settings: Settings) -> None:
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE {_LEAF} DISABLE TRIGGER outbox_append_only".encode())
        connection.execute("DELETE FROM outbox WHERE created_at < current_date - 1")


def _watch(dsn: str, over: threading.Event, waits: list[float]) -> None:
    waits.append(0.0)
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not over.wait(0.002):
            row = connection.execute(_WAITING, prepare=True).fetchone()
            assert row is not None
            waits.append(row[0])


def _report(dsn: str, over: threading.Event) -> None:
    with psycopg.connect(dsn) as connection:
        while not over.is_set():
            connection.execute("SELECT count(*) FROM (SELECT FROM outbox LIMIT 1000) read")
            over.wait(_REPORT_SECONDS)
            connection.rollback()


def _await_writers(settings: Settings) -> None:
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        deadline = time.monotonic() + 30
        while not connection.execute(
            "SELECT FROM outbox WHERE created_at >= current_date LIMIT 1"
        ).fetchall():
            assert time.monotonic() < deadline, "no writer is active"
            time.sleep(0.1)


def _wal(settings: Settings) -> int:
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        row = connection.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None
        return int(row[0])


def _dead(settings: Settings) -> int:
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        dead = "SELECT coalesce(pg_stat_get_dead_tuples(to_regclass(%s)), 0)"
        row = connection.execute(dead, [_LEAF]).fetchone()
        assert row is not None
        return int(row[0])
