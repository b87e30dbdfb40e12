"""The owner of a marked table.

Invariants:
- One owner at a time: a session advisory lock, in a session that the database ends if its owner is silent for
  the length of the lease.
- A claim has the claims' lock in shared mode until it ends. A table counts as taken once that lock was free.
  So no predecessor still has a row locked, whatever happened to the session that owned the table.
- The relay needs no table of its own: what operators see is in the session's application_name.
- Relays that share a table (`order = "none"`) all own it: the lock of each is shared. So a relay that keeps
  an order is not active at the same time as those that do not.
- Relays with different descriptions of one table do not run at the same time: each session has a lock that
  names its description, in shared mode.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from collections.abc import Mapping as Parameters
from contextlib import closing, suppress
from typing import Any, Final

import psycopg
from psycopg import sql

from outbox_pipelines.core import outages
from outbox_pipelines.database import Connection, connect, refuse_standby, require_own_session
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import examine, existing_sql, findings
from outbox_pipelines.existing.check import of_settings, open_mapping
from outbox_pipelines.existing.table_statements import Statements
from outbox_pipelines.relay import adoption
from outbox_pipelines.relay.core.breaker import Breaker, State
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.kafka.message import needs_json, needs_time
from outbox_pipelines.relay.lease.owner_session import Ownership, limit_silence
from outbox_pipelines.relay.read import contents
from outbox_pipelines.relay.relay_sql import PLAN_EACH
from outbox_pipelines.settings import RelaySettings

_LOG = logging.getLogger(__name__)
UNAVAILABLE: Final = {"Kafka": "Kafka unavailable, ", outages.REGISTRY: "registry unavailable, "}
"""How a session's name begins while its relay waits for one of these."""
# The upper half of a lock's number, above the table's OID: "obx" and the purpose of the lock.
_HOLDS: Final = 0x6F62_7801
_WAITS: Final = 0x6F62_7802
_CLAIMS: Final = 0x6F62_7803
# Combined with the OID: the first of the two numbers of a lock whose second number is of the description.
_DESCRIBES: Final = 0x6F62_7804


