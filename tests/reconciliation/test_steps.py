"""A day that is divided into slices, as steps on several machines compare it."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation import report, steps
from outbox_pipelines.reconciliation import steps as days
from outbox_pipelines.reconciliation.exchange import Exchange, local
from outbox_pipelines.reconciliation.report import Report
from tests.reconciliation.place import DAY, START_MS, Place, found, new_id
from tests.relay.topic import create_topic

AGGREGATES = 8


def _said(given: Report) -> str:
    return json.dumps(dataclasses.replace(given, seconds=0.0).described(), indent=1)


def _make_every_finding(place: Place) -> None:
    """Make a day with every kind of finding, of the topics and of a consumer."""
    parcels = place.outbox.topic("parcel")
    create_topic(place.outbox, 2, of="parcel", **{"cleanup.policy": "compact"})
    place.write(60, keys=AGGREGATES)
    place.relay()
    handled = [each.headers["id"] or "" for each in place.messages()]
    place.write(7, event_type="order.lost")
    place.write(3, aggregate_type="parcel")
    twice = place.write(12, event_type="order.twice", keys=AGGREGATES)
    late = place.write(12, event_type="order.late", keys=AGGREGATES)
    replayed = place.write(4, event_type="order.replayed", keys=1)
    astray = place.write(5, event_type="order.astray")
    parked = place.write(6, event_type="order.parked")
    place.pass_over()
    # In several partitions of the topic.
    for key in ("0", "1", "2", "3"):
        place.send(*twice, key=key)
    # At the same time, each behind the next of its aggregate.
    place.send(*reversed(late), *reversed(replayed), key="0", at_ms=START_MS + 5000)
    place.send(*astray, topic=parcels)
    (neighbor,) = place.write(1, day=DAY - timedelta(1), id=new_id())
    untimed = [f"7b0f2c3e-1f43-4a5e-9d63-52a3f5a1b0{n:02}" for n in range(9)]
    strangers = [new_id() for _ in range(15)]
    place.send(neighbor, *strangers, *untimed, "order-1", "", "order-2", at_ms=START_MS + 9000)
    place.consumer([*handled[8:], *twice, neighbor, *strangers[:12]])
    for event_id, state in zip(handled, ("waiting", "failed", "discarded") * 2, strict=False):
        place.receive(event_id, state)
    place.write(3)
    place.relay()
    place.write(5, event_type="order.waits")
    place.rows(
        "INSERT INTO outbox_audit (action, actor, reason, filter, events) "
        "SELECT 'replay', 'alice', 'mended', '{}', array_agg(seq) FROM outbox WHERE id = ANY (%s::uuid[])",
        replayed,
    )
    for event_id, state in zip(parked, ("waiting", "failed", "discarded") * 2, strict=True):
        place.rows("INSERT INTO outbox_parked SELECT *, %s FROM outbox WHERE id = %s", state, event_id)


@pytest.mark.extended
def test_the_report_is_that_of_one_slice(place: Place, tmp_path: Path) -> None:
    """Guards against a finding that spans slices and is lost, or counted in each of them."""
    _make_every_finding(place)
    settings = place.settings
    whole = days.reconcile(settings, DAY, handled=tmp_path / "whole")
    topics, billing = whole.sides
    assert set(found(topics)) == {kind.name for kind in report._OF_TOPICS}
    assert set(found(billing)) == {kind.name for kind in report._OF_CONSUMER}
    for slices in (2, 7):
        divided = days.reconcile(settings, DAY, handled=tmp_path / "divided", slices=slices)
        assert _said(divided) == _said(whole)
        assert pq.read_table(tmp_path / "divided") == pq.read_table(tmp_path / "whole")


def test_each_row_is_read_once_and_in_one_slice(place: Place) -> None:
    """Guards against a topic that is read for each slice, and a slice with most of the day."""
    place.write(200, keys=20)
    place.relay()
    place.consumer()
    with local() as exchange:
        of = _until_compared(place, exchange, slices=4)
        assert of.readers == ["topics_0", "topics_1", "topics_2", "consumer_0"]
        notes = {step: exchange.note(step) for step in of.readers}
        placed = [exchange.note(f"slice_{n}")["rows"]["placed"] for n in range(4)]
        rows = {
            "events": exchange.note(steps.DAY)["rows"]["written"],
            "messages": _added([notes[step]["rows"]["messages"] for step in of.of_topics]),
            "processed": notes["consumer_0"]["rows"]["processed"],
            "aggregates": _added(placed),
        }
    assert sum(notes[step]["messages"] for step in of.of_topics) == 200
    for counts in rows.values():
        assert sum(counts) == 200
        # Of 200 ids or 20 aggregates: twice the share is far from any chance, or from a skew that matters.
        assert max(counts) <= 100


def test_a_slice_that_is_missing_is_an_error(place: Place) -> None:
    """Guards against a clean report of a part of the day."""
    place.write(20)
    place.relay()
    with local() as exchange:
        _until_compared(place, exchange, slices=2)
        steps.order(0, exchange)
        with pytest.raises(SetupError, match="the rows of step order_1 are missing or incomplete"):
            steps.merge(place.settings, exchange)
        steps.order(1, exchange)
        # As after a retry of one step.
        steps.compare(place.settings, 1, exchange, print)
        steps.order(1, exchange)
        assert steps.merge(place.settings, exchange).equal
        (file, *_) = (exchange.directory / "written" / "0").iterdir()
        pq.write_table(pq.read_table(file).slice(1), file)
        with pytest.raises(SetupError, match="the rows of step day are missing or incomplete"):
            steps.compare(place.settings, 0, exchange, print)
        file.unlink()
        with pytest.raises(SetupError, match="the rows of step day are missing or incomplete"):
            steps.compare(place.settings, 0, exchange, print)


@pytest.mark.parametrize("slices", [0, 251])
def test_a_number_of_slices_that_cannot_be(place: Place, slices: int) -> None:
    """Guards against a configuration that divides by zero, or opens thousands of files."""
    with pytest.raises(SetupError, match=f"a day cannot be divided into {slices} slices: choose 1 to 250"):
        days.reconcile(place.settings, DAY, slices=slices)


def _until_compared(place: Place, exchange: Exchange, slices: int) -> steps.Day:
    of = steps.begin(place.settings, DAY, (), slices, exchange, print)
    for step in of.readers:
        steps.read(place.settings, step, exchange, print)
    for number in range(slices):
        steps.compare(place.settings, number, exchange, print)
    return of


def _added(counts: list[list[int]]) -> list[int]:
    return [sum(each) for each in zip(*counts, strict=True)]
