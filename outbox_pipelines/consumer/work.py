"""What becomes of messages: handled, or in the inbox.

Invariants:
- The event is recorded first, then handled; then the database commits; only then may the offset be committed.
- A failed event lies in the inbox before the next one is looked at, and the next ones of its key come behind.
- Of each partition that comes, as many events as may have been at hand when a process died go through the
  inbox, where attempts are counted before they begin: one that ends the process is found, and no other costs
  a commit more.
- The database's absence is nobody's failure: it is waited for, and nothing is counted.
"""

from __future__ import annotations

import inspect
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Protocol, TypeVar

from outbox_pipelines.consumer import inbox, queries
from outbox_pipelines.consumer.copies import DeadLetterTopic
from outbox_pipelines.consumer.errors import ConsumerError, UnreadableError
from outbox_pipelines.consumer.event import NAMESPACE, Event
from outbox_pipelines.consumer.handlers import Handler, Handlers
from outbox_pipelines.consumer.inbox import Arrival, Backlog, Inbox, Stored, Waiting
from outbox_pipelines.consumer.membership import Member, Place
from outbox_pipelines.consumer.reading import Reader
from outbox_pipelines.consumer.tables import bucket
from outbox_pipelines.consumer.tracing import surroundings
from outbox_pipelines.consumer.transactions import Database, is_worth_a_repetition, may_pass
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_TRIES: Final = 3
# How often the inbox is looked at while nothing in it is due, and how long it may keep us from Kafka.
_LOOK_SECONDS: Final = 1.0
_DRAIN_SECONDS: Final = 1.0
# Kafka hears of us at least so often while a list of events is worked through.
_SILENT_SECONDS: Final = 10.0
_LONGEST_PAUSE: Final = 5.0
_LONGEST_ERROR: Final = 2000


class StoppedError(Exception):
    """The consumer was stopped while it waited for the database."""


class Cache(Protocol):
    """What may know of events that were handled; see `cache`."""

    def known(self, source: str, ids: Sequence[uuid.UUID]) -> set[uuid.UUID]: ...

    def remember(self, source: str, ids: Sequence[uuid.UUID]) -> None: ...


