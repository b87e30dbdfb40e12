"""What a week leaves in Dagster's storage (SQLite, its default), and what `purge_history` makes of it.

Invariants:
- One run of each kind is really executed, one verdict and one tick really stored; the rest are copies.
- The job itself purges six days of the seven. Ticks are Dagster's own to purge: a day of them is there.
"""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import os
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import TickData, TickStatus

from benchmarks.table import Figure, Row
from outbox_pipelines.defs.dagster_internals import LOCATION
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.run_history import purge_history
from outbox_pipelines.settings import Settings

_DAYS = 7
_SESSIONS, _HOURLY, _CHECKS, _TICKS = 144, 24, 26, 17_280
# Six at first, one a minute afterwards.
_OBSERVATIONS = 15
_NUMBERS = ("events", "events_per_second", "lag_ms", "greatest_lag_ms")
_TAGS = {LOCATION: "__repository__@outbox", **Outbox().run_tags}


@dg.asset(key=["outbox", "relay"])
def _relay(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
    numbers = dict.fromkeys(_NUMBERS, 123_456.7)
    for _ in range(_OBSERVATIONS):
        context.log_event(
            dg.AssetObservation(context.asset_key, description="1,234 events", metadata=numbers)
        )
    return dg.MaterializeResult(metadata=numbers)


@dg.op
def _step(context: dg.OpExecutionContext) -> None:
    context.log.info("a line")


@dg.job(name="maintain_partitions")
def _maintain() -> None:
    for name in ("make_partitions", "close_days", "purge_rows"):
        _step.alias(name)()


def measure(settings: Settings) -> list[Row]:
    """Rows of the table."""
    with (
        tempfile.TemporaryDirectory(prefix="outbox-bench-") as home,
        _environment(OUTBOX_RUN_RETENTION_DAYS="1"),
    ):
        overrides = {"telemetry": {"enabled": False}}
        with dg.DagsterInstance.local_temp(home, overrides=overrides) as instance:
            _week(Path(home), instance)
            before, used = _megabytes(Path(home))
            runs = instance.get_runs_count()
            started = time.monotonic()
            result = purge_history(Outbox()).execute_in_process(instance=instance, tags=_TAGS)
            seconds = time.monotonic() - started
            assert result.success
            after, still_used = _megabytes(Path(home))
            gone = runs + 1 - instance.get_runs_count()
            vacuum = _vacuum(Path(home))
            least, _ = _megabytes(Path(home))
    return [
        Row(
            "Dagster's storage after a week",
            (Figure(before, "MB"), Figure(before / _DAYS, "MB a day"), Figure(runs, "runs")),
        ),
        Row(
            "purge of six days",
            (
                Figure(after, "MB"),
                Figure(seconds, "s"),
                Figure(gone / seconds, "runs/s"),
                Figure(used, "MB", "in use before"),
                Figure(still_used, "MB", "in use after"),
            ),
        ),
        Row("VACUUM afterwards (not needed)", (Figure(least, "MB"), Figure(vacuum, "s"))),
    ]


def _week(home: Path, instance: dg.DagsterInstance) -> None:
    relay = dg.Definitions(assets=[_relay], jobs=[dg.define_asset_job("relay_session", selection=[_relay])])
    sessions = relay.resolve_job_def("relay_session").execute_in_process(instance=instance, tags=_TAGS)
    hourly = _maintain.execute_in_process(instance=instance, tags=_TAGS)
    _copies(home, sessions.run_id, _SESSIONS)
    _copies(home, hourly.run_id, _HOURLY)
    for check in range(_CHECKS):
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                asset_key=dg.AssetKey(["outbox", "health"]),
                check_name=f"check_{check}",
                passed=True,
                description="what is measured, and what would be too much: 12.3 s of 60 s",
                metadata={"measured": 12.3, "warn": 15.0, "error": 60.0},
            )
        )
    for _ in range(_HOURLY):
        numbers = {f"number_{number}": 123_456.7 for number in range(8)}
        instance.report_runless_asset_event(dg.AssetObservation(["outbox", "health"], metadata=numbers))
    # The supervisor's, each with its reason.
    tick = TickData(
        instigator_origin_id="0" * 40,
        instigator_name="relay_supervisor",
        instigator_type=InstigatorType.SENSOR,
        status=TickStatus.SKIPPED,
        timestamp=time.time(),
        selector_id="0" * 40,
        skip_reason="shard 0 has been relayed by dagster run 12345678 on a host for 123 s",
    )
    instance.create_tick(tick)
    history, day = home / "history" / "runs", 86_400
    checks = ("asset_check_executions", "evaluation_event_timestamp", "true")
    _multiply(history / "index.db", "event_logs", "timestamp", "run_id = ''", _DAYS, day)
    _multiply(history / "index.db", *checks, _DAYS, day)
    _multiply(history / ".db", "event_logs", "timestamp", "true", _DAYS, day)
    _multiply(home / "schedules" / "schedules.db", "job_ticks", "timestamp", "true", _TICKS, 5)


