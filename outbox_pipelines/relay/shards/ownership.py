"""Who relays a shard, and how far it is.

Invariants:
- One owner at a time: a session advisory lock, an epoch in the position row that every settle checks, and
  a session that the database ends when its owner falls silent for the lease.
- The position moves forward in one statement, committed synchronously: with a lost commit, transaction ids
  that are given out again would count as published.
- A position counts in the database it was made in, and in no other.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, LiteralString

import psycopg

from outbox_pipelines.database import Connection, connect, refuse_standby
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import queries
from outbox_pipelines.relay.core.errors import ShardLostError
from outbox_pipelines.relay.shards import pooler
from outbox_pipelines.secret import first_line
from outbox_pipelines.settings import Settings


class NoSuchShardError(SetupError):
    """The shard that was named is none, or none any more."""


class ShardOwnership:
    """The right to relay one shard: wait for it, take it, keep it alive, give it back. For one thread.

    Args:
        shard: which one; None for whichever is free.
    """

    def __init__(self, settings: Settings, shard: int | None, owner: str) -> None:
        self._settings = settings
        self._given = shard
        self._schema = settings.db_schema
        self._owner = owner
        self._connection = connect(settings, name=f"outbox relay: {owner}")
        self.shard = shard or 0
        self.shards = 1
        self._waits_for: set[int] = set()
        self._candidates: list[int] = []
        self._candidates_at = -math.inf
        self._idle: dict[int, tuple[tuple[Any, ...], float]] = {}
        self._epoch = 0
        self._known: dict[str, Any] = {}
        """Parameters that every statement may name, beside the key."""
        self.identity = ""
        """Of database and schema, in Kafka's names."""
        self.predecessor_crashed = False
        """Whether it was another process, which did not give the shard back."""
        self.crashes = 0
        """How often in a row a relay of this shard has died without giving it back."""
        self.crash_guard_seq: int | None = None
        """The seq at which the last one died, if it knew, and how often one did in a row."""
        self.crash_guard_crashes = 0
        # Before anything is said to a session that may be another one next time.
        pooler.refuse(self._connection, settings)
        self._connection.execute("SET synchronous_commit = on")
        # Silence costs the place, at the shard or behind it: a stopped process would else keep it for ever.
        self._connection.execute(
            "SELECT set_config('idle_session_timeout', %s, false)",
            [f"{int(settings.lease_seconds * 1000)}ms"],
        )
        self._check_database()

    def try_wait(self) -> bool:
        """Becomes the one that waits for the shard; False where another one does already."""
        for shard in set(self._shards()) - self._waits_for:
            if self._ask(queries.TRY_LOCK, self._waiting(shard)):
                self._waits_for.add(shard)
        return bool(self._waits_for)

    def try_take(self) -> bool:
        """Takes the shard if nobody holds it."""
        for shard in self._shards():
            if self._ask(queries.TRY_LOCK, self._lock(shard)):
                for waiting in self._waits_for:
                    self._ask(queries.UNLOCK, self._waiting(waiting))
                self._waits_for.clear()
                if self._begin(shard):
                    return True
                # It was there a moment ago: their number has changed.
                self._ask(queries.UNLOCK, self._lock(shard))
                self._candidates_at = -math.inf
        return False

    def _begin(self, shard: int) -> bool:
        rows = self.execute(queries.TAKE, {"shard": shard, "owner": self._owner})
        if not rows:
            return False
        self.shard = shard
        self._epoch, self.shards, *more = rows[0]
        self.predecessor_crashed, self.crashes, self.crash_guard_seq, self.crash_guard_crashes, *rest = more
        self._adopt(rest)
        return True

    def _adopt(self, row: list[Any]) -> None:
        """Called when the shard is taken, with the rest of its row: for those who settle it."""

    def _shards(self) -> list[int]:
        """Those that may be taken, in an order of one's own: standbys do not queue at the first."""
        now = time.monotonic()
        if now - self._candidates_at > 1.0:
            self._candidates_at = now
            found = [row[0] for row in self.execute(queries.SHARD_NUMBERS, {})]
            if self._given is not None and self._given not in found:
                raise NoSuchShardError(
                    f"shard {self._given} does not exist, there are {len(found)}: see `outbox shards`"
                )
            self._candidates = [self._given] if self._given is not None else found
            random.shuffle(self._candidates)
        return self._candidates

    def _lock(self, shard: int) -> dict[str, Any]:
        return {"lock": f"{self._schema}.outbox_shards", "shard": shard}

    def _waiting(self, shard: int) -> dict[str, Any]:
        return {"lock": f"{self._schema}.outbox_shards.next", "shard": shard}

    def is_held(self) -> bool:
        """Whether this relay still holds the shard."""
        return bool(self.execute(queries.FIND_AGAIN, {}))

    def is_awaited(self) -> bool:
        """Whether another relay waits for this shard."""
        return self._ask(queries.LOCK_IS_HELD, self._waiting(self.shard))

    def connect(self, name: str) -> Connection:
        """Open a further connection of this relay, to the server on which it holds the shard.

        Raises:
            ShardLostError: the connection leads to another server, or the shard is lost.
            UnavailableError: the database is unavailable.
        """
        connection = connect(self._settings, name=f"outbox relay: {name}", beside=self._connection)
        try:
            ((pid,),) = self.execute(queries.PID, {})
            standby = connection.execute(queries.IS_STANDBY).fetchone()
            lock = self._lock(self.shard) | {"pid": pid}
            held = connection.execute(queries.LOCK_IS_HELD_BY, lock).fetchone()
            if standby != (False,) or held != (True,):
                raise ShardLostError(
                    f"the connection for the {name} does not see the lock of shard {self.shard}: it leads to "
                    "another server (a standby behind a load balancer?), or the lock is lost. OUTBOX_DSN "
                    "must lead to the primary alone"
                )
        except psycopg.OperationalError as error:
            connection.close()
            raise self._lost(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def beat(self) -> None:
        """Send a heartbeat without moving the position. From any thread.

        Raises:
            ShardLostError: the session has ended.
        """
        self.execute(queries.HEARTBEAT, {})

    def end_silent(self) -> None:
        """End the session of a relay that has done nothing for twice the lease, by this process's clock.

        The database ends it after the lease by its own clock, which takes longer if that clock went back.
        """
        now = time.monotonic()
        for shard in self._shards():
            (row, *_) = self.execute(queries.IDLE_OWNER, self._lock(shard)) or [()]
            seen, since = self._idle.get(shard, ((), now))
            if not row or row != seen:
                self._idle[shard] = row, now
            elif now - since > 2 * self._settings.lease_seconds:
                pid, start, changed = row
                # Of another role: a person must end it.
                with suppress(psycopg.errors.InsufficientPrivilege):
                    self.execute(queries.END_IDLE, {"pid": pid, "start": start, "since": changed})

    def intruder(self) -> tuple[int, str] | None:
        """Return a session that holds the lock of a shard and is no relay: its process, and a description."""
        for shard in self._shards():
            if found := self.execute(queries.INTRUDER, self._lock(shard)):
                pid, who = found[0]
                return pid, (
                    f"the lock of shard {shard} is held by {who}, which is not its relay. If it stays, "
                    f"end it: SELECT pg_terminate_backend({pid})"
                )
        return None

    def describe_owner(self) -> str:
        """Who holds the shard since when, for people."""
        if intruder := self.intruder():
            return intruder[1]
        row = self._connection.execute(queries.OWNER, {"shard": self.shard}).fetchone()
        owner, since = row if row and row[0] else ("another relay", None)
        return f"shard {self.shard} is held by {owner}" + (f" since {since}" if since else "")

    @property
    def key(self) -> dict[str, int]:
        """Shard, number of shards and epoch, for statements that only the owner may make."""
        return {"shard": self.shard, "shards": self.shards, "epoch": self._epoch}

    def execute(self, query: LiteralString, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """A statement in the session that holds the shard; its rows.

        Raises:
            ShardLostError: the session is gone.
        """
        try:
            given = {**self.key, **self._known, **parameters}
            cursor = self._connection.execute(query, given)
            return cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside commits together, or not at all."""
        try:
            with self._connection.transaction():
                yield
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    def release(self) -> None:
        """Gives the shard back, if it is held."""
        # Where the session has ended, lock and place are free already; else they would be in a moment, for
        # which a successor waits.
        if self._epoch:
            with suppress(psycopg.OperationalError):
                self._connection.execute(queries.RELEASE, self.key)
                self._connection.execute(queries.UNLOCK, self._lock(self.shard))
        self._connection.close()

    def _check_database(self) -> None:
        refuse_standby(self._connection)
        row = self._connection.execute(queries.IDENTITY).fetchone()
        assert row is not None
        system_identifier, database = row
        schema = hashlib.sha256(self._schema.encode()).hexdigest()[:8]
        self.identity = f"{system_identifier:x}-{database}-{schema}"
        saved = self._connection.execute(queries.SHARD_IDENTITY).fetchone()
        if saved is not None and saved != (system_identifier, database):
            raise SetupError(
                "the relay's position was made in another database (a restored dump, a copy): "
                "`outbox relay --rebase` explains and adopts it; run it before any writer starts"
            )
        filled = self._connection.execute(queries.SUBSCRIPTION).fetchone()
        if filled is not None:
            raise SetupError(
                f"the subscription {filled[0]} fills this outbox by logical replication: relay the database "
                "of its publisher, or leave the outbox out of the publication"
            )

    def _ask(self, query: LiteralString, lock: dict[str, Any]) -> bool:
        try:
            row = self._connection.execute(query, lock).fetchone()
        except psycopg.OperationalError as error:
            raise self._lost(error) from error
        return bool(row and row[0])

    def _lost(self, error: Exception) -> ShardLostError:
        return ShardLostError(f"the session at shard {self.shard} has ended: {first_line(error)}")
