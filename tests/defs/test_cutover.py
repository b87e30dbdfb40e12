"""The job `cutover`: a change of the source in the launchpad."""

from __future__ import annotations

from typing import Any

import dagster as dg

from outbox_pipelines.relay import service
from tests.conftest import Outbox
from tests.defs.conftest import failure_of, job_of, served_of


def _run(outbox: Outbox, instance: dg.DagsterInstance, **config: Any) -> dg.ExecuteInProcessResult:
    return job_of(served_of(outbox), "cutover").execute_in_process(
        run_config={"ops": {"change_source": {"config": config}}} if config else {},
        instance=instance,
        raise_on_error=False,
    )


def _metadata(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    assert result.success
    (handled,) = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_OUTPUT]
    return {name: value.value for name, value in handled.step_output_data.metadata.items()}


def test_there_and_back(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against a launch without configuration that changes something."""
    assert _metadata(_run(outbox, instance))["source"] == "polling"
    outbox.write("a", "b")
    there = _metadata(_run(outbox, instance, to="cdc"))
    assert there["source"] == "cdc"
    assert there["problems"] == [
        "no relay reads the slot, and the server keeps its log: start `outbox relay`"
    ]
    service.relay(outbox.settings, until_empty=True)
    assert len(outbox.messages()) == 2
    back = _metadata(_run(outbox, instance, to="polling"))
    assert (back["source"], back["slot"], back["problems"]) == ("polling", "", [])


def test_a_wait_without_an_end_is_refused(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    result = _run(outbox, instance, to="cdc", wait_seconds=float("nan"))
    failed = result.failure_data_for_node("change_source")
    assert failed is not None
    assert failed.user_failure_data is not None
    assert str(failed.user_failure_data.description).startswith(
        "wait_seconds is nan: write a number of seconds"
    )


def test_a_failure_is_one_line(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against a stack trace in place of the remedy."""
    with outbox.connect() as connection:
        connection.execute("SELECT outbox_change_shards(2, false, NULL)")
    result = _run(outbox, instance, to="cdc")
    (failed,) = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_FAILURE]
    assert "run `outbox shards set 1` first" in failure_of(failed)
