"""The calls, in the caller's open transaction: `emit`, `emit_many`; `cancel` for delayed events.

Invariants:
- All events of a call are checked before anything is sent: a refused event has not touched the transaction.
- Statements use the caller's connection, and are never followed by a commit, a rollback or a retry.
- Bodies of large payloads are stored before their rows are sent, so a committed reference leads to one.
- Synchronous and asynchronous targets differ in `await` alone.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, overload
from uuid import UUID

from outbox_pipelines.writer import content, statements
from outbox_pipelines.writer.context import Surroundings, surroundings
from outbox_pipelines.writer.errors import OutboxError, PayloadTooLargeError
from outbox_pipelines.writer.events import (
    MISSING,
    Emitted,
    NewEvent,
    TypedEvent,
    UnkeyedEvent,
    completed,
    of_typed,
)
from outbox_pipelines.writer.references import Body
from outbox_pipelines.writer.statements import Query
from outbox_pipelines.writer.targets import Way, way_through

if TYPE_CHECKING:
    from typing import Unpack

    from outbox_pipelines.writer.protocols import AsyncTarget, Options, Target


@overload
def emit(
    target: Target,
    aggregate_type: str,
    aggregate_id: object,
    event_type: str,
    payload: object,
    **options: Unpack[Options],
) -> Emitted: ...
@overload
def emit(
    target: AsyncTarget,
    aggregate_type: str,
    aggregate_id: object,
    event_type: str,
    payload: object,
    **options: Unpack[Options],
) -> Coroutine[Any, Any, Emitted]: ...
@overload
def emit(
    target: Target,
    event: TypedEvent,
    /,
    **options: Unpack[Options],
) -> Emitted: ...
@overload
def emit(
    target: AsyncTarget,
    event: TypedEvent,
    /,
    **options: Unpack[Options],
) -> Coroutine[Any, Any, Emitted]: ...
@overload
def emit(
    target: Target,
    event: UnkeyedEvent,
    /,
    *,
    aggregate_id: object,
    **options: Unpack[Options],
) -> Emitted: ...
@overload
def emit(
    target: AsyncTarget,
    event: UnkeyedEvent,
    /,
    *,
    aggregate_id: object,
    **options: Unpack[Options],
) -> Coroutine[Any, Any, Emitted]: ...
def emit(
    target: Target | AsyncTarget,
    aggregate_type: str | UnkeyedEvent,
    aggregate_id: object = MISSING,
    event_type: str = MISSING,
    payload: object = MISSING,
    *,
    headers: Mapping[str, object] | None = None,
    idempotency_key: str | None = None,
    correlation_id: str | UUID | None = None,
    causation_id: str | UUID | None = None,
    traceparent: str | None = None,
    version: int | None = None,
    deliver_after: datetime | timedelta | None = None,
    later_events_wait: bool = False,
) -> Emitted | Coroutine[Any, Any, Emitted]:
    """Write one event in the caller's open transaction, in one round trip; it may be its first statement.

    Lock or change the aggregate's own row first: then the events of an aggregate have the order of the
    commits.

    Args:
        target: a connection or cursor of psycopg or psycopg2; a `Session`, `scoped_session` (both flushed
            first) or `Connection` of SQLAlchemy; Django's `connection` within `atomic()`. With
            `await emit(…)` an asynchronous one: a connection or cursor of psycopg, an `AsyncSession`,
            `async_scoped_session` or `AsyncConnection` of SQLAlchemy, a connection of asyncpg.
        aggregate_type: what the event is about, such as ``order``; part of its topic. Or a `TypedEvent`,
            which names its type and id and is the payload: then without the next three. If its
            class names no id, with `aggregate_id`.
        aggregate_id: its id; the key of the message: text, an integer, a UUID, or an object of a type that
            defines its own text.
        event_type: what happened, such as ``order.placed``.
        payload: the body, at most 1,000,000 bytes of JSON (`Bodies.large` stores larger ones): any value
            that `json.dumps` accepts, and at any depth dates and times (ISO 8601; a naive one has no offset),
            timedelta (``PT90S``), UUID, Decimal (as *text*, so that no reader rounds it), enumerations (their
            values), mappings, sets (sorted), dataclasses, attrs classes, and models of pydantic. Or a
            `BytesPayload`, whose at most 1,000,000 bytes become the value in Kafka.
        headers: additional headers of the message, JSON like the payload.
        idempotency_key: a second event with this key is not written, but reported as a duplicate. While
            another open transaction has the key, `emit` waits for its end. If it commits, `emit` in
            REPEATABLE READ and SERIALIZABLE fails with a serialization failure (40001): retry the whole
            transaction. Two transactions that use the same keys one by one, in opposite orders,
            can deadlock (40P01): retry, or pass the events to `emit_many` together.
        correlation_id: the id of the process that the event belongs to, such as the request; default: that
            of `correlated`.
        causation_id: the id of the cause, such as another event's id; default: that of `correlated`.
        traceparent: W3C Trace Context; default: that of OpenTelemetry's current span, whose ``tracestate``
            then becomes a header.
        version: version of the payload's schema, or of the aggregate; 32 bits.
        deliver_after: when the event is due, at most ten years ahead: a time with a zone, or a duration by
            the database's clock. Until a relay moves it into the outbox, within about a second, it is
            delayed: it has no `seq`, and `cancel` removes it. A time in the past means at once.
        later_events_wait: whether later events of the aggregate follow it, and are delayed until it is due;
            by default they overtake it. In REPEATABLE READ and SERIALIZABLE change the aggregate's row, do
            not only lock it: then a transaction that began too early fails (40001).

    Raises:
        AutocommitError: the event would be committed separately: no transaction is open, and none begins.
        PayloadTooLargeError: the payload has more than 1,000,000 bytes. If only the database counts so many,
            because it writes out numbers with an exponent (1e300), the transaction is aborted.
        BodyStoreError: the store of large payloads is unavailable; nothing was written.
        InvalidEventError: the function given to `validate_with` refuses the payload.
        OutboxError: an empty name, content that is not JSON or that PostgreSQL does not store (NUL
            characters), an invalid traceparent, or an unsupported target.
        Exception: the driver's own exception, for errors that only the database detects; the transaction is
            aborted.
    """
    way = way_through(target)
    event = NewEvent(
        aggregate_type,  # type: ignore[arg-type]  # a typed event, which is completed
        aggregate_id,
        event_type,
        payload,
        headers=headers,
        idempotency_key=idempotency_key,
        correlation_id=correlation_id,
        causation_id=causation_id,
        traceparent=traceparent,
        version=version,
        deliver_after=deliver_after,
        later_events_wait=later_events_wait,
    )
    row = content.row(completed(event), surroundings())
    if way.asynchronous:
        return _one_later(way, target, row)
    if isinstance(row.payload, Body):
        [row] = _stored(way, target, [row])
    return _now(way, target, statements.one(row))[0]


@overload
def emit_many(target: Target, events: Iterable[NewEvent | TypedEvent]) -> list[Emitted]: ...
@overload
def emit_many(
    target: AsyncTarget, events: Iterable[NewEvent | TypedEvent]
) -> Coroutine[Any, Any, list[Emitted]]: ...
def emit_many(
    target: Target | AsyncTarget, events: Iterable[NewEvent | TypedEvent]
) -> list[Emitted] | Coroutine[Any, Any, list[Emitted]]:
    """Write many events in the caller's open transaction, in one round trip, in their order.

    Targets, content and errors are those of `emit`; the message of an `OutboxError` has the number of its
    event, counted from 0. All events are checked before any is sent. Without events nothing is sent.

    Idempotency keys are claimed in sorted order: concurrent calls with the same keys wait for each other and
    do not deadlock. Of two events in the list with the same key, the second is a duplicate of the first.

    A list of more than 64 MB of JSON takes several round trips; each claims its own keys in sorted order.

    Returns:
        The result of each event, in order.
    """
    way = way_through(target)
    around = surroundings()
    is_one = isinstance(events, NewEvent) or hasattr(events, "__event_type__")
    if is_one or not isinstance(events, Iterable):
        given = f"{'one' if is_one else 'a'} {type(events).__qualname__}"
        raise OutboxError(f"emit_many was given {given}: give a list of events")
    rows: Sequence[content.Row] = [_checked(number, event, around) for number, event in enumerate(events)]
    if way.asynchronous:
        return _all_later(way, target, rows)
    rows = _stored(way, target, rows)
    return [emitted for query in statements.many(rows) for emitted in _now(way, target, query)]


@overload
def cancel(target: Target, id: UUID) -> bool: ...
@overload
def cancel(target: AsyncTarget, id: UUID) -> Coroutine[Any, Any, bool]: ...
def cancel(target: Target | AsyncTarget, id: UUID) -> bool | Coroutine[Any, Any, bool]:
    """Remove a delayed event in the caller's open transaction; return whether it was still there.

    If it was not, it is due and will be published, or was canceled before. Its idempotency key stays used.
    Events that waited only for it are due at once.

    Args:
        target: as for `emit`.
        id: what `emit` returned.

    Raises:
        AutocommitError: no transaction is open, and none begins.
        OutboxError: `id` is no UUID; nothing was sent.
        Exception: the driver's own exception. In REPEATABLE READ and SERIALIZABLE, a serialization failure
            (40001) if the event was moved into the outbox since: retry the whole transaction.
    """
    way = way_through(target)
    query = statements.cancel(id)
    if way.asynchronous:
        return _canceled_later(way, target, query)
    return bool(way.run(target, query)[0][0])


async def _canceled_later(way: Way, target: object, query: Query) -> bool:
    return bool((await way.run(target, query))[0][0])


def write(target: Target, rows: Sequence[content.Row]) -> list[Emitted]:
    """Write checked rows, as `emit_many` does, through a synchronous target."""
    way = way_through(target)
    rows = _stored(way, target, rows)
    return [emitted for query in statements.many(rows) for emitted in _now(way, target, query)]


def _checked(number: int, event: NewEvent | TypedEvent, around: Surroundings) -> content.Row:
    if not isinstance(event, NewEvent) and not hasattr(event, "__event_type__"):
        raise OutboxError(
            f"event {number} is a {type(event).__name__}: give a NewEvent, or an object whose class has "
            "__event_type__"
        )
    try:
        return content.row(event if isinstance(event, NewEvent) else of_typed(event), around)
    except OutboxError as error:
        raise type(error)(f"event {number}: {error}") from error


def _now(way: Way, target: object, query: Query) -> list[Emitted]:
    try:
        rows = way.run(target, query)
        # An INSERT does not return an event that waits for another one.
        return _read(rows if rows else way.run(target, statements.waiting(query)))
    except Exception as error:
        _refuse_as_too_large(error)
        raise


async def _later(way: Way, target: object, query: Query) -> list[Emitted]:
    try:
        rows = await way.run(target, query)
        return _read(rows if rows else await way.run(target, statements.waiting(query)))
    except Exception as error:
        _refuse_as_too_large(error)
        raise


async def _one_later(way: Way, target: object, row: content.Row) -> Emitted:
    if isinstance(row.payload, Body):
        [row] = await _stored_later(way, target, [row])
    return (await _later(way, target, statements.one(row)))[0]


async def _all_later(way: Way, target: object, rows: Sequence[content.Row]) -> list[Emitted]:
    rows = await _stored_later(way, target, rows)
    return [emitted for query in statements.many(rows) for emitted in await _later(way, target, query)]


def _stored(way: Way, target: object, rows: Sequence[content.Row]) -> Sequence[content.Row]:
    """Store the bodies of large payloads, and return the rows with references.

    Raises:
        BodyStoreError: the store is unavailable.
    """
    # Without an answer, a test captures the events.
    if (groups := _by_store(rows)) and (answer := way.run(target, statements.DAY)):
        for numbers, bodies in groups:
            rows = _replaced(rows, numbers, bodies[0].store.put(answer[0][0], bodies))
    return rows


async def _stored_later(way: Way, target: object, rows: Sequence[content.Row]) -> Sequence[content.Row]:
    if (groups := _by_store(rows)) and (answer := await way.run(target, statements.DAY)):
        for numbers, bodies in groups:
            rows = _replaced(rows, numbers, await bodies[0].store.put_later(answer[0][0], bodies))
    return rows


def _by_store(rows: Sequence[content.Row]) -> list[tuple[list[int], list[Body]]]:
    """Return the bodies of each store, with the numbers of their rows."""
    groups: dict[int, tuple[list[int], list[Body]]] = {}
    for number, (_, _, _, payload, *_) in enumerate(rows):
        if isinstance(payload, Body):
            numbers, bodies = groups.setdefault(id(payload.store), ([], []))
            numbers.append(number)
            bodies.append(payload)
    return [*groups.values()]


def _replaced(
    rows: Sequence[content.Row], numbers: Sequence[int], payloads: Sequence[str]
) -> list[content.Row]:
    replaced = [*rows]
    for number, payload in zip(numbers, payloads, strict=True):
        replaced[number] = rows[number]._replace(payload=payload)
    return replaced


def _read(rows: Iterable[Sequence[Any]]) -> list[Emitted]:
    return [
        # The id is text if the application has its own codec for uuid. Without a third column: no duplicate.
        Emitted(row[0] if isinstance(row[0], UUID) else UUID(row[0]), row[1], len(row) > 2 and row[2])
        for row in rows
    ]


def _refuse_as_too_large(error: BaseException | None) -> None:
    """Raise `PayloadTooLargeError` if the database refused the size: its numbers may be longer (1e300)."""
    cause = error
    while cause is not None:
        state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        if state == "54000" and "outbox: the payload" in str(cause):
            message = str(cause).partition("\n")[0].removeprefix("outbox: ")
            raise PayloadTooLargeError(f"{message}: {content.ADVICE}") from error
        # SQLAlchemy and Django wrap the driver's error.
        cause = getattr(cause, "orig", None) or cause.__cause__
