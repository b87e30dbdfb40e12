"""Runs of the relay: what they publish, what they show, how they end."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines import definitions
from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.defs.relay import assets
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.quality.measurements import ShardStatus
from tests import forks
from tests.conftest import Message, Outbox, clean_environment, either, wait_until
from tests.defs.conftest import RELAY, Hold, failure_of, job_of, metadata_of, observed, run, served_of

# Each name is a plot of its own: reports show the time since the last one, and a session shows its totals.
REPORTED = {"events", "events_per_second", "latency_ms", "greatest_latency_ms"}
NUMBERS = {
    "session_events",
    "session_seconds",
    "session_events_per_second",
    "session_waited_seconds",
    "session_greatest_latency_ms",
}


def shard(outbox: Outbox) -> ShardStatus:
    return outbox_measurements.read(outbox.settings).shards[0]


def by_key(messages: list[Message]) -> dict[str, list[str]]:
    ids: dict[str, list[str]] = defaultdict(list)
    for message in messages:
        ids[message.key].append(str(message.headers["id"]))
    return ids


def written(outbox: Outbox) -> dict[str, list[str]]:
    ids: dict[str, list[str]] = defaultdict(list)
    with outbox.connect() as connection:
        for aggregate, id in connection.execute("SELECT aggregate_id, id::text FROM outbox ORDER BY seq"):
            ids[aggregate].append(id)
    return ids


def test_once_publishes_what_is_committed(
    outbox: Outbox, instance: dg.DagsterInstance, served: Served
) -> None:
    """Guards against a run that ends before the backlog does, and metadata that Dagster cannot plot."""
    outbox.fill(2_000)
    result, numbers = run("relay_once", instance, served)
    assert result.success
    assert by_key(outbox.messages()) == written(outbox)
    assert numbers is not None
    assert numbers.keys() == NUMBERS
    assert all(type(value) in (int, float) for value in numbers.values())
    assert numbers["session_events"] == 2_000
    rate = pytest.approx(2_000 / numbers["session_seconds"], rel=0.01)
    assert numbers["session_events_per_second"] == rate
    assert numbers["session_greatest_latency_ms"] > 0


def test_once_without_events_is_a_materialization_of_none(
    instance: dg.DagsterInstance, served: Served
) -> None:
    """Guards against a division by nothing, and against a quiet day that looks like a failed one."""
    result, numbers = run("relay_once", instance, served)
    assert result.success
    assert numbers is not None
    assert numbers["session_events"] == 0
    assert "session_greatest_latency_ms" not in numbers


@pytest.mark.parametrize("number", [-1, 99])
def test_a_shard_that_is_not_there_is_one_line(
    outbox: Outbox, instance: dg.DagsterInstance, served: Served, number: int
) -> None:
    result = job_of(served, "relay_once").execute_in_process(
        run_config={"ops": {"relay_shard": {"config": {"shard": number, "until_empty": True}}}},
        instance=instance,
        raise_on_error=False,
    )
    failed = result.failure_data_for_node("relay_shard")
    assert failed is not None
    assert failed.user_failure_data is not None
    assert f"shard {number}" in str(failed.user_failure_data.description)


def test_once_names_the_owner_of_the_shard(
    outbox: Outbox, instance: dg.DagsterInstance, served: Served, hold: Hold
) -> None:
    """Guards against a job that waits, or turns red, because the relay that it replaces is alive."""
    hold("relay-7 on db-host")
    outbox.fill(10)
    result, numbers = run("relay_once", instance, served)
    assert result.success
    assert numbers is None
    [observation] = observed(instance, result.run_id)
    assert "relay-7 on db-host" in str(observation.description)
    assert "relay-7 on db-host" in metadata_of(observation)["owned_by"]
    assert outbox.messages() == []


@pytest.mark.extended
def test_session_ends_where_its_place_is_taken(
    outbox: Outbox, instance: dg.DagsterInstance, served: Served, hold: Hold
) -> None:
    """Guards against standbys that pile up behind an owner and its successor."""
    hold("the owner")
    hold("the successor")
    result, numbers = run("relay_session", instance, served)
    assert result.success
    assert numbers is None
    assert "the owner" in str(observed(instance, result.run_id)[0].description)


def test_sessions_hand_over(outbox: Outbox, instance: dg.DagsterInstance, hold: Hold) -> None:
    """Guards against events lost, published twice or overtaken at the change, and against a session that ends
    without a successor."""
    outbox.fill(1_000)
    with ThreadPoolExecutor(2) as threads:
        sessions = []
        for _ in range(2):
            before = shard(outbox)
            sessions.append(
                threads.submit(run, "relay_session", instance, served_of(outbox, session_seconds=1.0))
            )
            wait_until(lambda before=before: shard(outbox).owner not in (None, before.owner))  # type: ignore[misc]
            outbox.fill(1_000)
        hold("the last relay")
        ended = [session.result(timeout=600) for session in sessions]
    (first, first_numbers), (second, second_numbers) = ended
    assert first.success
    assert second.success
    assert by_key(outbox.messages()) == written(outbox)
    assert first_numbers is not None
    assert second_numbers is not None
    assert first_numbers["session_events"] + second_numbers["session_events"] == 3_000
    assert first_numbers["session_seconds"] >= 1.0
    with outbox.connect() as connection:
        assert connection.execute("SELECT epoch FROM outbox_shards").fetchone() == (2,)


def test_session_reports_while_it_runs(
    outbox: Outbox, instance: dg.DagsterInstance, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a run that shows nothing for ten minutes, and reports that say nothing happened."""
    monkeypatch.setattr(assets, "_FIRST_REPORTS", 0.05)
    outbox.fill(500)
    with ThreadPoolExecutor(1) as threads:
        session = threads.submit(run, "relay_session", instance, served_of(outbox, session_seconds=1.0))

        def reports() -> list[dg.AssetObservation]:
            found = instance.get_runs(limit=1)
            return observed(instance, found[0].run_id) if found else []

        wait_until(reports, what="a report")
        outbox.fill(500)
        wait_until(
            lambda: sum(metadata_of(report)["events"] for report in reports()) == 1000, what="another report"
        )
        hold("the successor")
        result, numbers = session.result(timeout=600)
    found = [metadata_of(observation) for observation in observed(instance, result.run_id)]
    assert sum(each["events"] for each in found) == 1000
    assert all(each["events"] > 0 for each in found)
    assert all(0 <= each["latency_ms"] <= each["greatest_latency_ms"] for each in found)
    assert found[0].keys() == REPORTED
    assert numbers is not None
    # A plot of both would go up and down between totals and parts of them.
    assert not REPORTED & numbers.keys()
    # The topic was reported when it was first seen, and at the end; not with each report.
    reported = [metadata_of(each) for each in observed(instance, result.run_id, topics=True)]
    assert reported == [{}, {"session_events": 1000}]


