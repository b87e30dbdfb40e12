"""The sensor `alerts`: what it tells, over ticks and restarts."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import time
from collections.abc import Iterator
from uuid import uuid4

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, SensorInstigatorData

from outbox_pipelines.definitions import defs
from outbox_pipelines.defs import alerts as module
from outbox_pipelines.defs import places, runs
from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.relay.lease.owner_session import beating
from outbox_pipelines.relay.lease.shard import Shard
from tests.defs.conftest import job_of, sensor_of, serving
from tests.defs.test_health import lose_a_letter
from tests.quality.receivers import Webhook, webhook
from tests.schema.servers import Database


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    with webhook() as posted:
        monkeypatch.setenv("OUTBOX_ALERTS", posted.address)
        monkeypatch.setenv("OUTBOX_ALERT_AFTER_SECONDS", "0")
        monkeypatch.setenv("OUTBOX_UI_URL", "http://pages.example")
        yield posted


@pytest.fixture
def served(database: Database) -> Served:
    # Ahead: the check of active relays must not fail while the test runs, however long that takes.
    database.rows("UPDATE outbox_shards SET heartbeat = now() + interval '1 hour'")
    return serving(dsn=database.dsn)


@pytest.fixture(autouse=True)
def slow_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A code location that ticked in this test is not gone because the machine is slow."""
    monkeypatch.setattr(places, "_ALIVE_SECONDS", 3600.0)


class Ticks:
    """Ticks one after the other, with the cursor that Dagster keeps between them."""

    def __init__(self, instance: dg.DagsterInstance, hook: Webhook) -> None:
        self._instance = instance
        self._hook = hook
        self._cursor: str | None = None
        self.reason = ""

    def tick(self, served: Served) -> list[str]:
        """Run a tick; return the titles that it reported."""
        before = len(self._hook.bodies)
        with dg.build_sensor_context(
            instance=self._instance,
            cursor=self._cursor,
            repository_def=REPOSITORY,
        ) as context:
            result = sensor_of(served, "alerts")(context)
        assert isinstance(result, dg.SensorResult)
        self._cursor = result.cursor
        self.reason = str(result.skip_reason)
        return [body["title"].partition(": ")[2] for body in self._hook.bodies[before:]]


@pytest.fixture
def ticks(instance: dg.DagsterInstance, hook: Webhook) -> Ticks:
    return Ticks(instance, hook)


@dg.op(config_schema={"fails": bool})
def work(context: dg.OpExecutionContext) -> None:
    if context.op_config["fails"]:
        raise dg.Failure("the archive is full")


@dg.job(tags=serving().run_tags)
def some_job() -> None:
    work()


@dg.job
def nightly() -> None:
    """The user's."""
    work()


# With a job that can be made to fail.
REPOSITORY = dg.Definitions.merge(defs, dg.Definitions(jobs=[some_job, nightly])).get_repository_def()


def _run(instance: dg.DagsterInstance, *, fails: bool, day: str) -> str:
    result = some_job.execute_in_process(
        instance=instance,
        run_config={"ops": {"work": {"config": {"fails": fails}}}},
        tags={"dagster/partition": day},
        raise_on_error=False,
    )
    return result.run_id


def test_a_dead_letter_is_reported_until_it_is_resolved(
    ticks: Ticks, served: Served, database: Database, hook: Webhook
) -> None:
    assert ticks.tick(served) == []
    lose_a_letter(database)
    assert ticks.tick(served) == ["dead_letters"]
    assert "too large" in hook.bodies[0]["message"]
    assert "outbox dead-letters list" in hook.bodies[0]["message"]
    assert "http://pages.example/assets/outbox/health?view=checks" in hook.bodies[0]["message"]
    assert ticks.tick(served) == []
    database.rows("DELETE FROM outbox_parked")
    # One tick sees it gone, and with no time to wait the next one says so.
    assert ticks.tick(served) + ticks.tick(served) == ["dead_letters resolved"]


