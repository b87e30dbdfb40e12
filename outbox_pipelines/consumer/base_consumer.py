"""What both consumers share: their arguments, and how they run.

Invariants:
- Invalid arguments are rejected before any connection is opened.
- The work is written once, as coroutines; what waits for Kafka or a signal is the consumer's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, TypeVar

from outbox_pipelines.config.topics import is_topic
from outbox_pipelines.consumer import limits
from outbox_pipelines.consumer.blocking_calls import Blocking, at_once, in_thread
from outbox_pipelines.consumer.config import (
    BodyReader,
    Cache,
    PayloadReader,
    Plan,
    SchemaReader,
    body_getter,
    checked_origins,
    checked_policies,
    checked_table,
    decrypter,
    require_number,
    require_one_of,
    require_one_way,
    require_short,
    require_whole,
    schema_getter,
)
from outbox_pipelines.consumer.consumer_database import Database
from outbox_pipelines.consumer.dedupe_table import DedupeTable
from outbox_pipelines.consumer.errors import Policy, StoppedError
from outbox_pipelines.consumer.event_reading import Reader
from outbox_pipelines.consumer.figures import Counts, Figures
from outbox_pipelines.consumer.handler_registry import Handlers
from outbox_pipelines.consumer.inbox import LONGEST_SECONDS, Backlog
from outbox_pipelines.consumer.kafka_clients import DeadLetterTopic, settings
from outbox_pipelines.consumer.membership import Member
from outbox_pipelines.consumer.work import Work
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
_RECEIVED_AT_ONCE: Final = 500
IDLE_SECONDS: Final = 0.2
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
Limit = Callable[[], AbstractAsyncContextManager[object]]
_Connection = TypeVar("_Connection")
_Session = TypeVar("_Session")


class BaseConsumer(Handlers, Generic[_Connection, _Session]):
    """The base class of both consumers; see `Consumer` for the arguments."""

    def __init__(
        self,
        *,
        source: str,
        topics: Sequence[str],
        kafka: Mapping[str, Any],
        dsn: str | None = None,
        connect: Callable[[], _Connection] | None = None,
        session: Callable[[], _Session] | None = None,
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
        bodies: BodyReader | None = None,
        registry: SchemaReader | None = None,
        keys: PayloadReader | None = None,
    ) -> None:
        super().__init__()
        _require_source(source)
        _require_topics(topics, dead_letter_topic)
        if not 0 <= require_number("retry_seconds", retry_seconds) <= LONGEST_SECONDS:
            raise SetupError(f"retry_seconds is {retry_seconds:g}: give 0 to {LONGEST_SECONDS:.0f} seconds")
        self._source = source
        self._blocking: Blocking = in_thread if self._is_asynchronous else at_once
        self._topics = topics
        self._kafka = settings(kafka, source)
        group = str(self._kafka["group.id"])
        require_short("group.id", group)
        self._reader = Reader(header_names)
        self._counts = Counts()
        self._figures = Figures(is_running=False)
        self._measures = False
        self._seconds = limits.seconds(handler_seconds, kafka)
        self._plan = functools.partial(
            Plan,
            source=source,
            group=group,
            shared_seconds=limits.shared(kafka),
            max_attempts=require_whole("max_attempts", max_attempts, 1),
            retry_seconds=retry_seconds,
            blocks=require_one_of("on_dead_letter", on_dead_letter, "continue", "block") == "block",
            by_key=require_one_of("dedupe", dedupe, "id", "key") == "key",
            blocking=self._blocking,
            copies=DeadLetterTopic(kafka, dead_letter_topic) if dead_letter_topic else None,
            cache=cache,
            dedupe_table=checked_table(dedupe_table),
            body_of=body_getter(bodies, is_asynchronous=self._is_asynchronous),
            schema_of=schema_getter(registry, dedupe_table, is_asynchronous=self._is_asynchronous),
            decrypt=decrypter(keys, is_asynchronous=self._is_asynchronous),
            on_error=checked_policies(on_error),
            outage_after=require_whole("outage_after", outage_after, 0),
            origins=checked_origins(origins),
        )
        require_one_way(dsn, connect, session)
        self._connect = connect if dsn is None else self._by_dsn(dsn)
        self._session = session

    def _by_dsn(self, dsn: str) -> Callable[[], _Connection]:
        """Return what connects to the database of a connection string."""
        raise NotImplementedError

    def _database(self) -> Database:
        """Return the database of a run."""
        raise NotImplementedError

    @property
    def source(self) -> str:
        """The name of the consumer."""
        return self._source

    @property
    def counts(self) -> Counts:
        """The counts of the current or the last run; can be read from any thread."""
        return replace(self._counts, ignored_types=dict(self._counts.ignored_types))

    def measure(self) -> None:
        """Let the next run measure the inbox for the metrics."""
        self._measures = True

    @property
    def figures(self) -> Figures:
        """The measurements of the current or the last run; see `prometheus`."""
        return self._figures

    async def _handle(self, work: Work, member: Member) -> None:
        await work.take(await self._blocking(member.poll, work.at_once), member)
        await work.inbox.look()
        await work.inbox.measure()

    async def _receive(self, work: Work, member: Member) -> None:
        await work.receive(await self._blocking(member.poll, _RECEIVED_AT_ONCE), member)
        await work.inbox.measure()

    async def _with_kafka(
        self,
        step: Callable[[Work, Member], Awaitable[None]],
        limit: Limit,
        is_stopped: Callable[[], bool],
    ) -> Counts:
        """Repeat a step as a member of the group until it is stopped."""
        member = await self._blocking(Member, self._kafka, self._topics)

        async def pause(seconds: float) -> None:
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0 and not is_stopped():
                await self._blocking(member.wait, min(left, IDLE_SECONDS))
            await self._blocking(member.wait, 0)

        async def stay() -> None:
            if member.is_silent:
                await self._blocking(member.wait, 0)

        try:
            async with self._at_work(self._database(), limit, pause, is_stopped, stay) as work:
                while not is_stopped():
                    await step(work, member)
            return work.counts
        finally:
            await self._blocking(member.close)

    async def _without_kafka(
        self,
        limit: Limit,
        is_stopped: Callable[[], bool],
        pause: Callable[[float], Awaitable[None]],
        *,
        until_empty: bool,
    ) -> Counts:
        """Handle the events in the inbox until it is stopped, or until none is due."""
        database, waits = self._database(), not until_empty
        async with self._at_work(database, limit, pause, is_stopped, waits=waits) as work:
            while not is_stopped():
                await work.inbox.measure()
                if not await work.inbox.look(every=0):
                    if until_empty:
                        break
                    await pause(IDLE_SECONDS)
        return work.counts

    async def _backlog(self) -> tuple[Backlog, bool]:
        limit = contextlib.nullcontext
        async with self._at_work(self._database(), limit, _nothing, lambda: True, waits=False) as work:
            return await work.inbox.backlog()

    @asynccontextmanager
    async def _at_work(
        self,
        database: Database,
        limit: Limit,
        pause: Callable[[float], Awaitable[None]],
        is_stopped: Callable[[], bool],
        stay: Callable[[], Awaitable[None]] | None = None,
        waits: bool = True,
    ) -> AsyncIterator[Work]:
        plan = self._plan(
            limit=limit,
            pause=pause,
            is_stopped=is_stopped,
            stay=stay or _nothing,
            measures=self._measures,
            waits=waits,
        )
        work = Work(plan, self, self._reader, database)
        try:
            self._require_any()
            self._counts, self._figures = work.counts, work.figures
            with limits.limited_stop(work.retry, database, is_stopped, self._seconds):
                # A stop while it waits: the block has nothing to do.
                with contextlib.suppress(StoppedError):
                    await work.begin()
                with contextlib.suppress(StoppedError):
                    yield work
                    await work.end()
        except asyncio.CancelledError:
            if _is_cancelled():
                await work.end()
            raise
        finally:
            work.figures.is_running = False
            await database.close()
            work.types.warn()
            _LOG.info("consumer %s stopped: %s", self._source, work.counts)


def _is_cancelled() -> bool:
    """Whether the task is cancelled from outside; a handler's own CancelledError is its event's doing."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


async def _nothing(*_: object) -> None:
    """Do nothing: without Kafka, no poll is needed, and nothing is waited for."""


def _require_source(source: str) -> None:
    if not source:
        raise SetupError("source is empty: give the consumer a name, for example billing")
    if "\0" in source:
        raise SetupError("source has the character NUL, which PostgreSQL cannot store: remove it")
    require_short("source", source)


def _require_topics(topics: Sequence[str], copies: str | None) -> None:
    if isinstance(topics, str) or not topics:
        raise SetupError('topics is not a list of names: write for example ["order-events"]')
    if copies is not None and not is_topic(copies):
        raise SetupError(
            f"dead_letter_topic is {copies!r}, which Kafka does not accept: use 1 to 249 of the "
            "characters a-z A-Z 0-9 . _ -"
        )
    if copies in topics:
        raise SetupError(f"dead_letter_topic is {copies!r}, which the consumer reads: give another topic")
