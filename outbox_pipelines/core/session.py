"""Settings that every session of this package relies on, whatever its role or its database defines.

Invariants:
- Settings that change the result or the success of a statement are set here, once; settings that only change
  its speed are set where it matters.
- A pooler in transaction mode may run each transaction on another server connection. A session lock would
  belong to two relays, or stay behind in the pool; so would settings, in the sessions of the application. To
  detect one changes no session.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import psycopg
from psycopg import sql

from outbox_pipelines.errors import SetupError

# Of several hosts, the primary. A standby lags, does not show locks, and treats running transactions as
# finished. Drivers older than PostgreSQL 14 do not know "primary".
CONNECTION: Final[dict[str, Any]] = {
    # A peer that vanished, or a firewall that drops packets in silence, is noticed within these times. The
    # kernel would wait for two hours for an answer, and for 15 minutes for an acknowledgment.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    # Not set by a statement: the driver uses it from the first statement on.
    "client_encoding": "UTF8",
    "target_session_attrs": "primary" if psycopg.pq.version() >= 140000 else None,
}
# The server's function whose notice says that it no longer waits for a synchronous standby.
_WAIT_FOR_STANDBY: Final = "SyncRepWaitForLSN"
# How values are written and read. Also for a session that runs a handler's statements; there, transactions,
# names, policies and timeouts depend on its role.
SHARED: Final = {
    "array_nulls": "on",
    "bytea_output": "hex",
    "DateStyle": "ISO, YMD",
    "default_transaction_deferrable": "off",
    "default_transaction_read_only": "off",
    "extra_float_digits": "1",
    "idle_session_timeout": "0",
    "IntervalStyle": "postgres",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
}
# How long statements may take, and what names and times mean: only in sessions of this package alone.
OWN: Final = SHARED | {
    # A statement that waits for a lock, or works long, ends with its client; so does what the session holds.
    "client_connection_check_interval": "2s",
    "default_transaction_isolation": "read committed",
    "idle_in_transaction_session_timeout": "0",
    "lock_timeout": "0",
    "plan_cache_mode": "auto",
    # Otherwise a policy hides rows silently: they would never be published.
    "row_security": "off",
    # Kafka, a slot, a connector or a file changes after a commit, which a crash or a failover must not undo.
    "synchronous_commit": "on",
    "TimeZone": "UTC",
    # PostgreSQL 17 and later.
    "transaction_timeout": "0",
}
# First: the next statement may take longer than a short timeout, above all if it is compiled.
UNHURRIED: Final = "SET statement_timeout = 0; SET jit = off"
# A name that the server does not know would be an error.
_PIN: Final = """
SELECT set_config(name, value, false) FROM (VALUES {pins}) AS pin (name, value)
WHERE CASE name
    WHEN 'transaction_timeout' THEN current_setting('server_version_num')::int >= 170000
    -- Elsewhere a server may be unable to do so, and refuse the value.
    WHEN 'client_connection_check_interval' THEN version() ~ 'linux'
    -- It waits for more than `on` does.
    WHEN 'synchronous_commit' THEN current_setting('synchronous_commit') <> 'remote_apply'
    ELSE true END"""


def is_canceled_wait(notice: Any) -> bool:
    """Return whether a notice says that a commit is in this server alone, so that a failover can undo it.

    PostgreSQL reports success: `pg_cancel_backend` ends the wait for a synchronous standby, and not the
    transaction.

    Args:
        notice: psycopg's or asyncpg's.
    """
    names = ("source_function", "server_source_function")
    return any(getattr(notice, name, None) == _WAIT_FOR_STANDBY for name in names)


def pin(settings: dict[str, str]) -> str:
    """Return the statement that makes these settings hold for the session it runs in."""
    pairs = [
        sql.SQL("({}, {})").format(sql.Literal(name), sql.Literal(value)) for name, value in settings.items()
    ]
    return sql.SQL(_PIN).format(pins=sql.SQL(", ").join(pairs)).as_string()


@cache
def pin_own(schema: str) -> tuple[str, ...]:
    """Return the statements for a session that only this package uses; search_path is the outbox's schema."""
    return (
        *UNHURRIED.split("; "),
        pin(OWN),
        # A temporary table comes first where pg_temp is not named: one could stand before ours.
        sql.SQL("SET search_path = {}, pg_temp").format(sql.Identifier(schema)).as_string(),
    )


# A short timeout of the role or the database must not end it. Both in one transaction, without BEGIN.
_PID = "SET LOCAL statement_timeout = 0; SELECT pg_backend_pid()"
# The order in which two connections ask. Whether a pooler assigns the connection used last or the next in
# turn, at least one of the two then sees a second server connection.
_ORDER = (0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1)


def is_behind_pooler(connection: psycopg.Connection[Any]) -> bool:
    """Return whether a pooler answers for the database: it gives clients process ids of its own."""
    return _pid(connection) != connection.info.backend_pid


async def is_behind_pooler_async(connection: psycopg.AsyncConnection[Any]) -> bool:
    """As `is_behind_pooler`."""
    cursor = await connection.execute(_PID, prepare=False)
    cursor.nextset()
    return await cursor.fetchone() != (connection.info.backend_pid,)


def refuse_pooler(one: psycopg.Connection[Any], other: psycopg.Connection[Any], setting: str) -> None:
    """Raise `SetupError` if statements of one session run on several server connections.

    Args:
        setting: that names the database, for the message.
    """
    pids: tuple[set[int], set[int]] = (set(), set())
    for n in _ORDER:
        pids[n].add(_pid((one, other)[n]))
    if len(pids[0]) > 1 or len(pids[1]) > 1 or pids[0] & pids[1]:
        raise SetupError(
            f"{setting} leads through a pooler in transaction mode, where locks and settings of a session "
            "reach other clients: name the database itself, or a pool in session mode"
        )


def _pid(connection: psycopg.Connection[Any]) -> int:
    cursor = connection.execute(_PID, prepare=False)
    cursor.nextset()
    row = cursor.fetchone()
    assert row is not None
    return int(row[0])
