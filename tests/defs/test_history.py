"""The job `purge_history`: what goes, what stays, in SQLite's files and in PostgreSQL's tables."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dagster as dg
import psycopg
import pytest
import sqlalchemy
from dagster._core.storage.partition_status_cache import AssetPartitionStatus

from outbox_pipelines.defs import run_history, runs
from outbox_pipelines.defs.build import build
from outbox_pipelines.defs.dagster_internals import LOCATION
from outbox_pipelines.defs.outbox import PACKAGE
from outbox_pipelines.local.postgres import Postgres
from tests.conftest import Lasting, either, password_of
from tests.defs.conftest import EVERYTHING, OF_TABLE, failure_of, job_of, schedule_of, serving
from tests.schema.servers import Database, fresh

pytestmark = pytest.mark.slow

OURS = "__repository__@outbox"
DAYS = dg.DailyPartitionsDefinition(start_date="2026-01-01", timezone="UTC")
RELAY = dg.AssetKey(["outbox", "relay"])
FOREIGN = dg.AssetKey(["warehouse", "orders"])
# What an operator has done, and what a run of a day or of a check has found, stays.
STAY = {
    "dead_letters",
    "cutover",
    "archive_day",
    "drop_day",
    "replay_events",
    "reconcile_day",
    "check_catalog",
    "check_health",
}


@dg.asset(key=["outbox", "archive"], partitions_def=DAYS)
def archived() -> None: ...


@dg.asset_check(asset=archived, partitions_def=DAYS, name="archive_equals_table")
def equal() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


@dg.op
def publish(context: dg.OpExecutionContext) -> None:
    """As a session does that publishes to a topic, if the run says so."""
    print("a line that is captured")
    if topic := context.run.tags.get("topic"):
        context.log_event(dg.AssetObservation(["topic", topic]))
        context.log_event(dg.AssetMaterialization(RELAY))


@dg.op
def nothing() -> None: ...


@dg.job(tags=serving().run_tags)
def relay_session() -> None:
    publish()


@dg.job(tags=serving().run_tags)
def maintain_partitions() -> None:
    nothing()


@dg.job(name="relay_once")
def theirs() -> None:
    """The user's, with a name of ours."""
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
            "archive_day", selection=dg.AssetSelection.assets(archived), tags=serving().run_tags
        ),
        relay_session,
        maintain_partitions,
        theirs,
    ],
    executor=dg.in_process_executor,
)
CHECK = dg.AssetCheckKey(archived.key, "archive_equals_table")


@pytest.fixture(params=either("sqlite", "postgres"))
def instance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """An instance without runs, with each storage that it may have in production."""
    if request.param == "sqlite":
        storage: dg.DagsterInstance = request.getfixturevalue("sharded")
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


def run(
    instance: dg.DagsterInstance,
    job: str = "relay_session",
    day: str | None = None,
    location: str = OURS,
    **tags: str,
) -> str:
    """A run that has ended."""
    resolved = DEFINITIONS.resolve_job_def(job)
    done = resolved.execute_in_process(
        instance=instance, partition_key=day, tags={LOCATION: location, **tags}
    )
    return done.run_id


def age(instance: dg.DagsterInstance, days: int) -> None:
    """Makes all runs older."""
    with instance.run_storage.connect() as connection:  # type: ignore[attr-defined]
        is_sqlite = connection.dialect.name == "sqlite"
        column = "update_timestamp"
        older = f"datetime({column}, '-{days} days')" if is_sqlite else f"{column} - interval '{days} days'"
        connection.execute(sqlalchemy.text(f"UPDATE runs SET {column} = {older}"))


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


