"""Adopts an outbox whose position was made in another database: a restored dump or a copy.

Invariants:
- No event is lost: an event that is not known to be published is published again. Duplicates are possible.
- Everything happens in one transaction, under a lock that writers wait for.

Transaction ids have no meaning outside their database, and the rows contain those of the old database.
Therefore unpublished rows get the id of this transaction, as if it had written them, and the position covers
the transactions that ended before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import queries
from outbox_pipelines.secret import first_line
from outbox_pipelines.settings import Settings


@dataclass(frozen=True, slots=True)
class Rebased:
    """What a rebase found: events known to be published, and events that will be published (again)."""

    published: int
    waiting: int


def refuse_copy(connection: Connection) -> None:
    """Raise `SetupError` if the position was made in another database, whose transaction ids mean nothing."""
    identity = connection.execute(queries.IDENTITY).fetchone()
    saved = connection.execute(queries.SHARD_IDENTITY).fetchone()
    if saved is not None and saved != identity:
        raise SetupError(
            "the relay's position was made in another database (a restored dump or a copy): "
            "run `outbox relay --rebase`, which explains and adopts it, before any writer starts"
        )


def rebase(settings: Settings) -> Rebased | None:
    """Convert the positions of all shards to this database; return None if they already are.

    Raises:
        SetupError: the table is busy, or belongs to another role.
    """
    with connect(settings, name="outbox relay: rebase") as connection:
        identity = connection.execute(queries.IDENTITY).fetchone()
        saved = connection.execute(queries.SHARD_IDENTITY).fetchone()
        if identity is None or saved is None or saved == identity:
            return None
        connection.autocommit = False
        try:
            connection.execute(queries.LOCK_OUTBOX)
            connection.execute(queries.DECLARE_REBASE)
            own, now = _one(connection.execute(queries.NOW))
            counts = _one(connection.execute(queries.REBASE_ROWS, {"own": own, "now": now}))
            connection.execute(queries.REBASE_PARKED)
            connection.execute(queries.REBASE_SHARDS, {"done": now})
            connection.execute(queries.REBASE_DAYS, {"now": now})
            connection.execute(queries.FORGET_PROGRESS)
        except psycopg.errors.LockNotAvailable:
            raise SetupError(
                "the outbox is being written to: stop the writers, run the rebase, start the writers"
            ) from None
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.FeatureNotSupported) as error:
            raise SetupError(f"{first_line(error)}: run it as the role that owns the outbox") from None
        return Rebased(*counts)


def _one(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    row = cursor.fetchone()
    assert row is not None
    return row
