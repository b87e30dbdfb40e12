"""For an application's own tests: call a consumer with events, without Kafka.

    from outbox_pipelines.consumer.testing import handle, make_event

    placed = make_event("order.placed", {"total": 5}, aggregate_id=42)
    assert handle(consumer, placed, using=connection) == ["handled"]
    assert handle(consumer, placed, using=connection) == ["duplicate"]

Invariants:
- The code that records and handles an event is that of a consumer at work. Each event, or batch, is a
  savepoint of the test's own transaction: nothing is committed, and nothing reaches Kafka, the inbox or a
  cache.
- A handler's exception is raised, unless the test asks for its result.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

from outbox_pipelines.config.message_names import CONTENT_TYPE
from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer.base_consumer import BaseConsumer
from outbox_pipelines.consumer.config import Plan
from outbox_pipelines.consumer.consumer import AsyncConsumer, Consumer, drive
from outbox_pipelines.consumer.consumer_database import Database, Rows, Statement, end_handling
from outbox_pipelines.consumer.database_retry import DatabaseRetry
from outbox_pipelines.consumer.errors import RefusedError
from outbox_pipelines.consumer.event_reading import Event, Reader, Replay
from outbox_pipelines.consumer.handler_breakers import policy_of
from outbox_pipelines.consumer.handler_registry import Handler
from outbox_pipelines.consumer.handler_transactions import HandlerTransactions
from outbox_pipelines.consumer.items import Item
from outbox_pipelines.consumer.membership import Member
from outbox_pipelines.consumer.psycopg_transactions import Connections
from outbox_pipelines.consumer.settlement import Settlement
from outbox_pipelines.consumer.sqlalchemy_transactions import AsyncSessions, Sessions
from outbox_pipelines.consumer.work import Work
from outbox_pipelines.core import scripts
from outbox_pipelines.errors import SetupError
from outbox_pipelines.writer.bytes_payload import BytesPayload
from outbox_pipelines.writer.json_text import to_json

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

Verdict = Literal["handled", "duplicate", "ignored", "retry", "dead_letter", "outage", "waiting"]
"""What becomes of an event. `waiting`: one of its key waits in the inbox."""
_Result = TypeVar("_Result")
_IDLE: Final = 0


def make_event(
    type: str,
    payload: object = None,
    *,
    id: str | uuid.UUID | None = None,
    aggregate_type: str = "aggregate",
    aggregate_id: object = 1,
    value: bytes | None = None,
    headers: Mapping[str, str | None] | None = None,
    idempotency_key: str | None = None,
    correlation_id: str | None = None,
    causation_id: str | None = None,
    traceparent: str | None = None,
    version: int | None = None,
    topic: str = "events",
    partition: int = 0,
    offset: int = 0,
    timestamp: datetime | None = None,
    replay: Replay | None = None,
) -> Event:
    """Return an event as a handler gets it.

    Args:
        payload: what `emit` takes; it is read back from JSON, as a consumer reads it. None: a tombstone.
        id: a new one by default.
        value: the bytes in Kafka, in place of `payload`.
        replay: `Replay(uuid.uuid4(), datetime.now(UTC))` for an event that `outbox replay` has published.
    """
    headers = dict(headers or {})
    if isinstance(payload, BytesPayload):
        value, headers[CONTENT_TYPE] = payload
    elif value is None and payload is not None:
        value = to_json("payload", payload).encode()
    return Event(
        id=str(id or uuid.uuid4()),
        type=type,
        aggregate_type=aggregate_type,
        aggregate_id=None if aggregate_id is None else str(aggregate_id),
        value=value,
        headers=headers,
        idempotency_key=idempotency_key,
        correlation_id=correlation_id,
        causation_id=causation_id,
        traceparent=traceparent,
        version=version,
        topic=topic,
        partition=partition,
        offset=offset,
        timestamp=timestamp or datetime.now(UTC),
        replay=replay,
        content_type=headers.get(CONTENT_TYPE),
    )


def handle(consumer: Consumer, *events: Event, using: object, raises: bool = True) -> list[Verdict]:
    """Handle events, and return what becomes of each.

    Args:
        consumer: the application's own; its Kafka and its database are not connected to.
        events: what is there at once: a handler with `batch` gets them together.
        using: what handlers get. A connection of psycopg or a session of SQLAlchemy: the events are recorded
            there, in the test's own transaction. Anything else, such as None, is passed to the handlers, and
            nothing is recorded.
        raises: raise what a handler raises; otherwise its verdict is returned, as `on_error` has it.

    Raises:
        RefusedError: a payload does not fit the handler's annotation.
        SetupError: the consumer has no handlers, or its tables are not there.
    """
    if not isinstance(consumer, Consumer):
        raise SetupError("handle_async() is for an AsyncConsumer, handle() for a Consumer")
    return drive(_handled(consumer, events, _database(using, _OwnConnection, _OwnSession), raises))


async def handle_async(
    consumer: AsyncConsumer, *events: Event, using: object, raises: bool = True
) -> list[Verdict]:
    """As `handle`, with an asynchronous connection of psycopg or session of SQLAlchemy."""
    if not isinstance(consumer, AsyncConsumer):
        raise SetupError("handle_async() is for an AsyncConsumer, handle() for a Consumer")
    return await _handled(consumer, events, _database(using, _OwnAsyncConnection, _OwnAsyncSession), raises)


async def _handled(
    consumer: BaseConsumer[Any, Any], events: Sequence[Event], database: Database, raises: bool
) -> list[Verdict]:
    consumer._require_any()
    for each in events:
        if not isinstance(each, Event):
            raise SetupError(
                f"handle was given a {type(each).__name__} where an event belongs: write "
                'handle(consumer, make_event("order.placed", {"total": 5}), using=…)'
            )
    errors: list[BaseException] = []
    verdicts: dict[int, Verdict] = {}
    work = Work(
        _plan(consumer, database),
        consumer,
        cast(Reader, _Read()),
        database,
        retry=_Once,
        transactions=partial(_Noted, errors=errors),
        settlement=partial(_Verdicts, errors=errors, verdicts=verdicts),
    )
    await work.begin()
    messages = [_Message(each) for each in events]
    await work.take(messages, cast(Member, _Alone()))
    if raises and errors:
        raise errors[0]
    return [verdicts.get(id(each), "handled") for each in messages]


def _plan(consumer: BaseConsumer[Any, Any], database: Database) -> Plan:
    plan = consumer._plan(limit=nullcontext, pause=_nothing, is_stopped=lambda: False, stay=_nothing)
    table = None if isinstance(database, _NoDatabase) else plan.dedupe_table
    return replace(plan, cache=None, copies=None, dedupe_table=table)


@dataclass(frozen=True, slots=True)
class _Message:
    event: Event

    def topic(self) -> str:
        return self.event.topic

    def partition(self) -> int:
        return self.event.partition

    def offset(self) -> int:
        return self.event.offset


class _Read:
    """A reader that is not used: tests create events directly."""

    def read(self, message: _Message) -> Event:
        return message.event


class _Alone:
    """A member that keeps its partitions."""

    lag: Final[Mapping[Any, int]] = {}
    has_left: Final = False

    def changes(self) -> tuple[set[Any], set[Any]]:
        return set(), set()

    def has(self, message: object) -> bool:
        return True

    def done(self, messages: Sequence[object]) -> None:
        """No offset is kept."""


class _Once(DatabaseRetry):
    """Waits for nothing: no offset is kept, and the transaction is the test's."""

    async def run(self, do: Callable[[], Awaitable[_Result]]) -> _Result:
        return await do()

    async def secure(self) -> None: ...


