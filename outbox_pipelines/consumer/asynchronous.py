"""The consumer for an event loop; otherwise like the blocking one.

Invariants:
- Kafka's client is used by one thread at a time, and no blocking call runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from outbox_pipelines.consumer import connecting, limits
from outbox_pipelines.consumer.breaker import Policy
from outbox_pipelines.consumer.config import Cache, Counts
from outbox_pipelines.consumer.connecting import AsyncConnection
from outbox_pipelines.consumer.dedupe_table import DedupeTable
from outbox_pipelines.consumer.inbox import Backlog
from outbox_pipelines.consumer.membership import Member
from outbox_pipelines.consumer.options import (
    IDLE_SECONDS,
    RECEIVED_AT_ONCE,
    SIGNALS,
    Configured,
    Options,
    require_one_way,
)
from outbox_pipelines.consumer.processor import Work
from outbox_pipelines.consumer.transactions import AsyncConnections, AsyncSessions, Database

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


class AsyncConsumer(Configured):
    """Reads topics as a member of a group, and passes each event to the handler of its type.

    Handlers are written with `async def`, and run one after the other in the event loop of `run`.

    Args:
        source: the name of the consumer. An event is handled once within one source; consumers with
            different sources handle the same events independently.
        topics: the names of the topics; a name that begins with ^ is a regular expression.
        kafka: settings of librdkafka, at least `bootstrap.servers`; `group.id` is the source by default.
        dsn: the database of the handlers' tables, as a libpq connection string.
        connect: instead of `dsn`, returns an asynchronous psycopg connection without an open transaction.
        session: instead of both, an async_sessionmaker of SQLAlchemy: handlers then get a session.
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

    Raises:
        SetupError: an argument is invalid.
    """

    _is_asynchronous = True

    def __init__(
        self,
        *,
        source: str,
        topics: Sequence[str],
        kafka: Mapping[str, Any],
        dsn: str | None = None,
        connect: Callable[[], Awaitable[AsyncConnection]] | None = None,
        session: Callable[[], AsyncSession] | None = None,
        header_names: Mapping[str, str] = MappingProxyType({}),
        max_attempts: int = 5,
        retry_seconds: float = 10.0,
        on_dead_letter: Literal["continue", "block"] = "continue",
        dead_letter_topic: str | None = None,
        dedupe: Literal["id", "key"] = "id",
        on_error: Mapping[type[BaseException], Policy] = MappingProxyType({}),
        outage_after: int = 20,
        origins: Mapping[str, str] = MappingProxyType({}),
        handler_seconds: float | None = None,
        cache: Cache | None = None,
        dedupe_table: DedupeTable | None = None,
    ) -> None:
        options = Options(
            header_names,
            max_attempts,
            retry_seconds,
            on_dead_letter,
            dead_letter_topic,
            dedupe,
            on_error,
            outage_after,
            origins,
            handler_seconds,
            cache,
            dedupe_table,
        )
        super().__init__(source, topics, kafka, options)
        require_one_way(dsn, connect, session)
        self._connect = connect if dsn is None else connecting.async_dsn(dsn, self._source)
        self._session = session

    async def run(self, stop: asyncio.Event | None = None) -> Counts:
        """As `Consumer.run`, in the running event loop; cancellation rolls back the current events."""
        return await self._with_kafka(stop, self._handle)

    async def receive(self, stop: asyncio.Event | None = None) -> Counts:
        """As `Consumer.receive`."""
        return await self._with_kafka(stop, self._receive)

    async def drain(self, stop: asyncio.Event | None = None, *, until_empty: bool = False) -> Counts:
        """As `Consumer.drain`."""
        stop = asyncio.Event() if stop is None else stop

        async def pause(seconds: float) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), seconds)

        with _loop_signals_set(stop):
            database, waits = self._database(), not until_empty
            async with self._at_work(database, self._limit, pause, stop.is_set, waits=waits) as work:
                while not stop.is_set():
                    await work.measure()
                    if not await work.look(every=0):
                        if until_empty:
                            break
                        await pause(IDLE_SECONDS)
            return work.counts

    async def backlog(self) -> tuple[Backlog, bool]:
        """As `Consumer.backlog`."""
        database = self._database()
        async with self._at_work(database, self._limit, asyncio.sleep, lambda: True, waits=False) as work:
            return await work.backlog()

    async def _with_kafka(
        self,
        stop: asyncio.Event | None,
        step: Callable[[Work, Member], Awaitable[None]],
    ) -> Counts:
        stop = asyncio.Event() if stop is None else stop
        member = Member(self._kafka, self._topics)

        async def pause(seconds: float) -> None:
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0 and not stop.is_set():
                await _in_thread(member.wait, min(left, IDLE_SECONDS))
            await _in_thread(member.wait, 0)

        async def stay() -> None:
            if member.is_silent:
                await _in_thread(member.wait, 0)

        try:
            with _loop_signals_set(stop):
                database = self._database()
                async with self._at_work(database, self._limit, pause, stop.is_set, stay) as work:
                    while not stop.is_set():
                        await step(work, member)
                return work.counts
        finally:
            await _in_thread(member.close)

    async def _handle(self, work: Work, member: Member) -> None:
        await work.take(await _polled(member, self._at_once), member)
        await work.look()
        await work.measure()

    async def _receive(self, work: Work, member: Member) -> None:
        await work.receive(await _polled(member, RECEIVED_AT_ONCE), member)
        await work.measure()

    def _limit(self) -> AbstractAsyncContextManager[object]:
        return limits.deadline(self._seconds)

    def _database(self) -> Database:
        if self._session is not None:
            return AsyncSessions(self._session)
        assert self._connect is not None
        return AsyncConnections(self._connect)


async def _polled(member: Member, at_once: int) -> list[Any]:
    """Return the available messages; if there are none, wait for some in another thread."""
    return member.poll(at_once, 0) or await _in_thread(member.poll, at_once)


async def _in_thread(do: Callable[..., Any], *given: Any) -> Any:
    """Run a blocking call to its end, also if the task is cancelled: Kafka's client is for one thread."""
    running = asyncio.ensure_future(asyncio.to_thread(do, *given))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


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
