"""Rows that are too large to be read, or cannot be: found, set aside, and nobody else waits (G3, G9)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from outbox_pipelines.relay import service
from tests.conftest import Outbox, clean_environment, command
from tests.relay.parked import parked_rows

HUGE = "1e131071"  # a dozen bytes stored, 131,072 as text
# The relay's peak, of which Python and the drivers are some 100 MB.
MOST_MEMORY = 300 * 1024


@contextmanager
def _past_the_guard(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    """As a backfill, or rows from before the guard."""
    with outbox.connect() as connection:
        connection.execute("ALTER TABLE outbox DISABLE TRIGGER USER")
        yield connection
        connection.execute("ALTER TABLE outbox ENABLE TRIGGER USER")


def _insert(connection: psycopg.Connection[Any], key: str, events: int = 1, **columns: str) -> None:
    """Events of one aggregate; columns as SQL."""
    given = {
        "aggregate_type": "'order'",
        "aggregate_id": f"'{key}'",
        "event_type": "'e'",
        "payload": "'1'",
    } | columns
    names, values = ", ".join(given), ", ".join(given.values())
    statement = f"INSERT INTO outbox ({names}) SELECT {values} FROM generate_series(1, {events}) i"
    connection.execute(statement.encode())


def _numbers(count: int) -> str:
    return f"(SELECT jsonb_build_object('a', jsonb_agg({HUGE}::numeric)) FROM generate_series(1, {count}))"


UNREADABLE = {
    "headers of over 1 GB": {"headers": _numbers(8300)},
    "a correlation id of 270 MB": {"correlation_id": "repeat('x', 270000000)"},
    "an event type of 20 MB": {"event_type": "repeat('x', 20000000)"},
    "a payload of 197 MB": {"payload": _numbers(1500)},
}


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_a_row_that_cannot_be_read_is_a_dead_letter(outbox: Outbox, delivery: str) -> None:
    """Guards against one row that ends every read: nothing behind it is published, nobody can remove it."""
    with _past_the_guard(outbox) as connection:
        for n, columns in enumerate(UNREADABLE.values()):
            _insert(connection, f"bad {n}", **columns)
            _insert(connection, f"good {n}", 3)
        _insert(connection, "bad 0")
    relayed = outbox.outbox("relay", "--until-empty", OUTBOX_DELIVERY=delivery)
    assert relayed.returncode == 1, relayed.stderr
    assert {(row[0], row[2]) for row in parked_rows(outbox)} == {
        (f"bad {n}", "failed") for n in range(len(UNREADABLE))
    }
    assert sorted(message.key for message in outbox.messages()) == sorted(
        ["bad 0", *[f"good {n}" for n in range(len(UNREADABLE)) for _ in range(3)]]
    )


def test_its_dead_letter_is_shown_replayed_and_discarded(outbox: Outbox) -> None:
    """Guards against dead letters that only read the content, which nobody can."""
    with _past_the_guard(outbox) as connection:
        _insert(connection, "a", headers=_numbers(8300))
        _insert(connection, "b", correlation_id="repeat('x', 270000000)")
    service.relay(outbox.settings, until_empty=True)
    ids = {key: name for key, name, *_ in parked_rows(outbox)}
    listed = json.loads(outbox.outbox("dead-letters", "list", "--json").stdout)
    assert {row["aggregate_id"] for row in listed["rows"]} == {"a", "b"}
    assert any("the most that the relay reads" in row["error"] for row in listed["rows"])
    for name in ids.values():
        shown = outbox.outbox("dead-letters", "show", name)
        assert shown.returncode == 0, shown.stderr
        assert len(shown.stdout) < 10_000
        assert ("not shown" in shown.stdout) == (name == ids["a"])
    replayed = outbox.outbox("dead-letters", "replay", ids["a"], "--reason", "again", "--yes")
    assert replayed.returncode == 0, replayed.stderr
    service.relay(outbox.settings, until_empty=True)
    assert [row[2] for row in parked_rows(outbox)] == ["failed", "failed"]
    discarded = outbox.outbox("dead-letters", "discard", *ids.values(), "--reason", "no use", "--yes")
    assert discarded.returncode == 0, discarded.stderr
    assert {row[2] for row in parked_rows(outbox)} == {"discarded"}


def test_a_waiting_event_that_cannot_be_read(outbox: Outbox) -> None:
    """Guards against the same among the events that wait behind a refused one."""
    with _past_the_guard(outbox) as connection:
        for columns in ({}, {"headers": _numbers(8300)}, {}):
            _insert(connection, "a", **columns)
        # Passed over by the position, as after a refusal.
        connection.execute("INSERT INTO outbox_parked SELECT *, 'waiting', 0, now(), NULL FROM outbox")
        connection.execute("UPDATE outbox_shards SET done = pg_current_snapshot()")
    service.relay(outbox.settings, until_empty=True)
    assert [row[2] for row in parked_rows(outbox)] == ["failed"]
    assert [message.key for message in outbox.messages()] == ["a", "a"]


def _peak(outbox: Outbox, **environment: str) -> int:
    """A drain in a process of its own; its largest resident size in KiB."""
    program = (
        "import resource, subprocess, sys; p = subprocess.run(sys.argv[1:], capture_output=True, text=True);"
        "print(p.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, p.stderr[-500:])"
    )
    given = clean_environment() | outbox.environment | environment
    ran = subprocess.run(
        [sys.executable, "-c", program, *command("relay", "--until-empty")],
        env=given,
        capture_output=True,
        text=True,
        timeout=240,
    )
    code, peak, *rest = ran.stdout.split(maxsplit=2)
    assert code in ("0", "1"), rest
    return int(peak)


SIZES: dict[str, tuple[int, dict[str, str]]] = {
    "large payloads": (150, {"payload": "to_jsonb(repeat(md5(i::text), 30000))"}),
    "large payloads with one wide character": (
        100,
        {"payload": "to_jsonb(repeat(md5(i::text), 30000) || '😀')"},
    ),
    "large headers": (150, {"headers": "jsonb_build_object('a', repeat(md5(i::text), 28000))"}),
    "long ids": (3_000, {"correlation_id": "repeat(md5(i::text), 1000)"}),
    "long texts of short numbers": (30, {"payload": _numbers(100)}),
    "many of some kilobytes, wide": (20_000, {"payload": "to_jsonb(repeat(md5(i::text), 60) || '😀')"}),
}


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("case", SIZES)
def test_memory_is_bounded_whatever_the_rows(outbox: Outbox, case: str, delivery: str) -> None:
    """Guards against sizes that count the payload alone, or after hundreds of rows were fetched."""
    events, columns = SIZES[case]
    with _past_the_guard(outbox) as connection:
        _insert(connection, "' || i || '", events, **columns)
        _insert(connection, "small", 300)
    peak = _peak(outbox, OUTBOX_DELIVERY=delivery)
    print(f"{case}, {delivery}: {peak / 1024:.0f} MiB")
    assert peak < MOST_MEMORY
    assert sum(message.key == "small" for message in outbox.messages()) == 300
