"""The database of the data keys: one connection, and the functions of `sql/keys`; keys in memory for seconds.

Invariants:
- Each question is one statement, and one round trip; an idle connection that the server has closed is opened
  again.
- In memory, a key's time begins when the database was asked, not when it answered: a forgotten one is kept no
  longer.
- If the database is unavailable, has no tables or those of another version, or refuses, a `KeyStoreError`
  names the remedy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, LiteralString, TypeVar

import psycopg

from outbox_pipelines.core import scripts, session
from outbox_pipelines.core.outages import is_outage
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.errors import SetupError
from outbox_pipelines.subject_keys.errors import KeyStoreError
from outbox_pipelines.subject_keys.wrapping import WrappedKey

_VERSIONS: Final = "SELECT name, needs FROM key_store_migrations ORDER BY name"
_MASTER_KEY: Final = "SELECT master_key FROM key_store"
# Repeated, it changes nothing: a second one uses the master key of the first.
_IDENTIFY: Final = "INSERT INTO key_store (master_key) VALUES (%(master_key)s) ON CONFLICT DO NOTHING"
_FIND: Final = "SELECT subject, key_id::text, wrapped, wrapped_by FROM subject_keys_find(%(subjects)s)"
_ADD: Final = """
SELECT subject, key_id::text, wrapped, wrapped_by
FROM subject_keys_add(%(subjects)s, %(wrapped)s, %(master_key)s)"""
_READ: Final = "SELECT key_id::text, wrapped, wrapped_by FROM subject_keys_read(%(ids)s::uuid[])"
_FORGET: Final = """
SELECT key_id::text, forgotten_at, forgotten_by, reason, is_new
FROM subject_keys_forget(%(subject)s, %(actor)s, %(reason)s)"""
# The row's former version, which has the key. FULL would lock out writers.
_VACUUM: Final = "VACUUM (ANALYZE FALSE) subject_keys"
_LIST: Final = """
SELECT subject, key_id::text, forgotten_at, forgotten_by, reason FROM subject_keys
WHERE forgotten_at IS NOT NULL ORDER BY forgotten_at DESC LIMIT %(limit)s"""
# Waits for open inserts by the former one. Those that follow name this one, or are refused.
_MAKE_CURRENT: Final = "UPDATE key_store SET master_key = %(master_key)s"
# By key_id, which never changes: what is added in between is wrapped by the current master key already.
_WRAPPED: Final = """
SELECT subject, key_id::text, wrapped, wrapped_by FROM subject_keys
WHERE wrapped IS NOT NULL AND key_id > %(after)s::uuid ORDER BY key_id LIMIT 1000"""
# Only if it is still that one: what was forgotten since stays destroyed.
_REWRAP: Final = """
UPDATE subject_keys SET wrapped = new, wrapped_by = %(master_key)s
FROM unnest(%(ids)s::uuid[], %(old)s::bytea[], %(new)s::bytea[]) AS given (id, old, new)
WHERE key_id = id AND wrapped = old"""
_SERVER: Final = "SELECT system_identifier::text FROM pg_control_system()"
# After which it is asked whether the connection is open.
_IDLE_SECONDS: Final = 20.0
_FIRST: Final = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True)
class Erasure:
    """A subject that was forgotten."""

    subject: str
    key_id: str
    forgotten_at: datetime
    forgotten_by: str
    reason: str


class KeyStore:
    """The database of data keys; can be used by several threads.

    Args:
        conninfo: a libpq connection string.
        timeout: seconds for the connection, and for each statement.
    """

    def __init__(self, conninfo: str, timeout: float) -> None:
        self._conninfo = conninfo
        self._timeout = timeout
        self._lock = threading.Lock()
        self._connection: psycopg.Connection[Any] | None = None
        self._process = os.getpid()
        self._used_at = 0.0
        self._is_checked = False

    def master_key(self) -> str | None:
        """Return the id of the current master key; None before `keys migrate` has set it."""
        return next((id for (id,) in self._rows(_MASTER_KEY)), None)

    def find(self, subjects: Sequence[str]) -> dict[str, WrappedKey]:
        """Return the key of each subject that has one, also if it is destroyed."""
        rows = self._rows(_FIND, subjects=[*subjects])
        return {subject: WrappedKey(*columns) for subject, *columns in rows}

    def add(self, proposed: Mapping[str, bytes], master_key: str) -> dict[str, WrappedKey]:
        """Store a wrapped key for each subject that has none.

        Returns:
            The keys that the subjects have; none if this master key is not the current one.
        """
        rows = self._rows(_ADD, subjects=[*proposed], wrapped=[*proposed.values()], master_key=master_key)
        return {subject: WrappedKey(*columns) for subject, *columns in rows}

    def read(self, ids: Sequence[str]) -> list[WrappedKey]:
        """Return the keys of these ids, also those that are destroyed; nothing for an unknown id."""
        return [WrappedKey(*columns) for columns in self._rows(_READ, ids=[*ids])]

    def forget(self, subject: str, *, actor: str, reason: str) -> tuple[Erasure, bool] | None:
        """Destroy a key; return the erasure, and whether it was now; None for a subject without a key."""
        for *columns, is_new in self._rows(_FORGET, subject=subject, actor=actor, reason=reason):
            return Erasure(subject, *columns), is_new
        return None

    def vacuum(self) -> str:
        """Remove destroyed keys from the table; return why not, or an empty text."""
        said: list[str] = []
        with self._connected() as connection:

            def note(notice: Any) -> None:
                said.append(str(notice.message_primary))

            connection.add_notice_handler(note)
            try:
                connection.execute("SET statement_timeout = 0")
                connection.execute(_VACUUM)
            finally:
                connection.remove_notice_handler(note)
                self._limit(connection)
        return "; ".join(said)

    def erasures(self, limit: int | None) -> list[Erasure]:
        """Return forgotten subjects, the newest first."""
        return [Erasure(*row) for row in self._rows(_LIST, limit=limit)]

    def migrate(self, master_key: str) -> bool:
        """Create the tables if they are missing; return whether this made the master key the current one."""
        with self._connected(checks=False) as connection, connection.transaction():
            for file in scripts.files("keys"):
                connection.execute(file.read_bytes())
            self._check(connection)
            return connection.execute(_IDENTIFY, {"master_key": master_key}).rowcount == 1

    def make_current(self, master_key: str) -> None:
        """Let only this master key wrap new keys."""
        with self._connected() as connection:
            connection.execute(_MAKE_CURRENT, {"master_key": master_key})

    def wrapped(self) -> Iterator[list[tuple[str, WrappedKey]]]:
        """Yield the subjects and keys that are not destroyed, a thousand at a time."""
        after = _FIRST
        while rows := self._rows(_WRAPPED, after=after):
            yield [(subject, WrappedKey(*columns)) for subject, *columns in rows]
            after = rows[-1][1]

    def rewrap(self, keys: Sequence[tuple[WrappedKey, bytes]], master_key: str) -> int:
        """Replace wrapped keys, each given with how this master key has wrapped it; return how many."""
        given = {
            "ids": [old.key_id for old, _ in keys],
            "old": [old.wrapped for old, _ in keys],
            "new": [new for _, new in keys],
            "master_key": master_key,
        }
        with self._connected() as connection:
            return connection.execute(_REWRAP, given).rowcount

    def server(self) -> str:
        """Return the identifier of the server's data directory, which its replicas and backups share."""
        [(found,)] = self._rows(_SERVER)
        return str(found)

    def close(self) -> None:
        """Close the connection; the next question opens another one."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()

    def _rows(self, query: LiteralString, **given: Any) -> list[Any]:
        with self._connected() as connection:
            return connection.execute(query, given).fetchall()

    @contextmanager
    def _connected(self, *, checks: bool = True) -> Iterator[psycopg.Connection[Any]]:
        if self._process != os.getpid():
            # The lock may be held by a thread that the fork lacks, and the connection is the parent's.
            self._process, self._lock, self._connection = os.getpid(), threading.Lock(), None
        with self._lock:
            try:
                connection = self._open()
                if checks and not self._is_checked:
                    self._check(connection)
                yield connection
            except psycopg.Error as error:
                raise self._error(error) from None
            except SetupError as error:
                raise KeyStoreError(str(error)) from None

    def _check(self, connection: psycopg.Connection[Any]) -> None:
        rows = connection.execute(_VERSIONS).fetchall()
        scripts.require("keys", dict(rows), "the key store", "run `outbox keys migrate`")
        self._is_checked = True

    def _open(self) -> psycopg.Connection[Any]:
        idle, self._used_at = time.monotonic() - self._used_at, time.monotonic()
        if self._connection is not None and not self._connection.closed:
            if idle < _IDLE_SECONDS:
                return self._connection
            # The server, or a firewall, may have closed it.
            with suppress(psycopg.OperationalError):
                self._connection.execute("")
                return self._connection
            self._connection.close()
        self._connection = psycopg.connect(
            self._conninfo,
            autocommit=True,
            # Behind a pooler, a prepared statement is in another session.
            prepare_threshold=None,
            connect_timeout=max(2, round(self._timeout)),
            application_name="outbox keys",
            **session.CONNECTION,
        )
        self._limit(self._connection)
        return self._connection

    def _limit(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute(f"SET statement_timeout = {round(self._timeout * 1000)}".encode())

    def _error(self, error: psycopg.Error) -> KeyStoreError:
        said = first_line(error)
        if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.UndefinedFunction):
            return KeyStoreError(
                f"the key store has no tables ({said}): run `outbox keys migrate`, or correct OUTBOX_KEYS_DSN"
            )
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return KeyStoreError(
                f"the key store refuses: {said}. Its owner grants what a role needs: "
                "SELECT subject_keys_grant('…', 'writer'), 'reader' or 'operator'"
            )
        if is_outage(error):
            return KeyStoreError(f"the key store (OUTBOX_KEYS_DSN) is unavailable: {said}")
        return KeyStoreError(f"the key store refuses: {said}")


_Value = TypeVar("_Value")


class KeyCache(Generic[_Value]):
    """The newest values by name; can be used by several threads."""

    def __init__(self, seconds: float, size: int) -> None:
        self._seconds, self._size = seconds, size
        self._values: dict[str, tuple[float, _Value]] = {}
        self._lock = threading.Lock()

    def known(self, names: Iterable[str]) -> tuple[dict[str, _Value], list[str]]:
        """Return values by name, and the names that have none."""
        since = time.monotonic() - self._seconds
        values: dict[str, _Value] = {}
        missing: list[str] = []
        for name in names:
            found = self._values.get(name)
            if found is None or found[0] <= since:
                missing.append(name)
            else:
                values[name] = found[1]
        return values, missing

    def put(self, name: str, value: _Value, asked: float) -> None:
        """Keep a value from the time on when the database was asked."""
        with self._lock:
            self._values.pop(name, None)
            self._values[name] = asked, value
            if len(self._values) > self._size:
                del self._values[next(iter(self._values))]
