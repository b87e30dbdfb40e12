"""The consumer that blocks: each event's handler runs once, in one transaction with the note that it ran.

Invariants:
- One thread, one event or list of events at a time: a partition's events are handled in its order.
- It can be run again after it has ended.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from outbox_pipelines.consumer import limits, transactions
from outbox_pipelines.consumer.breaker import Policy
from outbox_pipelines.consumer.config import Cache, Counts
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
from outbox_pipelines.consumer.run_sync import drive
from outbox_pipelines.consumer.transactions import Connection, Connections, Database, Sessions

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class Consumer(Configured):
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
        header_names: headers that have another name, as `{"id": "event-id"}`; see OUTBOX_HEADER_NAMES.
        max_attempts: how often an event is tried before it is a dead letter.
        retry_seconds: seconds until the second attempt, doubled for each that follows, 5 minutes at most.
        on_dead_letter: whether events of the same key behind a dead letter are handled or wait.
        dead_letter_topic: gets a copy of each dead letter, with the reason in its headers.
        dedupe: by what events are told apart: their ids, or idempotency keys where they have one.
        on_error: what an exception of a handler means, as `{ConnectionError: "outage", KeyError:
            "dead_letter"}`. "retry", the default, counts an attempt. The nearest class decides.
        outage_after: so many different events that fail in a row are an outage of what the handler needs; 0:
            never.
        origins: where the events of a topic come from, as `{"orders-v2": "order-events"}`: the topic itself
            by default. An id that is no UUID, and an idempotency key, count within one origin. If a topic is
            renamed, give its old name here.
        handler_seconds: how long one call of a handler may take: 80 % of max.poll.interval.ms by default,
            90 % at most.
        cache: knows of events that were handled; see `RedisCache`.

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
        )
        super().__init__(source, topics, kafka, options)
        require_one_way(dsn, connect, session)
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
                    await work.measure()
                    if not await work.look(every=0):
                        if until_empty:
                            break
                        stop.wait(IDLE_SECONDS)
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
                        member.wait(min(left, IDLE_SECONDS))
                    member.wait(0)

                async def stay() -> None:
                    if member.is_silent:
                        member.wait(0)

                async with self._at_work(database, lambda: alarm, pause, stop.is_set, stay) as work:
                    while not stop.is_set():
                        await step(work, member)
                return work.counts

        with _signals_set(stop), limits.alarms(self._seconds) as alarm:
            return drive(done(alarm))

    async def _handle(self, work: Work, member: Member) -> None:
        await work.take(member.poll(self._at_once), member)
        await work.look()
        await work.measure()

    async def _receive(self, work: Work, member: Member) -> None:
        await work.receive(member.poll(RECEIVED_AT_ONCE), member)
        await work.measure()

    def _database(self) -> Database:
        if self._session is not None:
            return Sessions(self._session)
        assert self._connect is not None
        return Connections(self._connect)


@contextmanager
def _signals_set(stop: threading.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

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
