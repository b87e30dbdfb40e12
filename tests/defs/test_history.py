"""The job `purge_history`: what goes, what stays, in SQLite's files and in PostgreSQL's tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import dagster as dg
import psycopg
import pytest
import sqlalchemy
from dagster._core.event_api import PartitionKeyFilter
from dagster._core.storage.event_log import SqlEventLogStorage
from sqlalchemy.engine import Connection

from outbox_pipelines.defs import history_storage, ours
from outbox_pipelines.defs.build import build
from outbox_pipelines.defs.history import LOCATION
from outbox_pipelines.defs.outbox import PACKAGE
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.postgres import Postgres
from tests.conftest import Lasting, password_of
from tests.defs.conftest import failure_of, job_of, schedule_of, serving
from tests.schema.servers import Database, fresh

pytestmark = pytest.mark.slow

OURS = "__repository__@outbox"
DAYS = dg.DailyPartitionsDefinition(start_date="2026-01-01", timezone="UTC")
HEALTH = dg.AssetKey(["outbox", "health"])
FOREIGN = dg.AssetKey(["warehouse", "orders"])


@dg.asset(key=["outbox", "archive"], partitions_def=DAYS)
def archived() -> None:
    print("a line that is captured")


@dg.asset_check(asset=archived, partitions_def=DAYS, name="archive_equals_table")
def equal() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


@dg.op
def nothing() -> None: ...


@dg.job(tags=serving().run_tags)
def idle() -> None:
    nothing()


@dg.job
def nightly() -> None:
    """The user's, in the same code location."""
    nothing()


@dg.asset(key=["outbox", "report"])
def report_of_mine() -> None: ...


@dg.asset_check(asset=archived)
def mine() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


DEFINITIONS = dg.Definitions(
    assets=[archived, report_of_mine],
    asset_checks=[equal, mine],
    jobs=[
        dg.define_asset_job(
            "archive_day",
            selection=dg.AssetSelection.assets(archived) - dg.AssetSelection.checks(mine),
            tags=serving().run_tags,
        ),
        dg.define_asset_job(
            "without_check",
            selection=dg.AssetSelection.assets(archived).without_checks(),
            tags=serving().run_tags,
        ),
        dg.define_asset_job(
            "my_days", selection=dg.AssetSelection.assets(archived) - dg.AssetSelection.checks(mine)
        ),
        idle,
        nightly,
    ],
    executor=dg.in_process_executor,
)
CHECK = dg.AssetCheckKey(archived.key, "archive_equals_table")


@pytest.fixture(params=["sqlite", "postgres"])
def instance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """An instance without runs, with each storage that it may have in production."""
    if request.param == "sqlite":
        storage: dg.DagsterInstance = request.getfixturevalue("storage")
        storage.wipe()
        yield storage
        return
    server: Postgres = request.getfixturevalue("server")
    lasting: Lasting = request.getfixturevalue("lasting")
    template = lasting.once(("storage", server.dsn), lambda: _with_tables(server))
    with fresh(server, template) as database, _stored_in(database, tmp_path) as found:
        yield found


@contextmanager
def _with_tables(server: Postgres) -> Iterator[str]:
    """The name of a database with Dagster's tables, to be copied: making them takes most of a second."""
    with fresh(server) as made:
        with TemporaryDirectory() as home, _stored_in(made, Path(home)):
            pass
        yield str(psycopg.conninfo.conninfo_to_dict(made.dsn)["dbname"])


@contextmanager
def _stored_in(database: Database, home: Path) -> Iterator[dg.DagsterInstance]:
    given = psycopg.conninfo.conninfo_to_dict(database.dsn)
    place = {
        "scheme": "postgresql+psycopg2",
        "hostname": given["host"],
        "port": int(given["port"] or 0),
        "username": given["user"],
        "password": password_of(database.dsn),
        "db_name": given["dbname"],
    }
    settings = {"storage": {"postgres": {"postgres_db": place}}, "telemetry": {"enabled": False}}
    (home / "dagster.yaml").write_text(json.dumps(settings))
    with dg.DagsterInstance.from_config(str(home)) as found:
        yield found


def run(instance: dg.DagsterInstance, job: str = "idle", day: str | None = None, location: str = OURS) -> str:
    """A run that has ended."""
    resolved = DEFINITIONS.resolve_job_def(job)
    done = resolved.execute_in_process(instance=instance, partition_key=day, tags={LOCATION: location})
    return done.run_id


def report(instance: Any, check: str, passed: bool = True, asset: dg.AssetKey = HEALTH) -> None:
    """A result and an observation, as a sensor's tick leaves them."""
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(asset_key=asset, check_name=check, passed=passed)
    )
    instance.report_runless_asset_event(dg.AssetObservation(asset))


