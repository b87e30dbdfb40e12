"""The job `dead_letters`: what an operator does in the launchpad."""

from __future__ import annotations

import math
import threading
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.relay import service
from outbox_pipelines.writer import emit
from tests.conftest import Outbox
from tests.defs.conftest import failure_of, job_of, records_of, served_of


@pytest.fixture
def letter(outbox: Outbox) -> str:
    """A dead letter: its type makes no topic name."""
    with outbox.connect(autocommit=False) as connection:
        written = emit(connection, "or/der", 1, "order.placed", {})
    service.relay(outbox.settings.model_copy(update={"max_attempts": 1}), until_empty=True)
    return str(written.id)


def _run(outbox: Outbox, instance: dg.DagsterInstance, **config: Any) -> dg.ExecuteInProcessResult:
    return job_of(served_of(outbox), "dead_letters").execute_in_process(
        run_config={"ops": {"act_on_dead_letters": {"config": config}}},
        instance=instance,
        raise_on_error=False,
    )


def _state(outbox: Outbox) -> str:
    with outbox.connect() as connection:
        ((state,),) = connection.execute("SELECT state FROM outbox_parked")
    return str(state)


def _failure(result: dg.ExecuteInProcessResult) -> str:
    (failed,) = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_FAILURE]
    return failure_of(failed)


def test_by_default_it_lists_and_changes_nothing(
    outbox: Outbox, instance: dg.DagsterInstance, letter: str
) -> None:
    """Guards against a launch without configuration that does something."""
    result = _run(outbox, instance)
    assert result.success
    (output,) = result.get_step_success_events()
    (handled,) = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_OUTPUT]
    metadata = handled.step_output_data.metadata
    assert output.is_step_success
    assert metadata["found"].value == 1
    assert metadata["done"].value == 0
    (row,) = records_of(metadata["dead_letters"])
    assert (row.data["id"], row.data["aggregate"]) == (letter, "or/der 1")
    assert _state(outbox) == "failed"


def test_it_replays_and_discards_and_leaves_a_trace(
    outbox: Outbox, instance: dg.DagsterInstance, letter: str
) -> None:
    """Guards against an action that cannot be traced to its run."""
    replayed = _run(outbox, instance, action="replay", ids=[letter], reason="mended", wait_seconds=0)
    assert replayed.success
    assert _state(outbox) == "replaying"
    service.relay(outbox.settings.model_copy(update={"max_attempts": 1}), until_empty=True)
    assert _state(outbox) == "failed"
    discarded = _run(outbox, instance, action="discard", everything=True, reason="nobody needs it")
    assert discarded.success
    assert _state(outbox) == "discarded"
    with outbox.connect() as connection:
        rows = connection.execute(
            "SELECT on_behalf_of, action, reason FROM outbox_audit ORDER BY number"
        ).fetchall()
    assert rows == [
        (f"Dagster run {replayed.run_id[:8]}", "replay", "mended"),
        (f"Dagster run {discarded.run_id[:8]}", "discard", "nobody needs it"),
    ]


def test_a_replay_that_is_refused_fails(outbox: Outbox, instance: dg.DagsterInstance, letter: str) -> None:
    """Guards against a green run after which the events are dead letters as before."""
    with outbox.connect(autocommit=False) as connection:
        fine = str(emit(connection, "order", 2, "order.placed", {}).id)
        connection.execute(
            "INSERT INTO outbox_parked (id, seq, tx, aggregate_type, aggregate_id, event_type, payload, "
            "created_at, state, last_error, failed_at) SELECT id, -seq, '3', aggregate_type, aggregate_id, "
            "event_type, payload, created_at, 'failed', 'too large', now() FROM outbox WHERE id = %s",
            [fine],
        )
    stop = threading.Event()
    settings = outbox.settings.model_copy(update={"max_attempts": 1})
    relay = threading.Thread(target=service.relay, args=[settings], kwargs={"stop": stop})
    relay.start()
    try:
        result = _run(outbox, instance, action="replay", everything=True, reason="x", wait_seconds=300)
    finally:
        stop.set()
        relay.join()
    assert not result.success
    reason = _failure(result)
    assert "dead letters again: 1 of 2 replayed events" in reason
    assert letter in reason
    assert fine not in reason
    assert "\n" not in reason


def test_a_list_says_what_it_lists(outbox: Outbox, instance: dg.DagsterInstance, letter: str) -> None:
    result = _run(outbox, instance)
    [said] = [
        entry.user_message
        for entry in instance.all_logs(result.run_id)
        if "dead letters" in entry.user_message
    ]
    assert said == "dead letters found: 1; shown in the table: 1"


def test_an_unavailable_database_is_one_line(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against a stack trace where the operator needs a sentence."""
    away = outbox.settings.model_copy(update={"dsn": "host=127.0.0.1 port=1"})
    assert "\n" not in _failure(_run(Outbox(away), instance))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"action": "replay", "reason": "x"}, "set ids or a filter, or set only `everything`"),
        ({"action": "discard", "everything": True}, "reason is empty: set it"),
        ({"action": "discard", "error": "", "event_type": "x", "reason": "x"}, "error has an empty text"),
        ({"action": "list", "ids": [" "]}, "ids has an empty text"),
        ({"action": "discard", "ids": ["17"], "reason": "x"}, "ids that `list` shows"),
        *(
            (
                {"action": "replay", "everything": True, "reason": "x", "wait_seconds": seconds},
                f"wait_seconds is {seconds}: write a number of seconds",
            )
            for seconds in (math.nan, math.inf, -5.0)
        ),
    ],
)
def test_wrong_input(
    outbox: Outbox, instance: dg.DagsterInstance, letter: str, config: dict[str, Any], says: str
) -> None:
    """Guards against an action that the operator did not intend, and a failure that does not help."""
    result = _run(outbox, instance, **config)
    assert not result.success
    assert says in _failure(result)
    assert _state(outbox) == "failed"
