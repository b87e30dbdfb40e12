"""The job `replay_events`: what an operator does in the launchpad, on a run's page, and in a backfill."""

from __future__ import annotations

import threading
from concurrent import futures
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.defs import replay_events
from outbox_pipelines.replay import replays
from outbox_pipelines.replay.replay_record import cancel
from tests.conftest import read_topic, wait_until
from tests.defs.conftest import failure_of, job_of, metadata_of, records_of, served_of, serving
from tests.defs.test_reconciliation import place
from tests.reconciliation.place import DAY, Place

__all__ = ["place"]

SEND: dict[str, Any] = {"reason": "a new consumer", "to_topic": "{topic}", "rate": 1_000_000_000}
ROOT = "dagster/root_run_id"


def _run(
    place: Place,
    instance: dg.DagsterInstance,
    tags: dict[str, str] | None = None,
    *,
    day: str | None = str(DAY),
    **config: Any,
) -> dg.ExecuteInProcessResult:
    served = replace(served_of(place.outbox), partition_start=DAY)
    return job_of(served, "replay_events").execute_in_process(
        run_config={"ops": {"replay_day": {"config": config}}} if config else {},
        instance=instance,
        partition_key=day,
        tags=tags,
        raise_on_error=False,
    )


def _output(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    (output,) = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_OUTPUT]
    return dict(output.step_output_data.metadata)


def _failure(result: dg.ExecuteInProcessResult) -> str:
    assert not result.success
    (failed,) = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_FAILURE]
    return failure_of(failed)


def _log(instance: dg.DagsterInstance, run_id: str) -> list[str]:
    return [entry.user_message for entry in instance.all_logs(run_id) if not entry.is_dagster_event]


def _replayed(place: Place) -> list[str]:
    messages = read_topic(place.settings.kafka, place.topic)
    return [str(each.headers["id"]) for each in messages if "replay-id" in each.headers]


def _recorded(place: Place) -> list[tuple[Any, ...]]:
    return place.rows("SELECT id::text, on_behalf_of, state, sent FROM outbox_replays ORDER BY started_at")


def test_by_default_it_counts(place: Place, instance: dg.DagsterInstance) -> None:
    """Guards against a launch by mistake that sends a day's events again."""
    place.write(4)
    (other,) = place.write(1, event_type="order.paid")
    place.relay()
    result = _run(place, instance)
    assert result.success
    found = _output(result)
    assert found["events"].value == 5
    paid = next(row.data for row in records_of(found["by_type"]) if row.data["event_type"] == "order.paid")
    assert (paid["events"], paid["topic"], paid["example"]) == (1, place.topic, other)
    assert (_replayed(place), _recorded(place)) == ([], [])
    assert result.asset_materializations_for_node("replay_day") == []


def test_a_replay_leaves_a_trace_and_a_repetition_sends_nothing(
    place: Place, instance: dg.DagsterInstance
) -> None:
    """Guards against a replay that cannot be found, and one that a repeated run begins again."""
    sent = place.write(4)
    place.write(3, event_type="order.paid")
    place.relay()
    result = _run(place, instance, {"user": "ada@shop"}, event_types=["order.placed"], send=SEND)
    assert result.success, _failure(result)
    assert sorted(_replayed(place)) == sorted(sent)
    actor = f"ada@shop, Dagster run {result.run_id}"
    ((replay, *rest),) = _recorded(place)
    assert rest == [actor, "done", 4]
    (materialized,) = result.asset_materializations_for_node("replay_day")
    assert (materialized.asset_key.path, materialized.partition) == (["outbox", "replays"], str(DAY))
    metadata = metadata_of(materialized)
    assert [metadata[name] for name in ("replay", "sent", "events", "reason", "by", "to_topic")] == [
        *(replay, 4, 4, "a new consumer", actor, "{topic}")
    ]
    again = _run(
        place,
        instance,
        {"user": "bob@shop", ROOT: result.run_id},
        event_types=["order.placed"],
        send=SEND,
    )
    assert again.success
    assert f"replay {replay} of this run was done before: nothing is sent" in _log(instance, again.run_id)
    assert len(_recorded(place)) == 1
    assert len(_replayed(place)) == 4
    (row,) = records_of(_output(again)["replays"])
    assert (row.data["replay"], row.data["state"]) == (replay, "done")


