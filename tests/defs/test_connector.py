"""Debezium's connector in Dagster: the asset and its checks, where Kafka Connect is named."""

from __future__ import annotations

import dagster as dg
import pytest

from outbox_pipelines.defs import runs
from outbox_pipelines.defs.build import build
from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.quality.rules import OF_CONNECTOR
from tests.debezium.worker import answering
from tests.defs.conftest import sensor_of, serving
from tests.schema.servers import Database

KEY = dg.AssetKey(["outbox", "connector"])


@pytest.fixture
def served(database: Database, monkeypatch: pytest.MonkeyPatch) -> Served:
    database.rows("UPDATE outbox_shards SET heartbeat = now() + interval '10 minutes'")
    return serving(dsn=database.dsn)


def test_no_connector_without_kafka_connect(served: Served) -> None:
    assert KEY not in build([served]).resolve_asset_graph().get_all_asset_keys()


def test_a_failed_task_fails_the_check(
    instance: dg.DagsterInstance, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a connector that has failed and shows nowhere."""
    with answering(config=["config"], status=["status failed"], offsets=["offsets"]) as worker:
        monkeypatch.setenv("OUTBOX_CONNECT_URL", worker.url)
        graph = build([served]).resolve_asset_graph()
        assert KEY in graph.get_all_asset_keys()
        assert {key for key in graph.asset_check_keys if key.asset_key == KEY} == {
            key for key in runs.checks(served) if key.asset_key == KEY
        }
        with dg.build_sensor_context(instance=instance) as context:
            result = sensor_of(served, "health")(context)
    assert isinstance(result, dg.SensorResult)
    events = [event for event in result.asset_events if event.asset_key == KEY]
    checks = {event.check_name: event for event in events if isinstance(event, dg.AssetCheckEvaluation)}
    assert set(checks) == OF_CONNECTOR
    assert not checks["connector"].passed
    assert "an event is too large" in (checks["connector"].description or "")
    (seen,) = [event for event in events if isinstance(event, dg.AssetObservation)]
    assert seen.metadata["state"].value == "RUNNING"
    assert seen.metadata["tasks_running"].value == 0
    assert seen.metadata["worker"].value == "a:8083"
