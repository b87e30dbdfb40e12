"""Events as written to the outbox, and those that the open transaction has written."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload
from uuid import UUID

from outbox_pipelines.writer.bytes_payload import is_bytes, read_bytes
from outbox_pipelines.writer.content import Row
from outbox_pipelines.writer.statements import Query, Statement
from outbox_pipelines.writer.targets import Way, way_of

if TYPE_CHECKING:
    from outbox_pipelines.writer.protocols import AsyncTarget, Target


class WrittenEvent(NamedTuple):
    """An event in the outbox; the members after `seq` are the arguments of `emit`."""

    id: UUID
    seq: int
    """Its position in the order of events; of a delayed event, before it is due."""
    aggregate_type: str
    aggregate_id: str
    """The id as text: 42 is "42"."""
    event_type: str
    payload: Any
    """As JSON: a Decimal, a UUID, a date are text, a tuple is a list; or a `BytesPayload`."""
    headers: dict[str, Any] | None
    idempotency_key: str | None
    correlation_id: str | None
    causation_id: str | None
    traceparent: str | None
    version: int | None
    deliver_after: datetime | None = None
    """When it is due, in UTC; None if at once."""
    later_events_wait: bool = False


def written(drawn: UUID, seq: int, row: Row) -> WrittenEvent:
    """Return an event from its columns."""
    headers = None if row.headers is None else json.loads(row.headers)
    payload: Any = read_bytes(row.payload) if is_bytes(row.payload) else json.loads(row.payload)
    columns: tuple[Any, ...] = row._replace(
        payload=payload, headers=headers, later_events_wait=bool(row.later_events_wait)
    )
    return WrittenEvent(drawn, seq, *columns)._replace(deliver_after=_due(row.deliver_after))


def _due(text: str | None) -> datetime | None:
    if text is None or not text.startswith("PT"):
        return None if text is None else datetime.fromisoformat(text).astimezone(UTC)
    return datetime.now(UTC) + timedelta(seconds=float(text[2:-1]))


# By the transaction's id, because events that others have committed are visible too. Ids and JSON are read as
# text, whatever codecs the application has.
_COLUMNS: Final = """
id, seq, aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key, correlation_id,
causation_id, traceparent, version"""
_SELECT: Final = f"""
SELECT id::text, seq, aggregate_type, aggregate_id, event_type, payload::text, headers::text,
       idempotency_key, correlation_id, causation_id, traceparent, version,
       to_char(deliver_after AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'), later_events_wait
FROM (SELECT {_COLUMNS}, NULL::timestamptz AS deliver_after, false AS later_events_wait FROM outbox
      WHERE tx = pg_current_xact_id_if_assigned()
      UNION ALL
      SELECT {_COLUMNS}, deliver_after, later_events_wait AND deliver_after IS NOT NULL FROM outbox_delayed
      WHERE tx = pg_current_xact_id_if_assigned()) AS event
ORDER BY seq"""
_QUERY: Final = Query(Statement(_SELECT, _SELECT), (), ())


@overload
def events_of(target: Target) -> list[WrittenEvent]: ...
@overload
def events_of(target: AsyncTarget) -> Coroutine[Any, Any, list[WrittenEvent]]: ...
def events_of(
    target: Target | AsyncTarget,
) -> list[WrittenEvent] | Coroutine[Any, Any, list[WrittenEvent]]:
    """Return the events that a connection's open transaction has written so far, in order.

    For tests that roll back at their end. Events rolled back to a savepoint are not included. After the
    commit the list is empty: the next transaction has written nothing yet.

    Args:
        target: a target of `emit`; for an asynchronous one, await the result. A `Session` is flushed first.
            Its role must be allowed to read the outbox, like the owner; `outbox_grant_writer` is not enough.

    Raises:
        AutocommitError: no transaction is open, and none begins.
        OutboxError: an unsupported target.
    """
    way = way_of(type(target))
    if way.asynchronous:
        return _later(way, target)
    return _read(way.run(target, _QUERY))


async def _later(way: Way, target: object) -> list[WrittenEvent]:
    return _read(await way.run(target, _QUERY))


def _read(rows: Iterable[Sequence[Any]]) -> list[WrittenEvent]:
    return [written(UUID(drawn), seq, Row(*columns)) for drawn, seq, *columns in rows]