def test_a_lost_database_is_reported(ticks: Ticks, served: Served, database: Database) -> None:
    """Guards against silence when nothing can be measured; earlier reports are not resolved by that."""
    lose_a_letter(database)
    assert ticks.tick(served) == ["dead_letters"]
    away = serving(dsn="postgresql://nobody@127.0.0.1:1/nowhere")
    assert ticks.tick(away) + ticks.tick(away) == ["database"]
    assert ticks.tick(served) + ticks.tick(served) == ["database resolved"]
    database.rows("DELETE FROM outbox_parked")
    assert ticks.tick(served) + ticks.tick(served) == ["dead_letters resolved"]


def test_what_is_of_others_is_not_reported(
    ticks: Ticks, served: Served, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the user's own failures, and another outbox's, in the outbox's messages."""
    ticks.tick(served)
    fails = {"ops": {"work": {"config": {"fails": True}}}}
    nightly.execute_in_process(instance=instance, run_config=fails, raise_on_error=False)
    assert ticks.tick(served) == []
    monkeypatch.setattr(places, "of_tick", lambda context: "another outbox")
    _run(instance, fails=True, day="2026-01-01")
    assert ticks.tick(served) == []


def test_a_second_outbox_is_reported(
    ticks: Ticks, served: Served, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against one outbox's green over another's red."""
    ticked(instance, "billing", "relay_supervisor", "health")
    # One sensor of that name may be anybody's; and a code location that is gone ticks no more.
    ticked(instance, "shop", "health")
    ticked(instance, "gone", "relay_supervisor", "health", at=time.time() - 2 * 3600)
    monkeypatch.setattr(places, "of_tick", lambda context: "orders")
    assert ticks.tick(served) == ["code locations"]
    monkeypatch.setattr(places, "of_tick", lambda context: "billing")
    with dg.build_sensor_context(instance=instance) as context:
        assert places.clash(context, serving(), time.time()) is None


def test_two_outboxes_hide_nothing_of_each_other(
    ticks: Ticks, served: Served, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against one outbox's green over another's red, while both are in an instance and afterwards."""
    away = serving(dsn="postgresql://nobody@127.0.0.1:1/nowhere")
    cursors: dict[str, str | None] = {}

    def look(place: str, outbox: Served) -> dict[str, bool]:
        """What a tick of a code location stores; the page's newest result of each check afterwards."""
        monkeypatch.setattr(places, "of_tick", lambda context: place)
        with dg.build_sensor_context(instance=instance, cursor=cursors.get(place)) as context:
            result = sensor_of(outbox, "health")(context)
        assert isinstance(result, dg.SensorResult)
        cursors[place] = result.cursor
        for event in result.asset_events:
            instance.report_runless_asset_event(event)
        keys = [key for key in runs.checks(served) if key.asset_key.path[-1] == "health"]
        found = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
        return {
            key.name: bool(record.evaluation and record.evaluation.passed) for key, record in found.items()
        }

    ticked(instance, "orders", "relay_supervisor", "health")
    assert look("orders", served)["database"]
    ticked(instance, "billing", "relay_supervisor", "health")
    # Neither reports that all is well, since that would be of one alone.
    assert not look("billing", served)["database"]
    assert not look("orders", served)["database"]
    assert not look("billing", served)["database"]
    [entry] = instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(dg.AssetKey(["outbox", "health"]), "database"), limit=1
    )
    assert entry.evaluation is not None
    assert "code locations billing, orders of this" in str(entry.evaluation.description)
    # The other one is gone: what is known of this one is reported again.
    monkeypatch.setattr(places, "_ALIVE_SECONDS", 0.0)
    assert look("orders", served)["database"]
    assert not look("orders", away)["database"]


def test_a_result_says_whose_it_is(
    served: Served, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a day that is green for another outbox's sake without a word."""
    monkeypatch.setattr(places, "of_run", lambda run: "orders")
    job = job_of(served, "check_health")
    result = job.execute_in_process(instance=instance)
    marks = [each.metadata["code_location"].value for each in result.get_asset_check_evaluations()]
    assert set(marks) == {"orders"}
    ticked(instance, "billing", "relay_supervisor", "health")
    result = job.execute_in_process(instance=instance)
    for each in result.get_asset_check_evaluations():
        assert "billing, orders" in str(each.metadata["other_outboxes"].value)
        # What a slow machine makes of the others is not meant.
        assert each.check_name != "database" or not each.passed


def ticked(instance: dg.DagsterInstance, place: str, *sensors: str, at: float | None = None) -> None:
    """Sensors of a code location as the daemon remembers them."""
    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin(place), "__repository__")
    for name in sensors:
        data = SensorInstigatorData(last_tick_timestamp=at or time.time())
        origin = RemoteInstigatorOrigin(repository, name)
        instance.add_instigator_state(
            InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.DECLARED_IN_CODE, data)
        )


