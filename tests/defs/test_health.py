"""The asset `outbox/health`: its checks, reported by the sensor and by the job."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.definitions import defs
from outbox_pipelines.defs import health as module
from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.quality.rules import OF_CONNECTOR, RULES, chapter_text
from tests.defs.conftest import job_of, records_of, sensor_of, serving
from tests.schema.servers import Database

NAMES = {rule.name for rule in RULES} - OF_CONNECTOR | {"database"}


def _tick(
    instance: dg.DagsterInstance, served: Served, cursor: str | None = None
) -> tuple[dict[str, dg.AssetCheckEvaluation], list[dg.AssetObservation], dg.SensorResult]:
    """A tick: what it reports of the checks, of the asset, and all of it."""
    with dg.build_sensor_context(instance=instance, cursor=cursor) as context:
        result = sensor_of(served, "health")(context)
    assert isinstance(result, dg.SensorResult)
    found = list(result.asset_events)
    return (
        {event.check_name: event for event in found if isinstance(event, dg.AssetCheckEvaluation)},
        [event for event in found if isinstance(event, dg.AssetObservation)],
        result,
    )


@pytest.fixture
def served(database: Database) -> Served:
    # In the future, so that a slow machine does not age it.
    database.rows("UPDATE outbox_shards SET heartbeat = now() + interval '10 minutes'")
    return serving(dsn=database.dsn)


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Sets how far the sensor's clock is ahead."""
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: time.time() + seconds))


def lose_a_letter(database: Database) -> None:
    database.rows(
        "INSERT INTO outbox_parked (id, seq, tx, aggregate_type, aggregate_id, event_type, payload, "
        "created_at, state, last_error, failed_at) "
        "SELECT outbox_uuidv7(), nextval('outbox_seq'), '3', 'order', '1', 'order.placed', '{}', now(), "
        "'failed', 'too large', now()"
    )


def test_a_tick_reports_every_check(instance: dg.DagsterInstance, served: Served) -> None:
    evaluations, (observation,), result = _tick(instance, served)
    assert set(evaluations) == NAMES
    assert all(evaluation.passed for evaluation in evaluations.values())
    assert observation.metadata["unpublished"].value == 0
    megabytes: Any = observation.metadata["megabytes"].value
    assert megabytes > 0
    assert result.skip_reason is not None
    assert str(result.skip_reason.skip_message) == "all checks passed"


