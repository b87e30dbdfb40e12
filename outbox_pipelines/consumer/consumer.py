"""The consumers: each event's handler runs once, in one transaction with the note that it ran.

Invariants:
- One thread or task, one event or list of events at a time: a partition's events are handled in its order.
- A consumer can be run again after it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, Unpack

from outbox_pipelines.consumer import limits, transactions
from outbox_pipelines.consumer.copies import DeadLetterTopic
from outbox_pipelines.consumer.driving import drive
from outbox_pipelines.consumer.handlers import Handlers
from outbox_pipelines.consumer.inbox import LONGEST_SECONDS, Backlog
from outbox_pipelines.consumer.membership import Member, settings
from outbox_pipelines.consumer.reading import Reader
from outbox_pipelines.consumer.transactions import (
    AsyncConnection,
    AsyncConnections,
    AsyncSessions,
    Connection,
    Connections,
    Database,
    Sessions,
)
from outbox_pipelines.consumer.work import Cache, Counts, Plan, StoppedError, Work
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

_LOG: Final = logging.getLogger(__name__)
_WITH_CACHE: Final = 100
_RECEIVED_AT_ONCE: Final = 500
_IDLE_SECONDS: Final = 0.2
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Options(TypedDict, total=False):
    """What both consumers take beside the source, the topics and the database."""

    header_names: Mapping[str, str]
    """Headers that have another name, as `{"id": "event-id"}`; see OUTBOX_HEADER_NAMES."""
    attempts: int
    """How often an event is tried before it is a dead letter: 5."""
    backoff: float
    """Seconds until the second attempt: 10; doubled for each that follows, 5 minutes at most."""
    on_dead_letter: Literal["continue", "block"]
    """Whether those of the same key behind a dead letter are handled, the default, or wait."""
    dead_letter_topic: str | None
    """Gets a copy of each dead letter, with the reason in its headers."""
    dedupe: Literal["id", "key"]
    """By what events are told apart: their ids, the default, or idempotency keys where they have one."""
    handler_seconds: float
    """How long one call of a handler may take: 80 % of max.poll.interval.ms."""
    cache: Cache | None
    """Knows of events that were handled; see `RedisCache`."""


class _Consumer(Handlers):
    """What both consumers have."""

    def __init__(
        self, source: str, topics: Sequence[str], kafka: Mapping[str, Any], options: Options
    ) -> None:
        super().__init__()
        if not source:
            raise SetupError("source is empty: name who consumes, for example billing")
        if isinstance(topics, str) or not topics:
            raise SetupError('topics is no list of names: write for example ["order-events"]')
        if unknown := options.keys() - Options.__annotations__.keys():
            raise SetupError(f"there is no {min(unknown)}: there are {', '.join(Options.__annotations__)}")
        attempts, backoff = options.get("attempts", 5), options.get("backoff", 10.0)
        if attempts < 1:
            raise SetupError(f"attempts is {attempts}: give 1 or more")
        if not 0 <= backoff <= LONGEST_SECONDS:
            raise SetupError(f"backoff is {backoff:g}: give 0 to {LONGEST_SECONDS:.0f} seconds")
        copies = options.get("dead_letter_topic")
        self._source = source
        self._topics = topics
        self._kafka = settings(kafka, source)
        self._reader = Reader(options.get("header_names", {}))
        self._cache = options.get("cache")
        self._seconds = limits.seconds(options.get("handler_seconds"), kafka)
        self._plan = functools.partial(
            Plan,
            source=source,
            attempts=attempts,
            backoff=backoff,
            blocks=_one_of("on_dead_letter", options.get("on_dead_letter"), "continue", "block") == "block",
            by_key=_one_of("dedupe", options.get("dedupe"), "id", "key") == "key",
            copies=DeadLetterTopic(kafka, copies) if copies else None,
            cache=self._cache,
        )

    @property
    def source(self) -> str:
        """Who consumes."""
        return self._source

    @property
    def _at_once(self) -> int:
        return max(self.at_once, _WITH_CACHE if self._cache else 1)

    @asynccontextmanager
    async def _at_work(
        self,
        database: Database,
        limit: Callable[[], AbstractAsyncContextManager[object]],
        pause: Callable[[float], Awaitable[None]],
        is_stopped: Callable[[], bool],
    ) -> AsyncIterator[Work]:
        plan = self._plan(limit=limit, pause=pause, is_stopped=is_stopped)
        work = Work(plan, self, self._reader, database)
        try:
            await work.begin()
            with contextlib.suppress(StoppedError):
                yield work
        finally:
            await database.close()
            _LOG.info("consumer %s stopped: %s", self._source, work.counts)


class Consumer(_Consumer):
    """Reads topics as a member of a group, and gives each event to the handler of its type.

    Handlers are plain functions; see `AsyncConsumer` for `async def`.

    Args:
        source: who consumes. Events are told apart from those handled before within one source; two with
            different sources handle the same events each for itself.
        topics: their names; one that begins with ^ is a regular expression.
        kafka: settings of librdkafka, `bootstrap.servers` at least; `group.id` is the source by default.
        dsn: the database of the handlers' tables, as libpq takes it.
        connect: in place of `dsn`, gives a connection of psycopg without an open transaction.
        session: in place of both, a sessionmaker of SQLAlchemy: handlers then get a session.
        options: see `Options`.

    Raises:
        SetupError: the arguments do not fit.
    """

    def __init__(
        self,
        *,
        source: str,
        topics: Sequence[str],
        kafka: Mapping[str, Any],
        dsn: str | None = None,
        connect: Callable[[], Connection] | None = None,
        session: Callable[[], Session] | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(source, topics, kafka, options)
        _require_one_way(dsn, connect, session)
        self._connect = connect if dsn is None else transactions.dsn(dsn, self._source)
        self._session = session

    def run(self, stop: threading.Event | None = None) -> Counts:
        """Handles events until SIGTERM or SIGINT, or until `stop` is set; what is at hand is finished first.

        Signals are watched for in the main thread alone; a second one has its usual effect. While the
        database is away it waits; what a handler fails at lies in the inbox and is tried again from there.

        Returns:
            What became of the events.

        Raises:
            ConsumerError: Kafka's client cannot go on, or the tables refuse.
            SetupError: Kafka denies access or refuses the settings, or the tables are not there.
            psycopg.OperationalError: no entry to the database at the start.
        """
        return self._with_kafka(stop, self._handle)

    def receive(self, stop: threading.Event | None = None) -> Counts:
        """Puts events into the inbox, for `drain` to handle them; else like `run`.

        For handlers that take long: Kafka's partitions, and how long they may be kept, no longer matter.
        """
        return self._with_kafka(stop, self._receive)

    def drain(self, stop: threading.Event | None = None, *, until_empty: bool = False) -> Counts:
        """Handles what is in the inbox, without Kafka; any number of processes can do so side by side.

        Args:
            until_empty: end when nothing is due; else only with `stop` or a signal.
        """
        stop = threading.Event() if stop is None else stop

        async def pause(seconds: float) -> None:
            stop.wait(seconds)

        async def drained(alarm: AbstractAsyncContextManager[object]) -> Counts:
            async with self._at_work(self._database(), lambda: alarm, pause, stop.is_set) as work:
                while not stop.is_set():
                    if not await work.look(every=0):
                        if until_empty:
                            break
                        stop.wait(_IDLE_SECONDS)
            return work.counts

        with _signals_set(stop), limits.alarms(self._seconds) as alarm:
            return drive(drained(alarm))

    def backlog(self) -> tuple[Backlog, bool]:
        """How far the inbox is behind, and whether something is due in it."""

        async def pause(seconds: float) -> None:
            time.sleep(seconds)

        async def told() -> tuple[Backlog, bool]:
            async with self._at_work(self._database(), contextlib.nullcontext, pause, lambda: True) as work:
                return await work.backlog()

        return drive(told())

    def _with_kafka(
        self,
        stop: threading.Event | None,
        step: Callable[[Work, Member], Awaitable[None]],
    ) -> Counts:
        stop = threading.Event() if stop is None else stop

        async def done(alarm: AbstractAsyncContextManager[object]) -> Counts:
            with contextlib.closing(Member(self._kafka, self._topics)) as member:
                database = self._database()

                async def pause(seconds: float) -> None:
                    until = time.monotonic() + seconds
                    while (left := until - time.monotonic()) > 0 and not stop.is_set():
                        member.wait(min(left, _IDLE_SECONDS))
                    member.wait(0)

                async with self._at_work(database, lambda: alarm, pause, stop.is_set) as work:
                    while not stop.is_set():
                        await step(work, member)
                return work.counts

        with _signals_set(stop), limits.alarms(self._seconds) as alarm:
            return drive(done(alarm))

    async def _handle(self, work: Work, member: Member) -> None:
        await work.take(member.poll(self._at_once), member)
        await work.look()

    async def _receive(self, work: Work, member: Member) -> None:
        await work.receive(member.poll(_RECEIVED_AT_ONCE), member)

    def _database(self) -> Database:
        if self._session is not None:
            return Sessions(self._session)
        assert self._connect is not None
        return Connections(self._connect)


class AsyncConsumer(_Consumer):
    """Reads topics as a member of a group, and gives each event to the handler of its type.

    Handlers are written with `async def`, and run one after the other in the event loop of `run`.

    Args:
        source: who consumes. Events are told apart from those handled before within one source; two with
            different sources handle the same events each for itself.
        topics: their names; one that begins with ^ is a regular expression.
        kafka: settings of librdkafka, `bootstrap.servers` at least; `group.id` is the source by default.
        dsn: the database of the handlers' tables, as libpq takes it.
        connect: in place of `dsn`, gives an asynchronous connection of psycopg, without an open transaction.
        session: in place of both, an async_sessionmaker of SQLAlchemy: handlers then get a session.
        options: see `Options`.

    Raises:
        SetupError: the arguments do not fit.
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
        **options: Unpack[Options],
    ) -> None:
        super().__init__(source, topics, kafka, options)
        _require_one_way(dsn, connect, session)
        self._connect = connect if dsn is None else transactions.async_dsn(dsn, self._source)
        self._session = session

    async def run(self, stop: asyncio.Event | None = None) -> Counts:
        """As `Consumer.run`, in the running event loop; cancelling it rolls back what is at hand."""
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
            async with self._at_work(self._database(), self._limit, pause, stop.is_set) as work:
                while not stop.is_set():
                    if not await work.look(every=0):
                        if until_empty:
                            break
                        await pause(_IDLE_SECONDS)
            return work.counts

    async def backlog(self) -> tuple[Backlog, bool]:
        """As `Consumer.backlog`."""
        async with self._at_work(self._database(), self._limit, asyncio.sleep, lambda: True) as work:
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
                await _in_thread(member.wait, min(left, _IDLE_SECONDS))
            await _in_thread(member.wait, 0)

        try:
            with _loop_signals_set(stop):
                async with self._at_work(self._database(), self._limit, pause, stop.is_set) as work:
                    while not stop.is_set():
                        await step(work, member)
                return work.counts
        finally:
            await _in_thread(member.close)

    async def _handle(self, work: Work, member: Member) -> None:
        await work.take(await _polled(member, self._at_once), member)
        await work.look()

    async def _receive(self, work: Work, member: Member) -> None:
        await work.receive(await _polled(member, _RECEIVED_AT_ONCE), member)

    def _limit(self) -> AbstractAsyncContextManager[object]:
        return limits.deadline(self._seconds)

    def _database(self) -> Database:
        if self._session is not None:
            return AsyncSessions(self._session)
        assert self._connect is not None
        return AsyncConnections(self._connect)


async def _polled(member: Member, at_once: int) -> list[Any]:
    """What is here at once; only where that is nothing, it is waited for, beside the loop."""
    return member.poll(at_once, 0) or await _in_thread(member.poll, at_once)


async def _in_thread(do: Callable[..., Any], *given: Any) -> Any:
    """Does what blocks, to its end, also when the task is cancelled: Kafka's client is for one thread."""
    running = asyncio.ensure_future(asyncio.to_thread(do, *given))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _require_one_way(*ways: object) -> None:
    if sum(way is not None for way in ways) != 1:
        raise SetupError("give one of dsn, connect and session: the database of the handlers' tables")


def _one_of(name: str, given: str | None, *allowed: str) -> str:
    """What is given, by default the first."""
    if given not in (None, *allowed):
        raise SetupError(f"{name} is {given!r}: give {' or '.join(allowed)}")
    return given or allowed[0]


@contextmanager
def _signals_set(stop: threading.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
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

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
