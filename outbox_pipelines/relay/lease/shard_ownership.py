"""The owner of a shard, and its position.

Invariants:
- One owner at a time, by three means: a session advisory lock; an epoch in the position row, which every
  settle checks; a session that the database ends if its owner is silent for the length of the lease.
- One statement moves the position forward, with a synchronous commit. If the commit were lost, the database
  would assign the same transaction ids again, and their events would count as published.
- A position is valid only in the database in which it was made.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psycopg

from outbox_pipelines.core.text import counted
from outbox_pipelines.database import Connection, connect, refuse_standby, require_own_session
from outbox_pipelines.database.schema import no_position
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import adoption, relay_sql
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.lease.owner_session import Ownership, limit_silence
from outbox_pipelines.relay.lease.rebase import refuse_behind, refuse_copy
from outbox_pipelines.settings import RelaySettings


def identity_of(connection: Connection, schema: str) -> str:
    """Return what identifies database and schema in names at Kafka."""
    ((system_identifier, database),) = connection.execute(relay_sql.IDENTITY).fetchall()
    return f"{system_identifier:x}-{database}-{hashlib.sha256(schema.encode()).hexdigest()[:8]}"


class NoSuchShardError(SetupError):
    """The requested shard does not exist, or no longer exists."""


class ShardOwnership(Ownership):
    """The right to relay one shard.

    Args:
        shard: the shard; None for the first free one.
    """

    def __init__(self, settings: RelaySettings, shard: int | None, owner: str) -> None:
        super().__init__(settings, owner)
        self._wanted = shard
        self._schema = settings.db_schema
        self._owner = owner
        self.shard = shard or 0
        self.shards = 1
        self._waits_for: set[int] = set()
        self._candidates: list[int] = []
        self._candidates_at = -math.inf
        self._idle: dict[int, tuple[tuple[Any, ...], float]] = {}
        self._epoch = 0
        self.identity = ""
        """Identifies database and schema in names at Kafka."""
        self.predecessor_crashed = False
        """Whether the previous owner was another process and did not return the shard."""
        self.crashes = 0
        """How many times in a row a relay of this shard has crashed (ended without returning it)."""
        self.crash_guard_seq: int | None = None
        """The seq at which the last relay crashed, if known."""
        self.crash_guard_crashes = 0
        """How many times in a row a relay has crashed at that seq."""
        # First: behind a pooler, the next statement may run in another session.
        require_own_session(settings, self._connection)
        # Plans are kept, also from a time when no event was parked.
        self._connection.execute(relay_sql.BY_INDEX)
        ((self.pid,),) = self._connection.execute(relay_sql.PID).fetchall()
        limit_silence(self._connection, settings)
        self._check_database()

    def try_wait(self) -> bool:
        for shard in set(self._shards()) - self._waits_for:
            if self._ask(relay_sql.TRY_LOCK, self._waiting(shard)):
                self._waits_for.add(shard)
        return bool(self._waits_for)

    def try_take(self) -> bool:
        for shard in self._shards():
            if self._ask(relay_sql.TRY_LOCK, self._lock(shard)):
                for waiting in self._waits_for:
                    self._ask(relay_sql.UNLOCK, self._waiting(waiting))
                self._waits_for.clear()
                if self._begin(shard):
                    return True
                # The shard existed a moment ago: the number of shards has changed.
                self._ask(relay_sql.UNLOCK, self._lock(shard))
                self._candidates_at = -math.inf
        return False

    def _begin(self, shard: int) -> bool:
        rows = self.execute(relay_sql.TAKE, {"shard": shard, "owner": self._owner})
        if not rows:
            return False
        self.shard = shard
        self._epoch, self.shards, *more = rows[0]
        self.predecessor_crashed, self.crashes, self.crash_guard_seq, self.crash_guard_crashes, *rest = more
        self._adopt(rest)
        return True

    def _adopt(self, row: list[Any]) -> None:
        """Take over the rest of the shard's row when the shard is taken. For subclasses that settle it."""

    def _shards(self) -> list[int]:
        """Return the shards that may be taken, in random order: standbys do not all queue at the first."""
        now = time.monotonic()
        if now - self._candidates_at > 1.0:
            self._candidates_at = now
            shards = [row[0] for row in self.execute(relay_sql.SHARD_NUMBERS, {})]
            if not shards:
                raise no_position(self._schema)
            if self._wanted is not None and self._wanted not in shards:
                raise NoSuchShardError(
                    f"shard {self._wanted} does not exist; the outbox has {counted(len(shards), 'shard')}: "
                    "see `outbox shards`"
                )
            self._candidates = [self._wanted] if self._wanted is not None else shards
            random.shuffle(self._candidates)
        return self._candidates

    def _lock(self, shard: int) -> dict[str, Any]:
        return {"lock": f"{self._schema}.outbox_shards", "shard": shard}

    def _waiting(self, shard: int) -> dict[str, Any]:
        return {"lock": f"{self._schema}.outbox_shards.next", "shard": shard}

    def is_owned(self) -> bool:
        """Return whether this relay still owns the shard."""
        return bool(self.execute(relay_sql.FIND_AGAIN, {}))

    def is_awaited(self) -> bool:
        return self._ask(relay_sql.LOCK_IS_HELD, self._waiting(self.shard))

    def connect(self, name: str, *, replication: bool = False) -> Connection:
        """Open a further connection of this relay, to the server on which it owns the shard.

        Args:
            replication: for the replication protocol; it takes SQL without parameters only.

        Raises:
            ShardLostError: the connection leads to another server, or the shard is lost.
            UnavailableError: the database is unavailable.
        """
        connection = connect(
            self._settings, name=f"outbox relay: {name}", beside=self._connection, replication=replication
        )
        try:
            ((pid,),) = self.execute(relay_sql.PID, {})
            standby = connection.execute(relay_sql.IS_STANDBY).fetchone()
            lock = self._lock(self.shard) | {"pid": pid}
            has_lock = psycopg.ClientCursor(connection).execute(relay_sql.LOCK_IS_HELD_BY, lock).fetchone()
            if standby != (False,) or has_lock != (True,):
                raise ShardLostError(
                    f"the connection for the {name} does not see the lock of shard {self.shard}: it leads to "
                    "another server (for example a standby behind a load balancer), or the lock is lost. "
                    "OUTBOX_DSN must lead only to the primary"
                )
            ((own_pid,),) = connection.execute(relay_sql.PID)
            self._also(connection, own_pid)
        except psycopg.OperationalError as error:
            connection.close()
            raise self._lost(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def beat(self) -> None:
        self.execute(relay_sql.HEARTBEAT, {})

    def end_silent(self) -> None:
        """End the session of a relay that has been idle for twice the lease, by this process's clock.

        The database ends it after the lease, but by its own clock: that takes longer if the clock was set
        back.
        """
        now = time.monotonic()
        for shard in self._shards():
            (row, *_) = self.execute(relay_sql.IDLE_OWNER, self._lock(shard)) or [()]
            seen, since = self._idle.get(shard, ((), now))
            if not row or row != seen:
                self._idle[shard] = row, now
            elif now - since > 2 * self._settings.lease_seconds:
                pid, changed = row
                # The session belongs to another role: an operator must end it.
                with suppress(psycopg.errors.InsufficientPrivilege):
                    self.execute(relay_sql.END_IDLE, {"pid": pid, "since": changed})

    def intruder(self) -> tuple[int, str] | None:
        if why := adoption.draining(self._connection):
            return 0, why
        for shard in self._shards():
            if rows := self.execute(relay_sql.INTRUDER, self._lock(shard)):
                pid, who = rows[0]
                return pid, (
                    f"the lock of shard {shard} is owned by {who}, which is not its relay. If this message "
                    f"repeats, end that session: SELECT pg_terminate_backend({pid})"
                )
        return None

    def describe_owner(self) -> str:
        if intruder := self.intruder():
            return intruder[1]
        row = self._connection.execute(relay_sql.OWNER, {"shard": self.shard}).fetchone()
        owner, since = row if row and row[0] else ("another relay", None)
        return f"shard {self.shard} is owned by {owner}" + (f" since {since}" if since else "")

    @property
    def key(self) -> dict[str, int]:
        """Shard, number of shards and epoch: parameters of statements that only the owner may run."""
        return {"shard": self.shard, "shards": self.shards, "epoch": self._epoch}

    @property
    def _known(self) -> Mapping[str, Any]:
        return self.key

    @property
    def _name(self) -> str:
        return f"shard {self.shard}"

    def close(self) -> None:
        # If the session has ended, the lock is free already. Otherwise an explicit unlock is faster than the
        # end of the session, and a successor may be waiting.
        if self._epoch:
            with suppress(psycopg.OperationalError):
                self._connection.execute(relay_sql.RELEASE, self.key)
                self._connection.execute(relay_sql.UNLOCK, self._lock(self.shard))
        self._connection.close()

    def _check_database(self) -> None:
        refuse_standby(self._connection)
        self.identity = identity_of(self._connection, self._schema)
        refuse_copy(self._connection)
        filled = self._connection.execute(relay_sql.SUBSCRIPTION).fetchone()
        if filled is not None:
            raise SetupError(
                f"subscription {filled[0]} fills this outbox by logical replication: relay the publisher's "
                "database, or remove the outbox from the publication"
            )
        # After that: a subscription does not copy the sequence.
        refuse_behind(self._connection)
