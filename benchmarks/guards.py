"""What the guards of the outbox cost an INSERT: CPU time of PostgreSQL's process, with and without them.

Invariants:
- Each variant has a database and a session of its own; they take short turns, so that a drift affects all.
- The kernel counts the time of the session's process, in which the INSERTs are repeated: the client, its
  round trips and other processes are not included.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import psycopg

from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Figure, Ratio, Row, paired
from outbox_pipelines.settings import Settings

_ROUNDS: Final = sized(100, 25)
_EVENTS: Final = 1000
_COLUMNS: Final = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers) "
_ONE: Final = (
    f"DO $$ BEGIN FOR i IN 1..{_EVENTS} LOOP {_COLUMNS} VALUES ('order', i::text, 'order.placed', "
    f"""'{{"number": 5, "customer": "{"c" * 32}", "state": "placed", "note": "{"n" * 64}"}}', """
    "{headers}); {commit} END LOOP; END $$"
)
_MANY: Final = (
    _COLUMNS + "SELECT 'order', (i % 500)::text, 'order.placed', jsonb_build_object('number', i, "
    "'customer', md5(i::text), 'state', 'placed', 'note', md5((i * 7)::text) || md5((i * 11)::text)), NULL "
    f"FROM generate_series(1, {_EVENTS}) i"
)
_WITHOUT: Final = "DROP TRIGGER outbox_checked ON outbox; DROP TRIGGER outbox_unique_and_waiting ON outbox"
_WAYS: Final = {"none": _WITHOUT, "all": "SELECT 1"}


def _one(headers: str = "NULL", commit: str = "") -> str:
    return _ONE.replace("{headers}", headers).replace("{commit}", commit)


_KINDS: Final = {
    "one event": _one(),
    "one event, and its commit": _one(commit="COMMIT;"),
    "one event with headers": _one("""'{"tenant": "acme"}'"""),
    "1,000 events in one INSERT": _MANY,
}


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with ExitStack() as stack:
        sessions = {}
        for way, change in _WAYS.items():
            settings = stack.enter_context(fresh_outbox(servers))
            sessions[way] = stack.enter_context(psycopg.connect(settings.dsn, autocommit=True))
            sessions[way].execute(change.encode())
            # Otherwise each turn waits for the disk.
            sessions[way].execute("SET synchronous_commit = off")
        rows = []
        for kind, statement in _KINDS.items():
            spent: dict[str, list[float]] = {way: [] for way in sessions}
            for _ in range(_ROUNDS):
                for way, session in sessions.items():
                    spent[way].append(_cpu(session, statement) / _EVENTS)
            ratio = Ratio(paired(spent["all"], spent["none"]), "without guards")
            rows += [
                Row(f"{kind}: without guards", _us(spent["none"])),
                Row(f"{kind}: all guards", _us(spent["all"]), (ratio,), "1.03 ×"),
            ]
        return rows


def _cpu(session: psycopg.Connection[Any], statement: str) -> float:
    """Seconds that the session's process worked."""
    before = _worked(session)
    session.execute(statement.encode())
    return _worked(session) - before


def _worked(session: psycopg.Connection[Any]) -> float:
    # The kernel's own count of nanoseconds; utime and stime have hundredths of a second.
    return int(Path(f"/proc/{session.info.backend_pid}/schedstat").read_text().split()[0]) / 1e9


def _us(seconds: list[float]) -> tuple[Figure]:
    return (Figure(median(seconds) * 1e6, "µs of CPU"),)
