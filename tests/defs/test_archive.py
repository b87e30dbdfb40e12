"""The asset `outbox/archive`, its check, its job and its schedule."""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

import dagster as dg
import pytest
from dagster._core.event_api import PartitionKeyFilter
from psycopg.types.json import Jsonb

from outbox_pipelines.days.archive import export, report
from outbox_pipelines.days.partitions import close
from outbox_pipelines.defs import outbox_definitions
from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.expectations.day_suite import CHECKS
from tests.days.archive.days import days_ago, file, make_days, manifest, publish, write, write_shapes
from tests.defs.conftest import failure_of, metadata_of, records_of, schedule_of, serving
from tests.schema.servers import Database

_STEP = "outbox__archive"
ARCHIVE = dg.AssetKey(["outbox", "archive"])
CHECK = dg.AssetCheckKey(ARCHIVE, "archive_equals_table")
DAY, NEXT = days_ago(4), days_ago(3)


@pytest.fixture
def served(database: Database, tmp_path: Path) -> Served:
    """Of an outbox with two days that are over and published."""
    make_days(database, DAY)
    write_shapes(database, DAY)
    write(database, NEXT)
    publish(database)
    return serving(dsn=database.dsn, archive=str(tmp_path / "archive"))


def _refuse(*_: object) -> NoReturn:
    raise SetupError("a file cannot be read")


class Dagster:
    """Runs of the job, and what they leave."""

    def __init__(self, instance: dg.DagsterInstance, served: Served) -> None:
        self.instance = instance
        self.definitions = outbox_definitions(served)

    def run(self, day: date) -> dg.ExecuteInProcessResult:
        job = self.definitions.resolve_job_def("archive_day")
        return job.execute_in_process(instance=self.instance, partition_key=str(day), raise_on_error=False)

    def verdict(self, day: date) -> dg.AssetCheckEvaluation | None:
        """Of the check, for this day."""
        found = self.instance.event_log_storage.get_latest_asset_check_execution_by_key(
            [CHECK], PartitionKeyFilter(key=str(day))
        )
        record = found.get(CHECK)
        event = record.event.dagster_event if record and record.event else None
        # Otherwise it was planned, and left out.
        if event is None or event.event_type is not dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            return None
        return event.asset_check_evaluation_data

    def reason(self, result: dg.ExecuteInProcessResult) -> str:
        """Why the archive's step failed."""
        failed = next(e for e in result.filter_events(lambda e: e.is_step_failure) if e.step_key == _STEP)
        return failure_of(failed)


@pytest.fixture
def dagster(instance: dg.DagsterInstance, served: Served) -> Dagster:
    return Dagster(instance, served)


