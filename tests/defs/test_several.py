"""Several outboxes in one Dagster: merged with a project, or served together."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.metadata.metadata_value import CodeLocationReconstructionMetadataValue
from dagster._core.definitions.repository_definition import RepositoryLoadData

from outbox_pipelines.defs import outbox as outbox_module
from outbox_pipelines.defs import outbox_definitions, overview, ticks
from outbox_pipelines.defs.build import served
from outbox_pipelines.defs.dagster_internals import DefinitionsLoadContext, DefinitionsLoadType
from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.local import Stack
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.settings import load_settings
from tests.conftest import ADOPT, Outbox, fresh_database, topic_prefix, wait_until
from tests.days.partitions.test_partitions import DAYS_GO_BY
from tests.defs.conftest import records_of
from tests.defs.test_merging import project

NAMES = ("orders", "billing", "stock")


@pytest.fixture
def three(stack: Stack, migrated: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Outbox]]:
    """Three outboxes in three databases, whose connection strings are in variables."""
    with ExitStack() as databases:
        found = {}
        for name in NAMES:
            dsn = databases.enter_context(fresh_database(stack.dsn, migrated))
            topic = f"{topic_prefix()}-{name}-{{aggregate_type}}"
            found[name] = Outbox(load_settings(name=name, dsn=dsn, kafka=stack.kafka, topic=topic))
            with found[name].connect() as connection:
                connection.execute(ADOPT)
                connection.execute(DAYS_GO_BY.format(days=3).encode())
            monkeypatch.setenv(f"{name.upper()}_DSN", dsn)
        yield found


def in_dagster(outbox: Outbox, archive: Path) -> Served:
    settings = outbox.settings
    return Served(
        name=settings.name,
        dsn_variable=f"{settings.name.upper()}_DSN",
        settings={
            "kafka": settings.kafka,
            "topic": settings.topic,
            "archive": str(archive / settings.name),
            "session_seconds": 1.0,
            # Also in the first hour of a day.
            "close_after_minutes": 0.0,
        },
    )


@pytest.mark.extended
def test_three_beside_a_project(
    three: dict[str, Outbox], instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    """Guards against names that clash, and an outbox that works with another's settings."""
    outboxes = {name: in_dagster(outbox, tmp_path) for name, outbox in three.items()}
    merged = dg.Definitions.merge(project(), *map(outbox_definitions, outboxes.values()))
    repository = merged.get_repository_def()
    repository.load_all_definitions()
    assert {"nightly", "outbox_orders_relay_session", "outbox_stock_archive_day"} <= set(repository.job_names)
    # Merged into a project, nothing starts by itself.
    automation: list[Any] = [*repository.sensor_defs, *repository.schedule_defs]
    statuses = {each.default_status for each in automation}
    ours = [each for each in repository.sensor_defs if each.name.startswith("outbox_")]
    assert len(ours) == 9
    assert statuses == {dg.DefaultSensorStatus.STOPPED, dg.DefaultScheduleStatus.STOPPED}
    for name, outbox in three.items():
        outbox.write(*("a" * (NAMES.index(name) + 1)))
        served = outboxes[name]
        with ThreadPoolExecutor(1) as threads:
            job = repository.get_job(served.name_of("relay_session"))
            session = threads.submit(job.execute_in_process, instance=instance)
            wait_until(lambda outbox=outbox: len(outbox.messages()) == NAMES.index(outbox.settings.name) + 1)  # type: ignore[misc]
            successor = Shard(outbox.settings, 0, "the successor")
            try:
                assert successor.try_take() or successor.try_wait()
                assert session.result(timeout=600).success
            finally:
                successor.close()
        day = served.days.get_first_partition_key()
        archived = repository.get_job(served.name_of("archive_day"))
        assert archived.execute_in_process(instance=instance, partition_key=day).success
        assert instance.get_materialized_partitions(served.key("archive")) == {day}
        assert len(list((tmp_path / name).rglob("*.parquet"))) == 1
        checked = repository.get_job(served.name_of("check_health")).execute_in_process(instance=instance)
        assert {each.asset_key for each in checked.get_asset_check_evaluations()} == {served.key("health")}
    runs = instance.get_runs(dg.RunsFilter(tags={"outbox/name": "billing"}))
    assert {run.job_name for run in runs} == {
        f"outbox_billing_{job}" for job in ("relay_session", "archive_day", "check_health")
    }


