"""Opens connections to the database, all in the same way.

Invariants:
- The outbox's schema is the search_path, with temporary tables last; every statement elsewhere names its
  tables unqualified.
- A session is on a primary, and does not depend on settings of its role or its database (`session.py`).
- If the database is unavailable or refuses the connection, the `SetupError` is one line.
"""

from __future__ import annotations

import re
from typing import Any, Final

import psycopg

from outbox_pipelines.core import session
from outbox_pipelines.core.outages import is_refused
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.table_locks import LOCK_PATIENCE, LimitedSession, is_reading
from outbox_pipelines.errors import RefusedError, SetupError, UnavailableError
from outbox_pipelines.settings import OutboxSettings

Connection = psycopg.Connection[tuple[Any, ...]]

_PROTOCOL: Final[dict[bool, dict[str, Any]]] = {False: {}, True: {"replication": "database"}}
_DIRECT = "; a slot needs a direct connection: name the server itself instead of a pooler"
_OURS = re.compile(r"^permission denied for \w+ outbox_")
_NO_OUTBOX = re.compile(r"^(relation|function) \"?outbox.* does not exist")
_STANDBY = (
    "{} leads to a standby, where nothing can be relayed or changed: name the primary, or all hosts "
    "including the primary"
)


def connect(
    settings: OutboxSettings,
    *,
    name: str,
    beside: Connection | None = None,
    setting: str = "OUTBOX_DSN",
    replication: bool = False,
) -> LimitedSession:
    """Open a connection in autocommit mode, shown in pg_stat_activity under `name`.

    Args:
        beside: connect to the same host as this connection, of all hosts in OUTBOX_DSN.
        setting: the setting that names the database, for messages.
        replication: for the replication protocol; it takes SQL without parameters only.

    Raises:
        UnavailableError: the database is unavailable, is a standby, or refuses the credentials.
        SetupError: the setting is not a connection string, or leads through a pooler in transaction mode.
    """

    def opened(beside: Connection | None) -> LimitedSession:
        return LimitedSession.connect(
            settings.require_dsn(),
            autocommit=True,
            connect_timeout=10,
            application_name=name[:63],
            # A vanished peer is noticed within the lease.
            **session.CONNECTION | {"tcp_user_timeout": int(settings.lease_seconds * 1000)},
            **({} if beside is None else _host(beside)),
            **_PROTOCOL[replication],
        )

    try:
        connection = opened(beside)
    except psycopg.OperationalError as error:
        if "hot standby" in str(error):
            raise UnavailableError(_STANDBY.format(setting)) from None
        remedy = _DIRECT if replication and "startup parameter" in str(error) else ""
        kind = RefusedError if is_refused(error) else UnavailableError
        said = f"{first_line(error)}{_others(error)}{remedy}"
        raise kind(f"cannot connect to the database ({setting}): {said}") from None
    except psycopg.ProgrammingError as error:
        raise SetupError(f"{setting} is not a connection string: {first_line(error)}") from None
    try:
        # First: the settings would reach the sessions of the application.
        if session.is_behind_pooler(connection):
            with opened(connection) as other:
                session.refuse_pooler(connection, other, setting)
        connection.execute("; ".join(session.pin_own(settings.db_schema)))
        connection.limit_locks()
    except BaseException:
        connection.close()
        raise
    return connection


# The Arrow driver reads the types while it connects: it finds none of them by a quoted name, and a short
# timeout of the role or the database ends this query, or the session after it.
_DRIVER_NEEDS: Final = {
    "idle_session_timeout": "0",
    "quote_all_identifiers": "off",
    "statement_timeout": "0",
    "transaction_timeout": "0",
}
# How psycopg lists the failures of several hosts.
_TRIED: Final = re.compile(r"^- host: '([^']*)', port: '([^']*)'", re.MULTILINE)
_RESET_VALUES: Final = "SELECT name, reset_val FROM pg_settings WHERE name = ANY(%s)"


def reading_dsn(dsn: str) -> str:
    """Return the connection string for the Arrow driver; run `session.pin_own` there first.

    Raises:
        UnavailableError: the database is unavailable.
    """
    given: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(dsn, **session.CONNECTION)
    try:
        with psycopg.connect(dsn, autocommit=True, connect_timeout=10, **session.CONNECTION) as connection:
            connection.execute(f"{session.UNHURRIED}; {session.pin(session.OWN)}")
            found = dict(connection.execute(_RESET_VALUES, [list(_DRIVER_NEEDS)]).fetchall())
    except psycopg.OperationalError as error:
        raise UnavailableError(f"cannot connect to the database: {first_line(error)}") from None
    # Only if necessary, because some poolers refuse options.
    options = [
        f"-c {name}={_DRIVER_NEEDS[name]}" for name in sorted(found) if found[name] != _DRIVER_NEEDS[name]
    ]
    if is_reading():
        options.append(f"-c lock_timeout={int(LOCK_PATIENCE * 1000)}")
    if options:
        given["options"] = " ".join([given.get("options") or "", *options])
    return psycopg.conninfo.make_conninfo(**given)


def require_own_session(settings: OutboxSettings, connection: Connection) -> None:
    """Raise `SetupError` if statements of this session may run in others: also where a pooler hides."""
    with connect(settings, name="outbox relay: pooler?", beside=connection) as other:
        session.refuse_pooler(connection, other, "OUTBOX_DSN")


def refuse_standby(connection: Connection) -> None:
    """Raise `UnavailableError` on a standby behind a pooler, which answers the driver's question itself."""
    if connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
        raise UnavailableError(_STANDBY.format("OUTBOX_DSN"))


def refusal(error: psycopg.Error) -> str:
    """Return the database's message, with a remedy if the message has none."""
    said = first_line(error)
    if isinstance(error, psycopg.errors.InsufficientPrivilege) and "row-level security" in said:
        return (
            f"{said}. It would hide rows, so nothing was read: use the owner of the table or a role with "
            "BYPASSRLS, or ALTER TABLE … DISABLE ROW LEVEL SECURITY"
        )
    if isinstance(error, psycopg.errors.InsufficientPrivilege) and _OURS.search(said):
        return (
            f"{said}. The owner of the outbox grants what a role needs: SELECT outbox_grant_relay('…') for a "
            "relay, outbox_grant_operator('…') for a person"
        )
    if _NO_OUTBOX.search(said):
        return f"{said}: run `outbox migrate`, or set OUTBOX_SCHEMA to the schema of the outbox"
    return said


def _others(error: psycopg.OperationalError) -> str:
    """Return which servers were tried, if the first line of an error tells of the last one only."""
    hosts = list(dict.fromkeys(_TRIED.findall(str(error))))
    if len(hosts) < 2:
        return ""
    tried = ", ".join(f"{host}:{port}" for host, port in hosts)
    return f" (the last of {len(hosts)} servers; none could be used: {tried})"


def _host(connection: Connection) -> dict[str, Any]:
    """Return where a connection leads to: one of the hosts, and one of the addresses of its name."""
    info = connection.info
    address = None if info.host.startswith("/") else info.hostaddr or None
    return {"host": info.host, "port": info.port, "hostaddr": address}
