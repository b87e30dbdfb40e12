"""What the tests of large rows share: rows of many sizes, and the peak memory of a relay that drains them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psycopg

from tests.conftest import clean_environment, command

_HUGE = "1e131071"  # a dozen bytes stored, 131,072 as text
# The relay's peak, of which Python and the drivers are some 100 MB.
_MOST_MEMORY = 300_000_000


def insert(
    connection: psycopg.Connection[Any], key: str, events: int = 1, *, table: str = "outbox", **columns: str
) -> None:
    """Events of one aggregate; columns as SQL."""
    given = {
        "aggregate_type": "'order'",
        "aggregate_id": f"'{key}'",
        "event_type": "'e'",
        "payload": "'1'",
    } | columns
    names, values = ", ".join(given), ", ".join(given.values())
    statement = f"INSERT INTO {table} ({names}) SELECT {values} FROM generate_series(1, {events}) i"
    connection.execute(statement.encode())


def numbers(count: int) -> str:
    return f"(SELECT jsonb_build_object('a', jsonb_agg({_HUGE}::numeric)) FROM generate_series(1, {count}))"


# Nearly 8 MB; the one wide character makes it four times as many in memory.
WIDE = "to_jsonb(repeat(md5(i::text), 249000) || '😀')"
# As many as show the peak: it does not grow with their number (100 to 140 MiB with 1,200 large payloads).
SIZES: dict[str, tuple[int, dict[str, str]]] = {
    "large payloads": (60, {"payload": "to_jsonb(repeat(md5(i::text), 30000))"}),
    "large headers": (40, {"headers": "jsonb_build_object('a', repeat(md5(i::text), 28000))"}),
    "the largest, wide": (3, {"payload": WIDE}),
    "small as stored": (3, {"payload": numbers(60)}),
    "some kilobytes, wide": (2_000, {"payload": "to_jsonb(repeat(md5(i::text), 60) || '😀')"}),
}


def assert_peak(environment: dict[str, str]) -> None:
    """Drain in a process of its own, and look at its largest resident size."""
    program = (
        "import resource, subprocess, sys; p = subprocess.run(sys.argv[1:], capture_output=True, text=True);"
        "print(p.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, p.stderr[-500:])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *command("relay", "--until-empty")],
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    code, peak, *rest = ran.stdout.split(maxsplit=2)
    assert code in ("0", "1"), rest
    print(f"peak: {int(peak) / 1024:.0f} MiB")
    assert int(peak) * 1024 < _MOST_MEMORY
