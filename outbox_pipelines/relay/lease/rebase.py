"""Adopts an outbox whose position was made in another database, or whose sequence was set back.

Invariants:
- No event is lost: an event that is not known to be published is published again. Duplicates are possible.
- Afterwards the sequence is above every number the outbox has had, and no unpublished event has a number that
  another event has.
- Everything happens in one transaction, under a lock that writers wait for.

Transaction ids have no meaning outside their database, and the rows of a restored dump or a copy contain
those of the old database. Therefore unpublished rows get the id of this transaction, as if it had written
them, and the position covers the transactions that ended before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import psycopg

from outbox_pipelines.core import sequence
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.lease import rebase_sql
from outbox_pipelines.relay.relay_sql import IDENTITY, SHARD_IDENTITY
from outbox_pipelines.settings import OutboxSettings


@dataclass(frozen=True, slots=True)
class Rebased:
    """What a rebase found and changed."""

    published: int | None
    """Events known to be published; None if the position was made in this database."""
    waiting: int | None
    """Events that will be published, perhaps again; None if the position was made in this database."""
    raised: tuple[int, int] | None = None
    """Where the sequence was and is now, if it was behind."""
    renumbered: int = 0
    """Unpublished events that have a new number."""


def refuse_copy(connection: Connection) -> None:
    """Raise `SetupError` if the position was made in another database, whose transaction ids mean nothing."""
    if _is_copy(connection):
        raise SetupError(
            "the relay's position was made in another database (a restored dump or a copy): "
            "run `outbox relay --rebase`, which explains and adopts it, before any writer starts"
        )


def refuse_behind(connection: Connection) -> None:
    """Raise `SequenceError` if the sequence gives numbers that the outbox has already."""
    if problem := sequence.behind(*_one(connection.execute(sequence.STATE))):
        raise sequence.SequenceError(problem)


def rebase(settings: OutboxSettings) -> Rebased | None:
    """Convert the positions of all shards to this database, and the sequence; None if nothing is to be done.

    Raises:
        SetupError: the table is busy, or belongs to another role.
    """
    with connect(settings, name="outbox relay: rebase") as connection:
        is_copy = _is_copy(connection)
        is_behind = sequence.behind(*_one(connection.execute(sequence.STATE))) is not None
        if not (is_copy or is_behind or _one(connection.execute(rebase_sql.TWICE))[0]):
            return None
        connection.autocommit = False
        try:
            connection.execute(rebase_sql.LOCK_OUTBOX)
            connection.execute(rebase_sql.DECLARE_REBASE)
            if not is_copy:
                connection.execute(rebase_sql.FENCE)
            own, now = _one(connection.execute(rebase_sql.NOW))
            drawn, last = _one(connection.execute(sequence.STATE))
            parameters = {"own": own, "drawn": drawn, "last": last, "is_copy": is_copy}
            renumbered, to = _one(connection.execute(rebase_sql.RENUMBER, parameters))
            if to > drawn:
                connection.execute(rebase_sql.RAISE_SEQUENCE, {"to": to})
            changed = Rebased(None, None, (drawn, to) if to > drawn else None, renumbered)
            if not is_copy:
                return changed
            published, waiting = _one(connection.execute(rebase_sql.REBASE_ROWS, {"own": own, "now": now}))
            connection.execute(rebase_sql.REBASE_PARKED)
            connection.execute(rebase_sql.REBASE_SHARDS, {"done": now})
            connection.execute(rebase_sql.REBASE_DAYS, {"now": now})
            connection.execute(rebase_sql.FORGET_PROGRESS)
            return replace(changed, published=published, waiting=waiting)
        except psycopg.errors.LockNotAvailable:
            raise SetupError(
                "the outbox is being written to: stop the writers, run the rebase, start the writers"
            ) from None
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.FeatureNotSupported) as error:
            raise SetupError(f"{first_line(error)}: run it as the role that owns the outbox") from None


def _is_copy(connection: Connection) -> bool:
    identity = connection.execute(IDENTITY).fetchone()
    saved = connection.execute(SHARD_IDENTITY).fetchone()
    return saved is not None and saved != identity


def _one(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    row = cursor.fetchone()
    assert row is not None
    return row