def test_a_run_that_fails_is_reported_until_one_succeeds(
    ticks: Ticks, served: Served, instance: dg.DagsterInstance, hook: Webhook
) -> None:
    ticks.tick(served)
    failed = _run(instance, fails=True, day="2026-01-01")
    assert ticks.tick(served) == ["failed run of some_job 2026-01-01"]
    assert "the archive is full" in hook.bodies[0]["message"]
    assert f"http://pages.example/runs/{failed}" in hook.bodies[0]["message"]
    _run(instance, fails=True, day="2026-01-01")
    assert ticks.tick(served) == []
    _run(instance, fails=False, day="2026-01-02")
    assert ticks.tick(served) + ticks.tick(served) == []
    _run(instance, fails=False, day="2026-01-01")
    assert ticks.tick(served) + ticks.tick(served) == ["failed run of some_job 2026-01-01 resolved"]


def killed(instance: dg.DagsterInstance, shard: int) -> None:
    """A session whose process was killed, as Dagster leaves it."""
    job = REPOSITORY.get_job("relay_session")
    session = instance.create_run_for_job(
        job,
        run_config={"ops": {"relay_shard": {"config": {"shard": shard}}}},
        status=dg.DagsterRunStatus.STARTED,
        tags={**serving().run_tags, places.SHARD: f"outbox:{shard}"},
    )
    instance.report_engine_event("Executing steps in process (pid: 4711)", session)
    instance.report_engine_event(f"{_PROCESS} was terminated by signal 9 (SIGKILL).", session)
    instance.report_run_failed(session)


_PROCESS = "Run execution process for 12345678"