def age(instance: dg.DagsterInstance, days: int) -> None:
    """Makes all that is stored older."""
    storage = instance.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    places: list[tuple[AbstractContextManager[Connection], str, str]] = [
        (instance.run_storage.connect(), "runs", "update_timestamp"),  # type: ignore[attr-defined]
        (storage.index_connection(), "event_logs", "timestamp"),
        (storage.index_connection(), "asset_check_executions", "evaluation_event_timestamp"),
    ]
    if storage.is_run_sharded:
        places.append((storage.run_connection(""), "event_logs", "timestamp"))
    for place, table, column in places:
        with place as connection:
            is_sqlite = connection.dialect.name == "sqlite"
            older = (
                f"datetime({column}, '-{days} days')" if is_sqlite else f"{column} - interval '{days} days'"
            )
            connection.execute(sqlalchemy.text(f"UPDATE {table} SET {column} = {older}"))


def purge(instance: dg.DagsterInstance, **tags: str) -> dict[str, Any]:
    """What the job reports about itself, and under "log" its lines."""
    result = job_of(serving(), "purge_history").execute_in_process(
        instance=instance,
        tags=tags or {LOCATION: OURS},
        raise_on_error=False,
    )
    found: dict[str, Any] = {
        "log": [e.user_message for e in instance.all_logs(result.run_id) if not e.is_dagster_event]
    }
    for event in result.all_events:
        if event.event_type is dg.DagsterEventType.STEP_OUTPUT:
            found |= {name: value.value for name, value in event.step_output_data.metadata.items()}
        if event.event_type is dg.DagsterEventType.STEP_FAILURE:
            found["failed"] = failure_of(event)
    return found


def ids(instance: dg.DagsterInstance) -> set[str]:
    """Of the runs that are there, but the purges' own."""
    return {r.run_id for r in instance.get_runs() if r.job_name != "purge_history"}


def counted(storage: SqlEventLogStorage, table: str, where: str = "true") -> int:
    with storage.index_connection() as connection:
        found = connection.execute(sqlalchemy.text(f"SELECT count(*) FROM {table} WHERE {where}")).scalar()
        assert found is not None
        return int(found)


def test_runs_that_are_long_over_go(instance: dg.DagsterInstance) -> None:
    """Guards against a storage that grows without limit, in its tables or in separate files."""
    old = [run(instance) for _ in range(3)]
    age(instance, 15)
    young = run(instance)
    storage: Any = instance.event_log_storage
    files = [Path(storage.path_for_shard(run_id)) for run_id in old] if storage.is_run_sharded else []
    assert all(file.exists() for file in files)
    found = purge(instance)
    assert (found["runs"], found["runs_kept_for_what_they_show"]) == (3, 0)
    assert "3 of 3 runs" in found["log"]
    assert ids(instance) == {young}
    assert not any(file.exists() for file in files)
    assert counted(storage, "event_logs", f"run_id IN {tuple(old)}") == 0
    assert len(instance.all_logs(young)) > 5


def test_what_a_run_has_printed_goes_with_it(tmp_path: Path) -> None:
    """Guards against a directory that stays for each run."""
    overrides = {"telemetry": {"enabled": False}}
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides=overrides) as instance:
        run_id = run(instance, "idle")
        assert (tmp_path / "storage" / run_id).exists()
        history_storage.delete_run(instance, run_id)
        assert not (tmp_path / "storage" / run_id).exists()
        assert instance.get_run_by_id(run_id) is None


