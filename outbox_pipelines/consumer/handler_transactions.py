"""The transaction of a handler: record the event, call the handler, and let the transaction be committed.

Invariants:
- The event is recorded first, then handled; then the database commits. A duplicate's body is not read.
- A message of the inbox is handled under the id that it has now: if that is not the id of its row, it is
  recorded in the handler's transaction, and a message that was recorded under it is a duplicate.
- The handler's span follows the producer's; OpenTelemetry is used where the application has loaded it, and
  never imported.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from outbox_pipelines import __version__
from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer.config import Plan
from outbox_pipelines.consumer.consumer_database import ENDED, Database, TransactionError, left_over
from outbox_pipelines.consumer.database_retry import DatabaseRetry
from outbox_pipelines.consumer.errors import OutageError, UnreadableError
from outbox_pipelines.consumer.event_reading import Event
from outbox_pipelines.consumer.event_values import parsed
from outbox_pipelines.consumer.figures import Figures
from outbox_pipelines.consumer.handler_registry import Handler
from outbox_pipelines.consumer.inbox import Inbox
from outbox_pipelines.consumer.items import Item, Pace, prepare
from outbox_pipelines.consumer.processed_events import ProcessedEvents
from outbox_pipelines.errors import SetupError
from outbox_pipelines.writer import BodyStoreError, OutboxError, correlated
from outbox_pipelines.writer.references import Reference


class TooLongError(Exception):
    """Handlers that share a transaction are slower than expected."""

    def __init__(self, events: int) -> None:
        super().__init__(events)
        self.events = events


@dataclass
class HandlerTransactions:
    """The transactions of a consumer's handlers; must be used by one thread or task."""

    plan: Plan
    database: Database
    retry: DatabaseRetry
    processed: ProcessedEvents
    inbox: Inbox
    pace: Pace
    figures: Figures
    _open: tuple[str, Mapping[str, Any], Sequence[Item]] | None = None
    """The query that tells whether the transaction in which handlers run is committed, although the consumer
    has not ended the handling, and the items that they handle."""

    async def one(
        self, item: Item, following: Item | None = None
    ) -> Literal["handled", "duplicate", "behind"]:
        """Record and handle a new event; `behind`: an earlier event of its key must be handled first.

        Args:
            following: the item that will probably be recorded next.
        """
        assert item.handler is not None
        handler = item.handler

        async def attempt() -> Literal["handled", "duplicate", "behind"]:
            async with self.database.transaction() as transaction:
                if (began := await self.processed.record(transaction, item)) is not None:
                    self._began(item.id, began, [item])
                    await self._call(handler, [item], transaction)
                    await self._end_handling(transaction, following)
                    return "handled"
                known = await self.processed.known(transaction, [item.message_id])
                return "duplicate" if known else "behind"

        return await self.retry.attempt(attempt)

    async def many(self, items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
        """Record and handle new events together; return those that are new, and those that are behind.

        Raises:
            BehindError: the transaction cannot be used, because an event is behind another one.
            TooLongError: the handlers take too long for one transaction.
        """
        is_shared = items[0].handler is not None and not items[0].handler.batch

        async def attempt() -> tuple[Sequence[Item], Sequence[Item]]:
            start = time.monotonic()
            async with self.database.transaction() as transaction:
                new, behind, record = await self.processed.record_many(transaction, items)
                if new:
                    self._began(*record, new)
                    await self._call_in_turn(new, transaction)
            if is_shared:
                self.pace.took(len(new), time.monotonic() - start)
            return new, behind

        try:
            return await self.retry.attempt(attempt)
        except TooLongError as error:
            self._open = None
            self.pace.too_long(error.events)
            raise

    async def stored(self, seq: int, attempts: int, item: Item) -> Literal["handled", "duplicate", ""]:
        """Settle and handle a message of the inbox; return nothing if another process has it."""

        async def attempt() -> Literal["handled", "duplicate", ""]:
            if item.error:
                raise UnreadableError(item.error)
            if item.event is None or item.handler is None:
                raise UnreadableError(
                    f"{item.event} no longer has a handler: register one, or discard the event"
                )
            async with self.database.transaction() as transaction:
                began = await self.inbox.finish(transaction, seq, attempts)
                if not began:
                    return ""
                if item.id != item.message.message_id and await self.processed.is_duplicate(
                    transaction, item
                ):
                    await self.database.rows(transaction, queries.END_HANDLING, {})
                    return "duplicate"
                if not await self.processed.write_marks(transaction, [item]):
                    return "duplicate"
                self._open = queries.IS_SETTLED, {"seq": seq, "began": began}, [item]
                await self._call(item.handler, [item], transaction)
                await self._end_handling(transaction)
            return "handled"

        return await self.retry.attempt(attempt)

    async def spoilt(self) -> Sequence[Item]:
        """Return the items of a transaction whose handler failed and had committed it despite the guard."""
        if self._open is None:
            return []
        (query, given, items), self._open = self._open, None

        async def answer() -> bool:
            async with self.database.transaction() as transaction:
                [(is_committed,)] = await self.database.rows(transaction, query, given)
            return bool(is_committed)

        return items if await self.retry.run(answer) else []

    def _began(self, event_id: str, began: str, items: Sequence[Item]) -> None:
        """Remember how to look up the record of an event whose handler is about to run."""
        given = {"id": event_id, "source": self.plan.source, "began": began}
        self._open = queries.IS_RECORDED, given, items

    async def _call_in_turn(self, items: Sequence[Item], transaction: Any) -> None:
        """Call the handlers of a transaction, and end its handling."""
        first = items[0].handler
        assert first is not None
        if first.batch:
            await self._call(first, items, transaction)
        else:
            until = time.monotonic() + self.plan.shared_seconds
            for n, each in enumerate(items):
                if time.monotonic() > until:
                    raise TooLongError(n)
                assert each.handler is not None
                await self._call(each.handler, [each], transaction)
                # Otherwise the next handler would work outside of the transaction.
                await self.database.require_open(transaction)
        await self._end_handling(transaction)

    async def _call(self, handler: Handler, items: Sequence[Item], transaction: Any) -> None:
        """Call a handler; `_end_handling` must follow before the commit."""
        for item in items:
            if item.is_framed:
                await self._read_value(handler, item)
            if item.reference is not None:
                await self._read_body(handler, item, item.reference)
        if protected := [item for item in items if item.protected is not None]:
            await self._decrypt(handler, protected)
        arguments = [item.given for item in items]
        self.retry.is_called, self.retry.awaits = True, "handler"
        began = time.monotonic()
        try:
            with surroundings([item.event for item in items if item.event], self.plan.source):
                async with self.plan.limit():
                    done = handler.function(arguments if handler.batch else arguments[0], transaction)
                    if inspect.isawaitable(done):
                        await done
        finally:
            self.retry.awaits = "database"
            self.figures.called(handler.name, time.monotonic() - began)

    async def _read_value(self, handler: Handler, item: Item) -> None:
        """Read a framed value by its schema, so that the handler gets it as JSON has it.

        Raises:
            OutageError: the schema registry is unavailable, or refuses.
            UnreadableError: the value does not fit its schema, or the handler.
        """
        assert item.event is not None
        assert item.event._framed is not None
        assert self.plan.schema_of is not None
        await self.plan.stay()
        frame, body = item.event._framed
        try:
            read = await self.plan.schema_of(frame)
        except SetupError as error:
            raise OutageError(str(error)) from None
        try:
            event = item.event._with_payload(read(body) if read else parsed(item.event))
        except ValueError as error:
            raise UnreadableError(f"{item.event} is rejected: {error}") from None
        if read is None:
            prepare(item, event, handler, self.plan)
        else:
            self._give(item, event, handler)
        item.is_framed = False

    async def _read_body(self, handler: Handler, item: Item, reference: Reference) -> None:
        """Read the body of a new event, so that the handler gets it as its payload.

        Raises:
            OutageError: the store is unavailable.
            UnreadableError: the body is not JSON, or does not fit the handler.
        """
        assert item.event is not None
        assert self.plan.body_of is not None
        await self.plan.stay()
        try:
            content = await self.plan.body_of(reference)
        except BodyStoreError as error:
            raise OutageError(str(error)) from None
        try:
            event = item.event._with_body(content, reference.content_type)
        except ValueError:
            raise UnreadableError(f"{item.event} is rejected: its body {reference.key} is not JSON") from None
        self._give(item, event, handler)
        item.reference = None

    def _give(self, item: Item, event: Event, handler: Handler) -> None:
        """Set what the handler gets, or what has to be decrypted first."""
        if self.plan.decrypt is not None:
            item.protected = event
        else:
            item.given = handler.give(event)

    async def _decrypt(self, handler: Handler, items: Sequence[Item]) -> None:
        """Decrypt the payloads of new events, all with one question for their keys.

        Raises:
            OutageError: the key store is unavailable, or the master key is not its own.
            SubjectKeyError: a key is not in the store, or a value was changed.
            UnreadableError: a payload does not fit the handler.
        """
        assert self.plan.decrypt is not None
        await self.plan.stay()
        events = [each.protected for each in items if each.protected is not None]
        try:
            payloads = await self.plan.decrypt([each.payload for each in events])
        except OutboxError as error:
            raise OutageError(str(error)) from None
        except (ValueError, RecursionError) as error:
            raise UnreadableError(f"{events[0]} is rejected: {error}") from None
        for item, event, payload in zip(items, events, payloads, strict=True):
            item.given, item.protected = handler.give(event._with_payload(payload)), None

    async def _end_handling(self, transaction: Any, following: Item | None = None) -> None:
        """Let the transaction be committed, and the one of the following item begin.

        Raises:
            TransactionError: a handler ended it, or ignored an error of the database.
        """
        try:
            next_statement = None if following is None else self.processed.statement(following)
            is_ours = await self.database.end_handling(transaction, next_statement)
        except Exception as error:
            if (left := left_over(error)) is not None:
                raise left from error
            # It may be committed, by us.
            self._open = None
            raise
        if not is_ours:
            raise TransactionError(ENDED)
        self._open = None


def surroundings(events: Sequence[Event], source: str) -> AbstractContextManager[None]:
    """One event's handler writes events that it caused, in its trace; that of many writes on its own."""
    span = _span(events, source)
    if len(events) > 1:
        return span or nullcontext()
    ids = correlated(correlation_id=events[0].correlation_id, causation_id=events[0].id)
    return ids if span is None else _within(span, ids)


@contextmanager
def _within(span: AbstractContextManager[Any], ids: AbstractContextManager[None]) -> Iterator[None]:
    with span, ids:
        yield


def _span(events: Sequence[Event], source: str) -> Any:
    """Return the handler's span; None if nothing would see it."""
    otel = sys.modules.get("opentelemetry.trace")
    if otel is None:
        return None
    # Libraries load OpenTelemetry too. Without a provider, a span only passes a trace on.
    is_unset = isinstance(otel.get_tracer_provider(), getattr(otel, "ProxyTracerProvider", ()))
    if is_unset and not any(each.traceparent for each in events):
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    extract = TraceContextTextMapPropagator().extract
    carried = [
        extract({"traceparent": each.traceparent, "tracestate": each.headers.get("tracestate") or ""})
        for each in events
        if each.traceparent
    ]
    first = events[0]
    attributes: dict[str, Any] = {
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": first.topic,
        "messaging.consumer.group.name": source,
    }
    if len(events) == 1:
        attributes |= {"messaging.message.id": first.id, "outbox.event_type": first.type}
        follows: dict[str, Any] = {"context": carried[0]} if carried else {}
    else:
        attributes["messaging.batch.message_count"] = len(events)
        links = (otel.get_current_span(each).get_span_context() for each in carried)
        follows = {"links": [otel.Link(each) for each in links]}
    return otel.get_tracer("outbox_pipelines.consumer", __version__).start_as_current_span(
        f"{first.topic} process", kind=otel.SpanKind.CONSUMER, attributes=attributes, **follows
    )