def test_only_what_changes_is_reported_at_once(
    instance: dg.DagsterInstance,
    served: Served,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against a storage filled with unrequested data, and against news that wait for an hour."""
    _, _, first = _tick(instance, served)
    evaluations, observations, second = _tick(instance, served, first.cursor)
    assert (evaluations, observations) == ({}, [])
    lose_a_letter(database)
    evaluations, observations, third = _tick(instance, served, second.cursor)
    assert set(evaluations) == {"dead_letters"}
    found = evaluations["dead_letters"]
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert found.description == "1 dead letter (1 × too large)"
    assert found.metadata["value"].value == 1
    assert "outbox dead-letters list" in str(found.metadata["what_to_do"].value)
    (record,) = records_of(observations[0].metadata["dead_letters_by_reason"])
    assert record.data == {"events": 1, "reason": "too large"}
    assert "dead_letters: 1 dead letter" in str(third.skip_reason)
    later(monkeypatch, 3_601.0)
    evaluations, observations, fourth = _tick(instance, served, third.cursor)
    assert (evaluations, len(observations)) == ({}, 1)
    later(monkeypatch, 86_401.0)
    evaluations, _, _ = _tick(instance, served, fourth.cursor)
    assert set(evaluations) == NAMES


def test_a_result_of_another_reporter_is_corrected(instance: dg.DagsterInstance, served: Served) -> None:
    """Guards against a check that shows for a day what the job `check_health` found in one moment."""
    _, _, first = _tick(instance, served)
    for found in first.asset_events:
        instance.report_runless_asset_event(found)
    reported = dg.AssetCheckEvaluation(
        asset_key=dg.AssetKey(["outbox", "health"]),
        check_name="dead_letters",
        passed=False,
        severity=dg.AssetCheckSeverity.ERROR,
    )
    instance.report_runless_asset_event(reported)
    evaluations, _, second = _tick(instance, served, first.cursor)
    assert {name: each.passed for name, each in evaluations.items()} == {"dead_letters": True}
    instance.report_runless_asset_event(evaluations["dead_letters"])
    evaluations, _, _ = _tick(instance, served, second.cursor)
    assert evaluations == {}


def test_a_text_is_not_old(
    instance: dg.DagsterInstance,
    served: Served,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against an error whose page names the reason of an hour ago."""
    lose_a_letter(database)
    _, _, first = _tick(instance, served)
    database.rows("UPDATE outbox_parked SET last_error = 'not authorized'")
    evaluations, _, second = _tick(instance, served, first.cursor)
    assert evaluations["dead_letters"].description == "1 dead letter (1 × not authorized)"
    lose_a_letter(database)
    database.rows("UPDATE outbox_parked SET last_error = 'not authorized'")
    evaluations, _, _ = _tick(instance, served, second.cursor)
    assert evaluations == {}
    later(monkeypatch, 61.0)
    evaluations, _, _ = _tick(instance, served, second.cursor)
    assert evaluations["dead_letters"].description == "2 dead letters (2 × not authorized)"
    assert set(evaluations) == {"dead_letters"}


def test_each_check_links_to_its_chapter(
    instance: dg.DagsterInstance, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a name of a file where an operator looks for something to click on."""
    monkeypatch.setenv("OUTBOX_RUNBOOK_URL", "https://wiki.example.com/outbox")
    evaluations, _, _ = _tick(instance, served)
    links = {name: evaluation.metadata["runbook"] for name, evaluation in evaluations.items()}
    assert links == {name: dg.MetadataValue.url(f"https://wiki.example.com/outbox#{name}") for name in NAMES}


def test_a_failed_check_contains_its_chapter(
    instance: dg.DagsterInstance, served: Served, database: Database
) -> None:
    """Guards against a link to a file that an installed package does not have."""
    lose_a_letter(database)
    evaluations, _, _ = _tick(instance, served)
    assert {name for name, each in evaluations.items() if "runbook" in each.metadata} == {"dead_letters"}
    chapter = str(evaluations["dead_letters"].metadata["runbook"].value)
    assert "outbox dead-letters" in chapter
    assert "](#" not in chapter
    assert ".md)" not in chapter


def test_a_lost_database_is_a_failed_check(instance: dg.DagsterInstance, served: Served) -> None:
    """Guards against a sensor that falls silent when it matters."""
    _, _, first = _tick(instance, served)
    away = serving(dsn="postgresql://nobody@127.0.0.1:1/nowhere")
    evaluations, observations, second = _tick(instance, away, first.cursor)
    assert set(evaluations) == {"database"}
    assert not evaluations["database"].passed
    assert "cannot connect to the database" in str(evaluations["database"].description)
    assert observations == []
    evaluations, _, _ = _tick(instance, served, second.cursor)
    assert {name for name, each in evaluations.items() if each.passed} == {"database"}


def test_the_cursor_survives_a_rule_that_is_gone(instance: dg.DagsterInstance, served: Served) -> None:
    """Guards against an upgrade after which every tick fails."""
    before = json.dumps({"checks": {"of_old": [2, "", 0.0, []]}, "observed": 0.0})
    cursor = json.dumps({"cursors": {"outbox": before}})
    evaluations, _, result = _tick(instance, served, cursor)
    assert set(evaluations) == NAMES
    assert "of_old" not in json.loads(json.loads(str(result.cursor))["cursors"]["outbox"])["checks"]


def test_the_job_reports_the_same(instance: dg.DagsterInstance, served: Served, database: Database) -> None:
    """Guards against a rerun by hand that says something else than the sensor, or that fails."""
    lose_a_letter(database)
    result = job_of(served, "check_health").execute_in_process(instance=instance)
    assert result.success
    by_job = {each.check_name: each for each in result.get_asset_check_evaluations()}
    by_sensor, _, _ = _tick(instance, served)
    assert set(by_job) == NAMES | {"last_hour"}
    assert not by_job["last_hour"].passed
    for name in NAMES:
        assert (by_job[name].passed, by_job[name].severity) == (
            by_sensor[name].passed,
            by_sensor[name].severity,
        )
        assert set(by_job[name].metadata) == set(by_sensor[name].metadata)
    assert not by_job["dead_letters"].passed


def test_every_check_says_what_to_do() -> None:
    specs = {spec.name: spec for each in defs.asset_checks or () for spec in each.check_specs}
    for name in NAMES:
        description: Any = specs[name].description
        assert "When it fails: " in description
        assert "`runbook`" in description
        assert chapter_text(name), name


def test_observing_measures_now(served: Served) -> None:
    measure: Any = module.health(served)
    (observed,) = measure()
    assert observed.metadata["unpublished"] == 0
    measure = module.health(serving(dsn="postgresql://nobody@127.0.0.1:1/nowhere"))
    with pytest.raises(dg.Failure, match="cannot connect to the database"):
        list(measure())


def test_a_warning_is_no_error(instance: dg.DagsterInstance, served: Served, database: Database) -> None:
    """Guards against pages that are red for what can wait."""
    database.rows("UPDATE outbox_shards SET heartbeat = now() - interval '20 seconds'")
    found = _tick(instance, served)[0]["shards_relayed"]
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.WARN)
    database.rows("UPDATE outbox_shards SET heartbeat = now() - interval '2 minutes'")
    found = _tick(instance, served)[0]["shards_relayed"]
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.ERROR)
