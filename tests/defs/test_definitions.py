"""What Dagster finds when it loads the package."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path

import dagster as dg
import pytest

from outbox_pipelines.definitions import defs
from outbox_pipelines.defs import outbox_definitions
from outbox_pipelines.errors import SetupError
from tests.defs.conftest import EVERYTHING, serving

EVENTS, TABLES = dg.AssetKey(["outbox", "events"]), dg.AssetKey(["application", "tables"])


@pytest.fixture(scope="module")
def loaded() -> dg.Definitions:
    return defs


def test_the_relay_is_there(loaded: dg.Definitions) -> None:
    """Guards against a part that shows nothing and does nothing, because it is off or has no place."""
    assert loaded.get_repository_def().asset_graph.get(EVENTS).parent_keys == {TABLES}
    supervisor = loaded.resolve_sensor_def("relay_supervisor")
    assert supervisor.default_status is dg.DefaultSensorStatus.RUNNING


def test_a_code_server_can_load_it(loaded: dg.Definitions) -> None:
    """Guards against names that clash: the definitions load, the repository made of them does not."""
    repository = loaded.get_repository_def()
    repository.load_all_definitions()
    assert {"relay_session", "relay_once", "dead_letters", "maintain_partitions"} <= set(repository.job_names)


def test_everything_says_what_it_is_for() -> None:
    """Guards against definitions that leave the operator alone: use and remedy belong where he looks."""
    loaded = outbox_definitions(serving(**EVERYTHING))
    described = [
        *loaded.resolve_all_asset_specs(),
        *(loaded.jobs or ()),
        *(check for checks in loaded.asset_checks or () for check in checks.check_specs),
    ]
    for definition in described:
        name = getattr(definition, "name", None) or str(definition)
        assert definition.description, name
        assert "hen " in definition.description, name
        assert len(definition.description) > 200, name
    groups = {spec.key.path[0]: spec.group_name for spec in loaded.resolve_all_asset_specs()}
    assert groups == {"outbox": "outbox", "application": "application"}
    assert all(spec.kinds for spec in loaded.resolve_all_asset_specs())


def test_pages_of_sensors_and_schedules_have_a_short_description() -> None:
    """Guards against a wall of text: these pages show Markdown as plain text, in one paragraph."""
    outboxes = [dataclasses.replace(serving(**EVERYTHING), name=name) for name in ("outbox", "orders")]
    for given in (outboxes[:1], outboxes[1:], outboxes):
        loaded = outbox_definitions(*given)
        for definition in (*(loaded.sensors or ()), *(loaded.schedules or ())):
            description = definition.description
            assert description, definition.name
            assert 60 < len(description) < 400, definition.name
            assert not set("`\n") & set(description), definition.name


def test_events_are_partitioned_by_utc_day(loaded: dg.Definitions) -> None:
    """Guards against days in the server's own time zone, and against today, which no run can archive yet."""
    [events] = [s for s in loaded.resolve_all_asset_specs() if s.key == dg.AssetKey(["outbox", "events"])]
    days = events.partitions_def
    assert isinstance(days, dg.TimeWindowPartitionsDefinition)
    assert (days.timezone, days.end_offset) == ("UTC", 0)


def test_what_materialize_all_materializes(loaded: dg.Definitions) -> None:
    """Guards against days that are dropped by "Materialize all", and against an asset that shows as failed,
    because its last run was killed, while the next one relays."""
    graph = loaded.get_repository_def().asset_graph
    assert {key.path[-1] for key in graph.materializable_asset_keys} == {"archive", "reconciliation"}


def test_jobs_run_in_one_process(loaded: dg.Definitions) -> None:
    """Guards against Dagster's default executor, which spends twice the CPU on each run."""
    for name in ("relay_session", "relay_once"):
        assert loaded.resolve_job_def(name).executor_def.name == dg.in_process_executor.name


def test_loading_is_light() -> None:
    """Guards against imports that every run, every tick and every `dg` command would pay for; and against
    warnings that each would print."""
    heavy = (
        *("pandas", "numpy", "great_expectations", "duckdb", "pyarrow", "adbc_driver_postgresql", "obstore"),
        *("psycopg", "confluent_kafka"),
    )
    script = (
        "import sys; from outbox_pipelines import definitions; "
        f"print(*[name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
    assert done.stderr == ""


def test_the_instance_template_is_what_dagster_reads(tmp_path: Path) -> None:
    """Guards against a setting that this version of Dagster refuses, or reads without effect."""
    with as_file(files("outbox_pipelines.defs") / "dagster.yaml") as template:
        shutil.copy(template, tmp_path / "dagster.yaml")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        queue = instance.get_concurrency_config().run_queue_config
        assert queue is not None
        assert queue.tag_concurrency_limits[0] == {
            "key": "outbox/shard",
            "value": {"applyLimitPerUniqueValue": True},
            "limit": 2,
        }
        assert instance.run_coordinator.dequeue_interval_seconds == 1  # type: ignore[attr-defined]
        assert instance.run_monitoring_enabled
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled
        assert instance.get_settings("sensors")["use_threads"]
        assert instance.get_settings("retention")["sensor"]["purge_after_days"]["skipped"] == 1


def test_an_outbox_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an override that is ignored, and a wrong one that surfaces as pydantic's many lines."""

    monkeypatch.setenv("OUTBOX_DSN", "dbname=environment")
    monkeypatch.setenv("OUTBOX_KAFKA", "from-environment")
    settings = serving(dsn="dbname=given", schema="shop").load_settings()
    assert settings.require_dsn() == "dbname=given"
    assert (settings.kafka, settings.db_schema) == ("from-environment", "shop")
    with pytest.raises(SetupError, match="OUTBOX_SESSION_SECONDS"):
        serving(session_seconds=0).load_settings()