def test_a_session_that_was_replaced_is_not_reported(
    ticks: Ticks, served: Served, instance: dg.DagsterInstance, hook: Webhook, database: Database
) -> None:
    """Guards against a message for each killed process, long after the next one relays; and against one that
    does not say what Dagster knows."""
    ticks.tick(served)
    killed(instance, 0)
    assert ticks.tick(served) == ["failed run of relay_session shard 0"]
    assert f"{_PROCESS} was terminated by signal 9 (SIGKILL)." in hook.bodies[-1]["message"]
    # At once, not when the next session ends.
    # It is a copy of a template.
    database.rows(
        "UPDATE outbox_shards SET database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    settings = served.load_settings()
    successor = Shard(settings, 0, "dagster run 87654321 on host")
    assert successor.try_take()
    # A tick can take longer than the lease.
    try:
        with beating(successor.beat, settings.lease_seconds / 5):
            assert ticks.tick(served) + ticks.tick(served) == ["failed run of relay_session shard 0 resolved"]
            killed(instance, 0)
            assert ticks.tick(served) == []
    finally:
        successor.close()


def test_runs_before_the_first_tick_are_not_reported(
    ticks: Ticks, served: Served, instance: dg.DagsterInstance
) -> None:
    """Guards against a flood when alerts are switched on."""
    _run(instance, fails=True, day="2026-01-01")
    assert ticks.tick(served) == []


def test_a_failure_that_is_never_corrected_is_forgotten(
    ticks: Ticks, served: Served, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks.tick(served)
    _run(instance, fails=True, day="2026-01-01")
    assert len(ticks.tick(served)) == 1
    monkeypatch.setattr(module, "_FORGET_SECONDS", 0.0)
    # It is not over: so no message says that it is.
    assert ticks.tick(served) + ticks.tick(served) == []


def test_a_check_that_fails_is_reported_until_it_passes(
    ticks: Ticks, served: Served, instance: dg.DagsterInstance, hook: Webhook
) -> None:
    """Guards against a file that differs from its day, unnoticed until the table is full."""

    def judge(day: str, *, passed: bool, severity: dg.AssetCheckSeverity, asset: str = "archive") -> None:
        # Of a run: without one Dagster keeps a single result for each day.
        verdict = dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey(["outbox", asset]),
            check_name="archive_equals_table",
            passed=passed,
            severity=severity,
            description="2 events differ",
            partition=day,
        )
        event = dg.DagsterEvent("ASSET_CHECK_EVALUATION", "archive_day", event_specific_data=verdict)
        instance.report_dagster_event(event, run_id=str(uuid4()))

    error, warn = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN
    judge("2026-01-01", passed=False, severity=error)
    assert ticks.tick(served) == []
    judge("2026-01-02", passed=False, severity=error)
    judge("2026-01-03", passed=False, severity=warn)
    judge("2026-01-04", passed=False, severity=error, asset="health")
    assert ticks.tick(served) == ["check archive_equals_table 2026-01-02"]
    assert "2 events differ" in hook.bodies[0]["message"]
    judge("2026-01-03", passed=True, severity=error)
    assert ticks.tick(served) + ticks.tick(served) == []
    judge("2026-01-02", passed=True, severity=error)
    assert ticks.tick(served) + ticks.tick(served) == ["check archive_equals_table 2026-01-02 resolved"]


def test_what_no_address_accepted_is_sent_again(
    ticks: Ticks, served: Served, database: Database, hook: Webhook
) -> None:
    """Guards against an alert that counts as delivered although only a delivery was attempted."""
    lose_a_letter(database)
    hook.status = 500
    assert ticks.tick(served) == ["dead_letters"]
    assert ticks.tick(served) == ["dead_letters"]
    assert "did not accept" in ticks.reason
    assert "500" in ticks.reason
    # The next problem counts from its begin, and both are sent once.
    database.rows("UPDATE outbox_shards SET heartbeat = now() - interval '1 day'")
    assert ticks.tick(served) == ["dead_letters"]
    hook.status = 200
    assert ticks.tick(served) == ["dead_letters", "shards_relayed"]
    assert ticks.tick(served) == []


def test_an_address_that_fails_among_others_gets_it_later(
    ticks: Ticks, served: Served, database: Database, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a receiver that hears of nothing, because another one has accepted the message."""
    with webhook() as other:
        monkeypatch.setenv("OUTBOX_ALERTS", f"{hook.address} {other.address}")
        lose_a_letter(database)
        other.status = 500
        assert ticks.tick(served) == ["dead_letters"]
        assert ticks.tick(served) == []
        other.status, other.bodies = 200, []
        assert ticks.tick(served) == []
        assert [body["title"].partition(": ")[2] for body in other.bodies] == ["dead_letters"]


def test_without_addresses_it_does_nothing(
    instance: dg.DagsterInstance, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTBOX_ALERTS", raising=False)
    with dg.build_sensor_context(instance=instance) as context:
        found = sensor_of(served, "alerts")(context)
    assert isinstance(found, dg.SensorResult)
    assert "OUTBOX_ALERTS" in str(found.skip_reason)
