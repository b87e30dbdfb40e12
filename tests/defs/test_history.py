"""The job `purge_history`: what goes, what stays, in SQLite's files and in PostgreSQL's tables."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import psycopg
import pytest
import sqlalchemy
from dagster._core.event_api import PartitionKeyFilter
from dagster._core.events import DagsterEvent
from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log import SqlEventLogStorage, SqlEventLogStorageMetadata
from sqlalchemy.engine import Connection

from outbox_pipelines.defs import history_storage
from outbox_pipelines.defs.history import LOCATION, purge_history, purge_history_schedule
from outbox_pipelines.defs.resources import OutboxResource
from outbox_pipelines.errors import SetupError
from tests.schema.servers import Database

OURS = "__repository__@outbox"
DAYS = dg.DailyPartitionsDefinition(start_date="2026-01-01", timezone="UTC")
HEALTH = dg.AssetKey(["outbox", "health"])
FOREIGN = dg.AssetKey(["warehouse", "orders"])


@dg.asset(key=["outbox", "archive"], partitions_def=DAYS)
def archived() -> None:
    print("a line that is captured")


@dg.asset_check(asset=archived, partitions_def=DAYS)
def equal() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


@dg.op
def nothing() -> None: ...


@dg.job
def idle() -> None:
    nothing()


DEFINITIONS = dg.Definitions(
    assets=[archived],
    asset_checks=[equal],
    jobs=[
        dg.define_asset_job("archive_day", selection=[archived]),
        dg.define_asset_job("without_check", selection=dg.AssetSelection.assets(archived).without_checks()),
        idle,
    ],
    executor=dg.in_process_executor,
)
CHECK = dg.AssetCheckKey(archived.key, "equal")


def run(instance: dg.DagsterInstance, job: str = "idle", day: str | None = None, location: str = OURS) -> str:
    """A run that has ended."""
    resolved = DEFINITIONS.resolve_job_def(job)
    done = resolved.execute_in_process(instance=instance, partition_key=day, tags={LOCATION: location})
    return done.run_id


def report(instance: Any, check: str, passed: bool = True, asset: dg.AssetKey = HEALTH) -> None:
    """A verdict and an observation, as a sensor's tick leaves them."""
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(asset_key=asset, check_name=check, passed=passed)
    )
    instance.report_runless_asset_event(dg.AssetObservation(asset))


def age(instance: dg.DagsterInstance, days: int) -> None:
    """Makes all that is stored older."""
    shift = f"-{days} days"
    storage = instance.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    places: list[tuple[AbstractContextManager[Connection], str, str]] = [
        (instance.run_storage.connect(), "runs", "update_timestamp"),  # type: ignore[attr-defined]
        (storage.index_connection(), "event_logs", "timestamp"),
        (storage.index_connection(), "asset_check_executions", "evaluation_event_timestamp"),
        (storage.run_connection(""), "event_logs", "timestamp"),
    ]
    for place, table, column in places:
        with place as connection:
            connection.execute(
                sqlalchemy.text(f"UPDATE {table} SET {column} = datetime({column}, '{shift}')")
            )