@dataclass
class _Noted(HandlerTransactions):
    """Calls handlers like a running consumer, and keeps what they raise."""

    errors: list[BaseException] = field(default_factory=list)

    async def _call(self, handler: Handler, items: Sequence[Item], transaction: Any) -> None:
        try:
            await super()._call(handler, items, transaction)
        except Exception as error:
            self.errors.append(error)
            raise

    async def _end_handling(self, transaction: Any, following: Item | None = None) -> None:
        try:
            await super()._end_handling(transaction)
        except Exception as error:
            self.errors.append(error)
            raise

    async def spoilt(self) -> Sequence[Item]:
        return []


@dataclass
class _Verdicts(Settlement):
    """Tells the test what becomes of events, in place of the inbox."""

    errors: list[BaseException] = field(default_factory=list)
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    async def fail(self, item: Item, error: Exception) -> None:
        if error not in self.errors:
            self.errors.append(error)
        self._say(item, policy_of(error, self.plan.on_error))

    async def reject(self, item: Item) -> None:
        self.errors.append(RefusedError(item.error))
        self._say(item, "dead_letter")

    async def receive(self, items: Sequence[Item], **more: Any) -> dict[uuid.UUID, int]:
        for each in items:
            self._say(each, "waiting")
        return {each.message_id: 0 for each in items}

    async def duplicates(self, items: Sequence[Item]) -> None:
        for each in items:
            self._say(each, "duplicate")
        await super().duplicates(items)

    def skip(self, item: Item) -> None:
        super().skip(item)
        self._say(item, "ignored")

    def _say(self, item: Item, verdict: Verdict) -> None:
        self.verdicts[id(item.message)] = verdict