def test_sessions_that_are_long_over_go(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a storage that grows without limit, in its tables or in separate files."""
    monkeypatch.setattr(run_history, "_BATCH", 2)
    monkeypatch.setattr(run_history, "_LOG_EVERY", 2)
    old = [run(instance, job) for job in ("relay_session", "maintain_partitions") for _ in range(3)]
    age(instance, 15)
    young = run(instance)
    storage: Any = instance.event_log_storage
    is_in_files = getattr(storage, "is_run_sharded", False)
    files = [Path(storage.path_for_shard(run_id)) for run_id in old] if is_in_files else []
    assert all(file.exists() for file in files)
    found = purge(instance)
    # The newest run of `maintain_partitions` stays.
    assert found["runs"] == 5
    assert "4 runs deleted" in found["log"]
    assert ids(instance) == {young, old[-1]}
    assert [file.exists() for file in files] == ([False] * 5 + [True] if is_in_files else [])
    assert is_in_files or instance.all_logs(old[0]) == []
    assert len(instance.all_logs(young)) > 5
    assert purge(instance)["runs"] == 0


def test_what_a_run_has_printed_goes_with_it(tmp_path: Path) -> None:
    """Guards against a directory that stays for each run."""
    overrides = {"telemetry": {"enabled": False}}
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides=overrides) as instance:
        run_id = run(instance)
        run(instance)
        age(instance, 15)
        assert (tmp_path / "storage" / run_id).exists()
        assert purge(instance)["runs"] == 1
        assert not (tmp_path / "storage" / run_id).exists()


def test_the_setting_says_how_long(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against days that are fixed."""
    kept = {run(instance), run(instance)}
    age(instance, 13)
    assert purge(instance)["runs"] == 0
    assert ids(instance) == kept
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
    flying = {
        instance.create_run_for_job(relay_session, status=status, tags={LOCATION: OURS}).run_id
        for status in statuses
    }
    newest = run(instance)
    age(instance, 400)
    assert purge(instance)["runs"] == 0
    assert ids(instance) == flying | {newest}


def test_what_is_anothers_stays(instance: dg.DagsterInstance) -> None:
    """Guards against the history of another project, another outbox, or a user's job with a name of ours."""
    theirs = {
        run(instance, location="__repository__@warehouse"),
        run(instance, **{"outbox/name": "billing"}),
        run(instance, "relay_once"),
    }
    for _ in range(2):
        theirs.add(run(instance, location="__repository__@warehouse"))
        theirs.add(run(instance, "relay_once"))
        instance.report_runless_asset_event(dg.AssetObservation(FOREIGN))
    age(instance, 400)
    assert purge(instance)["runs"] == 0
    assert ids(instance) == theirs
    assert len(instance.fetch_observations(FOREIGN, limit=9).records) == 2
    found = purge(instance, another="tag")
    assert "launch purge_history there" in found["failed"]
    assert len(str(found["failed"]).splitlines()) == 1


def test_an_archived_day_stays_archived(instance: dg.DagsterInstance) -> None:
    """Guards against days that are shown as missing, and launched again, once their runs are old."""
    days = [f"2026-11-0{day}" for day in (2, 3, 4)]
    archives = {run(instance, "archive_day", day) for day in days for _ in range(2)}
    # A run of ours that has a day is a run of a day, whatever its job is.
    strange = {run(instance, **{"dagster/partition": "2026-11-02"}) for _ in range(2)}
    age(instance, 400)
    assert purge(instance)["runs"] == 0
    assert ids(instance) == archives | strange
    assert instance.get_status_by_partition(archived.key, days, DAYS) == dict.fromkeys(
        days,
        AssetPartitionStatus.MATERIALIZED,
    )
    assert len(instance.event_log_storage.get_asset_check_execution_history(CHECK, limit=9)) == 6


def test_what_a_page_shows_stays(instance: dg.DagsterInstance) -> None:
    """Guards against a topic, or the relay, without an entry because its last events came long ago."""
    run(instance, topic="orders")
    seldom = run(instance, topic="orders")
    often = [run(instance, topic="payments") for _ in range(2)][-1]
    idle = [run(instance) for _ in range(3)][-1]
    age(instance, 400)
    assert purge(instance)["runs"] == 4
    assert ids(instance) == {seldom, often, idle}
    assert instance.get_latest_materialization_event(RELAY) is not None
    for topic, run_id in (("orders", seldom), ("payments", often)):
        [record] = instance.fetch_observations(dg.AssetKey(["topic", topic]), limit=9).records
        assert record.run_id == run_id


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
    assert runs.is_ours(serving(), dg.DagsterRun("__ASSET_JOB", **chosen)) is expected  # type: ignore[arg-type]
    # What a user's own job chooses is the user's run.
    assert not runs.is_ours(serving(), dg.DagsterRun("my_days", **chosen))  # type: ignore[arg-type]


def test_all_that_is_here_is_known_as_ours() -> None:
    """Guards against a new job, asset or check whose history is never removed."""
    found = build([serving(**EVERYTHING)])
    repository = found.get_repository_def()
    jobs = {name for name in repository.job_names if not name.startswith("__")}
    assert {name for name in jobs if PACKAGE.items() <= repository.get_job(name).run_tags.items()} == jobs
    keys = {spec.key for spec in found.resolve_all_asset_specs() if spec.group_name == "outbox"}
    assert keys == runs.assets(serving())
    assert set(repository.asset_graph.asset_check_keys) == runs.checks(serving())


def test_a_new_job_is_decided_about() -> None:
    """Guards against a job whose runs fill the storage, and one whose runs are missed."""
    jobs = {
        name
        for settings in (EVERYTHING, OF_TABLE)
        for name in build([serving(**settings)]).get_repository_def().job_names
        if not name.startswith("__")
    }
    assert jobs == STAY | set(run_history.JOBS)


def test_a_storage_that_refuses_is_one_line(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a stack trace for a disk, or a database, that does not work."""

    def refuse(*_: object) -> None:
        raise OSError("disk full\nin a function")

    run(instance)
    run(instance)
    age(instance, 15)
    monkeypatch.setattr(type(instance), "delete_run", refuse)
    assert purge(instance)["failed"] == (
        "Dagster's storage failed: disk full: correct the cause, or wait until it is less busy, and run "
        "purge_history again; it continues from here"
    )


def test_it_runs_automatically_at_night() -> None:
    """Guards against a schedule that a user must find and switch on."""
    schedule = schedule_of(serving(), "purge_history")
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    assert schedule.job_name == "purge_history"
    assert schedule.cron_schedule == "7 3 * * *"
