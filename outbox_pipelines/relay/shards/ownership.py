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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg

from outbox_pipelines.database import Connection, connect, refuse_standby
from outbox_pipelines.errors import SetupError
from outbox_pipelines.position import Position, Snapshot
from outbox_pipelines.relay import bodies, queries
from outbox_pipelines.relay.core.blocked import DEATH_PAUSE, LONGEST_PAUSE
from outbox_pipelines.relay.core.errors import ShardLostError
from outbox_pipelines.relay.parking import queries as parked_queries
from outbox_pipelines.relay.shards import pooler
from outbox_pipelines.secret import first_line
from outbox_pipelines.settings import Settings

# Events to put aside, by their seq: the state, and why.
Parked = Mapping[int, tuple[str, str | None]]


class NoSuchShardError(SetupError):
    """The shard that was named is none, or none any more."""


@dataclass(slots=True)
class Settled:
    """What a settle moved the shard to."""

    events: int
    lag: float | None
    """Age of the newest of these events when they were settled, in seconds; None without a progress row."""
    topics: frozenset[str] = frozenset()
    """Where the relay has sent events since it took the shard, as far as they are still there."""


class Shard:
    """The right to relay one shard: wait for it, settle, keep it alive, give it back. For one thread.

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
        self.identity = ""
        """Of database and schema, in Kafka's names."""
        self.tick_id: str | None = None
        """Of the tick at hand, or the last one, in exactly_once."""
        self.predecessor_crashed = False
        """Whether it was another process, which did not give the shard back."""
        self.crashes = 0
        """How often in a row a relay of this shard has died without giving it back."""
        self.crash_guard_seq: int | None = None
        """The seq at which the last one died, if it knew, and how often one did in a row."""
        self.crash_guard_crashes = 0
        self._ctid = ""
        self._position: Position | None = None
        self._progress_at = 0.0
        self._events = 0
        self._newest: int | None = None
        self._open_from = "-infinity"
        self._has_command = bool(settings.dead_letter_command)
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
        self._epoch, self._ctid, done, target, last_seq, self.tick_id, self.shards, *rest = rows[0]
        (
            self.predecessor_crashed,
            self._open_from,
            self.crashes,
            self.crash_guard_seq,
            self.crash_guard_crashes,
        ) = rest
        self._position = Position(Snapshot.parse(done), Snapshot.parse(target) if target else None, last_seq)
        return True

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

    @property
    def position(self) -> Position:
        """How far the shard was when it was taken, or settled last."""
        assert self._position is not None, "take the shard first"
        return self._position

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

    def settle(
        self,
        position: Position,
        events: int = 0,
        newest: int | None = None,
        *,
        parked: Sequence[Parked] = (),
        tick_id: str | None = None,
        last: bool = False,
    ) -> Settled | None:
        """Moves the position over so many events, of which `newest` has the last `seq`; a heartbeat too.

        Args:
            parked: what is put aside in the same transaction.
            tick_id: of the tick that is opened with this position, in exactly_once.

        Returns what was written as progress: at most once a second, and at the last settle; else None.

        Raises:
            ShardLostError: the shard has another owner, or the session is gone.
        """
        self._events += events
        self._newest = newest or self._newest
        progress = self._events > 0 and (last or time.monotonic() - self._progress_at >= 1.0)
        query = queries.SETTLE_WITH_PROGRESS if progress else queries.SETTLE
        parameters = {
            "done": str(position.done),
            "target": str(position.target) if position.target else None,
            "last_seq": position.last_seq,
            "events": self._events,
            "newest": self._newest,
            "tick": tick_id,
        }
        if parked:
            with self.transaction():
                row = self._move(query, parameters)
                for some in parked:
                    self._park(some)
        else:
            row = self._move(query, parameters)
        self._ctid, self._position = row[0], position
        self.tick_id = tick_id or self.tick_id
        if not progress:
            return None
        settled = Settled(self._events, row[1])
        self._open_from = row[2]
        self._progress_at, self._events = time.monotonic(), 0
        return settled

    @property
    def key(self) -> dict[str, int]:
        """Shard, number of shards and epoch, for statements that only the owner may make."""
        return {"shard": self.shard, "shards": self.shards, "epoch": self._epoch}

    def calm(self) -> None:
        """Nothing that was on its way at the last death kills."""
        self.execute(queries.CALM, {})
        self.crashes, self.crash_guard_seq, self.crash_guard_crashes = 0, None, 0

    def show_breaker(self, state: str, reason: str | None) -> None:
        """Says in the database what the relay sees of Kafka, for people."""
        self.execute(queries.BREAKER, {"state": state, "reason": reason})

    def execute(self, query: LiteralString, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """A statement in the session that holds the shard; its rows.

        Raises:
            ShardLostError: the session is gone.
        """
        try:
            given = {**self.key, "open_from": self._open_from, "command": self._has_command, **parameters}
            cursor = self._connection.execute(query, given)
            return cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    def read_parked(
        self, seqs: Sequence[int], may_take_large: Callable[[], bool]
    ) -> Generator[tuple[int, tuple[Any, ...] | str]]:
        """The content of parked events, one after the other, or why it cannot be read: see `bodies.read`."""
        try:
            read = bodies.read(self._connection, parked_queries.BODIES, {}, seqs, may_take_large)
            with closing(read) as found:
                yield from found
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    def count(self, events: int) -> None:
        """So many were published beside the position; written with the next progress."""
        self._events += events

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

    def _move(self, query: LiteralString, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        ctid = self._ctid
        while not (rows := self.execute(query, {**parameters, "ctid": ctid})):
            # Moved by VACUUM FULL, or by somebody who changes the number of shards.
            found = self.execute(queries.FIND_AGAIN, {})
            if not found:
                raise ShardLostError(f"another relay has taken shard {self.shard}")
            ctid = found[0][0]
        return rows[0]

    def park(self, parked: Sequence[Parked]) -> None:
        """Puts aside ahead of the position: before the Kafka transaction that passes over these events."""
        with self.transaction():
            if not self.execute(queries.FIND_AGAIN, {}):
                raise ShardLostError(f"another relay has taken shard {self.shard}")
            for some in parked:
                self._park(some)

    def released(self, seqs: list[int]) -> None:
        """These parked events are published."""
        self.execute(parked_queries.RELEASED, {"seqs": seqs})

    def forget_tick(self) -> None:
        """From here on the database alone counts."""
        self.execute(queries.FORGET_TICK, {})
        self.tick_id = None

    def _park(self, parked: Parked) -> None:
        ends = {"from": min(parked), "to": max(parked)}
        ((start, stop),) = self.execute(queries.DAYS, ends)
        states, errors = zip(*parked.values(), strict=True)
        rows = {"seqs": list(parked), "states": list(states), "errors": list(errors)}
        self.execute(parked_queries.PARK, {**ends, **rows, "start": start, "stop": stop})
        if self.crash_guard_crashes and self.crash_guard_seq in parked:
            pause = min(LONGEST_PAUSE, DEATH_PAUSE * self._settings.retry_seconds)
            self.execute(parked_queries.DIED_ALONE, {"seq": self.crash_guard_seq, "pause": pause})
        dead = [seq for seq, (state, _) in parked.items() if state == "failed"]
        if dead and self._has_command:
            self.execute(parked_queries.COMMANDS_DUE, {"seqs": dead})

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
