"""Instances of Dagster on disk: one in memory cannot be shared by threads.

Invariants:
- Dagster's own storages are used. All runs' events are in one file, unless a test asks for a file for each.
- An engine lasts as long as the process: Dagster makes one for each event, and SQLAlchemy would compile each
  statement again, which is most of what a short run costs.
- The tables are made once in a session and copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import dagster as dg
import pytest
import sqlalchemy
from dagster._core.storage.event_log.sqlite import consolidated_sqlite_event_log, sqlite_event_log
from dagster._core.storage.runs.sqlite import sqlite_run_storage
from dagster._core.storage.schedules.sqlite import sqlite_schedule_storage

_STORAGES: Final[tuple[Any, ...]] = (
    *(consolidated_sqlite_event_log, sqlite_event_log),
    *(sqlite_run_storage, sqlite_schedule_storage),
)
_engines: dict[str, sqlalchemy.Engine] = {}


def _engine(url: str, **given: Any) -> sqlalchemy.Engine:
    if url not in _engines:
        _engines[url] = sqlalchemy.create_engine(url, **given)
    return _engines[url]


@contextmanager
def lasting_engines() -> Iterator[None]:
    """While this holds, a file has one engine, which keeps no connection."""
    with pytest.MonkeyPatch.context() as patch:
        for each in _STORAGES:
            patch.setattr(each, "create_engine", _engine)
        yield


@contextmanager
def stored(
    home: Path, overrides: Mapping[str, Any] | None = None, *, template: Path | None = None
) -> Iterator[dg.DagsterInstance]:
    """Open an instance in this directory.

    Args:
        overrides: of its settings, as in dagster.yaml.
        template: the directory of an instance without runs, to be copied.
    """
    files = home / "files"
    if template is not None:
        shutil.copytree(template / "files", files)
    files.mkdir(parents=True, exist_ok=True)
    kinds = {
        "run_storage": ("runs", "SqliteRunStorage"),
        "event_log_storage": ("event_log", "ConsolidatedSqliteEventLogStorage"),
        "schedule_storage": ("schedules", "SqliteScheduleStorage"),
    }
    settings: dict[str, Any] = {
        name: {
            "module": f"dagster._core.storage.{module}",
            "class": kind,
            "config": {"base_dir": str(files)},
        }
        for name, (module, kind) in kinds.items()
    }
    settings |= {"telemetry": {"enabled": False}}
    with dg.DagsterInstance.local_temp(str(home), overrides=settings | dict(overrides or {})) as found:
        yield found