def test_a_terminated_run_is_continued(
    place: Place, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a replay that a termination does not end, or that a repeated run begins again."""
    place.write(1_500)
    place.relay()

    def terminated(*_: object) -> None:
        wait_until(lambda: place.rows("SELECT 1 FROM outbox_replays WHERE sent > 0"))
        raise dg.DagsterExecutionInterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(futures, "wait", terminated)
        assert not _run(place, instance, send={**SEND, "rate": 300}).success
    (run,) = instance.get_runs()
    ((replay, actor, state, sent),) = _recorded(place)
    assert (actor, state) == (f"Dagster run {run.run_id}", "stopped")
    assert 0 < sent == len(_replayed(place)) < 1_500
    assert any("re-execute this run to continue" in line for line in _log(instance, run.run_id))
    again = _run(place, instance, {ROOT: run.run_id}, send=SEND)
    assert again.success, _failure(again)
    assert _recorded(place) == [(replay, actor, "done", 1_500)]
    assert len(_replayed(place)) == 1_500
    assert f"replay {replay} continues behind {sent:,} events" in _log(instance, again.run_id)


@pytest.mark.extended
def test_a_canceled_replay_is_not_begun_again(
    place: Place, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a retry that sends what an operator has canceled."""
    place.write(1_500)
    place.relay()
    looked = futures.wait

    def canceled(*given: Any) -> Any:
        for (replay,) in place.rows("SELECT id FROM outbox_replays WHERE state = 'running' AND sent > 0"):
            cancel(place.settings, replay)
        return looked(*given)

    monkeypatch.setattr(futures, "wait", canceled)
    monkeypatch.setattr(replay_events, "_LOOK_SECONDS", 0.1)
    result = _run(place, instance, send={**SEND, "rate": 300})
    ((replay, _, state, sent),) = _recorded(place)
    says = f"replay {replay} is canceled; {sent:,} of 1,500 events are sent: launch the job again"
    assert state == "canceled"
    assert says in _failure(result)
    assert says in _failure(_run(place, instance, {ROOT: result.run_id}, send=SEND))
    assert len(_recorded(place)) == 1


@pytest.mark.parametrize("by", ["a run", "a command"])
def test_one_waits_for_the_other(
    place: Place, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Guards against a backfill whose second day fails because the first is not over, or overtakes it."""
    monkeypatch.setattr(replay_events, "_LOOK_SECONDS", 0.1)
    place.write(2)
    place.relay()
    earlier = None
    if by == "a run":
        job = job_of(replace(served_of(place.outbox), partition_start=DAY), "replay_events")
        earlier = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=job.tags)
    said = "another replay is running" if earlier is None else f"waiting for run {earlier.run_id[:8]}"

    def end_it() -> None:
        def waits() -> bool:
            others = [each.run_id for each in instance.get_runs() if earlier is None or each != earlier]
            return any(said in line for run_id in others for line in _log(instance, run_id))

        wait_until(waits, what="the run to wait")
        assert _replayed(place) == []
        if earlier is None:
            other.close()
        else:
            instance.report_run_canceled(earlier)

    with place.outbox.connect() as other:
        if earlier is None:
            assert replays._LOCK.take(other, {}) is None
        ending = threading.Thread(target=end_it)
        ending.start()
        result = _run(place, instance, send=SEND)
        ending.join()
    assert result.success, _failure(result)
    assert sum(said in line for line in _log(instance, result.run_id)) == 1
    assert len(_replayed(place)) == 2


def test_a_day_of_a_backfill_may_have_no_event(place: Place, instance: dg.DagsterInstance) -> None:
    """Guards against a backfill that fails at the days on which a rare event did not occur."""
    place.write(1)
    place.relay()
    config: dict[str, Any] = {"event_types": ["order.paid"], "send": SEND}
    result = _run(place, instance, {"dagster/backfill": "b"}, **config)
    assert result.success
    assert _output(result)["events"].value == 0
    assert "no published event is selected" in _failure(_run(place, instance, **config))
    assert _recorded(place) == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"send": {**SEND, "reason": " "}}, "reason is empty: set it"),
        ({"send": {**SEND, "rate": 0}}, "rate is 0: write events per second, at least 1"),
        ({"send": {**SEND, "to_topic": "{top}"}}, "to_topic {top} is no topic"),
        ({"send": {**SEND, "to_topic": "nowhere"}}, "create it with 2 partitions, or use `create: true`"),
        ({"ids": ["17"]}, "ids 17 is not a UUID"),
        ({"where": "nothing = 1"}, '"nothing" not found'),
        ({"where": "1 +"}, "where is not a condition in SQL"),
    ],
)
def test_wrong_input(place: Place, instance: dg.DagsterInstance, config: dict[str, Any], says: str) -> None:
    """Guards against events that are sent before a mistake is found, and an option that is none here."""
    place.write(1)
    place.relay()
    said = _failure(_run(place, instance, **config))
    assert says in said
    assert "--" not in said
    assert "\n" not in said
    assert _replayed(place) == []


@pytest.mark.parametrize("config", [{"send": {"to_topic": "x"}}, {"send": {"reason": "x"}}, {"topic": "x"}])
def test_the_launchpad_refuses(config: dict[str, Any]) -> None:
    """Guards against a missing reason, or a misspelled condition, that is found when the run has begun."""
    job = replay_events.replay_events(serving())
    with pytest.raises(dg.DagsterInvalidConfigError):
        dg.validate_run_config(job, {"ops": {"replay_day": {"config": config}}})


def test_a_run_without_a_day_is_refused(place: Place, instance: dg.DagsterInstance) -> None:
    """Guards against a replay of all days."""
    assert "the run has no day" in _failure(_run(place, instance, day=None, send=SEND))


def test_a_partition_that_is_no_day_is_refused(place: Place, instance: dg.DagsterInstance) -> None:
    """Guards against a traceback for a tag that was typed."""
    said = _failure(_run(place, instance, {"dagster/partition": "garbage"}, day=None))
    assert said.startswith("the partition garbage is no day: ")