def test_a_day_is_archived_and_proven(
    dagster: Dagster, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a materialization that says nothing, and a job that leaves out its check."""
    monkeypatch.setattr(export, "_PROGRESS_ROWS", 10)
    result = dagster.run(DAY)
    assert result.success
    (materialized,) = result.asset_materializations_for_node("outbox__archive")
    said = manifest(served.load_settings(), DAY)
    metadata = metadata_of(materialized)
    assert materialized.partition == str(DAY)
    assert metadata["rows"] == said.rows > 20
    assert metadata["megabytes"] == round(said.size / 1e6, 3) > 0
    assert metadata["file"] == str(file(served.load_settings(), DAY))
    assert metadata["seconds"] > 0
    assert metadata["archived_before"] is False
    assert (metadata["dead_letters"], metadata["discarded"]) == (0, 0)
    assert metadata["payload_megabytes"] > 0
    assert metadata["lag_p99_seconds"] >= metadata["lag_median_seconds"] >= 0
    types = records_of(materialized.metadata["event_types"])
    assert sum(int(str(each.data["events"])) for each in types) == said.rows
    logged = [entry.user_message for entry in dagster.instance.all_logs(result.run_id)]
    assert f"{said.rows} rows written" in logged
    verdict = dagster.verdict(DAY)
    assert verdict is not None
    assert verdict.passed
    assert verdict.metadata["rows"].value == said.rows
    assert records_of(verdict.metadata["differences"]) == []
    monkeypatch.setattr(report, "read", _refuse)
    again = dagster.run(DAY)
    (materialized,) = again.asset_materializations_for_node("outbox__archive")
    assert metadata_of(materialized)["archived_before"] is True
    assert "pictures" not in materialized.metadata


@pytest.mark.extended
def test_pictures_of_the_days_before(dagster: Dagster) -> None:
    """Guards against an image that Dagster's pages do not show, and pictures of the day alone."""
    dagster.run(DAY)
    (materialized,) = dagster.run(NEXT).asset_materializations_for_node("outbox__archive")
    text = materialized.metadata["pictures"].value
    assert isinstance(text, str)
    pictures = re.findall(r"!\[of the last days\]\(data:image/svg\+xml;base64,([^)]+)\)", text)
    assert len(pictures) == 5
    for each in pictures:
        drawn = "".join(ElementTree.fromstring(b64decode(each)).itertext())
        assert str(DAY) in drawn
        assert str(NEXT) in drawn


def test_the_events_of_a_day_are_judged(dagster: Dagster, served: Served, database: Database) -> None:
    """Guards against a check without a result, a result that hides another day's, and markup of events."""
    (hostile,) = write(database, NEXT, [{"event_type": "![x](/graphql?query=mutation)", "payload": Jsonb(1)}])
    publish(database)
    result = dagster.run(DAY)
    assert result.success
    steps = [e.step_key for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_START]
    assert steps[0] == _STEP
    assert set(steps[1:]) == {f"{_STEP}_archive_equals_table", "check_archived_day"}
    found = {each.check_name: each for each in result.get_asset_check_evaluations()}
    assert set(found) == {"archive_equals_table", *CHECKS}
    assert found["ids_unique"].passed
    # One of the shapes is a payload of null, and one a list.
    payloads = found["payloads_valid"]
    rows = manifest(served.load_settings(), DAY).rows
    assert (payloads.passed, payloads.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert f"2 of {rows} rows do not meet it: " in str(payloads.description)
    assert payloads.metadata["events"].value == payloads.metadata["examined"].value == rows
    assert payloads.metadata["sample"].value == f"all {rows} events"
    assert dagster.run(NEXT).success
    for day, ids in ((DAY, 2), (NEXT, 1)):
        key = dg.AssetCheckKey(ARCHIVE, "payloads_valid")
        record = dagster.instance.event_log_storage.get_latest_asset_check_execution_by_key(
            [key], PartitionKeyFilter(key=str(day))
        )[key]
        assert record.evaluation is not None
        (row,) = records_of(record.evaluation.metadata["expectations"])
        assert (row.data["result"], row.data["rows"]) == ("warn", ids)
    assert row.data["ids"] == str(hostile.id)
    assert "graphql" not in str(record.evaluation)


@pytest.mark.extended
def test_a_check_that_blocks_stops_what_is_downstream(dagster: Dagster, served: Served) -> None:
    """Guards against a report of a day whose payloads are known to be invalid; and one that is held without
    being asked for."""
    for blocking in ([], ["payloads_valid"]):
        outbox = replace(served, blocking_checks=blocking)

        @dg.asset(partitions_def=outbox.days, deps=[outbox.key("archive")])
        def report() -> None: ...

        definitions = dg.Definitions.merge(outbox_definitions(outbox), dg.Definitions(assets=[report]))
        job = definitions.resolve_implicit_global_asset_job_def()
        result = job.execute_in_process(
            instance=dagster.instance,
            partition_key=str(DAY),
            asset_selection=[ARCHIVE, report.key],
            raise_on_error=False,
        )
        checked = {each.check_name: each for each in result.get_asset_check_evaluations()}
        is_error = checked["payloads_valid"].severity is dg.AssetCheckSeverity.ERROR
        materialized = {e.asset_key for e in result.get_asset_materialization_events()}
        assert (is_error, result.success) == (bool(blocking), not blocking)
        assert materialized == {ARCHIVE, *([] if blocking else [report.key])}


@pytest.mark.extended
def test_a_check_that_fails_holds_no_archive_up(dagster: Dagster, served: Served, tmp_path: Path) -> None:
    """Guards against days that stay in the table because of a typo in the event catalog."""
    (tmp_path / "catalog.yaml").write_text("events: [")
    mistyped = serving(
        dsn=served.settings["dsn"],
        archive=served.settings["archive"],
        catalog_file=str(tmp_path / "catalog.yaml"),
    )
    result = Dagster(dagster.instance, mistyped).run(DAY)
    assert not result.success
    assert result.asset_materializations_for_node(_STEP)
    assert manifest(served.load_settings(), DAY).rows > 20


@pytest.mark.extended
def test_a_later_day_hides_no_failure(dagster: Dagster, served: Served, database: Database) -> None:
    """Guards against a check that is green for all days because the last one is."""
    dagster.run(DAY)
    database.rows("ALTER TABLE outbox DISABLE TRIGGER outbox_append_only")
    ((id, seq),) = database.rows(
        "UPDATE outbox SET payload = '6' WHERE seq = (SELECT min(seq) FROM outbox) RETURNING id, seq"
    )
    database.rows("ALTER TABLE outbox ENABLE TRIGGER outbox_append_only")
    # A check blocks nothing: the asset is there, and the run a success.
    result = dagster.run(DAY)
    assert result.success
    difference = f"bucket 0: event {id} (seq {seq}) differs"
    assert f"{DAY}: {difference}" in [e.user_message for e in dagster.instance.all_logs(result.run_id)]
    assert dagster.run(NEXT).success
    then, verdict = dagster.verdict(NEXT), dagster.verdict(DAY)
    assert then is not None
    assert then.passed
    assert verdict is not None
    assert not verdict.passed
    assert verdict.severity is dg.AssetCheckSeverity.ERROR
    assert records_of(verdict.metadata["differences"])[-1].data == {"report": difference}


def test_a_tampered_file_of_a_dropped_day(dagster: Dagster, served: Served, database: Database) -> None:
    """Guards against a check that can say nothing once the rows are gone."""
    dagster.run(DAY)
    database.rows(f"DROP TABLE outbox_{DAY:%Y%m%d}")
    database.rows("UPDATE outbox_days SET state = 'dropped' WHERE day = %s", DAY)
    assert dagster.run(DAY).success
    verdict = dagster.verdict(DAY)
    assert verdict is not None
    assert verdict.passed
    path = file(served.load_settings(), DAY)
    path.write_bytes(path.read_bytes()[:-1])
    # Its events cannot be judged, either.
    assert not dagster.run(DAY).success
    verdict = dagster.verdict(DAY)
    assert verdict is not None
    assert not verdict.passed
    assert f"{path.name} has " in str(verdict.metadata["differences"].value)


@pytest.mark.parametrize("setting", [{}, {"archive": "/proc/archive"}, {"db_schema": "elsewhere"}])
def test_a_refusal_is_one_line(
    database: Database, dagster: Dagster, served: Served, setting: dict[str, str]
) -> None:
    """Guards against a stack trace for a day that is not ready, and for a set-up that is not right."""
    given = {"dsn": database.dsn, "archive": served.settings["archive"]} | setting
    wrong = Dagster(dagster.instance, replace(serving(**given), partition_start=date(2026, 1, 1)))
    # Today is no partition: no day that can be chosen is not over.
    day = DAY if setting else date(2026, 1, 2)
    result = wrong.run(day)
    assert not result.success
    reason = wrong.reason(result)
    assert len(reason.splitlines()) == 1
    assert reason.startswith(
        f"{day} is not a day of the outbox"
        if not setting
        else "the archive /proc/archive (OUTBOX_ARCHIVE) reports an error"
        if "archive" in setting
        else "no outbox in schema 'elsewhere' (OUTBOX_SCHEMA)"
    )
    # Nothing was archived: there is nothing to prove.
    assert wrong.verdict(day) is None


@pytest.mark.extended
def test_a_range_of_days(dagster: Dagster, database: Database, served: Served) -> None:
    """Guards against a backfill that takes all days in one run, and fails all for one."""
    # Dagster's default: a run for each.
    assert dagster.definitions.get_assets_def(ARCHIVE).backfill_policy is None
    job = dagster.definitions.resolve_job_def("archive_day")
    assert job.partitions_def == served.days
    keys = served.days.get_partition_keys_in_range(dg.PartitionKeyRange(str(DAY), str(days_ago(2))))
    assert keys == [str(DAY), str(NEXT), str(days_ago(2))]
    assert all(dagster.run(date.fromisoformat(key)).success for key in keys)
    done = dagster.instance.get_materialized_partitions(ARCHIVE)
    assert done == set(keys)
    query = "SELECT day::text FROM outbox_days WHERE state = 'archived' AND proven_at IS NOT NULL ORDER BY 1"
    assert [day for (day,) in database.rows(query)] == keys


# --- the schedule -----------------------------------------------------------------------------------------

NOON = datetime.now(UTC).replace(hour=12, minute=37, second=0, microsecond=0)


def tick(
    dagster: Dagster, served: Served, at: datetime = NOON
) -> tuple[list[tuple[str | None, str | None]], str | None]:
    """What a tick asks for, as days and keys of runs; and why it skips."""
    # As a block: the context opens the instance once more, and Dagster remembers it until it is closed.
    with dg.build_schedule_context(
        dagster.instance,
        at,
        repository_def=dagster.definitions.get_repository_def(),
    ) as context:
        found = schedule_of(served, "archive_days").evaluate_tick(context)
    requests = found.run_requests or []
    return [(request.partition_key, request.run_key) for request in requests], found.skip_message


def test_each_closed_day_is_requested_once(dagster: Dagster, database: Database, served: Served) -> None:
    """Guards against days that wait for an operator, and against two runs of one day."""
    assert tick(dagster, served) == ([], "every closed day is archived")
    close.close(served.load_settings(), DAY)
    close.close(served.load_settings(), NEXT)
    requests, _ = tick(dagster, served)
    assert [day for day, _ in requests] == [str(DAY), str(NEXT)]
    # The same tick again asks for the same runs; the next one tries again.
    assert tick(dagster, served)[0] == requests
    later, _ = tick(dagster, served, NOON + timedelta(hours=1))
    assert [day for day, _ in later] == [str(DAY), str(NEXT)]
    assert not set(later) & set(requests)
    dagster.run(DAY)
    assert [day for day, _ in tick(dagster, served)[0]] == [str(NEXT)]


@pytest.mark.extended
def test_a_day_at_work_is_left_alone(dagster: Dagster, database: Database, served: Served) -> None:
    """Guards against a second run each hour of a day that takes longer; one that failed is tried again."""
    close.close(served.load_settings(), DAY)
    job = dagster.definitions.resolve_job_def("archive_day")
    dagster.instance.create_run_for_job(job, tags={"dagster/partition": str(NEXT)})
    tags = {**served.run_tags, "dagster/partition": str(DAY)}
    run = dagster.instance.create_run_for_job(job, tags=tags)
    assert tick(dagster, served) == ([], f"runs in progress for {DAY}")
    close.close(served.load_settings(), NEXT)
    assert [day for day, _ in tick(dagster, served)[0]] == [str(NEXT)]
    dagster.instance.report_run_failed(run)
    assert [day for day, _ in tick(dagster, served)[0]] == [str(DAY), str(NEXT)]


def test_without_an_archive_nothing_is_requested(
    dagster: Dagster, database: Database, served: Served
) -> None:
    """Guards against an hourly failure where no archive is configured."""
    close.close(served.load_settings(), DAY)
    for archive_ in ("", "none"):
        requests, reason = tick(dagster, serving(dsn=database.dsn, archive=archive_))
        assert requests == []
        assert "set OUTBOX_ARCHIVE" in str(reason)


def test_it_runs_automatically() -> None:
    """Guards against a schedule that a user must find and switch on."""
    archive_days = schedule_of(serving(), "archive_days")
    assert archive_days.default_status is dg.DefaultScheduleStatus.RUNNING
    assert archive_days.job_name == "archive_day"
    # Not with everybody's jobs, at the full hour.
    assert archive_days.cron_schedule == "37 * * * *"
