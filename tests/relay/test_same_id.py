"""Two events with one id: each is parked, tried and published by its own (G1, G3)."""

from __future__ import annotations

import json
from uuid import UUID

import pytest

from outbox_pipelines.relay import service
from tests.conftest import Outbox, either, wait_until
from tests.relay.parked import keys, numbers, parked_rows
from tests.relay.threads import quick, running
from tests.relay.topic import NOISE, change_topic, create_topic

ID = UUID("0190aaaa-0000-7000-8000-000000000001")
SMALL, LARGE = {"max.message.bytes": "2000"}, {"max.message.bytes": "2000000"}
MODES = pytest.mark.parametrize("delivery", either("at_least_once", "exactly_once"))


def _write(outbox: Outbox, key: str, payload: dict[str, object]) -> None:
    """Each in a transaction of its own, since the table keeps the same id of one transaction apart."""
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) "
            "VALUES (%s, 'order', %s, 'order.placed', %s)",
            [ID, key, json.dumps(payload)],
        )


@MODES
def test_both_are_parked_and_both_are_published(outbox: Outbox, delivery: str) -> None:
    """Guards against a second parked event of the same id that is lost without a trace."""
    create_topic(outbox, **SMALL)
    _write(outbox, "a", {"n": 0, "noise": NOISE})
    _write(outbox, "b", {"n": 0, "noise": NOISE})
    settings = quick(outbox, delivery=delivery, max_attempts=1)
    service.relay(settings, until_empty=True)
    assert [(row[0], row[2]) for row in parked_rows(outbox)] == [("a", "failed"), ("b", "failed")]
    shown = outbox.outbox("dead-letters", "show", str(ID)).stdout
    assert '"aggregate_id": "a"' in shown
    assert '"aggregate_id": "b"' in shown
    change_topic(outbox, **LARGE)
    done = outbox.outbox("dead-letters", "replay", str(ID), "--reason", "the topic takes them now", "--yes")
    assert done.stdout == "2 dead letters replayed\n", done.stderr
    with running(settings):
        wait_until(lambda: parked_rows(outbox) == [], what="nothing parked")
    assert sorted(keys(outbox)) == ["a", "b"]


@MODES
def test_one_is_released_and_the_other_stays_parked(outbox: Outbox, delivery: str) -> None:
    """Guards against an event that is removed from the table because another one of its id was published."""
    create_topic(outbox, **SMALL)
    _write(outbox, "a", {"n": 0, "noise": NOISE})
    _write(outbox, "b", {"n": 0})
    with outbox.connect() as connection:
        # As after a refused batch: both are tried alone, and only one of them fits.
        connection.execute(
            "INSERT INTO outbox_parked SELECT *, 'retrying', 0, now(), 'its batch was refused' FROM outbox"
        )
        connection.execute("UPDATE outbox_shards SET done = pg_current_snapshot()")
    with running(quick(outbox, delivery=delivery, max_attempts=1)):
        wait_until(lambda: [(r[0], r[2]) for r in parked_rows(outbox)] == [("a", "failed")], what="one left")
        wait_until(lambda: keys(outbox) == ["b"], what="the other published")
    assert numbers(outbox, "b") == [0]
    with outbox.connect() as connection:
        found = connection.execute("SELECT aggregate_id, status FROM outbox_events ORDER BY seq").fetchall()
    assert found == [("a", "FAILED"), ("b", "PROCESSED")]
