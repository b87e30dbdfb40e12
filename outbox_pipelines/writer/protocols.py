"""The types of `emit`'s arguments: targets as protocols, so that type checkers need no driver, and options.

If the types were named, a driver that is not installed would be `Any`: `emit` would accept anything and
return the wrong type. The result of `close` distinguishes synchronous from asynchronous targets.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from datetime import datetime, timedelta
from typing import Any, Protocol, TypedDict, TypeVar
from uuid import UUID

Closed = TypeVar("Closed", covariant=True)
Later = Coroutine[Any, Any, None]


class PsycopgConnection(Protocol[Closed]):
    @property
    def pgconn(self) -> Any: ...
    def close(self) -> Closed: ...


class PsycopgCursor(Protocol[Closed]):
    @property
    def pgresult(self) -> Any: ...
    def close(self) -> Closed: ...


class Psycopg2Connection(Protocol):
    def get_backend_pid(self) -> int: ...


class Psycopg2Cursor(Protocol):
    @property
    def lastrowid(self) -> Any: ...


class SQLAlchemy(Protocol[Closed]):
    """Connections and sessions, also scoped ones."""

    def begin_nested(self) -> Any: ...
    def close(self) -> Closed: ...


class Django(Protocol):
    in_atomic_block: bool

    def cursor(self) -> Any: ...


class Asyncpg(Protocol):
    def is_in_transaction(self) -> bool: ...
    def close(self) -> Later: ...


Target = (
    PsycopgConnection[None]
    | PsycopgCursor[None]
    | Psycopg2Connection
    | Psycopg2Cursor
    | SQLAlchemy[None]
    | Django
)
AsyncTarget = PsycopgConnection[Later] | PsycopgCursor[Later] | SQLAlchemy[Later] | Asyncpg


class Options(TypedDict, total=False):
    """The optional arguments of `emit`, which have the defaults of its implementation."""

    headers: Mapping[str, object] | None
    idempotency_key: str | None
    correlation_id: str | UUID | None
    causation_id: str | UUID | None
    traceparent: str | None
    version: int | None
    deliver_after: datetime | timedelta | None
    later_events_wait: bool
