"""Who relays an existing table.

Invariants:
- One owner at a time: a session advisory lock, in a session that the database ends when its owner falls
  silent for the lease.
- A claim holds the claims' lock shared until it is over. The table counts as taken once that lock was free:
  so no row is still locked by a predecessor, whatever became of the session that owned it.
- The relay needs no table of its own: what is shown to people is in the session's name.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from collections.abc import Mapping as Parameters
from contextlib import closing, contextmanager, suppress
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from outbox_pipelines.database import Connection, connect, refuse_standby
from outbox_pipelines.errors import SetupError
from outbox_pipelines.parsers.table_mapping import Mapping, read_mapping
from outbox_pipelines.relay import bodies
from outbox_pipelines.relay.core.breaker import Breaker, State
from outbox_pipelines.relay.core.errors import ShardLostError
from outbox_pipelines.relay.kafka.encoding import needs_time
from outbox_pipelines.relay.marked_table import pg_catalog, queries
from outbox_pipelines.relay.marked_table.queries import Statements
from outbox_pipelines.relay.queries import TUNE
from outbox_pipelines.relay.shards import pooler
from outbox_pipelines.secret import first_line
from outbox_pipelines.settings import Settings

_LOG = logging.getLogger(__name__)
# Above a table's OID, which fills the lower half of a lock's number: "obx" and what the lock is for.
_HOLDS: Final = 0x6F62_7801
_WAITS: Final = 0x6F62_7802
_CLAIMS: Final = 0x6F62_7803


class TableOwnership:
    """The right to relay one existing table: wait for it, keep it, give it back.

    Attributes:
        shard: the only one, as others count them.
        statements: made for this table.
    """

    shard = 0

    def __init__(self, settings: Settings, owner: str) -> None:
        self._settings = settings
        self._name = f"outbox relay: {owner}"
        self._has_lock = False
        self._has_taken = False
        self._connection = connect(settings, name=self._name)
        try:
            self._begin()
        except BaseException:
            self._connection.close()
            raise

    def _begin(self) -> None:
        self._connection.execute(TUNE)
        refuse_standby(self._connection)
        if self._connection.info.parameter_status("server_encoding") == "SQL_ASCII":
            raise SetupError(
                "the encoding of the database is SQL_ASCII, in which bytes have no meaning: relay a table "
                "of a database with an encoding, such as UTF8"
            )
        pooler.refuse(self._connection, self._settings)
        self.mapping = open_mapping(self._settings)
        if self._settings.delivery == "exactly_once":
            raise SetupError(
                f"{self.mapping} has no place for the position that exactly_once needs: leave "
                "OUTBOX_DELIVERY at at_least_once"
            )
        if needs_time(self._settings) and "created_at" not in self.mapping.columns:
            raise SetupError(
                f"OUTBOX_VALUE_FORMAT={self._settings.value_format} needs the time of an event: name the "
                "column with it as created_at in the file of OUTBOX_TABLE_FILE"
            )
        found = pg_catalog.check(self._connection, self.mapping)
        for warning in found.warnings:
            _LOG.warning("%s", warning)
        self._oid = found.oid
        self.statements = Statements(
            self.mapping,
            found.types,
            max_attempts=self._settings.max_attempts,
            with_time=needs_time(self._settings),
        )
        self._pid = _pid(self._connection)
        # Silence costs the place: a stopped process would else keep it for ever.
        self._set("idle_session_timeout", lease(self._settings))

    def try_wait(self) -> bool:
        """Becomes the one that waits for the table; False where another one does already."""
        return self._ask(queries.TRY_LOCK, _WAITS)

    def try_take(self) -> bool:
        """Takes the table if nobody holds it, and no claim of a predecessor is left."""
        self._has_lock = self._has_lock or self._ask(queries.TRY_LOCK, _HOLDS)
        if self._has_lock and self._ask(queries.NO_CLAIMS, _CLAIMS):
            self._ask(queries.UNLOCK, _WAITS)
            self._has_taken = True
        return self._has_taken

    def is_awaited(self) -> bool:
        """Whether another relay waits for this table."""
        return bool(self.execute(queries.OWNER, {"key": key(_WAITS, self._oid)}))

    def end_silent(self) -> None:
        """The database ends the session of a frozen relay after the lease."""

    def intruder(self) -> None:
        """Return None: `describe_owner` names whatever session holds the lock."""

    def describe_owner(self) -> str:
        """Who holds the table since when, for people."""
        rows = self.execute(queries.OWNER, {"key": key(_HOLDS, self._oid)})
        if not rows:
            return f"{self.mapping} is held by another relay"
        pid, name, _, since = rows[0]
        return f"{self.mapping} is held by {shown(name, pid)}" + (f" since {since}" if since else "")

    def begin_claim(self, connection: Connection) -> None:
        """Begins a transaction in which rows may be claimed or marked.

        Raises:
            ShardLostError: another relay may have taken the table.
        """
        query = sql.SQL(queries.BEGIN).format(
            claims=key(_CLAIMS, self._oid), key=key(_HOLDS, self._oid), pid=self._pid
        )
        cursor = connection.execute(query)
        while cursor.nextset():
            pass
        if cursor.fetchone() != (True,):
            connection.execute("ROLLBACK")
            raise ShardLostError(f"the session that held {self.mapping} has ended")

    def connect(self) -> Connection:
        """A further connection for claims; they too end when the relay falls silent.

        Raises:
            ShardLostError: it does not see the table's lock: it leads to another server, or the lock is lost.
        """
        connection = connect(self._settings, name=f"{self._name}, claims", beside=self._connection)
        try:
            connection.execute(TUNE)
            connection.execute(
                "SELECT set_config('idle_in_transaction_session_timeout', %s, false)", [lease(self._settings)]
            )
            # Elsewhere it would find nothing to claim, for ever.
            self.begin_claim(connection)
            connection.execute("ROLLBACK")
        except BaseException:
            connection.close()
            raise
        return connection

    def beat(self) -> None:
        """A sign of life. From any thread.

        Raises:
            ShardLostError: the session is gone, or a pooler has given it another one's.
        """
        try:
            found = self.execute(queries.PID, {})
        except psycopg.errors.InFailedSqlTransaction:
            # The thread that claims has just had an error, and will say so itself.
            return
        if found != [(self._pid,)]:
            raise ShardLostError(f"the session at table {self.mapping} is not the one that took it")

    def show_kafka(self, breaker: Breaker) -> None:
        """Says in the log, and in the session's name, what the relay sees of Kafka."""
        is_closed = breaker.state is State.CLOSED
        if breaker.state is State.OPEN:
            _LOG.warning("Kafka is away: %s", breaker.reason)
        elif is_closed:
            _LOG.warning("Kafka is back")
        # In front: names are cut at 63 bytes.
        self._set("application_name", self._name if is_closed else f"Kafka is away, {self._name}")

    def execute(
        self, query: LiteralString | bytes, parameters: Parameters[str, Any]
    ) -> list[tuple[Any, ...]]:
        """A statement in the session that holds the table; its rows.

        Raises:
            ShardLostError: the session is gone.
        """
        try:
            cursor = self._connection.execute(query, parameters)
            return cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    def read(self, query: bytes, seqs: Sequence[int]) -> Generator[tuple[int, tuple[Any, ...] | str]]:
        """The content of rows, one after the other, or why it cannot be read: see `bodies.read`."""
        try:
            with closing(bodies.read(self._connection, query, {}, seqs)) as found:
                yield from found
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Everything inside commits together, or not at all."""
        try:
            with self._connection.transaction():
                yield self._connection
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    def release(self) -> None:
        """Gives the table back, if it is held."""
        if self._has_lock:
            with suppress(psycopg.OperationalError):
                self._connection.execute(queries.UNLOCK, {"key": key(_HOLDS, self._oid)})
        self._connection.close()

    def _ask(self, query: LiteralString, lock: int) -> bool:
        rows = self.execute(query, {"key": key(lock, self._oid)})
        return bool(rows and rows[0][0])

    def _set(self, setting: str, value: str) -> None:
        self.execute("SELECT set_config(%(setting)s, %(value)s, false)", {"setting": setting, "value": value})

    def _lost(self, error: Exception) -> ShardLostError:
        return ShardLostError(f"the session at table {self.mapping} has ended: {first_line(error)}")


def _pid(connection: Connection) -> int:
    """The process behind a connection. Not as the driver knows it, which a pooler may have told it."""
    row = connection.execute(queries.PID).fetchone()
    assert row is not None
    return int(row[0])


def open_mapping(settings: Settings) -> Mapping:
    """The mapping that OUTBOX_TABLE_FILE names, read now: it may have changed since the settings were.

    Raises:
        SetupError: it is none any more.
    """
    assert settings.table_file is not None
    try:
        return read_mapping(settings.table_file)
    except ValueError as error:
        raise SetupError(f"OUTBOX_TABLE_FILE={settings.table_file}: {error}") from None


def key(lock: int, oid: int) -> int:
    """The number of an advisory lock of a table."""
    return lock << 32 | oid


def holding(oid: int) -> int:
    """Return the number of the lock that the owner of a table holds."""
    return key(_HOLDS, oid)


def shown(name: str | None, pid: int) -> str:
    """A session's name as people know it; those of other roles are hidden from some."""
    if name and "outbox relay: " not in name:
        return f"session {pid} ({name}), which is no relay: SELECT pg_terminate_backend({pid}) ends it"
    return name.replace("outbox relay: ", "") if name else f"process {pid} of the database"


def lease(settings: Settings) -> str:
    """How long a session may be silent, for PostgreSQL."""
    return f"{int(settings.lease_seconds * 1000)}ms"
