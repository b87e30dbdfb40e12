"""How relay sessions and other runs share few slots: Dagster's own queue, on a real instance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon
from dagster._daemon.types import DaemonHeartbeat

from outbox_pipelines.defs import places
from outbox_pipelines.defs.relay import assets, queue
from tests.conftest import Outbox, wait_until
from tests.defs.conftest import job_of, sensor_of, served_of, serving
from tests.defs.conftest import run as run_to_its_end
from tests.defs.instances import stored
from tests.defs.test_relay import by_key, shard, written

QUEUED, STARTED = dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.STARTED
Of = Callable[[int], dg.DagsterInstance]
_DONE = dg.DagsterEventType.RUN_SUCCESS


@dg.op
def nothing() -> None: ...


@dg.job
def other() -> None:
    nothing()


@pytest.fixture
def of(tmp_path: Path, without_runs: Path) -> Iterator[Of]:
    """An instance with so many slots, whose daemon is alive."""
    with ExitStack() as instances:

        def make(slots: int) -> dg.DagsterInstance:
            overrides = {"concurrency": {"runs": {"max_concurrent_runs": slots}}}
            found = instances.enter_context(stored(tmp_path, overrides, template=without_runs))
            # However slow this machine is.
            beat(found, ago=-3600.0)
            return found

        yield make


def beat(instance: dg.DagsterInstance, ago: float = 0.0) -> None:
    instance.add_daemon_heartbeat(DaemonHeartbeat(time.time() - ago, "QUEUED_RUN_COORDINATOR", "1", []))


def put(
    instance: dg.DagsterInstance,
    number: int | None,
    status: dg.DagsterRunStatus = QUEUED,
    /,
    *,
    place: str = "outbox",
    **tags: str,
) -> dg.DagsterRun:
    """A session of a shard, as the supervisor asks for it; of no shard: another job's run."""
    if number is None:
        job, tags = other, {**tags}
    else:
        job = job_of(serving(), "relay_session")
        tags = {**job.tags, **places.shard_tag(place, serving(), number), **queue.PRIORITY, **tags}
    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin(place), "__repository__")
    return instance.create_run_for_job(
        job, tags=tags, status=status, remote_job_origin=RemoteJobOrigin(repository, job.name)
    )


def next_runs(instance: dg.DagsterInstance) -> list[str]:
    """The ids of the runs that Dagster's daemon would start now."""
    with QueuedRunCoordinatorDaemon(interval_seconds=1) as daemon:
        config = instance.get_concurrency_config()
        return [
            run.run_id for run in daemon._get_runs_to_dequeue(instance, config, fixed_iteration_time=None)
        ]


def change(instance: dg.DagsterInstance, run: dg.DagsterRun, event: dg.DagsterEventType) -> None:
    # Of the queue alone: each event that is logged costs a file of SQLite's.
    instance.run_storage.handle_run_event(run.run_id, dg.DagsterEvent(event.value, run.job_name))


def asked(
    instance: dg.DagsterInstance, run: dg.DagsterRun, number: int = 0, **given: float
) -> queue.Turn | None:
    """What a session that is an hour past its time has to do."""
    arguments = {"overdue": 3500.0, "session_seconds": 600.0, "now": time.time() + 3500.0} | given
    beat(instance, ago=time.time() - arguments["now"])
    return queue.turn(instance, run, serving(), number, **arguments)