class TableOwnership(Ownership):
    """The right to relay one marked table.

    Attributes:
        shard: always 0: a marked table has one shard.
        statements: the SQL for this table.
    """

    shard = 0

    def __init__(self, settings: RelaySettings, owner: str) -> None:
        super().__init__(settings, owner)
        self._session_name = f"outbox relay: {owner}"
        self._breaker_reason: str | None = None
        self._has_lock = False
        self._has_taken = False
        try:
            self._begin()
        except BaseException:
            self._connection.close()
            raise

    def _begin(self) -> None:
        self._connection.execute(PLAN_EACH)
        refuse_standby(self._connection)
        require_own_session(self._settings, self._connection)
        self._described = open_mapping(self._settings)
        findings.refuse(of_settings(self._connection, self._settings, self._described))
        self.mapping = adoption.followed(self._connection, self._described)
        found = examine.check(self._connection, self.mapping)
        for warning in found.warnings:
            _LOG.warning("%s", warning)
        self._oid = found.oid
        self.statements = Statements(
            self.mapping,
            found.types,
            max_attempts=self._settings.max_attempts,
            with_time=needs_time(self._settings),
            as_json=needs_json(self._settings),
        )
        self._refuse_other_descriptions()
        self.pid = _pid(self._connection)
        self._connection.execute(existing_sql.SET_PATIENCE)
        limit_silence(self._connection, self._settings)

    def _refuse_other_descriptions(self) -> None:
        # Another relay of this table would take it over with another order, or mark its rows differently.
        lock = {"table": _DESCRIBES ^ self._oid, "digest": self.mapping.digest}
        self.execute(existing_sql.DESCRIBE, lock)
        for pid, name in self.execute(existing_sql.DESCRIBED_OTHERWISE, lock):
            raise SetupError(
                f"{shown(name, pid)} relays {self.mapping} by a description that differs from that of "
                "OUTBOX_TABLE: give both relays the same file, or stop that relay first"
            )

    def try_wait(self) -> bool:
        return self._ask(existing_sql.TRY_LOCK, self._lock(_WAITS))

    def try_take(self) -> bool:
        # Not while a predecessor's claim is open.
        if self.mapping.is_shared:
            # A row that another relay has claimed is skipped.
            self._has_lock = self._has_lock or self._ask(existing_sql.TRY_SHARE, self._lock(_HOLDS))
            self._has_taken = self._has_lock and not self._must_wait()
            return self._has_taken
        self._has_lock = self._has_lock or self._ask(existing_sql.TRY_LOCK, self._lock(_HOLDS))
        if self._must_wait():
            return False
        if self._has_lock and self._ask(existing_sql.NO_CLAIMS, self._lock(_CLAIMS)):
            self._ask(existing_sql.UNLOCK, self._lock(_WAITS))
            self._has_taken = True
        return self._has_taken

    def is_awaited(self) -> bool:
        return not self.mapping.is_shared and bool(self.execute(existing_sql.OWNER, self._lock(_WAITS)))

    def end_silent(self) -> None:
        """Do nothing: the database ends the session of a frozen relay after the lease."""

    def intruder(self) -> tuple[int, str] | None:
        # `describe_owner` names any session with the lock.
        return (0, self._why_wait()) if self._must_wait() else None

    def describe_owner(self) -> str:
        if self._must_wait():
            return self._why_wait()
        rows = self.execute(existing_sql.OWNER, self._lock(_HOLDS))
        if not rows:
            return f"{self.mapping} is owned by another relay"
        pid, name, _, since = rows[0]
        return f"{self.mapping} is owned by {shown(name, pid)}" + (f" since {since}" if since else "")

    def begin_claim(self, connection: Connection) -> None:
        """Begin a transaction in which rows may be claimed or marked.

        Raises:
            ShardLostError: another relay may have taken the table.
        """
        query = sql.SQL(existing_sql.BEGIN).format(
            claims=key(_CLAIMS, self._oid),
            key=key(_HOLDS, self._oid),
            pid=self.pid,
            table=adoption.regclass(self.mapping),
            oid=self._oid,
        )
        cursor = connection.execute(query)
        while cursor.nextset():
            pass
        if cursor.fetchone() != (True,):
            connection.execute("ROLLBACK")
            raise ShardLostError(f"the session that owned {self.mapping} has ended, or the table was renamed")

    def connect(self) -> Connection:
        """Return another connection for claims; its transactions also end if the relay is silent.

        Raises:
            ShardLostError: it does not see the table's lock: it leads to another server, or the lock is lost.
        """
        connection = connect(self._settings, name=f"{self._session_name}, claims", beside=self._connection)
        try:
            connection.execute(PLAN_EACH)
            limit_silence(connection, self._settings, "idle_in_transaction_session_timeout")
            # On another server it would never find anything to claim.
            self.begin_claim(connection)
            connection.execute("ROLLBACK")
            self._also(connection, _pid(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    def beat(self) -> None:
        try:
            found = self.execute(existing_sql.PID, {})
        except psycopg.errors.InFailedSqlTransaction:
            # The claiming thread has just had an error, and reports it.
            return
        if found != [(self.pid,)]:
            raise ShardLostError(f"the session of table {self.mapping} is not the one that took it")
        if self.mapping.table != self._described.table:
            # After `drain` nothing is left for this relay. The next attempt says what to do instead.
            try:
                adoption.followed(self._connection, self._described)
            except SetupError as error:
                raise ShardLostError(str(error)) from None

    def show_kafka(self, breaker: Breaker) -> None:
        """Show in the log and in the session's name what the relay waits for."""
        is_closed = breaker.state is State.CLOSED
        if breaker.state is State.OPEN:
            self._breaker_reason = breaker.reason
            _LOG.warning("%s", outages.described(breaker.reason))
        elif is_closed:
            _LOG.warning("%s is available again", outages.server_of(self._breaker_reason))
        # At the beginning, because PostgreSQL truncates names to 63 bytes.
        server = outages.server_of(self._breaker_reason)
        name = self._session_name if is_closed else f"{UNAVAILABLE[server]}{self._session_name}"
        self.execute("SELECT set_config('application_name', %(name)s, false)", {"name": name})

    def read(
        self, query: bytes, parameters: Parameters[str, Any], seqs: Sequence[int]
    ) -> Generator[tuple[int, tuple[Any, ...] | str]]:
        """Yield the content of rows, one after the other, or why it cannot be read: see `contents.read`."""
        try:
            with closing(contents.read(self._connection, query, parameters, seqs)) as found:
                yield from found
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        if self._has_lock:
            with suppress(psycopg.OperationalError):
                self._connection.execute(existing_sql.UNLOCK, self._lock(_HOLDS))
        self._connection.close()

    def _must_wait(self) -> bool:
        """Return whether the append-only outbox has events that must be published before this table's."""
        return self.execute(adoption.MUST_WAIT, {"oid": self._oid}) == [(True,)]

    def _why_wait(self) -> str:
        return (
            f"rows of {self.mapping} wait for the events that were written into the append-only outbox: run "
            "`outbox adopt back` again"
        )

    @property
    def _name(self) -> str:
        return str(self.mapping)

    def _lock(self, lock: int) -> dict[str, int]:
        return {"key": key(lock, self._oid)}


def _pid(connection: Connection) -> int:
    """Return the server process of a connection. The driver's own value may come from a pooler."""
    ((pid,),) = connection.execute(existing_sql.PID)
    return int(pid)


def key(lock: int, oid: int) -> int:
    """Return the number of an advisory lock of a table."""
    return lock << 32 | oid


def holding(oid: int) -> int:
    """Return the number of the lock that the owner of a table has."""
    return key(_HOLDS, oid)


def awaiting(oid: int) -> int:
    """Return the number of the lock of a relay that waits for a table."""
    return key(_WAITS, oid)


def shown(name: str | None, pid: int) -> str:
    """Return a session's name as operators know it; PostgreSQL hides the names of other roles' sessions."""
    if name and "outbox relay: " not in name:
        return f"session {pid} ({name}), which is not a relay: SELECT pg_terminate_backend({pid}) ends it"
    return name.replace("outbox relay: ", "") if name else f"process {pid} of the database"
