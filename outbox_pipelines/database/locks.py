"""Locks of commands: advisory ones, and those of tables, which a command takes only for a moment.

Invariants:
- Only one process does something at a time, and a refused one names the other.
- A command that is repeated right after a kill is not refused by its own dead session: the server notices the
  end of a client within two seconds (`client_connection_check_interval`), and a try lasts longer.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg

from outbox_pipelines.core.text import plain
from outbox_pipelines.database import Connection

GOING_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.05
_TRY: Final[LiteralString] = "SELECT pg_try_advisory_{scope}lock({key})"
_UNLOCK: Final[LiteralString] = "SELECT pg_advisory_unlock({key})"
# The server shows a lock of one number as its two halves.
_HOLDER: Final[LiteralString] = """
SELECT l.pid, a.usename, a.application_name,
       to_char(a.backend_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.objsubid = {numbers} AND l.classid::bigint << 32 | l.objid::bigint = {whole}
LIMIT 1"""


@dataclass(frozen=True, slots=True)
class AdvisoryLock:
    """A lock of one number or of two, as expressions of SQL."""

    first: LiteralString
    second: LiteralString = ""

    def take(
        self, connection: Connection, given: Mapping[str, Any], *, for_transaction: bool = False
    ) -> str | None:
        """Take the lock, and wait a moment for it; return who has it if another session does."""
        scope: LiteralString = "xact_" if for_transaction else ""
        query = _TRY.format(scope=scope, key=self._key)
        for _ in tries():
            if connection.execute(query, given).fetchone() == (True,):
                return None
        numbers: LiteralString = "2" if self.second else "1"
        row = connection.execute(_HOLDER.format(numbers=numbers, whole=self._whole), given).fetchone()
        if row is None:
            return "a session that has just ended: run the command again"
        pid, role, name, since = row
        # PostgreSQL hides what sessions of other roles do.
        who = f"session {pid}" + (f" of role {role} ({name or 'unnamed'})" if role else "")
        return plain(who + (f", since {since}" if since else ""))

    def unlock(self, connection: Connection, given: Mapping[str, Any]) -> None:
        """Unlock the lock of the session."""
        connection.execute(_UNLOCK.format(key=self._key), given)

    @property
    def _key(self) -> LiteralString:
        return f"{self.first}, {self.second}" if self.second else self.first

    @property
    def _whole(self) -> LiteralString:
        if not self.second:
            return self.first
        return f"(({self.first})::bigint << 32 | (({self.second})::bigint & 4294967295))"


def tries() -> Iterator[None]:
    """Yield for each try to take what a session that is ending may still have."""
    deadline = time.monotonic() + GOING_SECONDS
    yield
    while time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        yield


def briefly(
    *,
    times: float = math.inf,
    seconds: float = math.inf,
    pause: tuple[float, float] = (0.02, 0.2),
    wait: Callable[[float], object] = time.sleep,
    is_cut: bool = False,
) -> Iterator[suppress]:
    """Yield attempts at what waits only a moment for its locks; when they are over, the loop ends.

    In the loop stand `with attempt:` and a block that returns when it has succeeded.

    Args:
        times: how many attempts, at most.
        seconds: after this time, no further attempt begins.
        pause: seconds between two attempts: from, to.
        wait: what pauses; if it returns true, no further attempt begins.
        is_cut: whether the server also cancels statements that take long; then they and deadlocks are tried
            again as well.
    """
    failures: tuple[type[psycopg.Error], ...] = (psycopg.errors.LockNotAvailable,)
    if is_cut:
        failures += (psycopg.errors.QueryCanceled, psycopg.errors.DeadlockDetected)
    until, made = time.monotonic() + seconds, 0
    while True:
        yield suppress(*failures)
        made += 1
        if made >= times or time.monotonic() > until or wait(random.uniform(*pause)):
            return
