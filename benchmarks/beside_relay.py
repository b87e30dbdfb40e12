"""What a relay beside eight writers costs them: their rate alone, beside it, and beside a mere use of CPU.

Invariants:
- All share the cores: CPU of the relay, its sessions and the broker is CPU that writers lack. A third turn
  burns as much of it in other processes, without touching the database.
- The turns alternate; ratios are medians of rounds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import psycopg

from benchmarks import programs
from benchmarks.quick import sized
from benchmarks.servers import fill, fresh_outbox
from benchmarks.table import Figure, Ratio, Row, paired, rate
from outbox_pipelines.local import postgres
from outbox_pipelines.settings import Settings

_WRITERS: Final = 8
_ROUNDS: Final = sized(4, 1)
_SECONDS: Final = sized(2.5, 1.5)
# The statement of `emit`, after a change of a business row.
_SCRIPT: Final = """\\set n random(0, 999)
BEGIN;
UPDATE orders SET n = n + 1 WHERE id = :n;
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
VALUES ('order', :n, 'order.placed', '{"total": 5, "state": "placed"}') RETURNING id, seq;
COMMIT;
"""
# A process that uses a share of a core, in short bursts like the relay's.
_BURN: Final = """
import sys, time
share, began = float(sys.argv[1]), time.monotonic()
while True:
    while time.process_time() < share * (time.monotonic() - began):
        pass
    time.sleep(0.005)
"""
_BURNERS: Final = 3


class _Turn(NamedTuple):
    """Figures of some seconds."""

    rate: float
    """Events a second, each in a transaction of its own."""
    cpu: float
    """CPU of the writers' sessions for an event, in seconds."""
    relay: float
    """CPU of the relay's process, in cores."""
    sessions: float
    """CPU of its sessions in PostgreSQL, in cores."""
    broker: float
    """CPU of the broker, in cores."""

    @property
    def others(self) -> float:
        return self.relay + self.sessions + self.broker


def rows(servers: Settings) -> list[Row]:
    """Rows of the table; about a minute."""
    found: dict[str, list[_Turn]] = {"alone": [], "relay": [], "burner": []}
    with fresh_outbox(servers) as settings, psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, n int NOT NULL) WITH (fillfactor = 50)")
        connection.execute("INSERT INTO orders SELECT i, 0 FROM generate_series(0, 999) i")
        fill(settings, 200_000)
        programs.drain(settings)  # The broker compiles its code.
        for _ in range(1 + _ROUNDS):
            found["alone"].append(_turn(settings, connection))
            with _relay(settings, connection) as process:
                found["relay"].append(_turn(settings, connection, process.pid))
            with _burning(found["relay"][-1].others):
                found["burner"].append(_turn(settings, connection))
    # The first round creates files and caches.
    alone, relay, burner = (turns[1:] for turns in found.values())
    shares = [median(turn[at] for turn in relay) for at in (2, 3, 4)]
    beyond = paired((turn.rate for turn in relay), (turn.rate for turn in burner))
    return [
        Row(f"{_WRITERS} writers alone", (rate([turn.rate for turn in alone]),)),
        _row(f"{_WRITERS} writers beside a relay that publishes their events", relay, alone),
        _row(f"{_WRITERS} writers beside as much CPU, burned by other processes", burner, alone),
        Row(
            "the relay's cost for writers beyond CPU",
            tuple(
                Figure(share, "cores", name)
                for name, share in zip(("relay", "sessions", "broker"), shares, strict=True)
            ),
            (Ratio(beyond, "beside the burned CPU"),),
            "≥ 0.90 ×",
        ),
    ]


def _row(what: str, turns: list[_Turn], alone: list[_Turn]) -> Row:
    events = paired((turn.rate for turn in turns), (turn.rate for turn in alone))
    cpu = paired((turn.cpu for turn in turns), (turn.cpu for turn in alone))
    return Row(
        what,
        (rate([turn.rate for turn in turns]),),
        (Ratio(events, "alone"), Ratio(cpu, "alone", "CPU of an event")),
    )


def _turn(settings: Settings, connection: psycopg.Connection[Any], relay: int | None = None) -> _Turn:
    with _writing(settings):
        time.sleep(0.7)  # The clients connect and prepare.
        before = _counts(connection, relay)
        time.sleep(_SECONDS)
        after = _counts(connection, relay)
    seconds, events, cpu, *others = (b - a for a, b in zip(before, after, strict=True))
    return _Turn(events / seconds, cpu / events, *(each / seconds for each in others))


def _counts(connection: psycopg.Connection[Any], relay: int | None) -> tuple[float, ...]:
    """The time; events; CPU of the writers' sessions, the relay, its sessions and the broker."""
    row = connection.execute(
        "SELECT (SELECT last_value FROM outbox_seq), "
        "array_agg(pid) FILTER (WHERE application_name = 'pgbench'), "
        "array_agg(pid) FILTER (WHERE application_name <> 'pgbench' AND pid <> pg_backend_pid()) "
        "FROM pg_stat_activity WHERE datname = current_database()"
    ).fetchone()
    assert row is not None
    events, writers, sessions = row
    others = [_cpu([relay]), _cpu(sessions), _cpu(_brokers())] if relay else [0.0, 0.0, 0.0]
    return time.monotonic(), float(events), _cpu(writers), *others


def _cpu(processes: list[int]) -> float:
    """Seconds of CPU of all threads of the processes."""
    nanoseconds = 0
    for thread in [thread for pid in processes for thread in Path(f"/proc/{pid}/task").iterdir()]:
        with suppress(OSError):  # It has just ended.
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def _brokers() -> list[int]:
    children = [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
    return [pid for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "java"]


@contextmanager
def _writing(settings: Settings) -> Iterator[None]:
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(_SCRIPT)
        script.flush()
        program = postgres.find_programs(settings.local_postgres) / "pgbench"
        command = [str(program), "-n", "-M", "prepared", "-c", str(_WRITERS), "-j", "2", "-T", "60"]
        process = subprocess.Popen(
            [*command, "-f", script.name, settings.dsn], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait()


@contextmanager
def _relay(settings: Settings, connection: psycopg.Connection[Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a relay; what was written before is published when the block begins."""
    with programs.running(settings, "outbox_pipelines", "relay") as process:
        while not _is_drained(connection):
            time.sleep(0.05)
        yield process


def _is_drained(connection: psycopg.Connection[Any]) -> bool:
    [(drained,)] = connection.execute(
        "SELECT outbox_covers(s.done, s.target, s.last_seq, o.tx, o.seq) FROM outbox_shards s, "
        "LATERAL (SELECT tx, seq FROM outbox ORDER BY seq DESC LIMIT 1) o"
    )
    return bool(drained)


@contextmanager
def _burning(cores: float) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(_BURNERS):
            process = subprocess.Popen([sys.executable, "-c", _BURN, str(cores / _BURNERS)])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield
