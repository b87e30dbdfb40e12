"""Rows that are too large or cannot be read: detected and parked, without a delay for others (G3, G9)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from outbox_pipelines.relay import relay_sql, service
from tests.conftest import Outbox
from tests.relay.parked import parked_rows
from tests.relay.sizes import SIZES, WIDE, assert_peak, insert, numbers
from tests.relay.topic import create


@contextmanager
def _past_the_guard(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    """As a backfill, or rows from before the guard."""
    with outbox.connect() as connection:
        connection.execute("ALTER TABLE outbox DISABLE TRIGGER USER")
        yield connection
        connection.execute("ALTER TABLE outbox ENABLE TRIGGER USER")


UNREADABLE = {
    "payload of 26 MB": {"payload": numbers(200)},
    "headers of 2 MB": {"headers": numbers(15)},
    "correlation id of 9 MB": {"correlation_id": "repeat('x', 9000000)"},
    "event type of 9 MB": {"event_type": "repeat('x', 9000000)"},
}


def test_a_row_that_cannot_be_read_is_a_dead_letter(outbox: Outbox) -> None:
    """Guards against one row that ends every read: nothing behind it is published."""
    _make_topic(outbox)
    with _past_the_guard(outbox) as connection:
        # More than PostgreSQL puts into one text: reading it is an error.
        insert(connection, "over 1 GB", headers=numbers(8300))
        for key, columns in UNREADABLE.items():
            insert(connection, key, 1, **columns)
            insert(connection, "good", 3)
        insert(connection, "over 1 GB")
    relayed = outbox.outbox("relay", "--until-empty")
    assert relayed.returncode == 1, relayed.stderr
    dead = parked_rows(outbox)
    assert [(row[0], row[2]) for row in dead] == [(key, "failed") for key in ("over 1 GB", *UNREADABLE)]
    assert sorted(message.key for message in outbox.messages()) == [
        *(["good"] * 3 * len(UNREADABLE)),
        "over 1 GB",
    ]
    ids = {key: event_id for key, event_id, *_ in dead}
    _assert_shown(outbox, ids)
    replayed = outbox.outbox("dead-letters", "replay", ids["headers of 2 MB"], "--reason", "again", "--yes")
    assert replayed.returncode == 0, replayed.stderr
    service.relay(outbox.settings, until_empty=True)
    assert {row[2] for row in parked_rows(outbox)} == {"failed"}
    discarded = outbox.outbox("dead-letters", "discard", *ids.values(), "--reason", "no use", "--yes")
    assert discarded.returncode == 0, discarded.stderr
    assert {row[2] for row in parked_rows(outbox)} == {"discarded"}


def _assert_shown(outbox: Outbox, ids: dict[str, str]) -> None:
    """Dead letters are listed and shown without the content that cannot be read."""
    listed = json.loads(outbox.outbox("dead-letters", "list", "--json").stdout)
    assert {row["aggregate_id"] for row in listed["rows"]} == set(ids)
    assert sum("the most that the relay reads" in row["error"] for row in listed["rows"]) == len(UNREADABLE)
    for key, hidden in (("over 1 GB", True), ("payload of 26 MB", True), ("event type of 9 MB", False)):
        shown = outbox.outbox("dead-letters", "show", ids[key])
        assert shown.returncode == 0, shown.stderr
        assert len(shown.stdout) < 10_000
        assert ("not shown" in shown.stdout) == hidden


def test_a_waiting_event_that_cannot_be_read(outbox: Outbox) -> None:
    """Guards against the same among the events that wait behind a refused one."""
    _make_topic(outbox)
    with _past_the_guard(outbox) as connection:
        for columns in ({}, {"payload": numbers(200)}, {}):
            insert(connection, "a", 1, **columns)
        # Passed over by the position, as after a refusal.
        connection.execute("INSERT INTO outbox_parked SELECT *, 'waiting', 0, now(), NULL FROM outbox")
        connection.execute("UPDATE outbox_shards SET done = pg_current_snapshot()")
    service.relay(outbox.settings, until_empty=True)
    assert [row[2] for row in parked_rows(outbox)] == ["failed"]
    assert [message.key for message in outbox.messages()] == ["a", "a"]


# With transactions, more is in memory at once.
@pytest.mark.extended
@pytest.mark.parametrize(
    "delivery", [pytest.param("at_least_once", marks=pytest.mark.thorough(only=True)), "exactly_once"]
)
def test_memory_is_bounded_whatever_the_rows(outbox: Outbox, delivery: str) -> None:
    """Guards against sizes that count the payload alone, or after hundreds of rows were fetched."""
    _make_topic(outbox)
    with _past_the_guard(outbox) as connection:
        for events, columns in SIZES.values():
            insert(connection, "' || i || '", events, **columns)
        insert(connection, "small", 300)
    assert_peak(outbox.environment | {"OUTBOX_DELIVERY": delivery})
    assert sum(message.key == "small" for message in outbox.messages()) == 300


@pytest.mark.extended
@pytest.mark.parametrize(
    "delivery", ["at_least_once", pytest.param("exactly_once", marks=pytest.mark.thorough(only=True))]
)
def test_large_events_come_from_both_sides(outbox: Outbox, delivery: str) -> None:
    """Guards against large parked and new events in memory at once, or waiting for each other."""
    _make_topic(outbox, largest=20_000_000)
    with _past_the_guard(outbox) as connection:
        for key in ("parked", "and another"):
            insert(connection, key, 3, payload=WIDE)
        connection.execute("INSERT INTO outbox_parked SELECT *, 'waiting', 0, now(), NULL FROM outbox")
        connection.execute("UPDATE outbox_shards SET done = pg_current_snapshot()")
        insert(connection, "new", 4, payload=WIDE)
        insert(connection, "small", 300)
    assert_peak(outbox.environment | {"OUTBOX_DELIVERY": delivery})
    assert Counter(message.key for message in outbox.messages()) == {
        "parked": 3,
        "and another": 3,
        "new": 4,
        "small": 300,
    }
    assert parked_rows(outbox) == []


def _make_topic(outbox: Outbox, largest: int = 1_000_000) -> None:
    """Small, and there when the relay starts: the first look-up takes seconds on a busy broker."""
    create(outbox.settings.kafka, outbox.topic(), 1, **{"max.message.bytes": str(largest)})


def test_fitting_and_larger_content(outbox: Outbox) -> None:
    """Guards against sizes that leave out a column, or content that is cut where it fits exactly."""
    whole = {"type": "t" * 10, "key": "k" * 10, "event": "e" * 10, "payload": "p" * 60, "metadata": "m" * 10}

    def read(most: int = 100, changed: Mapping[str, str | None] | None = None) -> dict[str, str | None]:
        query = f"""
            SELECT {relay_sql.FITTING}
            FROM (SELECT 1, gen_random_uuid(), %(type)s::text, %(key)s::text, %(event)s::text,
                         %(payload)s::text, %(metadata)s::text)
                 AS event (seq, id, aggregate_type, aggregate_id, event_type, payload, metadata)"""
        with outbox.connect() as connection:
            row = connection.execute(query.encode(), {"most": most, **whole, **(changed or {})}).fetchone()
        assert row is not None
        return dict(zip(whole, row[2:], strict=True))

    assert read() == whole
    for name, text in whole.items():
        more = {name: text + "x"}
        assert read(100, more) == whole | more | {"payload": None}
    # As much without metadata; as little where the metadata is too large as it is stored.
    without = {"payload": "p" * 70, "metadata": None}
    assert read(100, without) == whole | without
    assert read(100, {"metadata": ""}) == whole | {"payload": None, "metadata": ""}
    for name in ("type", "key", "event"):
        exact, longer = {name: "x" * 1000}, {name: "x" * 1001}
        assert read(1000, exact) == whole | exact | {"payload": None}
        assert read(1000, longer) == whole | {name: "x" * 999, "payload": None}
    for most in (100, 1000):
        assert read(most, {"metadata": "x" * most})["metadata"] == "x" * most
        assert read(most, {"metadata": "x" * (most + 1)})["metadata"] is None
    limit = relay_sql.MOST_METADATA
    assert read(3 * limit, {"metadata": "x" * limit}) == whole | {"metadata": "x" * limit}
    assert read(3 * limit, {"metadata": "x" * (limit + 1)}) == whole | {"payload": None, "metadata": None}
