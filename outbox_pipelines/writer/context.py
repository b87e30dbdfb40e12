"""The surroundings of an event: the ids of the request, the current trace, and the outbox it is for.

Invariants:
- Values of the event itself take precedence.
- OpenTelemetry is used if the application has loaded it, and never imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple
from uuid import UUID

from outbox_pipelines.writer.errors import OutboxError


class Surroundings(NamedTuple):
    correlation_id: str | UUID | None = None
    causation_id: str | UUID | None = None
    traceparent: str | None = None
    tracestate: str | None = None


_NONE: Final = Surroundings()
_CURRENT: Final = ContextVar("outbox_correlation", default=_NONE)


@contextmanager
def correlated(
    *, correlation_id: str | UUID | None = None, causation_id: str | UUID | None = None
) -> Iterator[None]:
    """Set the ids of every event that is written within the block and has none of its own.

    An omitted id comes from the enclosing `correlated`, which applies again after the block. Tasks of asyncio
    and `asyncio.to_thread` inherit the ids. A new thread, or one of a pool, does not: enter the block there.
    Do not use it as a decorator of `async def`: the body would run after the block.

        with correlated(correlation_id=request.headers["x-request-id"]):
            place_order(session)
    """
    around = _CURRENT.get()
    token = _CURRENT.set(
        Surroundings(
            around.correlation_id if correlation_id is None else correlation_id,
            around.causation_id if causation_id is None else causation_id,
        )
    )
    try:
        yield
    finally:
        _CURRENT.reset(token)


SCHEMA: Final[ContextVar[str | None]] = ContextVar("outbox_schema", default=None)
"""That of the outbox; None if the search_path determines it."""


@contextmanager
def in_schema(schema: str | None) -> Iterator[None]:
    """Let `emit`, `emit_many`, `cancel` and `events_of` within the block use the outbox of a schema.

    The search_path stays as it is; None for what it determines. Tasks and threads: as for `correlated`. What
    a flush of SQLAlchemy writes has its own schema, by `outbox_table(schema=…)` or `__outbox_schema__`.

        with in_schema("billing"):
            emit(connection, "invoice", invoice_id, "invoice.sent", {})

    Raises:
        OutboxError: `schema` is no name; nothing was sent.
    """
    if schema is not None and (not isinstance(schema, str) or not schema or "\0" in schema):
        raise OutboxError(f"in_schema was given {schema!r}: give the name of the outbox's schema")
    token = SCHEMA.set(schema)
    try:
        yield
    finally:
        SCHEMA.reset(token)


def surroundings() -> Surroundings:
    """Return the ids of `correlated`, and the W3C headers of OpenTelemetry's current span if it is valid."""
    ids = _CURRENT.get()
    otel = sys.modules.get("opentelemetry.trace")
    if otel is None:
        return ids
    span = otel.get_current_span().get_span_context()
    if not span.is_valid:
        return ids
    return ids._replace(
        traceparent=f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}",
        tracestate=span.trace_state.to_header() or None,
    )