@pytest.mark.extended
def test_session_outlives_a_report_that_fails(
    outbox: Outbox, instance: dg.DagsterInstance, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a relay that stops because Dagster's storage was locked, or unavailable for a moment."""
    monkeypatch.setattr(assets, "_FIRST_REPORTS", 0.05)
    failed = threading.Event()
    store = dg.DagsterInstance.handle_new_event

    def flaky(self: dg.DagsterInstance, event: dg.EventLogEntry, **options: Any) -> None:
        if event.dagster_event_type is dg.DagsterEventType.ASSET_OBSERVATION:
            failed.set()
            raise OSError("the storage is away")
        store(self, event, **options)

    monkeypatch.setattr(dg.DagsterInstance, "handle_new_event", flaky)
    outbox.fill(500)
    with ThreadPoolExecutor(1) as threads:
        session = threads.submit(run, "relay_session", instance, served_of(outbox, session_seconds=1.0))
        assert failed.wait(600)
        hold("the successor")
        result, numbers = session.result(timeout=600)
    assert result.success
    assert numbers is not None
    assert numbers["session_events"] == 500


def test_what_an_operator_must_correct_is_one_line(
    outbox: Outbox, instance: dg.DagsterInstance, served: Served
) -> None:
    """Guards against a stack trace where the operator needs a sentence."""
    with outbox.connect() as connection:
        connection.execute("DROP TABLE outbox CASCADE; DROP TABLE outbox_migrations")
    result, _ = run("relay_once", instance, served)
    assert not result.success
    [failed] = instance.all_logs(result.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    shown = failure_of(failed.dagster_event)
    assert "outbox migrate" in shown
    assert "\n" not in shown


def test_an_unexpected_error_fails_the_run(
    outbox: Outbox, instance: dg.DagsterInstance, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a relay thread whose crash is not reported."""
    from outbox_pipelines.relay import service

    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(service, "relay", broken)
    result, numbers = run("relay_session", instance, served)
    assert not result.success
    assert numbers is None


@pytest.fixture
def session_process(outbox: Outbox, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A session in a process of its own, which has the shard."""
    with as_file(files("outbox_pipelines.defs") / "dagster.yaml") as template:
        shutil.copy(template, tmp_path / "dagster.yaml")
    execute = [sys.executable, "-m", "dagster", "job", "execute"]
    started: forks.Popen[bytes] = forks.Popen(
        [*execute, "-m", definitions.__name__, "-j", "relay_session"],
        env=clean_environment() | outbox.environment | {"DAGSTER_HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with started as process:
        try:
            wait_until(lambda: shard(outbox).owner, seconds=300, what="session")
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("by", either("signal", "ui"))
def test_terminated_session_ends_in_order(
    outbox: Outbox, tmp_path: Path, session_process: subprocess.Popen[bytes], by: str
) -> None:
    """Guards against a termination that leaves published events unsettled (they would be published twice), a
    thread that keeps the process alive, and a deployment that shows as a failed run."""
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance, ThreadPoolExecutor(1) as threads:

        def write() -> None:
            is_alive = True
            while is_alive:
                outbox.fill(20)
                # As fast as it can, it would write for minutes on a busy machine.
                with suppress(subprocess.TimeoutExpired):
                    session_process.wait(0.05)
                    is_alive = False

        writer = threads.submit(write)
        wait_until(lambda: shard(outbox).events_per_second, seconds=120, what="publishing")
        [session] = instance.get_runs()
        if by == "ui":
            instance.report_run_canceling(session)
        session_process.terminate()
        session_process.wait(timeout=600)
        writer.result(timeout=600)
        [ended] = instance.get_runs()
        record = instance.get_latest_materialization_event(RELAY)
    assert ended.status is (dg.DagsterRunStatus.CANCELED if by == "ui" else dg.DagsterRunStatus.SUCCESS)
    assert record is not None
    assert record.asset_materialization is not None
    assert shard(outbox).owner is None
    published = len(outbox.messages())
    assert published == metadata_of(record.asset_materialization)["session_events"]
    assert outbox.outbox("relay", "--until-empty").returncode == 0
    messages = outbox.messages()
    assert len(messages) > published
    assert by_key(messages) == written(outbox)