def purge(instance: dg.DagsterInstance, **tags: str) -> dict[str, Any]:
    """What the job says of itself, and under "log" its lines."""
    result = purge_history.execute_in_process(
        instance=instance,
        resources={"outbox": OutboxResource()},
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
            found["failed"] = event.step_failure_data.user_failure_data.description
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
    """Guards against a storage that grows without end, in its tables or in files beside them."""
    old = [run(instance) for _ in range(3)]
    age(instance, 15)
    young = run(instance)
    storage: Any = instance.event_log_storage
    files = [Path(storage.path_for_shard(run_id)) for run_id in old]
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
    monkeypatch.setenv("OUTBOX_HISTORY_DAYS", "12")
    assert purge(instance)["runs"] == 1
    monkeypatch.setenv("OUTBOX_HISTORY_DAYS", "0")
    assert str(purge(instance)["failed"]).startswith("OUTBOX_HISTORY_DAYS=0: ")


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


def test_a_verdict_outlives_what_was_begun_after_it(instance: dg.DagsterInstance) -> None:
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
    """Guards against verdicts of every five minutes that stay for ever, and against none that stays."""
    storage: Any = instance.event_log_storage
    for passed in (True, False):
        report(instance, "lag", passed)
        report(instance, "kafka", not passed)
    report(instance, "rows", asset=FOREIGN)
    report(instance, "rows", asset=FOREIGN)
    age(instance, 15)
    report(instance, "young")
    report(instance, "young")
    assert purge(instance)["events"] == 2 + 4
    assert counted(storage, "asset_check_executions", "check_name IN ('lag', 'kafka')") == 2
    for check, passed in (("lag", False), ("kafka", True)):
        key = dg.AssetCheckKey(HEALTH, check)
        verdict = storage.get_latest_asset_check_execution_by_key([key])[key]
        assert verdict.status.value == ("SUCCEEDED" if passed else "FAILED")
        assert verdict.event is not None
    assert counted(storage, "asset_check_executions", "check_name = 'young'") == 2
    assert counted(storage, "asset_check_executions", "check_name = 'rows'") == 2
    # 2 that are the newest of their checks, 2 young ones, 2 of others.
    assert counted(storage, "event_logs", "dagster_event_type = 'ASSET_CHECK_EVALUATION'") == 6
    assert len(instance.fetch_observations(HEALTH, limit=99).records) == 2
    assert len(instance.fetch_observations(FOREIGN, limit=99).records) == 2
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
    history_storage.delete_events(instance, datetime.now(UTC) + timedelta(days=1), told.append)
    assert told == [3, 6, 7, 10, 13, 14]


def test_a_storage_that_refuses_is_one_line(instance: dg.DagsterInstance) -> None:
    """Guards against a stack trace for a disk, or a database, that is out of order."""
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
    assert failed.startswith("Dagster's storage refuses: ")
    assert "run purge_history again" in failed
    assert len(failed.splitlines()) == 1


def test_a_storage_of_another_kind_is_one_line() -> None:
    """Guards against an attribute error on an instance that keeps its events elsewhere."""
    with dg.DagsterInstance.ephemeral() as instance:
        # In memory it is SQL too; whatever is not has none of its tables.
        elsewhere = SimpleNamespace(event_log_storage=object())
        with pytest.raises(SetupError, match="events in object, which purge_history does not know: switch"):
            history_storage.runs_in_view(elsewhere)  # type: ignore[arg-type]
        assert history_storage.runs_in_view(instance) == set()


def test_it_runs_by_itself_at_night() -> None:
    """Guards against a schedule that somebody must find and switch on."""
    assert purge_history_schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    assert purge_history_schedule.job_name == "purge_history"
    assert purge_history_schedule.cron_schedule == "7 3 * * *"


def test_loading_touches_no_internals() -> None:
    """Guards against a new Dagster that moves something, and takes every job and sensor with it."""
    script = (
        "import sys; import dagster; before = set(sys.modules); "
        "from outbox_pipelines.defs import history; "
        "print(*[m for m in set(sys.modules) - before if m.startswith('dagster._core.storage')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


# --- PostgreSQL -------------------------------------------------------------------------------------------


class InPostgres(SqlEventLogStorage):
    """Dagster's tables and its SQL in PostgreSQL: what dagster-postgres is made of, which is not here."""

    def __init__(self, dsn: str) -> None:
        self.engine = sqlalchemy.create_engine(
            "postgresql+psycopg://",
            creator=lambda: psycopg.connect(dsn),
            # Made for SQLite, this storage goes on after a refusal, which ends a transaction here.
            isolation_level="AUTOCOMMIT",
        )
        SqlEventLogStorageMetadata.create_all(self.engine)
        super().__init__()

    def index_connection(self) -> Any:
        return self.engine.begin()

    def run_connection(self, run_id: str | None = None) -> Any:
        return self.engine.begin()

    def has_table(self, table_name: str) -> bool:
        return sqlalchemy.inspect(self.engine).has_table(table_name)

    def upgrade(self) -> None: ...

    def watch(self, run_id: Any, cursor: Any, callback: Any) -> None: ...

    def end_watch(self, run_id: Any, handler: Any) -> None: ...

    def alembic_version(self) -> Any: ...


@pytest.fixture
def in_postgres(database: Database) -> Iterator[InPostgres]:
    storage = InPostgres(database.dsn)
    yield storage
    storage.engine.dispose()


def _entry(event: DagsterEvent, days_old: int, run_id: str = "") -> EventLogEntry:
    return EventLogEntry(
        error_info=None,
        level=20,
        user_message="",
        run_id=run_id,
        timestamp=(datetime.now(UTC) - timedelta(days=days_old)).timestamp(),
        dagster_event=event,
        job_name="any",
    )


def _verdict(check: str, passed: bool = True, asset: dg.AssetKey = HEALTH) -> DagsterEvent:
    return DagsterEvent(
        event_type_value=dg.DagsterEventType.ASSET_CHECK_EVALUATION.value,
        job_name="any",
        event_specific_data=dg.AssetCheckEvaluation(asset_key=asset, check_name=check, passed=passed),
    )


def _observation(asset: dg.AssetKey) -> DagsterEvent:
    from dagster._core.events import AssetObservationData

    return DagsterEvent(
        event_type_value=dg.DagsterEventType.ASSET_OBSERVATION.value,
        job_name="any",
        event_specific_data=AssetObservationData(dg.AssetObservation(asset)),
    )


def test_the_same_in_postgres(in_postgres: InPostgres) -> None:
    """Guards against SQL that only SQLite takes, or reads otherwise."""
    for days_old in (30, 20, 1):
        in_postgres.store_event(_entry(_verdict("lag", passed=days_old == 1), days_old))
        in_postgres.store_event(_entry(_observation(HEALTH), days_old))
        in_postgres.store_event(_entry(_verdict("rows", asset=FOREIGN), days_old))
        in_postgres.store_event(_entry(_observation(FOREIGN), days_old))
    for days_old, run_id in ((30, "replaced"), (29, "newest")):
        in_postgres.store_event(_entry(_observation(dg.AssetKey(["outbox", "relay"])), days_old, run_id))
    instance: Any = SimpleNamespace(event_log_storage=in_postgres)
    assert history_storage.runs_in_view(instance) == {"newest"}
    before = datetime.now(UTC) - timedelta(days=14)
    assert history_storage.delete_events(instance, before) == 2 + 2
    key = dg.AssetCheckKey(HEALTH, "lag")
    (verdict,) = in_postgres.get_asset_check_execution_history(key, limit=9)
    assert verdict.status.value == "SUCCEEDED"
    assert counted(in_postgres, "asset_check_executions") == 1 + 3
    # A verdict and an observation of ours, three each of others, two of runs.
    assert counted(in_postgres, "event_logs") == 2 + 6 + 2
