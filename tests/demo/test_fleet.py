"""`make fleet`: three airlines, one relay process that is killed and returns, and nothing left at its end."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psycopg

from outbox_pipelines.local.server import free_port
from tests.conftest import wait_until
from tests.demo.processes import Demo, demo


def _published(fleet: Demo) -> list[int]:
    """Of each airline, by the newest line."""
    lines = [line for line in fleet.output.splitlines() if " published" in line]
    return [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) published", lines[-1])]


def test_a_killed_relay_comes_back_and_nothing_is_left(database: dict[str, str], directory: Path) -> None:
    """Guards against a demo that shows a fleet which does not relay, or leaves databases behind."""
    with demo(directory, database, "fleet", "--port", str(free_port())) as fleet:
        wait_until(lambda: fleet.told("Ctrl-C"), seconds=120, what="the address")
        wait_until(lambda: fleet.told(" published"), seconds=30, what="a line of progress")
        wait_until(lambda: min(_published(fleet)) > 0, seconds=60, what="an event of each airline")
        pid = re.search(r"kill -9 (\d+)", fleet.output)
        assert pid is not None
        os.kill(int(pid[1]), signal.SIGKILL)
        wait_until(lambda: fleet.told("was killed, and started again"), what="another process")
        before = _published(fleet)
        wait_until(
            lambda: all(now > then for now, then in zip(_published(fleet), before, strict=True)),
            seconds=60,
            what="further events of each airline",
        )
        fleet.process.send_signal(signal.SIGTERM)
        assert fleet.process.wait(600) == 0, fleet.output
        assert fleet.descendants() == []
        assert list(directory.iterdir()) == []
    with psycopg.connect(database["OUTBOX_DSN"]) as connection:
        found = connection.execute("SELECT FROM pg_database WHERE datname LIKE 'outbox_fleet%'").fetchall()
    assert found == []