def _database(
    using: object, of_connection: Callable[..., Database], of_session: Callable[..., Database]
) -> Database:
    kinds = {(each.__module__.partition(".")[0], each.__name__) for each in type(using).__mro__}
    ours = "Async" if of_session is _OwnAsyncSession else ""
    if ("psycopg", f"{ours}Connection") in kinds:
        return of_connection(using)
    if ("sqlalchemy", f"{ours}Session") in kinds:
        return of_session(using)
    if wrong := {module for module, _ in kinds} & {"psycopg", "psycopg2", "asyncpg", "sqlalchemy"}:
        raise SetupError(
            f"using is a {type(using).__name__} of {min(wrong)}: give what the handlers get, "
            f"{ours}Connection of psycopg or {ours}Session of SQLAlchemy"
        )
    return _NoDatabase(using)


class _OwnConnection(Connections):
    """Savepoints in the transaction of a test; with autocommit a transaction for each."""

    def __init__(self, connection: Any) -> None:
        super().__init__(_no_other)
        self._own = connection

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        connection = self._own
        if connection.info.transaction_status == _IDLE and not connection.autocommit:
            # Otherwise the savepoint would be a transaction, and be committed.
            connection.execute("SELECT")
        with connection.transaction():
            yield connection

    async def end_handling(self, transaction: Any, following: Statement | None = None) -> bool:
        return await end_handling(self, transaction)


class _OwnAsyncConnection(_OwnConnection):
    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        connection = self._own
        if connection.info.transaction_status == _IDLE and not connection.autocommit:
            await connection.execute("SELECT")
        async with connection.transaction():
            yield connection


class _OwnSession(Sessions):
    def __init__(self, session: Session) -> None:
        super().__init__(lambda: session)
        self._own = session

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session]:
        with self._own.begin_nested():
            yield self._own


class _OwnAsyncSession(AsyncSessions):
    def __init__(self, session: AsyncSession) -> None:
        super().__init__(lambda: session)
        self._own = session

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        async with self._own.begin_nested():
            yield self._own


class _NoDatabase:
    """Every event is new, and nothing is recorded."""

    warnings = 0

    def __init__(self, using: object) -> None:
        self._using = using

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[object]:
        yield self._using

    async def rows(self, transaction: object, query: str, given: Mapping[str, Any]) -> Rows:
        if query == queries.RECORD_MANY:
            return [(given["ids"].count(",") + 1, "", None)]
        if query == queries.RECORD:
            return [("",)]
        if query == queries.VERSIONS:
            return [(file.stem, None) for file in scripts.files("consumer")]
        return [(True,)] if query in (queries.TABLES, queries.END_HANDLING) else []

    async def require_open(self, transaction: object) -> None: ...

    async def end_handling(self, transaction: object, following: Statement | None = None) -> bool:
        return True

    def abort(self) -> None:
        """Nothing waits for an answer of a database."""

    async def close(self) -> None: ...


async def _no_other() -> Any:
    raise AssertionError("a test has one connection")


async def _nothing(*_: object) -> None: ...
