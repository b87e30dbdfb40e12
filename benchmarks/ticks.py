"""What an event costs at small rates: CPU and context switches of the relay, its sessions and the broker."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import psycopg

from benchmarks import programs
from benchmarks.latency import RATES, running, warm
from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Figure, Row, microseconds
from outbox_pipelines.settings import Settings

_SECONDS: Final = sized(15.0, 4.0)
_SESSIONS: Final = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'outbox relay%'"
# Each statement of a relay is a transaction, and so is each event of the writers.
_DONE: Final = """
SELECT pg_sequence_last_value('outbox_seq'), xact_commit
FROM pg_stat_database WHERE datname = current_database()"""


class Cost(NamedTuple):
    """Of some processes, since they began."""

    cpu: float
    """In seconds."""
    switches: int
    """Context switches: of a thread that has nothing to do, its wakeups."""

    def since(self, before: Cost) -> Cost:
        """Return what was added."""
        return Cost(self.cpu - before.cpu, self.switches - before.switches)


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    rows = []
    for name in ("relay", "relay, exactly_once"):
        with fresh_outbox(servers) as settings, running(settings, name) as pid:
            warm(settings)
            rows += [_at_rate(settings, name, pid, rate, clients) for rate, clients in RATES]
            time.sleep(3)
            spent, _ = _spent(settings, pid)
            rows.append(
                Row(f"idle: {name}", (Figure(spent["relay"].switches / _SECONDS, "wakeups a second"),))
            )
    return rows


def _at_rate(settings: Settings, name: str, pid: int, rate: int, clients: int) -> Row:
    with programs.running(settings, "benchmarks.load", settings.dsn, clients, rate):
        time.sleep(2)
        spent, (events, transactions) = _spent(settings, pid)
    figures = [microseconds(cost.cpu / events, part) for part, cost in spent.items()]
    switches = sum(cost.switches for cost in spent.values()) / events
    statements = (transactions - events) / events
    return Row(
        f"an event at {rate:,}/s: {name}",
        (*figures, Figure(switches, "context switches"), Figure(statements, "statements")),
    )


def _spent(settings: Settings, relay: int) -> tuple[dict[str, Cost], tuple[int, int]]:
    """Return what is spent within `_SECONDS`, and the events and transactions of that time."""
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        sessions = [pid for (pid,) in connection.execute(_SESSIONS)]
        parts = {"relay": [relay], "its sessions": sessions, "broker": [_broker()]}
        (done_before,) = connection.execute(_DONE).fetchall()
        before = {part: _cost(pids) for part, pids in parts.items()}
        time.sleep(_SECONDS)
        spent = {part: _cost(pids).since(before[part]) for part, pids in parts.items()}
        (done,) = connection.execute(_DONE).fetchall()
    return spent, (done[0] - done_before[0], done[1] - done_before[1])


def _cost(pids: Iterable[int]) -> Cost:
    """Return the cost of processes (Linux)."""
    cpu, switches = 0, 0
    for task in (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()):
        with suppress(OSError):
            cpu += int((task / "schedstat").read_text().split()[0])
            lines = (task / "status").read_text().splitlines()
            switches += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return Cost(cpu / 1e9, switches)


def _broker() -> int:
    """Return the process of the broker, which this one has started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (broker,) = (pid for pid in children if b"kafka.Kafka" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return int(broker)
