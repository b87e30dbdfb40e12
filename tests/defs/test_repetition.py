"""Jobs that Dagster may repeat: a run fails after all of its work, and the next one changes nothing more."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.catalog import comparison
from outbox_pipelines.consumer import loading
from outbox_pipelines.defs import run_history
from outbox_pipelines.defs.dagster_internals import LOCATION
from outbox_pipelines.defs.relay import relay_session
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import months
from outbox_pipelines.existing.cleaning import clean_up
from outbox_pipelines.reconciliation import steps
from tests.catalog.conftest import CATALOG
from tests.conftest import Outbox
from tests.defs import test_history
from tests.defs.conftest import job_of, served_of, serving
from tests.defs.test_cleaning import cleaning
from tests.defs.test_inbox import named
from tests.defs.test_reconciliation import place
from tests.existing.cleaning.conftest import Cleaning, make
from tests.existing.months.test_ahead import NAMES, table
from tests.reconciliation.place import DAY, Place
from tests.schema.events import insert
from tests.schema.servers import Database

__all__ = ["cleaning", "make", "named", "place", "table"]

pytestmark = pytest.mark.slow

Repeat = Callable[..., None]


@pytest.fixture
def repeat(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> Repeat:
    """Executes a job that fails when its work is done, and then again as a retry does."""

    def repeat(
        job: dg.JobDefinition,
        module: ModuleType,
        work: str,
        state: Callable[[], object],
        *,
        changes: bool = True,
        **options: Any,
    ) -> None:
        owner, _, name = work.rpartition(".")
        target: Any = getattr(module, owner) if owner else module
        original = getattr(target, name)

        def fail(*arguments: Any, **named: Any) -> None:
            result = original(*arguments, **named)
            if isinstance(result, Iterator):
                deque(result)
            raise SetupError("the network is down")

        untouched = state()
        with monkeypatch.context() as patch:
            patch.setattr(target, name, fail)
            failed = job.execute_in_process(instance=instance, raise_on_error=False, **options)
        assert not failed.success
        done = state()
        assert (done != untouched) == changes
        assert job.execute_in_process(instance=instance, **options).success
        assert state() == done

    return repeat


def test_published_events_are_published_once(outbox: Outbox, repeat: Repeat) -> None:
    outbox.fill(50)

    def state() -> object:
        with outbox.connect() as connection:
            states = connection.execute("SELECT * FROM outbox_events ORDER BY seq").fetchall()
        return sorted(str(message.headers["id"]) for message in outbox.messages()), states

    repeat(job_of(served_of(outbox), "relay_once"), relay_session, "RelaySession.result", state)


@pytest.mark.extended
def test_rows_are_removed_once(
    cleaning: Cleaning, repeat: Repeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_ARCHIVE", str(tmp_path / "archive"))

    def state() -> object:
        files = {file.name: file.read_bytes() for file in (tmp_path / "archive").rglob("*") if file.is_file()}
        return cleaning.execute("SELECT * FROM events ORDER BY 1"), files

    repeat(job_of(serving(dsn=cleaning.settings.dsn), "clean_table"), clean_up, "clean", state)


def test_months_are_made_once(table: Cleaning, repeat: Repeat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TABLE", json.dumps(table.settings.table))
    served = serving(dsn=table.settings.dsn, months_ahead=2)
    repeat(job_of(served, "make_months"), months, "ensure", lambda: table.execute(NAMES))


@pytest.mark.parametrize("named", ["Consumer"], indirect=True)
def test_events_are_handled_once(database: Database, named: str, repeat: Repeat) -> None:
    """The handler would fail a second time: an invoice's key is unique."""

    def state() -> object:
        return database.rows("SELECT order_id FROM invoices"), database.rows(
            "SELECT message_id, state, attempts FROM inbox ORDER BY 1"
        )

    config = {"ops": {"drain": {"config": {"consumer": named}}}}
    repeat(job_of(serving(), "drain_inbox"), loading, "drain", state, run_config=config)


@pytest.mark.extended
def test_runs_are_deleted_once(
    instance: dg.DagsterInstance, repeat: Repeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.wipe()
    for _ in range(3):
        test_history.run(instance)
    test_history.age(instance, 15)
    test_history.run(instance)
    repeat(
        job_of(serving(), "purge_history"),
        run_history,
        "_delete_runs",
        lambda: test_history.ids(instance),
        tags={LOCATION: test_history.OURS},
    )


def test_a_reconciliation_only_reads(place: Place, repeat: Repeat) -> None:
    place.write(4)
    place.relay()

    def state() -> object:
        return sorted(map(str, place.messages())), place.rows("SELECT * FROM outbox_events ORDER BY seq")

    served = replace(served_of(place.outbox), partition_start=DAY)
    job = job_of(served, "reconcile_day")
    repeat(job, steps, "reconcile", state, changes=False, partition_key=str(DAY))


def test_a_comparison_with_the_catalog_only_reads(database: Database, repeat: Repeat, tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    with database.connect() as connection:
        insert(connection)
    served = serving(dsn=database.dsn, catalog_file=str(tmp_path / "catalog.yaml"))
    events = partial(database.rows, "SELECT * FROM outbox")
    repeat(job_of(served, "check_catalog"), comparison, "compare", events, changes=False)
