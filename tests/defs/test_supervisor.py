"""Ticks of the supervisor, on a real instance and a real shard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

from outbox_pipelines.database import schema
from outbox_pipelines.defs import places
from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.defs.places import SHARD
from outbox_pipelines.defs.relay import sensors
from outbox_pipelines.defs.relay.supervision import owner_of
from outbox_pipelines.local import Stack
from outbox_pipelines.settings import load_settings
from tests.conftest import Outbox, fresh_database
from tests.defs.conftest import Hold, job_of, sensor_of, served_of, serving
from tests.defs.instances import stored

QUEUED, STARTED = dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.STARTED
Tick = Callable[[], dg.SensorResult]
Later = Callable[[float], None]


@pytest.fixture(scope="module")
def migrated(stack: Stack) -> Iterator[Outbox]:
    with fresh_database(stack.dsn) as dsn:
        settings = load_settings(dsn=dsn, kafka=stack.kafka)
        schema.migrate(settings)
        yield Outbox(settings)


@pytest.fixture
def outbox(migrated: Outbox) -> Outbox:
    """One database for all of them: they publish nothing, and a shard that was never owned is soon made."""
    with migrated.connect() as connection:
        connection.execute("UPDATE outbox_shards SET owner = NULL, owned_since = NULL, heartbeat = NULL")
    return migrated


@pytest.fixture
def tick(outbox: Outbox, instance: dg.DagsterInstance) -> Tick:
    """One tick; each sees the runs that are there by then, as the daemon's do."""
    return lambda: evaluate(instance, served_of(outbox, session_seconds=600))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Sets how far the supervisor's clock is ahead of the runs'."""

    def move(seconds: float) -> None:
        monkeypatch.setattr(sensors, "time", SimpleNamespace(time=lambda: time.time() + seconds))

    return move


def evaluate(instance: dg.DagsterInstance, served: Served) -> dg.SensorResult:
    context = dg.build_sensor_context(instance=instance)
    result = sensor_of(served, "relay_supervisor")(context)
    assert isinstance(result, dg.SensorResult)
    return result


def launched(
    instance: dg.DagsterInstance, result: dg.SensorResult, status: dg.DagsterRunStatus = STARTED
) -> dg.DagsterRun:
    """What the daemon makes of the one request of a tick."""
    [request] = result.run_requests or []
    job = job_of(serving(), "relay_session")
    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("outbox"), "__repository__")
    return instance.create_run_for_job(
        job,
        run_config=request.run_config,
        tags=dict(job.tags) | dict(request.tags),
        status=status,
        remote_job_origin=RemoteJobOrigin(repository, job.name),
    )


def reason(result: dg.SensorResult) -> str:
    """Why a tick asked for nothing."""
    assert not result.run_requests
    return str(result.skip_reason.skip_message if result.skip_reason else "")


def age(outbox: Outbox, column: str, seconds: float) -> None:
    """As if that had been so long ago."""
    with outbox.connect() as connection:
        connection.execute(
            f"UPDATE outbox_shards SET {column} = clock_timestamp() - make_interval(secs => %s)", [seconds]
        )


def test_one_session_is_asked_for(tick: Tick, instance: dg.DagsterInstance) -> None:
    """Guards against a request at every tick of the several seconds that a run needs to start."""
    asked = tick()
    [request] = asked.run_requests or []
    assert request.tags[SHARD] == "0"
    assert request.run_config == {"ops": {"relay_shard": {"config": {"shard": 0}}}}
    run = launched(instance, asked, QUEUED)
    assert run.run_id[:8] in reason(tick())
    launched(instance, asked, STARTED)
    assert "starting" in reason(tick())


def test_queued_session_is_waited_for(tick: Tick, later: Later, instance: dg.DagsterInstance) -> None:
    """Guards against a queue that grows by a run every five seconds while all places are taken."""
    launched(instance, tick(), QUEUED)
    later(3600)
    assert "starting" in reason(tick())


def test_started_run_without_process_blocks_nothing(
    tick: Tick, later: Later, instance: dg.DagsterInstance
) -> None:
    """Guards against a relay that stays stopped after a crash of everything: its run stays STARTED forever,
    and would occupy a place in the queue's limit as well."""
    run = launched(instance, tick())
    later(61)
    assert tick().run_requests
    ended = instance.get_run_by_id(run.run_id)
    assert ended is not None
    assert ended.status is dg.DagsterRunStatus.FAILURE