def test_a_session_sees_that_there_are_fewer_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a session that keeps the slots that there were when it began."""
    file = tmp_path / "dagster.yaml"

    def allow(slots: int) -> None:
        file.write_text(
            f"concurrency: {{runs: {{max_concurrent_runs: {slots}}}}}\ntelemetry: {{enabled: false}}\n"
        )

    allow(2)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with dg.DagsterInstance.get() as instance:
        session = put(instance, 0, STARTED)
        put(instance, 0)
        put(instance, None)
        assert asked(instance, session) is None
        allow(1)
        found = asked(instance, session)
        assert found is not None
        assert "max_concurrent_runs is 1" in found.reason
        # A variable that names another instance says nothing about this one.
        monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "another"))
        (tmp_path / "another").mkdir()
        (tmp_path / "another" / "dagster.yaml").write_text(file.read_text())
        assert asked(instance, session) is None


def test_a_session_ends_for_a_run_that_is_queued(of: Of) -> None:
    """Guards against a relay that keeps the only slot forever."""
    instance = of(1)
    session = put(instance, 0, STARTED)
    successor = put(instance, 0)
    waiting = put(instance, None)
    assert next_runs(instance) == []
    found = asked(instance, session)
    assert found is not None
    assert (found.successor, found.priority) == (successor.run_id, -1)
    assert "max_concurrent_runs is 1" in found.reason
    found.give(instance)
    change(instance, session, dg.DagsterEventType.RUN_SUCCESS)
    # Sessions that end each other would be the only ones to run.
    assert next_runs(instance) == [waiting.run_id]
    queue.put_first(instance, [instance.get_run_by_id(successor.run_id)])  # type: ignore[list-item]
    assert instance.get_run_by_id(successor.run_id).tags["dagster/priority"] == "-1"  # type: ignore[union-attr]
    change(instance, waiting, dg.DagsterEventType.RUN_START)
    late = put(instance, None, **{"dagster/priority": "5"})
    queue.put_first(instance, [instance.get_run_by_id(successor.run_id)])  # type: ignore[list-item]
    change(instance, waiting, dg.DagsterEventType.RUN_SUCCESS)
    assert next_runs(instance) == [successor.run_id]
    assert late.status is QUEUED


@pytest.mark.parametrize(
    "why",
    [
        "no daemon",
        "no successor",
        "nothing else is queued",
        "another run ends first",
        "a slot is free",
        "soon",
    ],
)
def test_a_session_goes_on(of: Of, why: str) -> None:
    """Guards against a shard without a relay where that helps no run."""
    instance = of(3 if why == "a slot is free" else 2)
    session = put(instance, 0, STARTED)
    second = {"another run ends first": None, "a successor is starting": 0}.get(why, 1)
    put(instance, second, STARTED)
    if why != "no successor":
        put(instance, 0)
        # Of a shard that is relayed: it is no more urgent than ours.
        put(instance, 1)
    if why != "nothing else is queued":
        put(instance, None)
    now = time.time() + 3500.0
    if why == "no daemon":
        beat(instance)
        assert (
            queue.turn(instance, session, serving(), 0, overdue=3500.0, session_seconds=600.0, now=now)
            is None
        )
    elif why == "soon":
        assert asked(instance, session, overdue=29.0) is None
        assert asked(instance, session, overdue=31.0) is not None
    else:
        assert asked(instance, session) is None
    if why == "nothing else is queued":
        # A run has a time limit, too: the instance ends it after a day, as failed.
        assert asked(instance, session, overdue=3700.0, now=time.time() + 3700.0) is not None


def test_of_several_sessions_the_longest_at_work_ends(of: Of) -> None:
    """Guards against two shards without a relay where one slot is asked for."""
    instance = of(2)
    # The other is of another outbox.
    sessions = [put(instance, 0, STARTED), put(instance, 0, STARTED, place="elsewhere")]
    put(instance, 0)
    put(instance, 0, place="elsewhere")
    put(instance, None)
    ends = [asked(instance, session, overdue=31.0) is not None for session in sessions]
    assert ends == [True, False]
    assert asked(instance, sessions[1], overdue=61.0) is not None


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_everything_gets_its_turn(of: Of, slots: int, shards: int) -> None:
    """Guards against sessions that keep ending each other, and a shard that waits for a whole backfill."""
    instance = of(slots)
    backfill = [put(instance, None) for _ in range(3)]
    shown: list[str] = []
    gaps, longest = dict.fromkeys(range(shards), 0), 0

    def of_shard(number: int, status: dg.DagsterRunStatus) -> list[dg.DagsterRun]:
        found = instance.get_runs(
            dg.RunsFilter(statuses=[status], tags=places.shard_tag("outbox", serving(), number))
        )
        return sorted(found, key=lambda run: shown.index(run.run_id) if run.run_id in shown else 0)

    # Once round is a session's time: the supervisor asks, sessions give way, other runs end.
    for _ in range(10):
        others = [run for run in instance.get_runs() if run.status is STARTED and not queue.is_session(run)]
        for number in gaps:
            if not of_shard(number, QUEUED):
                put(instance, number)
            at_work = of_shard(number, STARTED)
            if not at_work:
                queue.put_first(instance, of_shard(number, QUEUED))
            elif given := asked(instance, at_work[0], number):
                given.give(instance)
                change(instance, at_work[0], _DONE)
        for run in others:
            change(instance, run, _DONE)
        while started := next_runs(instance):
            shown += started
            for run_id in started:
                begun = instance.get_run_by_id(run_id)
                assert begun is not None
                change(instance, begun, dg.DagsterEventType.RUN_START)
            # A successor takes over at once.
            for number in gaps:
                for run in of_shard(number, STARTED)[:-1]:
                    change(instance, run, _DONE)
        for number in gaps:
            gaps[number] = 0 if of_shard(number, STARTED) else gaps[number] + 1
        longest = max(longest, *gaps.values())
    # In turns: what the other shards and one run of another kind take; nothing where slots are enough.
    assert longest <= (0 if slots > shards else 1 if shards == 1 else 2)
    assert [run.run_id for run in backfill if run.run_id not in shown] == []


@pytest.mark.extended
def test_the_session_at_work_gives_its_slot(outbox: Outbox, of: Of, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a session that never looks, and events that are lost or published twice when it ends."""
    monkeypatch.setattr(assets, "_FIRST_REPORTS", 0.05)
    monkeypatch.setattr(queue, "_PATIENCE", 1.0)
    instance = of(1)
    served = served_of(outbox, session_seconds=1.0)
    outbox.fill(1_000)
    with ThreadPoolExecutor(1) as threads:
        session = threads.submit(run_to_its_end, "relay_session", instance, served)
        wait_until(lambda: shard(outbox).owner, what="the session")
        # In this process neither the session nor a tick knows of a code location.
        successor = put(instance, 0, **places.shard_tag(None, serving(), 0))
        put(instance, None)
        result, numbers = session.result(timeout=600)
    assert result.success
    assert numbers is not None
    assert numbers["session_seconds"] >= 1.0
    assert shard(outbox).owner is None
    assert by_key(outbox.messages()) == written(outbox)
    put(instance, None, STARTED)
    with dg.build_sensor_context(instance=instance) as context:
        tick = sensor_of(served, "relay_supervisor")(context)
    assert isinstance(tick, dg.SensorResult)
    assert not tick.run_requests
    found = instance.get_run_by_id(successor.run_id)
    assert found is not None
    assert found.tags["dagster/priority"] == "10"
