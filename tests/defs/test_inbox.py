"""The sensor `inbox` and the job `drain_inbox`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from outbox_pipelines.consumer import migrate
from outbox_pipelines.defs.inbox import handled
from tests.defs.conftest import job_of, sensor_of, serving
from tests.schema.servers import Database

SERVICE = """
from outbox_pipelines.consumer import {kind}

kafka = {{"bootstrap.servers": "127.0.0.1:1"}}
consumer = {kind}(source="billing", topics=["orders"], kafka=kafka, dsn={dsn!r})

@consumer.on("order.placed")
{prefix}def placed(event, connection):
    {wait}connection.execute("INSERT INTO invoices (order_id) VALUES (%s)", [event.aggregate_id])
"""
RECEIVED = """
INSERT INTO inbox (message_id, source, topic, partition, "offset", key, event_type, headers, sent_at)
SELECT gen_random_uuid(), 'billing', 'orders', 0, n, n % 3, 'order.placed',
    json_build_array(json_build_array('id', n::text), json_build_array('event-type', 'order.placed'),
        json_build_array('aggregate-type', 'order'), json_build_array('aggregate-id', n::text)), now()
FROM generate_series(1, 12) n"""


@pytest.fixture(params=["Consumer", "AsyncConsumer"])
def named(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[str]:
    """A service's consumer, by the name of its module; 12 events lie in its inbox."""
    with database.connect() as connection:
        migrate(connection)
        connection.execute("CREATE TABLE invoices (order_id text PRIMARY KEY)")
        connection.execute(RECEIVED)
    asynchronous = request.param == "AsyncConsumer"
    words = {"prefix": "async ", "wait": "await "} if asynchronous else {"prefix": "", "wait": ""}
    (tmp_path / "billing_events.py").write_text(SERVICE.format(kind=request.param, dsn=database.dsn, **words))
    monkeypatch.chdir(tmp_path)
    yield "billing_events:consumer"
    sys.modules.pop("billing_events", None)


def look(instance: dg.DagsterInstance, names: str, cursor: str | None = None) -> dg.SensorExecutionData:
    context = dg.build_sensor_context(
        instance=instance,
        cursor=cursor,
    )
    return sensor_of(serving(drain_consumers=names), "inbox").evaluate_tick(context)


def test_what_is_due_is_handled_by_a_run(
    instance: dg.DagsterInstance, database: Database, named: str
) -> None:
    """Guards against an inbox that is not drained although Dagster is configured to drain it."""
    shown = look(instance, named)
    assert shown.run_requests is not None
    [request] = shown.run_requests
    done = job_of(serving(), "drain_inbox").execute_in_process(
        run_config=request.run_config,
        tags=request.tags,
        instance=instance,
    )
    assert done.success
    with psycopg.connect(database.dsn) as connection:
        [(invoices, states)] = connection.execute(
            "SELECT (SELECT count(*) FROM invoices), (SELECT array_agg(DISTINCT state) FROM inbox)"
        ).fetchall()
    assert (invoices, states) == (12, ["processed"])
    again = look(instance, named, shown.cursor)
    assert not again.run_requests
    assert again.skip_message == "billing: 0 waiting"


def test_one_run_at_a_time_and_the_backlog_is_observed(
    instance: dg.DagsterInstance, database: Database, named: str
) -> None:
    """Guards against a run each quarter of a minute, and a plot without points."""
    shown = look(instance, named)
    observation, verdict = shown.asset_events
    assert isinstance(observation, dg.AssetObservation)
    assert isinstance(verdict, dg.AssetCheckEvaluation)
    metadata = observation.metadata
    assert (metadata["billing waiting"].value, metadata["billing dead letters"].value) == (12, 0)
    assert verdict.passed
    assert shown.run_requests is not None
    [request] = shown.run_requests
    instance.create_run_for_job(
        job_of(serving(), "drain_inbox"),
        run_config=request.run_config,
        tags=request.tags,
        status=dg.DagsterRunStatus.STARTED,
    )
    again = look(instance, named, shown.cursor)
    assert not again.run_requests
    assert again.asset_events == []
    # What changes is reported at once.
    with database.connect() as connection:
        connection.execute("UPDATE inbox SET state = 'failed' WHERE seq = 1")
    _, verdict = look(instance, named, again.cursor).asset_events
    assert isinstance(verdict, dg.AssetCheckEvaluation)
    assert (verdict.passed, verdict.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert re.fullmatch(r"billing: 11 waiting for up to \d+ s, 1 dead letter", str(verdict.description))


@pytest.mark.parametrize(
    ("change", "passed", "says"),
    [
        (
            "UPDATE inbox SET received_at = now() - interval '20 minutes'",
            False,
            r"12 waiting for up to 1,2\d\d s",
        ),
        ("UPDATE inbox SET state = 'failed'", False, "0 waiting, 12 dead letters"),
        ("UPDATE inbox SET state = 'discarded'", True, "0 waiting"),
        ("UPDATE inbox SET paused_since = now(), last_error = 'tax'", True, r"paused: [\w.]+ \(tax\)"),
        (
            "UPDATE inbox SET paused_since = now(), last_error = 'tax', event_type = repeat('x', 5000)",
            True,
            r"paused: x+… \(5,000 characters\) \(tax\)",
        ),
    ],
)
def test_the_check_by_hand(database: Database, named: str, change: str, passed: bool, says: str) -> None:
    with database.connect() as connection:
        connection.execute(change.encode())
    verdict = handled(serving(drain_consumers=named))()
    assert isinstance(verdict, dg.AssetCheckResult)
    assert verdict.passed is passed
    assert re.search(says, str(verdict.description))


def test_a_result_of_another_reporter_is_corrected(instance: dg.DagsterInstance, named: str) -> None:
    """Guards against a check that shows for a day what a run found in one moment."""
    first = look(instance, named)
    for found in first.asset_events:
        instance.report_runless_asset_event(found)
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey(["outbox", "inbox"]),
            check_name="handled",
            passed=False,
            severity=dg.AssetCheckSeverity.ERROR,
        )
    )
    second = look(instance, named, first.cursor)
    _, verdict = second.asset_events
    assert isinstance(verdict, dg.AssetCheckEvaluation)
    assert verdict.passed
    instance.report_runless_asset_event(verdict)
    assert look(instance, named, second.cursor).asset_events == []


def test_nothing_is_asked_for(instance: dg.DagsterInstance) -> None:
    assert "OUTBOX_DRAIN_CONSUMERS is empty" in str(look(instance, "").skip_message)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("billing", "write module:name"),
        ("no_such_module:consumer", "cannot find the module no_such_module"),
        ("json:consumer", "json has no consumer"),
        ("json:loads", "give a Consumer or AsyncConsumer"),
    ],
)
def test_a_wrong_name_says_what_to_write(instance: dg.DagsterInstance, name: str, says: str) -> None:
    assert says in str(look(instance, name).skip_message)
