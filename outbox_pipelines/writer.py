"""Write an outbox event in the transaction of your business rows: one call, `emit`.

    with psycopg.connect(dsn) as connection:
        connection.execute("UPDATE orders SET state = 'placed' WHERE id = %s", [order_id])
        emit(connection, "order", order_id, "order.placed", {"total": 5})

Invariants:
- The event is written on the caller's connection and in the caller's transaction, or not at all: `emit` never
  commits, never opens a transaction of its own, never falls back.
- Nothing is imported but the standard library and the caller's own driver.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

if TYPE_CHECKING:
    import psycopg
    import sqlalchemy
    import sqlalchemy.orm

    Target = (
        psycopg.Connection[Any]
        | psycopg.Cursor[Any]
        | sqlalchemy.Connection
        | sqlalchemy.orm.Session
        | sqlalchemy.orm.scoped_session[Any]
    )

__all__ = ["AutocommitError", "Emitted", "OutboxError", "emit"]


class OutboxError(Exception):
    """The event was not written; the message says why and what to do."""


class AutocommitError(OutboxError):
    """The connection commits every statement by itself: event and business rows could part."""


class Emitted(NamedTuple):
    """What `emit` wrote."""

    id: UUID
    """The event's id; for a duplicate, that of the event which had the key first."""
    seq: int | None
    """Its place in the order of events; None for a duplicate."""
    duplicate: bool
    """True if the idempotency key was known: nothing was written."""


def emit(
    target: Target,
    aggregate_type: str,
    aggregate_id: object,
    event_type: str,
    payload: object,
    *,
    headers: Mapping[str, object] | None = None,
    idempotency_key: str | None = None,
    correlation_id: str | None = None,
    causation_id: str | None = None,
    traceparent: str | None = None,
    version: int | None = None,
) -> Emitted:
    """Writes one event in the caller's open transaction, in one round trip.

    Lock or change the aggregate's own row first: then the order of an aggregate's events is the order of the
    commits.

    Args:
        target: psycopg connection or cursor, or SQLAlchemy `Session` (flushed first) or `Connection`.
        aggregate_type: what the event is about, such as ``order``; part of the topic's name.
        aggregate_id: which one; the key of the message. Written as ``str(aggregate_id)``.
        event_type: what happened, such as ``order.placed``.
        payload: the body, anything that `json.dumps` takes.
        headers: further headers of the message.
        idempotency_key: a second event with this key is not written, but reported as a duplicate.

    Raises:
        AutocommitError: the connection is in autocommit mode and no transaction is open.
        OutboxError: an empty name, a payload that is not JSON, a target of another kind.
    """
    run = _runner(target)
    values: dict[str, object] = {
        "aggregate_type": _name("aggregate_type", aggregate_type),
        "aggregate_id": _name("aggregate_id", aggregate_id),
        "event_type": _name("event_type", event_type),
        "payload": _json("payload", payload),
        "headers": None if headers is None else _json("headers", _mapping(headers)),
        "correlation_id": correlation_id,
        "causation_id": causation_id,
        "traceparent": traceparent,
        "version": version,
    }
    if idempotency_key is None:
        drawn, seq = run(_INSERT, values)
        return Emitted(_uuid(drawn), seq, duplicate=False)
    drawn, seq, duplicate = run(
        _EMIT, values | {"idempotency_key": _name("idempotency_key", idempotency_key)}
    )
    return Emitted(_uuid(drawn), seq, duplicate)


# A column list, so that the table may grow; seq and tx are drawn by the database. Casts, because drivers send
# text of no type, and an int of another width.
_INSERT: Final = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers,
                    correlation_id, causation_id, traceparent, version)
VALUES (:aggregate_type, :aggregate_id, :event_type, CAST(:payload AS jsonb), CAST(:headers AS jsonb),
        :correlation_id, :causation_id, :traceparent, CAST(:version AS int))
