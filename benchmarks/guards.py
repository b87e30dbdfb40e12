"""What the guards of the outbox cost an INSERT: CPU time of PostgreSQL's process, with and without them.

Invariants:
- Each variant has a database and a session of its own; they take short turns, so that a drift affects all.
- The kernel counts the time of the session's process: the client and other processes are not included.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Figure, Ratio, Row, paired
from outbox_pipelines.settings import Settings

_ROUNDS = sized(600, 100)
_COLUMNS = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers) "
_ONE = _COLUMNS + "VALUES ('order', %s, 'order.placed', %s::jsonb, %s::jsonb)"
_MANY = (
    _COLUMNS + "SELECT 'order', (i %% 500)::text, 'order.placed', jsonb_build_object('number', i, "
    "'customer', md5(i::text), 'state', 'placed', 'note', md5((i * 7)::text) || md5((i * 11)::text)), NULL "
    "FROM generate_series(1, 1000) i"
)
_PAYLOAD = f'{{"number": 5, "customer": "{"c" * 32}", "state": "placed", "note": "{"n" * 64}"}}'
_HEADERS = '{"tenant": "acme"}'
_WITHOUT_GUARDS = "DROP TRIGGER outbox_checked ON outbox; DROP TRIGGER outbox_unique_key ON outbox"
_WITHOUT_LIMITS = """
DROP TRIGGER outbox_checked ON outbox;
CREATE TRIGGER outbox_checked BEFORE INSERT ON outbox FOR EACH ROW
WHEN (NEW.headers IS NOT NULL
      OR NEW.created_at <> transaction_timestamp() OR NEW.tx <> pg_current_xact_id()
      OR NEW.seq <> currval('outbox_seq')
      OR NOT has_function_privilege('outbox_unrestricted()'::regprocedure, 'EXECUTE'))
EXECUTE FUNCTION outbox_check_row()"""
_WAYS = {"none": _WITHOUT_GUARDS, "no limits": _WITHOUT_LIMITS, "all": "SELECT 1"}
# Statement, its values, how often in a turn, events.
_KINDS: dict[str, tuple[str, list[str | None] | None, int, int]] = {
    "one event": (_ONE, ["5", _PAYLOAD, None], 10, 10),
    "one event with headers": (_ONE, ["5", _PAYLOAD, _HEADERS], 10, 10),
    "1,000 events in one INSERT": (_MANY, None, 1, 1000),
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
            sessions[way].prepare_threshold = 0
        rows = []
        for kind, (statement, values, times, events) in _KINDS.items():
            spent: dict[str, list[float]] = {way: [] for way in sessions}
            for _ in range(_ROUNDS if times > 1 else _ROUNDS // 10):
                for way, session in sessions.items():
                    spent[way].append(_cpu(session, statement, values, times) / events)
            rows += [
                Row(f"{kind}: without guards", _us(spent["none"])),
                Row(
                    f"{kind}: all but the limits on sizes",
                    _us(spent["no limits"]),
                    (Ratio(paired(spent["no limits"], spent["none"]), "without guards"),),
                ),
                Row(
                    f"{kind}: all guards",
                    _us(spent["all"]),
                    (
                        Ratio(paired(spent["all"], spent["none"]), "without guards"),
                        Ratio(paired(spent["all"], spent["no limits"]), "without limits"),
                    ),
                    "1.03 ×, 1.01 ×",
                ),
            ]
        return rows


def _cpu(
    session: psycopg.Connection[Any], statement: str, values: list[str | None] | None, times: int
) -> float:
    """Seconds that the session's process worked."""
    before = _worked(session)
    for _ in range(times):
        session.execute(statement.encode(), values or ())
    return _worked(session) - before


def _worked(session: psycopg.Connection[Any]) -> float:
    # The kernel's own count of nanoseconds; utime and stime have hundredths of a second.
    return int(Path(f"/proc/{session.info.backend_pid}/schedstat").read_text().split()[0]) / 1e9


def _us(seconds: list[float]) -> tuple[Figure]:
    return (Figure(median(seconds) * 1e6, "µs of CPU"),)
