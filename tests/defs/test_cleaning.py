"""The job `clean_table` and its schedule, on a real table."""

from __future__ import annotations

import json
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.defs.outbox import Outbox as Served
from tests.defs.conftest import job_of, schedule_of, serving
from tests.existing import textbook
from tests.existing.cleaning.conftest import SOME, Cleaning, Make, make

__all__ = ["make"]


@pytest.fixture
def cleaning(make: Make, monkeypatch: pytest.MonkeyPatch) -> Cleaning:
    cleaning = make(textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING)
    cleaning.execute(SOME)
    monkeypatch.setenv("OUTBOX_TABLE", json.dumps(cleaning.settings.table))
    monkeypatch.setenv("OUTBOX_CLEAN_AFTER_HOURS", "1")
    monkeypatch.setenv("OUTBOX_ARCHIVE", "none")
    return cleaning


def _served(cleaning: Cleaning) -> Served:
    return serving(dsn=cleaning.settings.dsn, kafka=cleaning.settings.kafka)


def _run(cleaning: Cleaning) -> dg.ExecuteInProcessResult:
    return job_of(_served(cleaning), "clean_table").execute_in_process(raise_on_error=False)


def test_rows_are_removed(cleaning: Cleaning) -> None:
    result = _run(cleaning)
    assert result.success
    (output,) = [event for event in result.all_events if event.event_type is dg.DagsterEventType.STEP_OUTPUT]
    shown: dict[str, Any] = {name: each.value for name, each in output.step_output_data.metadata.items()}
    assert shown["rows_deleted"] == 10
    assert shown["table"] == "public.events"
    assert cleaning.execute("SELECT count(*) FROM events") == [(12,)]


def test_what_is_wrong_is_one_line(cleaning: Cleaning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBOX_CLEAN_AFTER_HOURS")
    result = _run(cleaning)
    assert not result.success
    (failure,) = [each for each in result.all_events if each.event_type is dg.DagsterEventType.STEP_FAILURE]
    assert failure.step_failure_data.user_failure_data is not None
    description = failure.step_failure_data.user_failure_data.description
    assert description is not None
    assert description.startswith("OUTBOX_CLEAN_AFTER_HOURS is not set")
    assert "\n" not in description


def test_the_schedule_starts_it_if_it_is_configured(
    cleaning: Cleaning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rows that are removed although no setting asks for it."""
    schedule = schedule_of(_served(cleaning), "clean_table")
    with dg.build_schedule_context() as context:
        assert isinstance(schedule(context), dg.RunRequest)
        monkeypatch.delenv("OUTBOX_CLEAN_AFTER_HOURS")
        skipped = schedule(context)
    assert isinstance(skipped, dg.SkipReason)
    assert "no clean-up configured" in str(skipped.skip_message)
