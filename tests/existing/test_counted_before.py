"""Counts of an earlier publisher, which adds one at every failed poll, outages included."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_pipelines.existing import check, table_measurements
from tests.conftest import either
from tests.existing import guides, textbook
from tests.existing.conftest import Make
from tests.existing.guides import Guide
from tests.existing.test_guides import KEYS, Relayed
from tests.existing.textbook import Table
from tests.relay.topic import NOISE

SMALL = {"max.message.bytes": "2000"}


@pytest.mark.parametrize("guide", [guides.A, guides.C, guides.D], ids=lambda guide: guide.name)
@pytest.mark.parametrize("count", either(50, 1, 5))
def test_they_make_no_dead_letters(make_table: Make, guide: Guide, count: int) -> None:
    """Guards against rows that are silently not published after a hand-over (G1)."""
    table = make_table(guide.ddl, guide.mapping)
    relayed = Relayed(guide, table.with_(**guide.settings))
    relayed.write(*((KEYS[n % 3], "order.created", {"n": n}) for n in range(50)))
    name = "outbox_events" if guide.name == "C" else "outbox"
    error = "" if guide.name == "C" else ", last_error = 'connection refused'"
    with table.connect() as connection:
        connection.execute(f"UPDATE {name} SET retry_count = {count}{error}".encode())
    totals = relayed.table.drain()
    assert (totals.events, totals.unpublished) == (50, 0)
    assert relayed.pending() == 0
    assert len(relayed.messages()) == 50


def _attempts(table: Table) -> list[tuple[Any, ...]]:
    return table.rows("retry_count, last_error LIKE 'outbox: %%', published_at IS NOT NULL")


@pytest.mark.extended
@pytest.mark.parametrize("is_recorded", [True, False])
def test_they_are_no_attempts(make_table: Make, is_recorded: bool) -> None:
    """Guards against a dead letter of the first refusal, and attempts that are lost with a relay."""
    mapping = textbook.PUBLISHED_AT_MAPPING.replace('next_attempt_at = "next_attempt_at"\n', "")
    ddl = textbook.PUBLISHED_AT
    if not is_recorded:
        ddl += "; ALTER TABLE events ADD COLUMN failed_at timestamptz"
        mapping = mapping.replace('last_error = "last_error"', 'failed_at = "failed_at"')
    table = make_table(ddl, mapping).with_(max_attempts=3, retry_seconds=3600.0)
    table.make_topic(**SMALL)
    table.write(("a", {"n": 0, "noise": NOISE}), ("b", {"n": 0}))
    with table.connect() as connection:
        connection.execute("UPDATE events SET retry_count = 7, last_error = 'connection refused'")
    for attempts, dead in ((1, 0), (2, 0), (3, 1), (3, 1)):
        totals = table.drain()
        assert _attempts(table)[0] == (attempts, is_recorded, False)
        assert totals.unpublished == 1
        assert table_measurements.read(table.settings).dead_letters == dead
    assert table.keys() == ["b"]
    with table.connect() as connection:
        connection.execute(
            "UPDATE events SET retry_count = 0, payload = '{\"n\": 1}', failed_at = NULL"
            if not is_recorded
            else "UPDATE events SET retry_count = 0, payload = '{\"n\": 1}'"
        )
    assert table.drain().events == 1


def test_a_lower_maximum_makes_no_dead_letter(table: Table) -> None:
    """Guards against events that a setting gives up without another attempt, and without a word."""
    table.make_topic(**SMALL)
    table.write(("a", {"n": 0, "noise": NOISE}))
    for _ in range(2):
        with table.connect() as connection:
            connection.execute("UPDATE events SET next_attempt_at = NULL")
        table.drain(max_attempts=5, retry_seconds=3600.0)
    assert _attempts(table) == [(2, True, False)]
    assert table_measurements.read(table.with_(max_attempts=1).settings).dead_letters == 0
    with table.connect() as connection:
        connection.execute("UPDATE events SET payload = '{\"n\": 0}', next_attempt_at = NULL")
    assert table.drain(max_attempts=1).events == 1


@pytest.mark.extended
def test_a_reason_to_wait_keeps_whose_attempts_they_are(table: Table) -> None:
    """Guards against attempts that begin again with each missing topic."""
    table.make_topic(**SMALL)
    table.write(("a", {"n": 0, "noise": NOISE}), ("b", {"n": 0}))
    table.drain(retry_seconds=3600.0)
    assert _attempts(table)[0] == (1, True, False)
    with table.connect() as connection:
        connection.execute("UPDATE events SET next_attempt_at = NULL")
    table.drain(retry_seconds=3600.0, topic="missing-{aggregate_type}", create_topics=False)
    ((count, is_ours, _), *_) = _attempts(table)
    assert (count, is_ours) == (1, True)


def test_the_check_names_what_nothing_tells_apart(make_table: Make) -> None:
    """Guards against `nothing to correct` for rows that an earlier publisher gave up, or has counted."""
    table = make_table(guides.C.ddl, guides.C.mapping).with_(**guides.C.settings)
    relayed = Relayed(guides.C, table)
    relayed.write(*((KEYS[0], "order.created", {"n": n}) for n in range(3)))
    with table.connect() as connection:
        connection.execute("UPDATE outbox_events SET retry_count = 3")
        connection.execute("UPDATE outbox_events SET status = 'FAILED' WHERE id = 1")
    found = {finding.problem: finding.statements for finding in check.read(table.settings).findings}
    (failed,) = (found[problem] for problem in found if "dead letters" in problem)
    (counted,) = (found[problem] for problem in found if "2 pending rows" in problem)
    with table.connect() as connection:
        for statement in (*counted, *failed):
            connection.execute(statement.encode())
    assert not [finding for finding in check.read(table.settings).findings if "rows" in finding.problem]
    assert table.drain().events == 3


@pytest.mark.parametrize(("length", "is_refused"), [(20, True), (21, False)])
def test_a_last_error_without_room(make_table: Make, length: int, is_refused: bool) -> None:
    """Guards against a dead letter that its row cannot record, and which is tried without end."""
    table = make_table(
        textbook.PUBLISHED_AT.replace("last_error text", f"last_error varchar({length})"),
        textbook.PUBLISHED_AT_MAPPING,
    )
    assert check.read(table.settings).is_wrong == is_refused