RETURNING id, seq"""
# The function claims the key first, so that a duplicate is an answer and not an error.
_EMIT: Final = """
SELECT id, seq, duplicate
FROM outbox_emit(:aggregate_type, :aggregate_id, :event_type, CAST(:payload AS jsonb),
                 CAST(:headers AS jsonb), :idempotency_key, :correlation_id, :causation_id, :traceparent,
                 CAST(:version AS int))"""

_NAMES: Final = (
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "payload",
    "headers",
    "idempotency_key",
    "correlation_id",
    "causation_id",
    "traceparent",
    "version",
)


def _psycopg_style(statement: str) -> str:
    for name in _NAMES:
        statement = statement.replace(f":{name}", f"%({name})s")
    return statement


_FOR_PSYCOPG: Final = {statement: _psycopg_style(statement) for statement in (_INSERT, _EMIT)}

_Run = Callable[[str, dict[str, object]], Sequence[Any]]


def _runner(target: Any) -> _Run:
    """What executes a statement on the caller's connection. A driver that is not loaded made no target."""
    if psycopg := sys.modules.get("psycopg"):
        if isinstance(target, psycopg.Cursor):
            return _on_psycopg(target.connection)
        if isinstance(target, psycopg.Connection):
            return _on_psycopg(target)
    if orm := sys.modules.get("sqlalchemy.orm"):
        if isinstance(target, orm.scoped_session):
            target = target()
        if isinstance(target, orm.Session):
            # The business rows first: their locks put the events of an aggregate in order.
            target.flush()
            return _on_sqlalchemy(target.connection())
    if (sqlalchemy := sys.modules.get("sqlalchemy")) and isinstance(target, sqlalchemy.Connection):
        return _on_sqlalchemy(target)
    raise OutboxError(
        f"cannot write through {type(target).__module__}.{type(target).__qualname__}: give a psycopg "
        "connection or cursor, or a SQLAlchemy Session or Connection"
    )


def _on_psycopg(connection: psycopg.Connection[Any]) -> _Run:
    import psycopg

    if connection.autocommit and connection.info.pipeline_status:
        # Whether a transaction is open is known when what was sent before is answered.
        with connection.pipeline() as pipeline:
            pipeline.sync()
    if connection.autocommit and connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        raise AutocommitError(_AUTOCOMMIT.format("`with connection.transaction():`"))

    def run(statement: str, values: dict[str, object]) -> Sequence[Any]:
        # A cursor of our own kind: the caller's may return dicts, or take other placeholders.
        with psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
            cursor.execute(_FOR_PSYCOPG[statement].encode(), values)
            row = cursor.fetchone()
        assert row is not None
        return row

    return run


def _on_sqlalchemy(connection: sqlalchemy.Connection) -> _Run:
    import sqlalchemy

    if connection.dialect.name != "postgresql":
        raise OutboxError(f"this connection leads to {connection.dialect.name}: the outbox is in PostgreSQL")
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise AutocommitError(_AUTOCOMMIT.format("an engine without isolation_level='AUTOCOMMIT'"))

    def run(statement: str, values: dict[str, object]) -> Sequence[Any]:
        return connection.execute(sqlalchemy.text(statement), values).one()

    return run


_AUTOCOMMIT: Final = (
    "the connection is in autocommit mode: the event would be committed apart from your business rows. "
    "Write both in one transaction: use {}"
)


def _name(column: str, value: object) -> str:
    if value is None:
        raise OutboxError(
            f"{column} is None: an id that the database draws is known after the INSERT (`session.flush()`)"
        )
    # Of an enumeration of strings the value: drivers would write its name.
    text = str.__str__(value) if isinstance(value, str) else str(value)
    if not text:
        raise OutboxError(f"{column} is empty: give it a value")
    return text


def _mapping(headers: object) -> dict[str, object]:
    if not isinstance(headers, Mapping):
        raise OutboxError(f"headers are a {type(headers).__name__}: give a mapping from names to values")
    return dict(headers)


def _json(column: str, value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise OutboxError(f"{column} does not serialise to JSON: {error}") from error


def _uuid(value: UUID | str) -> UUID:
    return value if isinstance(value, UUID) else UUID(value)