def test_a_tick_ends_in_time(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a tick that Dagster gives up after 60 s with all that it found, again and again; and
    against an outbox that is never reached."""
    seconds = 0.0
    monkeypatch.setattr(ticks, "time", SimpleNamespace(monotonic=lambda: seconds, time=lambda: seconds))
    reached: list[str] = []

    def one(context: dg.SensorEvaluationContext, reading: ticks.Reading, cursor: str | None) -> ticks.Tick:
        nonlocal seconds
        seconds += 20.0
        reached.append(reading.outbox.name)
        if reading.outbox.name == "orders":
            raise ValueError("as on each tick")
        return ticks.Tick("well", str(int(cursor or 0) + 1))

    outboxes = [Served(name=name) for name in NAMES]
    sensor = ticks.sensor(outboxes, "health", one, seconds=30, description="")
    cursor = None
    for _ in range(3):
        with dg.build_sensor_context(instance=instance, cursor=cursor) as context:
            found = sensor.evaluate_tick(context)
        cursor = found.cursor
    assert reached == ["orders", "billing", "stock", "orders", "billing", "stock"]
    assert json.loads(str(cursor))["cursors"] == {"orders": None, "billing": "2", "stock": "2"}
    assert "orders: no time in this tick" in str(found.skip_message)


def test_one_of_several_stops_no_other(
    three: dict[str, Outbox], instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a code location that one bad entry keeps from loading, or one database from being seen;
    and against an overview without it."""
    (tmp_path / "outbox.toml").write_text(
        f'[outbox]\nkafka = "{three["orders"].settings.kafka}"\n'
        + "".join(f'[outboxes.{name}]\ndsn = {{ env = "{name.upper()}_DSN" }}\n' for name in NAMES)
        + '[outboxes.misspelled]\ndsn = { env = "ORDERS_DSN" }\nkafkaa = "a"\n'
    )
    monkeypatch.setenv("OUTBOX_CONFIG", str(tmp_path / "outbox.toml"))
    monkeypatch.setenv("BILLING_DSN", "postgresql://nobody@127.0.0.1:1/nowhere")
    monkeypatch.delenv("STOCK_DSN")
    definitions = outbox_definitions(*served())
    repository = definitions.get_repository_def()
    sensors = {sensor.name: sensor for sensor in repository.sensor_defs}
    assert set(sensors) == {
        f"outboxes_{name}" for name in ("relay_supervisor", "health", "alerts", "overview")
    }
    assert sensors["outboxes_health"].default_status is dg.DefaultSensorStatus.RUNNING

    def tick(name: str) -> dg.SensorExecutionData:
        with dg.build_sensor_context(instance=instance, repository_def=repository) as context:
            found = sensors[name].evaluate_tick(context)
        for event in found.asset_events:
            instance.report_runless_asset_event(event)
        return found

    (request,) = tick("outboxes_relay_supervisor").run_requests or []
    assert request.job_name == "outbox_orders_relay_session"
    assert request.tags["outbox/shard"] == "orders:0"
    found = tick("outboxes_health")
    assert set(json.loads(str(found.cursor))["cursors"]) == {*NAMES, "misspelled"}
    results: dict[Any, Any] = {
        (event.asset_key.path[1], event.check_name): event
        for event in found.asset_events
        if isinstance(event, dg.AssetCheckEvaluation)
    }
    assert results["orders", "database"].passed
    said = {name: results[name, "database"].description for name in ("billing", "stock", "misspelled")}
    assert "cannot connect to the database" in said["billing"]
    assert "names STOCK_DSN, which is not set" in said["stock"]
    assert "did you mean kafka?" in said["misspelled"]
    (shown,) = tick("outboxes_overview").asset_events
    assert isinstance(shown, dg.AssetMaterialization)
    rows = {str(row.data["outbox"]): row.data for row in records_of(shown.metadata["outboxes"])}
    assert [rows[name]["state"] for name in ("billing", "stock", "misspelled")] == ["ERROR"] * 3
    assert list(rows["billing"])[:3] == ["state", "outbox", "wrong"]
    assert str(rows["billing"]["wrong"]).startswith("database: ")
    assert all(len(str(row["wrong"])) < 250 for row in rows.values())
    assert shown.metadata["checks of billing"] == dg.MetadataValue.url(
        "/assets/outbox/billing/health?view=checks"
    )
    assert (rows["orders"]["backlog"], rows["orders"]["dead_letters"], rows["orders"]["days_late"]) == (
        0,
        0,
        0,
    )
    graph = repository.asset_graph
    assert graph.get(overview.KEY).parent_keys == {
        dg.AssetKey(["outbox", name, "health"]) for name in (*NAMES, "misspelled")
    }
    by_hand = definitions.resolve_implicit_job_def_def_for_assets([overview.KEY])
    assert by_hand is not None
    assert by_hand.execute_in_process(instance=instance, asset_selection=[overview.KEY]).success


def test_an_outbox_that_is_no_longer_measured_is_not_well(instance: dg.DagsterInstance) -> None:
    """Guards against a green row of an outbox whose sensor has stopped."""
    orders = Served(name="orders")
    health = orders.key("health")
    passed = dg.AssetCheckEvaluation(asset_key=health, check_name="database", passed=True)
    for event in (passed, dg.AssetObservation(health, metadata={"unpublished": 3})):
        instance.report_runless_asset_event(event)
    states = [overview.rows(instance, [orders], time.time() + later)[0] for later in (0.0, 7_201.0)]
    assert [row["state"] for row in states] == ["OK", "UNKNOWN"]
    assert (states[1]["measured (UTC)"], states[1]["backlog"]) == (states[0]["measured (UTC)"], 3)
    measured = datetime.fromisoformat(f"{states[1]['measured (UTC)']}+00:00").timestamp()
    assert abs(measured - time.time()) < 60


@pytest.mark.parametrize(
    ("changed", "seconds", "is_due"),
    [
        ({}, 299, False),
        ({}, 3_600, True),
        ({"states": {"orders": "WARN"}}, 1, True),
        ({"figures": [["ERROR", "orders", 5]]}, 299, False),
        ({"figures": [["ERROR", "orders", 5]]}, 300, True),
    ],
)
def test_the_overview_has_figures_of_today(changed: dict[str, object], seconds: int, is_due: bool) -> None:
    """Guards against figures that are an hour old while they are corrected, and a storage that grows."""
    before = {"states": {"orders": "ERROR"}, "figures": [["ERROR", "orders", 4]], "at": 1_000.0}
    assert overview._is_due(before, {**before, **changed, "at": 1_000.0 + seconds}) is is_due
    assert overview._is_due({}, before)


def test_the_process_of_a_run_reads_no_first_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against each run asking the databases of all outboxes."""
    asked: list[str] = []

    def read(served: Served) -> date:
        asked.append(served.name)
        return date(2026, 11, 20)

    monkeypatch.setattr(outbox_module, "first_day", read)
    server = DefinitionsLoadContext(DefinitionsLoadType.INITIALIZATION)
    with DefinitionsLoadContext.scoped(server):
        shown = [Served(name=name).days for name in NAMES]
    recorded = {
        key: CodeLocationReconstructionMetadataValue(value)
        for key, value in server.get_pending_reconstruction_metadata().items()
    }
    load_data = RepositoryLoadData(reconstruction_metadata=recorded)
    with DefinitionsLoadContext.scoped(
        DefinitionsLoadContext(DefinitionsLoadType.RECONSTRUCTION, repository_load_data=load_data)
    ):
        assert [Served(name=name).days for name in NAMES] == shown
    assert asked == list(NAMES)
