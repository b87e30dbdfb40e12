"""The blocking consumer, and that for an event loop.

Each event's handler runs once, in one transaction with the record of the event.

Invariants:
- One thread or task handles one event or batch at a time: a partition's events are handled in order.
- A consumer can run again after it has ended.
- Kafka's client is used by one thread at a time, and no blocking call runs in an event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from outbox_pipelines.consumer import limits, psycopg_transactions
from outbox_pipelines.consumer.base_consumer import SIGNALS, BaseConsumer
from outbox_pipelines.consumer.consumer_database import Database
from outbox_pipelines.consumer.figures import Counts
from outbox_pipelines.consumer.inbox import Backlog
from outbox_pipelines.consumer.membership import Member
from outbox_pipelines.consumer.psycopg_transactions import AsyncConnection, Connection, Connections
from outbox_pipelines.consumer.sqlalchemy_transactions import AsyncSessions, Sessions
from outbox_pipelines.core.signals import set_from_handler

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from outbox_pipelines.consumer.work import Work
else:
    Session = AsyncSession = Any

_Result = TypeVar("_Result")


class Consumer(BaseConsumer[Connection, Session]):
    """Reads topics as a member of a group, and passes each event to the handler of its type.

    Handlers are plain functions; see `AsyncConsumer` for `async def`.

    Args:
        source: the name of the consumer. An event is handled once within one source; consumers with
            different sources handle the same events independently.
        topics: the names of the topics; a name that begins with ^ is a regular expression.
        kafka: settings of librdkafka, at least `bootstrap.servers`; `group.id` is the source by default.
        dsn: the database of the handlers' tables, as a libpq connection string.
        connect: instead of `dsn`, returns a psycopg connection without an open transaction.
        session: instead of both, a sessionmaker of SQLAlchemy: handlers then get a session.
        header_names: renamed headers, such as `{"id": "event-id"}`; see OUTBOX_HEADER_NAMES.
        max_attempts: attempts before an event becomes a dead letter.
        retry_seconds: seconds until the second attempt, doubled for each later one, at most 5 minutes.
        on_dead_letter: whether later events of a dead letter's key are handled or blocked.
        dead_letter_topic: the topic for a copy of each dead letter, with the reason in its headers.
        dedupe: how duplicates are detected: by id, or by idempotency key if the event has one.
        on_error: the meaning of a handler's exceptions, such as `{ConnectionError: "outage", KeyError:
            "dead_letter"}`. "retry", the default, counts an attempt. The nearest class decides.
        outage_after: the number of different events that must fail in a row to count as an outage, where
            neither their errors nor their number say so before; 0: never. See docs/consuming-failures.md.
        origins: the origins of topics, such as `{"orders-v2": "order-events"}`; the default is the topic
            itself. An id that is not a UUID, and an idempotency key, are unique within one origin. If a topic
            is renamed, give its old name here.
        handler_seconds: the time limit of one call of a handler; by default 80 %, at most 90 % of
            max.poll.interval.ms.
        cache: a cache of handled events; see `RedisCache`.
        dedupe_table: a table in which older consumers of this service record processed events. Each event is
            recorded there too, and one that is already there counts as a duplicate.
        bodies: the store of large payloads, a `Bodies`: handlers get the verified body as the payload.
            Otherwise they get the reference, also as `event.reference`.
        registry: the registry of the schemas that values are framed with, a `SchemaRegistry`: values in Avro
            and Protobuf are read. Otherwise only JSON is.
        keys: the keys of data subjects, a `SubjectKeys`: handlers get encrypted members of the payload
            decrypted, and `ERASED` for those that were erased. Otherwise they get encrypted text.

    Raises:
        SetupError: an argument is invalid.
    """

    def run(self, stop: threading.Event | None = None) -> Counts:
        """Handle events until SIGTERM or SIGINT, or until `stop` is set; finish the current events first.

        Signals are handled only in the main thread; a second signal has its usual effect. While the database
        or Kafka is unavailable, the consumer waits, also at its start. Failed events are tried again from the
        inbox.

        Returns:
            Counts of the events by result.

        Raises:
            ConsumerError: Kafka's client cannot continue, or the tables cannot be used.
            SetupError: Kafka denies access or rejects the settings, or the tables do not exist.
            UnavailableError: at the start, the database or Kafka refuses the credentials.
        """
        return self._consume(stop, self._handle)

    def receive(self, stop: threading.Event | None = None) -> Counts:
        """Write events to the inbox, from which `drain` handles them; otherwise like `run`.

        For slow handlers: they are then not limited by Kafka's partitions and poll interval.
        """
        return self._consume(stop, self._receive)

    def drain(self, stop: threading.Event | None = None, *, until_empty: bool = False) -> Counts:
        """Handle the events in the inbox, without Kafka; any number of processes can do so in parallel.

        Args:
            until_empty: end when no event is due; otherwise end only after `stop` or a signal.
        """
        stop = threading.Event() if stop is None else stop

        async def pause(seconds: float) -> None:
            stop.wait(seconds)

        with _signals_set(stop), limits.alarms(self._seconds) as alarm:
            return drive(self._without_kafka(lambda: alarm, stop.is_set, pause, until_empty=until_empty))

    def backlog(self) -> tuple[Backlog, bool]:
        """Return the backlog of the inbox, and whether an event in it is due."""
        return drive(self._backlog())

    def _consume(
        self, stop: threading.Event | None, step: Callable[[Work, Member], Awaitable[None]]
    ) -> Counts:
        stop = threading.Event() if stop is None else stop
        with _signals_set(stop), limits.alarms(self._seconds) as alarm:
            return drive(self._with_kafka(step, lambda: alarm, stop.is_set))

    def _by_dsn(self, dsn: str) -> Callable[[], Connection]:
        return psycopg_transactions.dsn(dsn, self._source)

    def _database(self) -> Database:
        if self._session is not None:
            return Sessions(self._session)
        assert self._connect is not None
        return Connections(self._connect)


class AsyncConsumer(BaseConsumer[Awaitable[AsyncConnection], AsyncSession]):
    """Reads topics as a member of a group, and passes each event to the handler of its type.

    Handlers are written with `async def`, and run one after the other in the event loop of `run`. The
    arguments are those of `Consumer`; `connect` returns an asynchronous psycopg connection, and `session` is
    an async_sessionmaker of SQLAlchemy.
    """

    _is_asynchronous = True

    async def run(self, stop: asyncio.Event | None = None) -> Counts:
        """As `Consumer.run`, in the running event loop; cancellation rolls back the current events."""
        return await self._consume(stop, self._handle)

    async def receive(self, stop: asyncio.Event | None = None) -> Counts:
        """As `Consumer.receive`."""
        return await self._consume(stop, self._receive)

    async def drain(self, stop: asyncio.Event | None = None, *, until_empty: bool = False) -> Counts:
        """As `Consumer.drain`."""
        stop = asyncio.Event() if stop is None else stop

        async def pause(seconds: float) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), seconds)

        with _loop_signals_set(stop):
            return await self._without_kafka(self._limit, stop.is_set, pause, until_empty=until_empty)

    async def backlog(self) -> tuple[Backlog, bool]:
        """As `Consumer.backlog`."""
        return await self._backlog()

    async def _consume(
        self, stop: asyncio.Event | None, step: Callable[[Work, Member], Awaitable[None]]
    ) -> Counts:
        stop = asyncio.Event() if stop is None else stop
        with _loop_signals_set(stop):
            return await self._with_kafka(step, self._limit, stop.is_set)

    def _limit(self) -> AbstractAsyncContextManager[object]:
        return limits.deadline(self._seconds)

    def _by_dsn(self, dsn: str) -> Callable[[], Awaitable[AsyncConnection]]:
        return psycopg_transactions.async_dsn(dsn, self._source)

    def _database(self) -> Database:
        if self._session is not None:
            return AsyncSessions(self._session)
        assert self._connect is not None
        return Connections(self._connect, psycopg.AsyncConnection)


def drive(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine whose parts block, and which never waits for an event loop; return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking part has waited for an event loop")


@contextmanager
def _signals_set(stop: threading.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def on_signal(number: int, frame: FrameType | None) -> None:
        set_from_handler(stop)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _loop_signals_set(stop: asyncio.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
