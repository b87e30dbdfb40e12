"""The asset `outbox/reconciliation`, its check and its job."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import mistune
import pytest
from dagster._core.event_api import PartitionKeyFilter

from outbox_pipelines.core.text import plain
from outbox_pipelines.defs.reconciliation import reconciliation
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.reconciliation import steps
from outbox_pipelines.settings import Settings
from tests.conftest import Outbox
from tests.defs.conftest import failure_of, job_of, metadata_of, served_of, serving
from tests.reconciliation.place import DAY, Place
from tests.relay.topic import create_topic

CHECK = dg.AssetCheckKey(dg.AssetKey(["outbox", "reconciliation"]), "nothing_is_lost")


@pytest.fixture
def place(outbox: Outbox, tmp_path: Path) -> Place:
    create_topic(outbox, 2)
    return Place(outbox, tmp_path)


def _run(
    place: Place, instance: dg.DagsterInstance, day: date, slices: int | None = None, **overrides: str
) -> dg.ExecuteInProcessResult:
    consumers = json.dumps(place.consumers)
    served = served_of(place.outbox, consumers=consumers, **overrides)
    job = job_of(replace(served, partition_start=date(2026, 1, 1)), "reconcile_day")
    config = {} if slices is None else {"ops": {"outbox__reconciliation": {"config": {"slices": slices}}}}
    return job.execute_in_process(
        instance=instance, partition_key=str(day), raise_on_error=False, run_config=config
    )


def test_each_day_has_its_counts_and_its_own_result(place: Place, instance: dg.DagsterInstance) -> None:
    """Guards against a later day's success that hides a loss, and a result without names."""
    place.write(4)
    place.relay()
    (lost,) = place.write(1)
    place.pass_over()
    place.write(2, day=DAY + timedelta(1))
    place.relay()
    result = _run(place, instance, DAY)
    # A difference is the check's to tell.
    assert result.success
    (materialized,) = result.asset_materializations_for_node("outbox__reconciliation")
    assert materialized.partition == str(DAY)
    metadata = metadata_of(materialized)
    assert (metadata["events"], metadata["messages"], metadata["read_from"]) == (5, 6, "table")
    assert _run(place, instance, DAY + timedelta(1)).success
    for day, passed in ((DAY, False), (DAY + timedelta(1), True)):
        record = instance.event_log_storage.get_latest_asset_check_execution_by_key(
            [CHECK], PartitionKeyFilter(key=str(day))
        )[CHECK]
        found = record.evaluation
        assert found is not None
        assert found.passed is passed
        if passed:
            assert found.description == "2 events: the topics have all"
        else:
            assert (found.severity, found.description) == (
                dg.AssetCheckSeverity.ERROR,
                "topics: 1 missing",
            )
            assert found.metadata["topics: missing"].value == 1
            assert lost in str(found.metadata["report"].value)


IMAGE = "order\n```\n![x](/graphql?query=mutation) <img src=x> [a](b) \\[c](d) `"


CONTROL = "order\x1b[31m\x1b]0;a title\x07\r\n2026-01-01 - dagster - INFO - all well\u202e\u2028"


def _run_jobs(place: Place, instance: dg.DagsterInstance, text: str) -> None:
    """Run the jobs that report events, for events whose type and aggregate are this text."""
    place.write(2, event_type=text, aggregate_id=text)
    place.pass_over()
    place.write(1, event_type=text, aggregate_id=text, aggregate_type=text)
    place.relay()
    served = served_of(place.outbox)
    _run(place, instance, DAY)
    job_of(served, "check_health").execute_in_process(instance=instance)
    job_of(served, "dead_letters").execute_in_process(instance=instance)


@pytest.mark.extended
def test_text_of_events_controls_no_terminal(place: Place, instance: dg.DagsterInstance) -> None:
    """Guards against a writer whose event type runs escape sequences where Dagster's log is shown."""
    _run_jobs(place, instance, CONTROL)
    lines = [log.message for run in instance.get_runs() for log in instance.all_logs(run.run_id)]
    assert any(r"\x1b[31m\x1b]0;a title\x07\r\n2026" in line for line in lines)
    assert [line for line in lines if plain(line) != line] == []