@dataclass(slots=True)
class Counts:
    """What became of the messages of a run."""

    handled: int = 0
    duplicates: int = 0
    """Handled or received before, by this source."""
    ignored: int = 0
    """Of types that nobody asked for."""
    received: int = 0
    """Put into the inbox: failed, behind one that failed, or to be handled from there."""
    failures: int = 0
    """Attempts that failed."""
    dead_letters: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How a consumer works; see `Consumer` for what the fields mean."""

    source: str
    attempts: int
    backoff: float
    blocks: bool
    by_key: bool
    limit: Callable[[], AbstractAsyncContextManager[object]]
    pause: Callable[[float], Awaitable[None]]
    is_stopped: Callable[[], bool]
    copies: DeadLetterTopic | None = None
    cache: Cache | None = None


@dataclass(frozen=True, slots=True)
class _Item:
    """A message at hand, and what handles it; one that is no event has an error instead."""

    message: Any
    message_id: uuid.UUID
    event: Event | None = None
    handler: Handler | None = None
    error: str = ""


class Work:
    """One consumer's work; to be used by one thread or task."""

    def __init__(self, plan: Plan, handlers: Handlers, reader: Reader, database: Database) -> None:
        self.counts = Counts()
        self._plan = plan
        self._handlers = handlers
        self._reader = reader
        self._database = database
        self._inbox = Inbox(database, plan.source, blocks=plan.blocks, backoff=plan.backoff)
        # How many more events of a partition go through the inbox.
        self._cautious: dict[Place, int] = {}
        self._look_at = 0.0

    async def begin(self) -> None:
        """Asks for the tables.

        Raises:
            SetupError: they are not there.
        """
        async with self._database.transaction() as transaction:
            [(there,)] = await self._database.rows(transaction, queries.TABLES, {})
        if not there:
            raise SetupError(
                "the consumer's tables are not there: outbox consumer migrate, or migrate(connection)"
            )

    async def take(self, messages: Sequence[Any], member: Member) -> None:
        """Handles messages at hand in their order; those of a partition that goes meanwhile are left."""
        for place in member.take_news():
            self._cautious[place] = self._handlers.at_once
        items = [self._item(each) for each in messages]
        known = await self._known(items) if self._plan.cache else set()
        for group in self._groups(items):
            if self._plan.is_stopped():
                return
            if member.seconds_since_poll > _SILENT_SECONDS:
                await self._plan.pause(0)
            group = [each for each in group if member.has(each.message)]
            new = [each for each in group if each.message_id not in known]
            self.counts.duplicates += len(group) - len(new)
            if new:
                await self._take_group(new)
            for each in group:
                member.done(each.message)

    async def receive(self, messages: Sequence[Any], member: Member) -> None:
        """Puts messages at hand into the inbox, to be handled from there."""
        items = [self._item(each) for each in messages]
        unreadable = [each for each in items if each.error]
        wanted = [each for each in items if each.handler]
        self.counts.ignored += len(items) - len(wanted) - len(unreadable)
        for each in unreadable:
            await self._refuse(each)
        if wanted:
            new = await self._receive(wanted)
            self.counts.received += len(new)
            self.counts.duplicates += len(wanted) - len(new)
        for each in items:
            member.done(each.message)

    async def look(self, every: float = _LOOK_SECONDS) -> bool:
        """Handles what is due in the inbox; so many seconds after nothing was, it looks again.

        Returns:
            Whether there was something that no other process had.
        """
        if time.monotonic() < self._look_at:
            return False
        until = time.monotonic() + _DRAIN_SECONDS
        before = self.counts.handled, self.counts.failures
        for head in await self._surely(self._inbox.heads):
            due: Waiting | None = head
            while due and not self._plan.is_stopped() and time.monotonic() < until:
                due = await self._attempt_again(due)
        is_done = (self.counts.handled, self.counts.failures) == before
        self._look_at = time.monotonic() + every if is_done else 0.0
        return not is_done

    async def backlog(self) -> tuple[Backlog, bool]:
        """How far the inbox is behind, and whether something is due in it."""
        return await self._inbox.backlog(), bool(await self._inbox.heads())

    def _item(self, message: Any) -> _Item:
        try:
            event = self._reader.read(message)
            handler = self._handlers.handler(event.type)
            if handler is None and not event.type:
                raise UnreadableError(f"{event} names no type: handle it with on_other, or send event-type")
        except UnreadableError as error:
            place = f"{message.topic()}/{message.partition()}/{message.offset()}"
            return _Item(message, uuid.uuid5(NAMESPACE, place), error=str(error))
        return _Item(message, event.identity(by_key=self._plan.by_key), event, handler)

    def _groups(self, items: Sequence[_Item]) -> Iterator[list[_Item]]:
        """Items that are handled together: neighbours with one handler that takes many."""
        for handler, neighbours in groupby(items, lambda each: each.handler):
            size = handler.batch or 1 if handler else 1
            same = list(neighbours)
            for start in range(0, len(same), size):
                yield same[start : start + size]

    async def _take_group(self, items: list[_Item]) -> None:
        first = items[0]
        if first.error:
            await self._refuse(first)
        elif first.handler is None:
            self.counts.ignored += 1
        elif self._cautious and any(_place(each) in self._cautious for each in items):
            await self._take_cautiously(items)
        elif len(items) == 1:
            await self._take(first)
        else:
            await self._take_many(first.handler, items)

    async def _take(self, item: _Item) -> None:
        assert item.event is not None
        assert item.handler is not None
        event, handler = item.event, item.handler
        given = {
            "id": str(item.message_id),
            "source": self._plan.source,
            "topic": event.topic,
            "key": inbox.key_of(event, item.message_id),
            "block": self._plan.blocks,
        }

        async def attempt() -> tuple[bool, bool]:
            async with self._database.transaction() as transaction:
                is_new = bool(await self._database.rows(transaction, queries.RECORD, given))
                if is_new:
                    await self._call(handler, [event], transaction)
                return is_new, not is_new and bool(await self._recorded(transaction, [item.message_id]))

        try:
            is_new, is_known = await self._repeated(attempt)
        except SetupError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises
            await self._put_aside(item, error)
            return
        if is_new:
            self.counts.handled += 1
            self._remember([item])
        elif is_known:
            self.counts.duplicates += 1
            self._remember([item])
        elif await self._receive([item]):
            # It was not recorded for the sake of one before it.
            self.counts.received += 1
        else:
            self.counts.duplicates += 1

    async def _take_many(self, handler: Handler, items: Sequence[_Item]) -> None:
        given = {
            "ids": [str(each.message_id) for each in items],
            "topics": [each.event.topic for each in items if each.event],
            "keys": [inbox.key_of(each.event, each.message_id) for each in items if each.event],
            "source": self._plan.source,
            "block": self._plan.blocks,
        }

        async def attempt() -> tuple[list[_Item], set[uuid.UUID]]:
            async with self._database.transaction() as transaction:
                rows = await self._database.rows(transaction, queries.RECORD_MANY, given)
                recorded = {uuid.UUID(text) for (text,) in rows}
                # One of each id, the first.
                new = [*{each.message_id: each for each in reversed(items)}.values()][::-1]
                new = [each for each in new if each.message_id in recorded]
                if new:
                    await self._call(handler, [each.event for each in new if each.event], transaction)
                others = [each.message_id for each in items if each.message_id not in recorded]
                return new, recorded | await self._recorded(transaction, others)

        try:
            new, known = await self._repeated(attempt)
        except SetupError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises
            _LOG.warning("%d events failed together and are handled one by one: %s", len(items), _told(error))
            for each in items:
                await self._take(each)
            return
        left = [each for each in items if each.message_id not in known]
        self.counts.handled += len(new)
        self.counts.duplicates += len(items) - len(new) - len(left)
        self._remember([each for each in items if each.message_id in known])
        for each in left:
            await self._take(each)

    async def _take_cautiously(self, items: Sequence[_Item]) -> None:
        """Events that may have ended the process before: their attempts are counted."""
        where = await self._receive(items)
        self.counts.duplicates += len(items) - len(where)
        for each in items:
            seq = where.pop(each.message_id, None)
            if seq is not None:
                self._be_less_cautious(_place(each))
                before = self.counts.handled
                await self._attempt_again(Waiting(seq, 0))
                self.counts.received += self.counts.handled == before

    def _be_less_cautious(self, place: Place) -> None:
        left = self._cautious.pop(place, 0) - 1
        if left > 0:
            self._cautious[place] = left

    async def _put_aside(self, item: _Item, error: Exception) -> None:
        """The event's first attempt failed. It may have been handled all the same: the answer was lost."""
        text = _told(error)
        dead = self._plan.attempts <= 1 and self._has_copy(item.message, 1, text)
        if not await self._receive([item], attempts=1, error=text, dead=dead):
            self.counts.duplicates += 1
            return
        self._count_failure(str(item.event), text, 1, dead=dead)
        self.counts.received += 1

    async def _refuse(self, item: _Item) -> None:
        """A message that is no event becomes a dead letter at once: no second attempt would change it."""
        dead = self._has_copy(item.message, 0, item.error)
        if await self._receive([item], error=item.error, dead=dead):
            self._count_failure("a message", item.error, 0, dead=dead)
        else:
            self.counts.duplicates += 1

    async def _attempt_again(self, waiting: Waiting) -> Waiting | None:
        """Handles a message of the inbox. Returns the next one of its key that is due, where it succeeded."""
        if waiting.attempts >= self._plan.attempts:
            await self._give_up(waiting)
            return None
        message = await self._surely(lambda: self._inbox.claim(waiting))
        if message is None:
            return None
        attempts = waiting.attempts + 1
        try:
            if not await self._repeated(lambda: self._handle_stored(waiting.seq, message)):
                return None
        except SetupError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises
            await self._miss(waiting.seq, attempts, message, error)
            return None
        self.counts.handled += 1
        return await self._surely(lambda: self._inbox.next(waiting.seq))

    async def _handle_stored(self, seq: int, message: Stored) -> bool:
        item = self._item(message)
        if item.error:
            raise UnreadableError(item.error)
        if item.event is None or item.handler is None:
            raise UnreadableError(f"{item.event} has no handler any more: register one, or discard it")
        async with self._database.transaction() as transaction:
            is_ours = await self._inbox.finish(transaction, seq)
            if is_ours:
                await self._call(item.handler, [item.event], transaction)
        return is_ours

    async def _miss(self, seq: int, attempts: int, message: Stored, error: Exception) -> None:
        text = _told(error)
        last = attempts >= self._plan.attempts or isinstance(error, UnreadableError)
        dead = last and self._has_copy(message, attempts, text)
        await self._surely(lambda: self._inbox.missed(seq, attempts, text, dead=dead))
        self._count_failure(f"the message {seq} of the inbox", text, attempts, dead=dead)

    async def _give_up(self, waiting: Waiting) -> None:
        """All attempts have begun and none has told its end, or the topic of dead letters was away."""
        message = await self._surely(lambda: self._inbox.read(waiting.seq))
        dead = self._has_copy(message, waiting.attempts, inbox.ENDED)
        await self._surely(lambda: self._inbox.missed(waiting.seq, waiting.attempts, inbox.ENDED, dead=dead))
        self._count_failure(
            f"the message {waiting.seq} of the inbox", inbox.ENDED, waiting.attempts, dead=dead
        )

    def _has_copy(self, message: Any, attempts: int, error: str) -> bool:
        """Whether a message may become a dead letter: its copy is there, where copies are asked for."""
        if self._plan.copies is None:
            return True
        try:
            self._plan.copies.send(message, source=self._plan.source, attempts=attempts, error=error)
        except ConsumerError as problem:
            _LOG.warning("a message waits to become a dead letter: %s", problem)
            return False
        return True

    def _count_failure(self, what: str, error: str, attempts: int, *, dead: bool) -> None:
        self.counts.failures += 1
        self.counts.dead_letters += dead
        if dead:
            _LOG.error("%s is a dead letter after %d attempts: %s", what, attempts, error)
        else:
            _LOG.warning("%s was not handled in attempt %d: %s", what, attempts, error)

    async def _receive(self, items: Sequence[_Item], **more: Any) -> dict[uuid.UUID, int]:
        arrivals = [
            Arrival.of(each.event, each.message_id, each.message)
            if each.event
            else Arrival.of_no_event(each.message_id, each.message)
            for each in items
        ]
        return await self._surely(lambda: self._inbox.receive(arrivals, **more))

    async def _call(self, handler: Handler, events: list[Event], transaction: Any) -> None:
        with surroundings(events, self._plan.source):
            async with self._plan.limit():
                done = handler.function(events if handler.batch else events[0], transaction)
                if inspect.isawaitable(done):
                    await done

    async def _known(self, items: Sequence[_Item]) -> set[uuid.UUID]:
        """Ids that the cache knows and the database confirms."""
        assert self._plan.cache is not None
        told = self._plan.cache.known(self._plan.source, [each.message_id for each in items])

        async def verified() -> set[uuid.UUID]:
            async with self._database.transaction() as transaction:
                return await self._recorded(transaction, list(told))

        return await self._surely(verified) if told else set()

    async def _recorded(self, transaction: Any, ids: Sequence[uuid.UUID]) -> set[uuid.UUID]:
        """Those that were handled or received before."""
        if not ids:
            return set()
        given = {
            "ids": [str(each) for each in ids],
            "buckets": list({bucket(each) for each in ids}),
            "source": self._plan.source,
        }
        return {uuid.UUID(text) for (text,) in await self._database.rows(transaction, queries.KNOWN, given)}

    def _remember(self, items: Sequence[_Item]) -> None:
        if self._plan.cache is not None:
            self._plan.cache.remember(self._plan.source, [each.message_id for each in items])

    async def _repeated(self, attempt: Callable[[], Awaitable[_Result]]) -> _Result:
        """At once again, where the database chose another transaction."""
        for _ in range(_TRIES - 1):
            try:
                return await attempt()
            except Exception as error:
                if not is_worth_a_repetition(error):
                    raise
        return await attempt()

    async def _surely(self, do: Callable[[], Awaitable[_Result]]) -> _Result:
        """Does what needs the database alone; while that is away it waits.

        Raises:
            StoppedError: meanwhile.
            ConsumerError: the tables refuse.
        """
        pause = 0.0
        while not pause or not self._plan.is_stopped():
            try:
                done = await do()
            except Exception as error:
                if isinstance(error, SetupError):
                    raise
                if not may_pass(error):
                    raise ConsumerError(f"the consumer's tables cannot be used: {_told(error)}") from error
                if not pause:
                    _LOG.warning("the database is away, and is waited for: %s", _told(error))
            else:
                if pause:
                    _LOG.info("the database is back")
                return done
            pause = min(2 * pause or 0.1, _LONGEST_PAUSE)
            await self._plan.pause(pause)
        raise StoppedError


def _place(item: _Item) -> Place:
    return str(item.message.topic()), item.message.partition()


def _told(error: BaseException) -> str:
    """One line for people, which PostgreSQL's text can have."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return inbox.readable(text)[:_LONGEST_ERROR]