def test_the_setting_says_how_long(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against days that are fixed."""
    kept = run(instance)
    age(instance, 13)
    assert purge(instance)["runs"] == 0
    assert ids(instance) == {kept}
    monkeypatch.setenv("OUTBOX_RUN_RETENTION_DAYS", "12")
    assert purge(instance)["runs"] == 1
    monkeypatch.setenv("OUTBOX_RUN_RETENTION_DAYS", "0")
    assert str(purge(instance)["failed"]).startswith("OUTBOX_RUN_RETENTION_DAYS=0: ")


def test_a_run_in_flight_stays(instance: dg.DagsterInstance) -> None:
    """Guards against a session that loses its run while it relays, however old."""
    statuses = [
        dg.DagsterRunStatus.NOT_STARTED,
        dg.DagsterRunStatus.STARTING,
        dg.DagsterRunStatus.STARTED,
        dg.DagsterRunStatus.CANCELING,
    ]
    job = DEFINITIONS.resolve_job_def("idle")
    flying = {
        instance.create_run_for_job(job, status=status, tags={LOCATION: OURS}).run_id for status in statuses
    }
    age(instance, 400)
    assert purge(instance)["runs"] == 0
    assert ids(instance) == flying


def test_runs_of_other_locations_stay(instance: dg.DagsterInstance) -> None:
    """Guards against the history of another project on the same instance."""
    theirs = run(instance, location="__repository__@warehouse")
    report(instance, "rows", asset=FOREIGN)
    report(instance, "rows", asset=FOREIGN)
    age(instance, 15)
    found = purge(instance)
    assert (found["runs"], found["events"]) == (0, 0)
    assert ids(instance) == {theirs}
    found = purge(instance, another="tag")
    assert "launch purge_history there" in found["failed"]
    assert len(str(found["failed"]).splitlines()) == 1


def test_what_is_the_users_stays(instance: dg.DagsterInstance) -> None:
    """Guards against the loss of the history of the user's own jobs, assets and checks."""
    theirs = {run(instance, "nightly"), run(instance, "my_days", "2026-11-02")}
    run(instance)
    asset = dg.AssetKey(["outbox", "report"])
    for _ in range(3):
        report(instance, "lag", asset=asset)
        report(instance, "rows_of_mine")
    age(instance, 400)
    found = purge(instance)
    # Of ours: the run of `idle`, and two observations of `outbox/health`.
    assert (found["runs"], found["events"]) == (1, 2)
    assert ids(instance) == theirs
    storage: Any = instance.event_log_storage
    for key in (dg.AssetCheckKey(asset, "lag"), dg.AssetCheckKey(HEALTH, "rows_of_mine")):
        history = storage.get_asset_check_execution_history(key, limit=9)
        assert [record.event is not None for record in history] == [True] * 3
    assert len(instance.fetch_observations(asset, limit=9).records) == 3


@pytest.mark.parametrize(
    ("assets", "checks", "expected"),
    [
        ([archived.key], None, True),
        ([archived.key], [CHECK], True),
        ([], [CHECK], True),
        ([archived.key, report_of_mine.key], None, False),
        ([archived.key], [CHECK, dg.AssetCheckKey(archived.key, "mine")], False),
        ([], [dg.AssetCheckKey(archived.key, "mine")], False),
        ([FOREIGN], None, False),
        ([], None, False),
    ],
)
def test_a_run_of_chosen_assets_is_ours_where_all_are(
    assets: list[dg.AssetKey], checks: list[dg.AssetCheckKey] | None, expected: bool
) -> None:
    """Guards against runs that stay permanently because they were started on an asset's page; and against the
    loss of those that the user's assets were part of."""
    chosen = {"asset_selection": frozenset(assets), "asset_check_selection": checks and frozenset(checks)}
    assert ours.is_ours(serving(), dg.DagsterRun("__ASSET_JOB", **chosen)) is expected  # type: ignore[arg-type]
    # What a user's own job chooses is the user's run.
    assert not ours.is_ours(serving(), dg.DagsterRun("my_days", **chosen))  # type: ignore[arg-type]


def test_all_that_is_here_is_known_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a new job, asset or check whose history is never removed."""
    # An outbox without it has no connector.
    monkeypatch.setenv("OUTBOX_CONNECT", "http://127.0.0.1:8083")
    found = build([serving()])
    repository = found.get_repository_def()
    jobs = {name for name in repository.job_names if not name.startswith("__")}
    assert {name for name in jobs if PACKAGE.items() <= repository.get_job(name).run_tags.items()} == jobs
    keys = {spec.key for spec in found.resolve_all_asset_specs() if spec.group_name == "outbox"}
    assert keys == ours.assets(serving())
    assert set(repository.asset_graph.asset_check_keys) == ours.checks(serving())


def test_an_archived_day_stays_archived(instance: dg.DagsterInstance) -> None:
    """Guards against days that are shown as missing, and launched again, once their runs are old."""
    # As days are dropped: without a check, which would keep the run too.
    other = run(instance, "without_check", "2026-11-03")
    replaced, newest = run(instance, "archive_day", "2026-11-02"), run(instance, "archive_day", "2026-11-02")
    age(instance, 400)
    found = purge(instance)
    assert (found["runs"], found["runs_kept_for_what_they_show"]) == (1, 2)
    assert ids(instance) == {newest, other}
    assert replaced not in ids(instance)
    assert instance.get_materialized_partitions(archived.key) == {"2026-11-02", "2026-11-03"}
    verdict = instance.event_log_storage.get_latest_asset_check_execution_by_key(
        [CHECK], PartitionKeyFilter(key="2026-11-02")
    )[CHECK]
    assert (verdict.run_id, verdict.status.value) == (newest, "SUCCEEDED")
    assert instance.event_log_storage.get_asset_check_execution_history(CHECK, limit=9)[-1].run_id == newest


def test_a_result_outlives_what_was_begun_after_it(instance: dg.DagsterInstance) -> None:
    """Guards against a check that says nothing, because a run that should say it was killed."""
    said = run(instance, "archive_day", "2026-11-02")
    materialized = run(instance, "without_check", "2026-11-02")
    job = DEFINITIONS.resolve_job_def("archive_day")
    # It has planned the check.
    killed = instance.create_run_for_job(job, tags={LOCATION: OURS, "dagster/partition": "2026-11-02"})
    instance.report_run_failed(killed)
    age(instance, 400)
    purge(instance)
    assert ids(instance) == {materialized, said, killed.run_id}


def test_events_without_a_run_go_but_the_newest(instance: dg.DagsterInstance) -> None:
    """Guards against results of every five minutes that stay permanently, and against none that stays."""
    storage: Any = instance.event_log_storage
    for passed in (True, False):
        report(instance, "lag", passed)
        report(instance, "kafka", not passed)
    report(instance, "rows", asset=FOREIGN)
    report(instance, "rows", asset=FOREIGN)
    age(instance, 15)
    report(instance, "keys")
    report(instance, "keys")
    assert purge(instance)["events"] == 2 + 4
    assert counted(storage, "asset_check_executions", "check_name IN ('lag', 'kafka')") == 2
    for check, passed in (("lag", False), ("kafka", True)):
        key = dg.AssetCheckKey(HEALTH, check)
        verdict = storage.get_latest_asset_check_execution_by_key([key])[key]
        assert verdict.status.value == ("SUCCEEDED" if passed else "FAILED")
        assert verdict.event is not None
    assert counted(storage, "asset_check_executions", "check_name = 'keys'") == 2
    assert counted(storage, "asset_check_executions", "check_name = 'rows'") == 2
    # 2 that are the newest of their checks, 2 young ones, 2 of others.
    assert counted(storage, "event_logs", "dagster_event_type = 'ASSET_CHECK_EVALUATION'") == 6
    assert len(instance.fetch_observations(HEALTH, limit=99).records) == 2
    assert len(instance.fetch_observations(FOREIGN, limit=99).records) == 2
    if storage.is_run_sharded:
        with storage.run_connection("") as connection:
            copies = connection.execute(sqlalchemy.text("SELECT count(*) FROM event_logs")).scalar()
        assert copies == 4
    assert purge(instance)["events"] == 0


def test_the_newest_stays_where_all_is_old(instance: dg.DagsterInstance) -> None:
    """Guards against pages that turn empty when nothing has happened for long."""
    report(instance, "lag")
    age(instance, 400)
    assert purge(instance)["events"] == 0
    assert len(instance.fetch_observations(HEALTH, limit=9).records) == 1


def test_batches_are_bounded(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one transaction for a year, which holds up everybody else."""
    for _ in range(8):
        report(instance, "lag")
    monkeypatch.setattr(history_storage, "BATCH", 3)
    told: list[int] = []
    history_storage.delete_events(instance, datetime.now(UTC) + timedelta(days=1), serving(), told.append)
    assert told == [3, 6, 7, 10, 13, 14]


def test_a_storage_that_refuses_is_one_line(instance: dg.DagsterInstance) -> None:
    """Guards against a stack trace for a disk, or a database, that does not work."""
    run(instance)
    age(instance, 15)
    storage: Any = instance.event_log_storage
    with storage.index_connection() as connection:
        connection.execute(sqlalchemy.text("ALTER TABLE asset_check_executions RENAME TO gone"))
    try:
        failed = str(purge(instance)["failed"])
    finally:
        with storage.index_connection() as connection:
            connection.execute(sqlalchemy.text("ALTER TABLE gone RENAME TO asset_check_executions"))
    assert failed.startswith("Dagster's storage failed: ")
    assert "run purge_history again" in failed
    assert len(failed.splitlines()) == 1


def test_a_storage_of_another_kind_is_one_line() -> None:
    """Guards against an attribute error on an instance that keeps its events elsewhere."""
    with dg.DagsterInstance.ephemeral() as instance:
        # In memory it is SQL too; whatever is not has none of its tables.
        elsewhere = SimpleNamespace(event_log_storage=object())
        with pytest.raises(
            SetupError, match="events in object, which purge_history does not support: turn off"
        ):
            history_storage.runs_in_view(elsewhere)  # type: ignore[arg-type]
        assert history_storage.runs_in_view(instance) == set()


def test_it_runs_automatically_at_night() -> None:
    """Guards against a schedule that a user must find and switch on."""
    schedule = schedule_of(serving(), "purge_history")
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    assert schedule.job_name == "purge_history"
    assert schedule.cron_schedule == "7 3 * * *"


def test_loading_touches_no_internals() -> None:
    """Guards against a new Dagster that moves something, and takes every job and sensor with it."""
    script = (
        "import sys; import dagster; before = set(sys.modules); "
        "from outbox_pipelines.defs import history; "
        "print(*[m for m in set(sys.modules) - before if m.startswith('dagster._core.storage')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


# --- PostgreSQL -------------------------------------------------------------------------------------------