def test_run_that_starts_slowly_is_waited_for(tick: Tick, later: Later, instance: dg.DagsterInstance) -> None:
    """Guards against pods that never relay, because each takes longer to start than a process does."""
    run = launched(instance, tick(), dg.DagsterRunStatus.STARTING)

    def status() -> dg.DagsterRunStatus:
        found = instance.get_run_by_id(run.run_id)
        assert found is not None
        return found.status

    for seconds in (61, 170):
        later(seconds)
        # Another one does no harm: the first may be dead.
        assert tick().run_requests
        assert status() is dg.DagsterRunStatus.STARTING
    later(181)
    tick()
    assert status() is dg.DagsterRunStatus.FAILURE


def _limits(limit: dict[str, Any]) -> dict[str, Any]:
    return {"concurrency": {"runs": {"tag_concurrency_limits": [limit]}}}


def test_too_few_places_are_named(outbox: Outbox, tmp_path: Path, without_runs: Path, hold: Hold) -> None:
    """Guards against an operator who does not learn why events wait for other runs."""
    overrides = {"concurrency": {"runs": {"max_concurrent_runs": 1}}}
    with stored(tmp_path, overrides, template=without_runs) as instance:
        hold(owner_of("a-session", "host:1"))
        assert "max_concurrent_runs is 1" in reason(evaluate(instance, served_of(outbox)))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            {"run_monitoring": {"enabled": True, "max_runtime_seconds": 600}},
            "max_runtime_seconds is 600 in dagster.yaml",
        ),
        (
            _limits({"key": places.SHARD, "value": {"applyLimitPerUniqueValue": True}, "limit": 1}),
            "Set at least 2",
        ),
        (
            _limits({"key": "outbox/job", "value": "relay_session", "limit": 1}),
            "runs with the tag outbox/job",
        ),
        (_limits({"key": places.SHARD, "value": {"applyLimitPerUniqueValue": True}, "limit": 2}), None),
        (_limits({"key": "outbox/job", "value": "archive_day", "limit": 1}), None),
    ],
)
def test_settings_that_stop_successors_are_named(
    outbox: Outbox,
    tmp_path: Path,
    without_runs: Path,
    hold: Hold,
    overrides: dict[str, Any],
    named: str | None,
) -> None:
    """Guards against an operator who does not learn why sessions are ended, or never end."""
    with stored(tmp_path, overrides, template=without_runs) as instance:
        hold(owner_of("a-session", "host:1"))
        said = reason(evaluate(instance, served_of(outbox)))
        assert named in said if named else "dagster.yaml" not in said


