"""Every job under `run_retries: enabled`: which runs Dagster repeats, and what a repetition does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.days.archive import day as days
from outbox_pipelines.defs import outbox_definitions
from outbox_pipelines.errors import SetupError
from tests.conftest import either
from tests.days.archive.days import days_ago, make_days, publish, write
from tests.defs.conftest import EVERYTHING, OF_TABLE, job_of, serving
from tests.defs.instances import stored
from tests.schema.servers import Database

pytestmark = pytest.mark.slow

# The supervisor starts the next session; the others act on what is there when they run.
ONCE = {"cutover", "dead_letters", "drop_day", "relay_session"}
REPEATED = {
    *("archive_day", "check_catalog", "clean_table", "drain_inbox", "maintain_partitions", "make_months"),
    *(
        "expire_archive",
        "purge_history",
        "reconcile_day",
        "register_days",
        "relay_once",
        "replay_events",
        "sweep_bodies",
    ),
    # It succeeds whatever it finds.
    "check_health",
}
DAILY = {"archive_day", "drop_day", "reconcile_day", "replay_events"}
DAY = days_ago(4)


@pytest.fixture
def instance(tmp_path: Path, without_runs: Path) -> Iterator[dg.DagsterInstance]:
    overrides = {"run_retries": {"enabled": True, "max_retries": 2}}
    with stored(tmp_path / "home", overrides, template=without_runs) as found:
        yield found


def test_every_job_is_decided_about() -> None:
    """Guards against a new job that Dagster repeats without a decision whether it may."""
    both = [outbox_definitions(serving(**settings)) for settings in (EVERYTHING, OF_TABLE)]
    jobs = {job.name for each in both for job in each.jobs or ()}
    assert jobs == ONCE | REPEATED


@pytest.mark.parametrize("name", sorted((ONCE | REPEATED) - {"check_health"}))
def test_dagster_repeats_no_action_of_an_operator(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Guards against a replay that is repeated: it would replay what has come since; and against sessions
    that Dagster and the supervisor repeat, each without knowing of the other."""
    monkeypatch.delenv("OUTBOX_DSN", raising=False)
    done = job_of(serving(), name).execute_in_process(
        instance=instance,
        raise_on_error=False,
        partition_key=str(DAY) if name in DAILY else None,
        run_config={"ops": {"drain": {"config": {"consumer": "no:consumer"}}}}
        if name == "drain_inbox"
        else {},
    )
    run = instance.get_run_by_id(done.run_id)
    assert run is not None
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert run.tags.get("dagster/will_retry") == ("true" if name in REPEATED else "false")


def job(name: str, dsn: str, archive: str) -> dg.JobDefinition:
    """What `execute_job` makes the job with."""
    return job_of(serving(dsn=dsn, archive=archive), name)


@pytest.mark.parametrize(
    ("name", "function"),
    either(
        ("maintain_partitions", "outbox_pipelines.days.partitions.close.purge"),
        ("archive_day", "outbox_pipelines.days.archive.day.verify"),
    ),
)
def test_a_run_is_repeated_from_its_failure(
    instance: dg.DagsterInstance,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    function: str,
) -> None:
    """Guards against a retry that asks for outputs, which are not stored, or that does work twice."""
    make_days(database, DAY)
    write(database, DAY)
    publish(database)
    arguments: Any = (name, database.dsn, str(tmp_path / "archive"))
    made = dg.build_reconstructable_job("tests.defs.test_retries", "job", arguments)
    tags = {"dagster/partition": str(DAY)} if name == "archive_day" else {}

    def fail(*_: object) -> None:
        raise SetupError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(function, fail)
        failed = dg.execute_job(made, instance, tags=tags, raise_on_error=False)
    assert not failed.success
    before = _state(database, tmp_path)
    options = dg.ReexecutionOptions.from_failure(failed.run_id, instance)
    again = dg.execute_job(made, instance, tags=tags, reexecution_options=options)
    assert again.success
    assert len(again.get_step_success_events()) == 1
    assert _state(database, tmp_path) == before


@pytest.mark.extended
def test_a_run_is_repeated_after_its_work(
    instance: dg.DagsterInstance, database: Database, tmp_path: Path
) -> None:
    """Guards against a second file, day or event if a process dies after its work."""
    make_days(database, DAY)
    write(database, DAY)
    publish(database)
    served = serving(dsn=database.dsn, archive=str(tmp_path / "archive"))
    states = []
    for _ in range(2):
        for name in ("maintain_partitions", "archive_day"):
            done = job_of(served, name).execute_in_process(
                instance=instance, partition_key=str(DAY) if name == "archive_day" else None
            )
            assert done.success
        states.append(_state(database, tmp_path))
    assert states[0] == states[1]
    assert days.verify(served.load_settings(), DAY).equal


def _state(database: Database, tmp_path: Path) -> object:
    """The events, the days and the files."""
    files = {file.name: file.read_bytes() for file in (tmp_path / "archive").rglob("*") if file.is_file()}
    tables = database.rows("SELECT relname FROM pg_class WHERE relname LIKE 'outbox%' ORDER BY 1")
    return tables, database.rows("SELECT id, seq FROM outbox ORDER BY seq"), files
