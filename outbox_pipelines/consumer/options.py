"""The options of both consumers, and how they are started.

Invariants:
- Invalid options are rejected before any connection is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from outbox_pipelines.config.topics import is_topic
from outbox_pipelines.consumer import limits
from outbox_pipelines.consumer.breaker import Policy
from outbox_pipelines.consumer.config import Cache, Counts, Plan, StoppedError
from outbox_pipelines.consumer.dead_letter_topic import DeadLetterTopic
from outbox_pipelines.consumer.dedupe_table import DedupeTable
from outbox_pipelines.consumer.figures import Figures
from outbox_pipelines.consumer.handlers import Handlers
from outbox_pipelines.consumer.inbox import LONGEST_SECONDS
from outbox_pipelines.consumer.membership import settings
from outbox_pipelines.consumer.numbers import require_number, require_whole
from outbox_pipelines.consumer.patience import limited_stop
from outbox_pipelines.consumer.processor import Work
from outbox_pipelines.consumer.reading import Reader
from outbox_pipelines.consumer.transactions import Database
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
_WITH_CACHE: Final = 100
# Bytes; the same as in sql/consumer.
_LONGEST_NAME: Final = 500
RECEIVED_AT_ONCE: Final = 500
IDLE_SECONDS: Final = 0.2
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Options:
    """The common options of both consumers, except source, topics and database; see `Consumer`."""

    header_names: Mapping[str, str]
    max_attempts: int
    retry_seconds: float
    on_dead_letter: Literal["continue", "block"]
    dead_letter_topic: str | None
    dedupe: Literal["id", "key"]
    on_error: Mapping[type[BaseException], Policy]
    outage_after: int
    origins: Mapping[str, str]
    handler_seconds: float | None
    cache: Cache | None
    dedupe_table: DedupeTable | None


class Configured(Handlers):
    """The base class of both consumers."""

    def __init__(
        self, source: str, topics: Sequence[str], kafka: Mapping[str, Any], options: Options
    ) -> None:
        super().__init__()
        if not source:
            raise SetupError("source is empty: give the consumer a name, for example billing")
        if "\0" in source:
            raise SetupError("source has the character NUL, which PostgreSQL cannot store: remove it")
        _require_short("source", source)
        if isinstance(topics, str) or not topics:
            raise SetupError('topics is not a list of names: write for example ["order-events"]')
        if not 0 <= require_number("retry_seconds", options.retry_seconds) <= LONGEST_SECONDS:
            raise SetupError(
                f"retry_seconds is {options.retry_seconds:g}: give 0 to {LONGEST_SECONDS:.0f} seconds"
            )
        copies = options.dead_letter_topic
        if copies is not None and not is_topic(copies):
            raise SetupError(
                f"dead_letter_topic is {copies!r}, which Kafka does not accept: use 1 to 249 of the "
                "characters a-z A-Z 0-9 . _ -"
            )
        if copies in topics:
            raise SetupError(f"dead_letter_topic is {copies!r}, which the consumer reads: give another topic")
        self._source = source
        self._topics = topics
        self._kafka = settings(kafka, source)
        _require_short("group.id", str(self._kafka["group.id"]))
        self._reader = Reader(options.header_names)
        self._cache = options.cache
        self._counts = Counts()
        self._figures = Figures(is_running=False)
        self._measures = False
        self._seconds = limits.seconds(options.handler_seconds, kafka)
        self._plan = functools.partial(
            Plan,
            source=source,
            group=str(self._kafka["group.id"]),
            shared_seconds=limits.shared(kafka),
            max_attempts=require_whole("max_attempts", options.max_attempts, 1),
            retry_seconds=options.retry_seconds,
            blocks=_one_of("on_dead_letter", options.on_dead_letter, "continue", "block") == "block",
            by_key=_one_of("dedupe", options.dedupe, "id", "key") == "key",
            copies=DeadLetterTopic(kafka, copies) if copies else None,
            cache=self._cache,
            dedupe_table=_table(options.dedupe_table),
            on_error=_policies(options.on_error),
            outage_after=require_whole("outage_after", options.outage_after, 0),
            origins=_origins(options.origins),
        )

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
            self.require_any()
            self._counts, self._figures = work.counts, work.figures
            with limited_stop(work, database, is_stopped, self._seconds):
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


async def _nothing() -> None:
    """Do nothing: without Kafka, no poll is needed."""


def require_one_way(*ways: object) -> None:
    if sum(way is not None for way in ways) != 1:
        raise SetupError("give exactly one of dsn, connect and session: the database of the handlers' tables")


def _require_short(name: str, given: str) -> None:
    """Raise SetupError for a name that the indexes of the consumer's tables may have no room for."""
    if (size := len(given.encode(errors="replace"))) > _LONGEST_NAME:
        raise SetupError(f"{name} has {size} bytes, more than {_LONGEST_NAME}: give a shorter name")


def _policies(given: Mapping[type[BaseException], Policy]) -> Mapping[type[BaseException], Policy]:
    for error, policy in given.items():
        if not (isinstance(error, type) and issubclass(error, BaseException)):
            raise SetupError(f"on_error has {error!r}: give exception classes, such as ConnectionError")
        _one_of(f"on_error of {error.__name__}", policy, "retry", "dead_letter", "outage")
    return given


def _table(given: DedupeTable | None) -> DedupeTable | None:
    if given is not None and not isinstance(given, DedupeTable):
        raise SetupError(
            f'dedupe_table is {given!r}: write for example DedupeTable("public.processed_events")'
        )
    return given


def _origins(given: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(given, Mapping):
        raise SetupError(f'origins is {given!r}: write for example {{"order-events": "orders"}}')
    for topic, origin in given.items():
        if not isinstance(origin, str) or not origin:
            raise SetupError(f'origins has {origin!r} for {topic}: write for example {{"{topic}": "orders"}}')
    return given


def _one_of(name: str, given: str | None, *allowed: str) -> str:
    """What is given, by default the first."""
    if given not in (None, *allowed):
        raise SetupError(f"{name} is {given!r}: give {' or '.join(allowed)}")
    return given or allowed[0]