def test_sessions_of_other_outboxes_are_counted(
    outbox: Outbox, tmp_path: Path, without_runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards against an outbox without a relay whose operator does not learn that others have all slots."""
    overrides = {"concurrency": {"runs": {"max_concurrent_runs": 2}}}
    with stored(tmp_path, overrides, template=without_runs) as instance:
        for name in ("orders", "billing"):
            other = Served(name=name)
            job = job_of(other, "relay_session")
            tags = {**job.tags, **places.shard_tag("outbox", other, 0)}
            instance.create_run_for_job(job, tags=tags, status=STARTED)
        assert evaluate(instance, served_of(outbox)).run_requests
    assert "max_concurrent_runs is 2 in dagster.yaml; with 3 shards set at least 4" in capfd.readouterr().err


def test_a_session_is_first_in_the_queue(tick: Tick) -> None:
    [request] = tick().run_requests or []
    assert request.tags["dagster/priority"] == "10"


def test_session_that_relays_is_left_alone(
    outbox: Outbox, tick: Tick, later: Later, instance: dg.DagsterInstance, hold: Hold
) -> None:
    """Guards against a supervisor that ends or doubles a healthy session."""
    run = launched(instance, tick())
    owner = owner_of(run.run_id, "host:1")
    hold(owner)
    age(outbox, "owned_since", 500)
    later(500)
    assert owner in reason(tick())
    assert instance.get_run_by_id(run.run_id).status is STARTED  # type: ignore[union-attr]


def test_session_past_its_time_gets_one_successor(
    outbox: Outbox, tick: Tick, instance: dg.DagsterInstance, hold: Hold
) -> None:
    """Guards against sessions that never end, and against more than one successor."""
    hold(owner_of("a-session", "host:1"))
    age(outbox, "owned_since", 539)
    reason(tick())
    age(outbox, "owned_since", 541)
    asked = tick()
    launched(instance, asked, QUEUED)
    assert "starting" in reason(tick())
    hold("the successor")
    assert "a successor waits" in reason(tick())


def test_lost_successor_is_replaced(
    outbox: Outbox, tick: Tick, later: Later, instance: dg.DagsterInstance, hold: Hold
) -> None:
    """Guards against a dead successor that keeps the next one out."""
    hold(owner_of("a-session", "host:1"))
    age(outbox, "owned_since", 541)
    dead = launched(instance, tick())
    later(61)
    assert tick().run_requests
    assert instance.get_run_by_id(dead.run_id).status is dg.DagsterRunStatus.FAILURE  # type: ignore[union-attr]


def test_run_that_may_wait_is_not_ended(
    outbox: Outbox, tick: Tick, later: Later, instance: dg.DagsterInstance, hold: Hold
) -> None:
    """Guards against a healthy successor, or a session that has just handed over, being marked as failed."""
    run = launched(instance, tick())
    owner = hold(owner_of("a-session", "host:1"))
    later(3600)
    reason(tick())
    age(outbox, "owned_since", 3600)
    hold(owner_of(run.run_id, "host:2"))
    reason(tick())
    owner.close()
    tick()
    assert instance.get_run_by_id(run.run_id).status is STARTED  # type: ignore[union-attr]


def test_standalone_relay_is_left_alone(outbox: Outbox, tick: Tick, hold: Hold) -> None:
    """Guards against Dagster competing with the service that relays in production."""
    hold("db-host:4711")
    age(outbox, "owned_since", 100_000)
    assert "db-host:4711" in reason(tick())


@pytest.mark.extended
def test_sessions_that_fail_at_once_grow_rare(tick: Tick, later: Later, instance: dg.DagsterInstance) -> None:
    """Guards against a failed run every few seconds for as long as a broker is unavailable; one failure (a
    killed worker) is replaced at the next tick."""
    for pause in (0, 0, 10, 20, 40, 80, 160, 300, 300):
        if pause:
            later(pause - 3)
            assert "next attempt in" in reason(tick())
            later(pause + 1)
        instance.report_run_failed(launched(instance, tick()))
        later(0)


def test_session_that_fails_late_is_replaced_at_once(
    tick: Tick, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a pause after sessions that did their work before they were killed."""
    from outbox_pipelines.defs.relay import supervision

    monkeypatch.setattr(supervision, "QUICK_SECONDS", 0.0)
    for _ in range(4):
        run = launched(instance, tick(), dg.DagsterRunStatus.STARTING)
        instance.report_dagster_event(
            dg.DagsterEvent(dg.DagsterEventType.RUN_START.value, run.job_name), run_id=run.run_id
        )
        instance.report_run_failed(instance.get_run_by_id(run.run_id))  # type: ignore[arg-type]
    assert tick().run_requests


def test_runs_of_another_outbox_are_not_ours(
    outbox: Outbox, later: Later, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against two outboxes in one Dagster that end each other's sessions."""
    monkeypatch.setattr(places, "of_tick", lambda context: "another outbox")
    served = served_of(outbox)
    theirs = launched(instance, evaluate(instance, served))
    assert evaluate(instance, served).run_requests
    # As one value of the tag, two outboxes would have two places in the queue between them.
    assert theirs.tags[SHARD] == "another outbox:0"
    later(3600)
    assert evaluate(instance, served).run_requests
    assert instance.get_run_by_id(theirs.run_id).status is STARTED  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [({"dsn": "host=127.0.0.1 port=1"}, "OUTBOX_DSN"), ({"kafka": ""}, "OUTBOX_KAFKA")],
)
def test_tick_says_why_the_state_is_unknown(
    outbox: Outbox, instance: dg.DagsterInstance, overrides: dict[str, str], remedy: str
) -> None:
    """Guards against a stack trace for each tick of an outbox that is wrong, which Dagster keeps forever."""
    said = reason(evaluate(instance, served_of(outbox, **overrides)))
    assert remedy in said
    assert "\n" not in said
    assert len(said) < 300


def test_every_shard_is_served(outbox: Outbox, tick: Tick, instance: dg.DagsterInstance, hold: Hold) -> None:
    """Guards against shards beyond the first that no relay serves."""
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox_shards (shard, shards, done, system_identifier, database) "
            "SELECT n, 3, done, system_identifier, database FROM outbox_shards, generate_series(1, 2) n"
        )
        try:
            hold(owner_of("a-session", "host:1"))
            requests = tick().run_requests or []
            assert [request.tags[SHARD] for request in requests] == ["1", "2"]
            assert [request.run_config["ops"]["relay_shard"]["config"]["shard"] for request in requests] == [
                1,
                2,
            ]
        finally:
            connection.execute("DELETE FROM outbox_shards WHERE shard > 0")