def _copies(home: Path, run_id: str, a_day: int) -> None:
    """Of a run: its files, and its rows in the two databases that all runs share."""
    runs, shards = home / "history" / "runs.db", home / "history" / "runs"
    every = 86_400 // a_day
    # The files as they stand, without what SQLite still has beside them.
    with closing(sqlite3.connect(shards / f"{run_id}.db")) as shard:
        shard.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with closing(sqlite3.connect(runs)) as index, closing(sqlite3.connect(shards / "index.db")) as events:
        for number in range(_DAYS * a_day - 1):
            copy = str(uuid.uuid4())
            shutil.copy(shards / f"{run_id}.db", shards / f"{copy}.db")
            if (printed := home / "storage" / run_id).exists():
                shutil.copytree(printed, home / "storage" / copy)
            shift = f"-{every * (number + 1)} seconds"
            _clone(index, "runs", run_id, copy, "update_timestamp", shift)
            _clone(index, "run_tags", run_id, copy, None, shift)
            _clone(events, "event_logs", run_id, copy, "timestamp", shift)
        index.commit()
        events.commit()


def _clone(
    connection: sqlite3.Connection, table: str, run_id: str, copy: str, time_column: str | None, shift: str
) -> None:
    names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "id"]
    values = [
        "?1"
        if name == "run_id"
        else f"datetime({name}, ?3)"
        if name == time_column
        else f'replace("{name}", ?2, ?1)'
        if name in ("run_body", "event")
        else f'"{name}"'
        for name in names
    ]
    columns = ", ".join(f'"{name}"' for name in names)
    # A third parameter that a statement does not name is refused.
    shifted = [shift] if time_column else []
    connection.execute(
        f"INSERT INTO {table} ({columns}) SELECT {', '.join(values)} FROM {table} WHERE run_id = ?2",
        [copy, run_id, *shifted],
    )


def _multiply(path: Path, table: str, time_column: str, where: str, times: int, seconds: int) -> None:
    """So many of each row that is there, one every so many seconds back from now; the newest last."""
    with closing(sqlite3.connect(path)) as connection:
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "id"]
        values = [
            f"datetime({name}, '-' || ({seconds} * n) || ' seconds')" if name == time_column else f'"{name}"'
            for name in names
        ]
        columns = ", ".join(f'"{name}"' for name in names)
        connection.execute(
            f"WITH RECURSIVE series(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM series WHERE n < ?) "
            f"INSERT INTO {table} ({columns}) SELECT {', '.join(values)} FROM {table}, series WHERE {where} "
            "ORDER BY n DESC, id",
            [times - 1],
        )
        connection.commit()


def _megabytes(home: Path) -> tuple[float, float]:
    """On disk, and without SQLite's free pages."""
    whole = free = 0
    for path in home.rglob("*"):
        if path.is_file():
            whole += path.stat().st_size
    for path in (home / "history").rglob("*.db"):
        with closing(sqlite3.connect(path)) as connection:
            pages, size = (
                connection.execute(f"PRAGMA {of}").fetchone()[0] for of in ("freelist_count", "page_size")
            )
            free += pages * size
    return whole / 1e6, (whole - free) / 1e6


def _vacuum(home: Path) -> float:
    started = time.monotonic()
    for path in (home / "history" / "runs.db", home / "history" / "runs" / "index.db"):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return time.monotonic() - started


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
