"""Ticks of outboxes that are wrong: what they say, how often they try, and what Dagster keeps of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import psycopg
import pytest

from outbox_pipelines.defs import ticks
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.errors import SetupError
from tests.defs.conftest import failure_of, job_of, schedule_of, sensor_of

NOTHING = "OUTBOX_DSN is not set: set it"


class Faulty:
    """A sensor whose tick fails with `error` while there is one."""

    def __init__(self, *names: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = SetupError(NOTHING)
        self.now = 0.0
        self.tried: list[float] = []
        self.cursor: str | None = None
        outboxes = [Outbox(name=name, dsn_variable=f"{name.upper()}_DSN") for name in names]
        self._sensor = ticks.sensor(outboxes, "health", self._one, seconds=5, description="")
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(ticks, "time", clock)

    def _one(
        self, context: dg.SensorEvaluationContext, reading: ticks.Reading, cursor: str | None
    ) -> ticks.Tick:
        self.tried.append(self.now)
        if self.error is not None:
            raise self.error
        return ticks.Tick(f"{reading.outbox.name} has a relay", "kept")

    def tick(self, instance: dg.DagsterInstance) -> str:
        """Why a tick launched nothing."""
        with dg.build_sensor_context(instance=instance, cursor=self.cursor) as context:
            found = self._sensor.evaluate_tick(context)
        self.cursor = found.cursor
        return str(found.skip_message)


def test_an_outbox_that_is_wrong_is_tried_ever_more_rarely(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards against a connection every five seconds, and a log that has each of them."""
    sensor = Faulty("orders", monkeypatch=monkeypatch)
    said = []
    for seconds in range(0, 300, 5):
        sensor.now = float(seconds)
        said.append(sensor.tick(instance))
    assert said[0] == "ORDERS_DSN is not set: set it (next attempt in 10 s)"
    assert set(said[-12:]) == {
        "ORDERS_DSN is not set: set it (next attempt in 60 s)",
        "waits after an error",
    }
    assert sensor.tried == [0, 10, 30, 70, 130, 190, 250]
    assert capfd.readouterr().err.count("ORDERS_DSN is not set") == 1
    # After a day, and after a clock that was set back by a year.
    for seconds in [*range(86_400, 90_000, 60), 0]:
        sensor.now = float(seconds)
        sensor.tick(instance)
    assert sensor.tried[-2:] == [89_940, 0]
    sensor.error, sensor.now = None, 310.0
    assert sensor.tick(instance) == "orders has a relay"
    assert json.loads(str(sensor.cursor)) == {"cursors": {"orders": "kept"}, "errors": {}}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (psycopg.OperationalError("server closed\nDETAIL: x"), "the database refuses: server closed"),
        (KeyError("postgresql://a:hunter2@b"), "KeyError: see the code server's log"),
        (SetupError("long " * 1_000), "long long"),
    ],
)
def test_every_error_is_a_short_reason(
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    said: str,
) -> None:
    """Guards against a failed tick: Dagster keeps its stack trace forever."""
    sensor = Faulty("orders", monkeypatch=monkeypatch)
    sensor.error = error
    found = sensor.tick(instance)
    assert found.startswith(said)
    assert len(found) < 300
    assert "hunter2" not in found + caplog.text
    assert ("in _one" in caplog.text) is isinstance(error, KeyError)


def test_the_page_of_many_outboxes_is_short(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a reason of several thousand characters, in which what is wrong cannot be found."""
    names = [f"shop_{number}" for number in range(50)]
    sensor = Faulty(*names, monkeypatch=monkeypatch)
    assert len(sensor.tick(instance)) < 400
    sensor.error, sensor.now = None, 20.0
    assert sensor.tick(instance) == (
        "shop_0: shop_0 has a relay; shop_1: shop_1 has a relay; shop_2: shop_2 has a relay; 47 more outboxes"
    )


@pytest.mark.parametrize(
    "name", ["cutover", "dead_letters", "maintain_partitions", "purge_history", "relay_once", "archive_day"]
)
def test_errors_name_the_variable_of_the_outbox(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Guards against an operator who corrects OUTBOX_DSN, which this outbox does not read."""
    monkeypatch.setenv("ORDERS_DSN", "host=127.0.0.1 port=1 dbname=orders")
    settings = {"kafka": "127.0.0.1:1", "archive": str(tmp_path)}
    orders = Outbox(name="orders", dsn_variable="ORDERS_DSN", settings=settings)
    day = "2026-11-20" if name == "archive_day" else None
    done = job_of(orders, name).execute_in_process(instance=instance, partition_key=day, raise_on_error=False)
    failed = instance.all_logs(done.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    found = " ".join(failure_of(each.dagster_event) for each in failed)
    assert "OUTBOX_DSN" not in found
    # This one reads no database of the outbox.
    assert ("ORDERS_DSN" in found) is (name != "purge_history")


def test_a_check_names_the_variable_of_the_outbox(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORDERS_DSN", "host=127.0.0.1 port=1 dbname=orders")
    orders = Outbox(name="orders", dsn_variable="ORDERS_DSN")
    with dg.build_sensor_context(instance=instance) as context:
        found = sensor_of(orders, "health")(context)
    assert isinstance(found, dg.SensorResult)
    [result] = found.asset_events
    assert isinstance(result, dg.AssetCheckEvaluation)
    assert "ORDERS_DSN" in str(result.description)
    assert "OUTBOX_DSN" not in f"{result.description} {found.skip_reason}"


@pytest.mark.parametrize(
    "name",
    [
        *("archive_days", "check_catalog", "clean_table", "drop_days", "maintain_partitions", "make_months"),
        *("expire_archive", "register_days", "sweep_bodies"),
    ],
)
def test_a_schedule_skips_too(instance: dg.DagsterInstance, name: str) -> None:
    outbox = Outbox(name="orders", dsn_variable="ORDERS_DSN")
    found = schedule_of(outbox, name)(dg.build_schedule_context(instance=instance))
    assert isinstance(found, dg.SkipReason)
    assert "the environment variable ORDERS_DSN is not set" in str(found.skip_message)