def test_text_of_events_is_no_markup_of_a_page(place: Place, instance: dg.DagsterInstance) -> None:
    """Guards against a writer whose event type makes an operator's browser launch a job."""
    _run_jobs(place, instance, IMAGE)
    texts = []
    for run in instance.get_runs():
        for event in instance.all_logs(run.run_id):
            data: Any = None if event.dagster_event is None else event.dagster_event.event_specific_data
            shown = getattr(data, "materialization", None) or data
            texts.append(getattr(shown, "description", None) or "")
            for name, value in (getattr(shown, "metadata", None) or {}).items():
                # A chapter of ours, in which no text of an event is.
                assert name == "runbook" or not isinstance(value, dg.MarkdownMetadataValue)
    page = str(mistune.html("\n\n".join(texts)))
    assert "graphql" in page
    assert not re.search(r"<(a|img)\b", page)


def test_what_only_lags_is_a_warning(place: Place, instance: dg.DagsterInstance) -> None:
    place.write(2)
    place.relay()
    place.consumer()
    place.write(1)
    place.relay()
    (found,) = _run(place, instance, DAY).get_asset_check_evaluations()
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert found.description == "billing: 1 lagging"
    assert found.metadata["billing: compared"].value == 3


@pytest.mark.extended
def test_slices_are_steps_of_one_run(
    place: Place, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against a slice that fails and is left out, or that makes all others run again."""
    ids = place.write(40, keys=10)
    place.relay()
    place.consumer(ids[3:])
    place.write(2)
    place.pass_over()
    (whole,) = _run(place, instance, DAY).get_asset_check_evaluations()
    compared: list[int] = []
    compare = steps.compare

    def fail_once(settings: Settings, number: int, *rest: Any) -> None:
        compared.append(number)
        if compared.count(2) == 1 and number == 2:
            raise UnavailableError("no broker answers")
        compare(settings, number, *rest)

    monkeypatch.setattr(steps, "compare", fail_once)
    monkeypatch.setattr("outbox_pipelines.defs.reconciliation._AGAIN", dg.RetryPolicy(max_retries=1))
    archive = tmp_path / "archive"
    result = _run(place, instance, DAY, slices=4, archive=str(archive))
    assert result.success
    assert sorted(compared) == [0, 1, 2, 2, 3]
    (found,) = result.get_asset_check_evaluations()
    assert (found.passed, found.severity, found.description) == (False, whole.severity, whole.description)
    assert found.metadata["report"] == whole.metadata["report"]
    (materialized,) = result.asset_materializations_for_node("outbox__reconciliation")
    assert (materialized.partition, metadata_of(materialized)["events"]) == (str(DAY), 42)
    assert [path for path in archive.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("slices", "archive", "said"),
    [
        (2, "none", "set OUTBOX_ARCHIVE to a location that all steps reach, or slices to 1"),
        (0, "archive", "a day cannot be divided into 0 slices: choose 1 to 250"),
    ],
)
def test_slices_that_cannot_be(
    place: Place, instance: dg.DagsterInstance, tmp_path: Path, slices: int, archive: str, said: str
) -> None:
    """Guards against a clean check without a comparison."""
    archive = archive if archive == "none" else str(tmp_path / archive)
    result = _run(place, instance, DAY, slices=slices, archive=archive)
    (failed,) = result.filter_events(lambda event: event.is_step_failure)
    assert said in failure_of(failed)
    assert list(result.get_asset_check_evaluations()) == []


def test_a_failure_is_one_line(place: Place, instance: dg.DagsterInstance) -> None:
    result = _run(place, instance, date(2026, 1, 2))
    (failed,) = result.filter_events(lambda event: event.is_step_failure)
    assert "2026-01-02 is not a day of the outbox" in failure_of(failed)


def test_its_days_are_those_of_the_table() -> None:
    served = serving()
    made = reconciliation(served)
    assert made.partitions_def is served.days
    (spec,) = made.check_specs
    assert spec.partitions_def is served.days
