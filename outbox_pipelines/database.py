"""Connections to the database, opened in one way.

Invariants:
- The outbox's schema is the search_path; every statement elsewhere names its tables unqualified.
- A database that cannot be reached or entered is a `SetupError` of one line.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from outbox_pipelines.errors import AwayError, SetupError
from outbox_pipelines.settings import Settings

Connection = psycopg.Connection[tuple[Any, ...]]


def connect(settings: Settings, *, name: str) -> Connection:
    """A connection in autocommit mode, seen in pg_stat_activity under `name`.

    Raises:
        AwayError: the database is away, or refuses the credentials.
        SetupError: OUTBOX_DSN is not a connection string.
    """
    try:
        connection = psycopg.connect(
            settings.require_dsn(),
            autocommit=True,
            connect_timeout=10,
            application_name=name[:63],
            # A peer that vanished is noticed within the lease, not after the kernel's two hours.
            keepalives_idle=5,
            keepalives_interval=2,
            keepalives_count=3,
            tcp_user_timeout=int(settings.lease_seconds * 1000),
        )
    except psycopg.OperationalError as error:
        raise AwayError(f"no entry to the database (OUTBOX_DSN): {first_line(error)}") from None
    except psycopg.ProgrammingError as error:
        raise SetupError(f"OUTBOX_DSN is not a connection string: {first_line(error)}") from None
    connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(settings.db_schema)))
    return connection


def first_line(error: Exception) -> str:
    """The first line of a driver's message: the rest repeats it or gives a stack."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
