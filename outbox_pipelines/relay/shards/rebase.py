"""Adopts an outbox whose position was made in another database: a restored dump, a copy.

Invariants:
- Never loses: what is not known as published is published again; may duplicate.
- One transaction, under a lock that writers wait for.

Transaction ids mean nothing outside of their database, and rows carry those of the old one. So unpublished
rows get the id of this very transaction, as if it had written them, and the position is what was over before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from outbox_pipelines.database import connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import queries
from outbox_pipelines.secret import first_line
from outbox_pipelines.settings import Settings


@dataclass(frozen=True, slots=True)
class Rebased:
    """What a rebase found: events known as published, and events that will be published (again)."""

    published: int
    waiting: int


def rebase(settings: Settings) -> Rebased | None:
    """Makes the positions of all shards some of this database; None where it is already.

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
            raise SetupError("the outbox is being written: stop the writers, rebase, start them") from None
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.FeatureNotSupported) as error:
            raise SetupError(f"{first_line(error)}: rebase as the role that owns the outbox") from None
        return Rebased(*counts)


def _one(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    row = cursor.fetchone()
    assert row is not None
    return row
