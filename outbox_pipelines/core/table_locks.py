"""Sessions of commands that only read: they do not wait for a table's lock without end.

Invariants:
- Such a session waits `LOCK_PATIENCE` seconds for a lock, and then names the session that has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final

import psycopg

from outbox_pipelines.core import answers
from outbox_pipelines.errors import LockedError

LOCK_PATIENCE: Final = 5.0
_reads: Final[ContextVar[bool]] = ContextVar("reads", default=False)

# Only this mode conflicts with reading. Also of a session that waits for it: readers queue behind it.
_LOCKED: Final = """
SELECT l.relation::regclass::text, l.granted, l.pid, a.usename, a.application_name,
       to_char(a.xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY c.relnamespace <> current_schema()::regnamespace, c.relispartition, l.granted DESC, a.xact_start
LIMIT 1"""


@contextmanager
def reading_only() -> Iterator[None]:
    """Limit how long sessions that the block opens wait for locks, in this thread."""
    token = _reads.set(True)
    try:
        yield
    finally:
        _reads.reset(token)


def is_reading() -> bool:
    """Return whether sessions that are opened now only read."""
    return _reads.get()


class LimitedSession(answers.Session):
    """A connection with these limits."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._reads = _reads.get()

    def limit_locks(self) -> None:
        """Limit waits for locks, if this session was opened for reading only."""
        if self._reads:
            self.execute(f"SET lock_timeout = {int(LOCK_PATIENCE * 1000)}".encode())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        is_locked = self._reads and isinstance(error, psycopg.errors.LockNotAvailable)
        locked = self._locked() if is_locked else None
        super().__exit__(kind, error, traceback)
        if locked is not None:
            raise locked from None

    def _locked(self) -> LockedError:
        """Return the error that names the session whose lock this one has waited for."""
        self.rollback()
        row = self.execute(_LOCKED).fetchone()
        if row is None:
            return LockedError(
                f"waited {LOCK_PATIENCE:g} s for a lock that is free now: run the command again"
            )
        relation, is_granted, pid, role, name, since = row
        who = (
            "a prepared transaction" if pid is None else f"session {pid} of role {role} ({name or 'unnamed'})"
        )
        what = "has locked" if is_granted else "waits for a lock on"
        end = f", or SELECT pg_terminate_backend({pid})" if pid is not None else ""
        return LockedError(
            f"waited {LOCK_PATIENCE:g} s: {who} {what} {relation}"
            f"{f', in a transaction since {since}' if since else ''}. Wait for its end{end}"
        )
