"""`outbox relay --trace-latency`: the stages of an event, from its row to the settled position."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from outbox_pipelines.event import Event
from outbox_pipelines.relay.telemetry.latency import written
from tests.conftest import Outbox
from tests.relay.cdc.slots import make


@pytest.mark.parametrize("source", ["polling", "cdc"])
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_stages_add_up(outbox: Outbox, delivery: str, source: str) -> None:
    """Guards against a stage that is missing or counted twice: the longest would be looked for in vain."""
    if source == "cdc":
        make(outbox)
        assert outbox.outbox("relay", "--until-empty").returncode == 0
    before = time.monotonic()
    outbox.write(*range(5))
    outbox.write(*range(3))
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) "
            "VALUES (%s, 'order', '1', 'order.placed', '{}')",
            [uuid.uuid4()],
        )
    done = outbox.outbox("relay", "--until-empty", "--trace-latency", "--delivery", delivery)
    assert done.returncode == 0
    assert len(outbox.messages()) == 9
    longest = 1000 * (time.monotonic() - before)
    assert "latency of 9 events in " in done.stderr
    shown = [line for line in done.stderr.splitlines() if " -> " in line]
    stages = {line[2:26].strip(): [float(number) for number in line[26:53].split()] for line in shown}
    *parts, (total, _, _) = [stages.pop(name) for name in _NAMES]
    assert stages == {}
    assert all(0 <= p50 <= p99 <= most < longest for p50, p99, most in parts)
    assert total == pytest.approx(sum(p50 for p50, _, _ in parts[:4]), abs=0.5 * total + 5)
    assert "1 events have an id without a time" in done.stderr


_NAMES = (
    *("written -> seen", "seen -> read", "read -> sent", "sent -> acknowledged"),
    *("acknowledged -> settled", "written -> acknowledged"),
)


def test_an_id_contains_its_time(outbox: Outbox) -> None:
    """Guards against a time that is wrong by the part of a millisecond, or by a thousand."""
    before = time.time()
    outbox.write("a")
    with outbox.connect() as connection:
        ((found,),) = connection.execute("SELECT id::text FROM outbox").fetchall()
    at = written(Event(1, found, "order", "a", "order.placed", "{}", None))
    assert at is not None
    assert before - 0.002 <= at <= time.time() + 0.002
    assert written(Event(1, str(uuid.uuid4()), "order", "a", "order.placed", "{}", None)) is None


def test_it_is_for_one_outbox_with_times(outbox: Outbox) -> None:
    """Guards against a table that shows nothing without a reason."""
    table = Path(__file__).parents[1] / "history" / "table.toml"
    done = outbox.outbox("relay", "--trace-latency", OUTBOX_TABLE_FILE=str(table))
    assert done.returncode == 2
    assert "--trace-latency: for the append-only outbox" in done.stderr
