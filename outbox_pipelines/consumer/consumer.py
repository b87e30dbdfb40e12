"""The blocking consumer: each event's handler runs once, in one transaction with the record of the event.

Invariants:
- One thread handles one event or batch at a time: a partition's events are handled in order.
- A consumer can run again after it has ended.
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

from outbox_pipelines.consumer import connecting, limits
from outbox_pipelines.consumer.breaker import Policy
from outbox_pipelines.consumer.config import Cache, Counts
from outbox_pipelines.consumer.connecting import Connection
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
from outbox_pipelines.consumer.run_sync import drive
from outbox_pipelines.consumer.transactions import Connections, Database, Sessions
from outbox_pipelines.core.signals import set_from_handler

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class Consumer(Configured):
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

    Raises:
        SetupError: an argument is invalid.
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
        self._connect = connect if dsn is None else connecting.dsn(dsn, self._source)
        self._session = session

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
        return self._with_kafka(stop, self._handle)

    def receive(self, stop: threading.Event | None = None) -> Counts:
        """Write events to the inbox, from which `drain` handles them; otherwise like `run`.

        For slow handlers: they are then not limited by Kafka's partitions and poll interval.
        """
        return self._with_kafka(stop, self._receive)

    def drain(self, stop: threading.Event | None = None, *, until_empty: bool = False) -> Counts:
        """Handle the events in the inbox, without Kafka; any number of processes can do so in parallel.

        Args:
            until_empty: end when no event is due; otherwise end only after `stop` or a signal.
        """
        stop = threading.Event() if stop is None else stop

        async def pause(seconds: float) -> None:
            stop.wait(seconds)

        async def drained(alarm: AbstractAsyncContextManager[object]) -> Counts:
            database, waits = self._database(), not until_empty
            async with self._at_work(database, lambda: alarm, pause, stop.is_set, waits=waits) as work:
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
        """Return the backlog of the inbox, and whether an event in it is due."""

        async def pause(seconds: float) -> None:
            time.sleep(seconds)

        async def told() -> tuple[Backlog, bool]:
            database, limit = self._database(), contextlib.nullcontext
            async with self._at_work(database, limit, pause, lambda: True, waits=False) as work:
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
        set_from_handler(stop)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
