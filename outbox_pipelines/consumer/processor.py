"""Process messages: handle them, or write them to the inbox.

Invariants:
- The event is recorded first, then handled; then the database commits; only then is the offset committed.
- A failed event is in the inbox before the next one is read, and later events of its key go behind it.
- After a crash, as many events of a partition as can have been in progress go through the inbox, where
  attempts are counted before they begin: this detects an event that crashes the process; see `crash_guard`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from outbox_pipelines.consumer import dedupe_marks, inbox, queries
from outbox_pipelines.consumer.attempts import SPOILT, Attempts, Item, told, unreadable
from outbox_pipelines.consumer.config import Plan, StoppedError
from outbox_pipelines.consumer.crash_guard import CrashGuard
from outbox_pipelines.consumer.handlers import Handler, Handlers
from outbox_pipelines.consumer.inbox import Arrival, Backlog, Waiting
from outbox_pipelines.consumer.membership import Member, Place
from outbox_pipelines.consumer.reading import Reader
from outbox_pipelines.consumer.tables import bucket
from outbox_pipelines.consumer.transactions import Database
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
# How often the inbox is checked while nothing in it is due, and how long it can delay polling Kafka.
_LOOK_SECONDS: Final = 1.0
_DRAIN_SECONDS: Final = 1.0
# Maximum age of the inbox's metrics.
_MEASURE_SECONDS: Final = 10.0


class _BehindError(Exception):
    """Another process has written an event to the inbox that events of this batch must wait for."""


class Work(Attempts):
    """The work of one consumer; must be used by one thread or task."""

    def __init__(self, plan: Plan, handlers: Handlers, reader: Reader, database: Database) -> None:
        super().__init__(plan, handlers, reader, database)
        self._guard = CrashGuard(database, plan.source, plan.group)
        self._look_at = 0.0
        self._measure_at = 0.0

    async def begin(self) -> None:
        """Check the consumer's tables, and the service's own one.

        Raises:
            SetupError: they do not exist, or cannot be used.
        """
        async with self._database.transaction() as transaction:
            [(there,)] = await self._database.rows(transaction, queries.TABLES, {})
            foreign = [] if there else await self._database.rows(transaction, queries.FOREIGN, {})
        if foreign and foreign[0][0]:
            raise SetupError(
                "the search_path leads to a table processed_events or inbox that is not the consumer's: "
                "create the consumer's tables in another schema (OUTBOX_CONSUMER_SCHEMA=… outbox consumer "
                "migrate), and put that schema first in the search_path"
            )
        if not there:
            raise SetupError(
                "the consumer's tables do not exist: run `outbox consumer migrate` or migrate(connection)"
            )
        if self._plan.dedupe_table is not None:
            table, source = self._plan.dedupe_table, self._plan.source
            self._marks = await dedupe_marks.load(self._database, table, source)

    async def take(self, messages: Sequence[Any], member: Member) -> None:
        """Handle messages in their order; skip those of a partition that is revoked in between."""
        await self._follow(member)
        items = [self._item(each) for each in messages]
        known = await self._known(items) if self._plan.cache else set()
        for group in self._groups(items):
            if self._plan.is_stopped():
                return
            await self._plan.stay()
            await self._follow(member)
            group = [each for each in group if member.has(each.message)]
            new = [each for each in group if each.message_id not in known]
            await self._count_duplicates([each for each in group if each.message_id in known])
            if new:
                await self._take_group(new)
            for each in group:
                member.done(each.message)
            self.figures.progress()
        self.figures.lag = member.lag
        self.figures.progress()

    async def _follow(self, member: Member) -> None:
        """Disown revoked partitions, and own assigned ones."""
        gone, come = member.changes()
        if gone:
            await self._surely(lambda: self._guard.give_up(gone))
        if come:
            await self._surely(lambda: self._guard.assigned(come, self._handlers.at_once))

    async def end(self) -> None:
        """End cleanly: the next owner of the partitions does not need the crash guard."""
        await self._guard.end()

    async def receive(self, messages: Sequence[Any], member: Member) -> None:
        """Write messages to the inbox, from where they are handled."""
        items = [self._item(each) for each in messages]
        broken = [each for each in items if each.error]
        wanted = [each for each in items if each.handler and not each.error]
        for each in items:
            if not each.error and not each.handler:
                self._pass_over(each)
        for each in broken:
            await self._refuse(each)
        if wanted:
            new = await self._receive(wanted)
            self.counts.received += len(new)
            await self._count_duplicates(_not_among(wanted, new))
        for each in items:
            member.done(each.message)
        self.figures.lag = member.lag
        self.figures.progress()

    async def measure(self) -> None:
        """Measure the inbox if its metrics are too old."""
        if self._plan.measures and time.monotonic() >= self._measure_at:
            self.figures.backlog = await self._surely(self._inbox.backlog)
            self._measure_at = time.monotonic() + _MEASURE_SECONDS

    async def look(self, every: float = _LOOK_SECONDS) -> bool:
        """Handle due messages of the inbox; if there were none, check again after this many seconds.

        Returns:
            Whether there was a due message that no other process had.
        """
        if time.monotonic() < self._look_at:
            return False
        until = time.monotonic() + _DRAIN_SECONDS
        before = self._settled()
        for head in await self._surely(self._heads):
            due: Waiting | None = head
            while due and not self._plan.is_stopped() and time.monotonic() < until:
                due = await self._attempt_again(due)
                self.figures.progress()
        is_idle = self._settled() == before
        self._look_at = time.monotonic() + every if is_idle else 0.0
        self.figures.progress()
        return not is_idle

    def _settled(self) -> tuple[int, int, int]:
        return self.counts.handled, self.counts.duplicates, self.counts.failures

    async def _heads(self) -> list[Waiting]:
        if not self._breakers:
            return await self._inbox.heads()
        named = self._handlers.types
        held = [each for each in named if self._is_held(self._handlers.handler(each))]
        heads = await self._inbox.heads(held, named, other_held=self._is_held(self._handlers.other))
        there = {id(self._handlers.handler(each.event_type)) for each in heads}
        now = time.monotonic()
        for of, breaker in self._breakers.items():
            if breaker.is_open and breaker.may_call(now) and of not in there:
                # Each of its events was tried: start again with the first one.
                await self._inbox.hurry([each for each in breaker.blamed.values() if each is not None])
        return heads

    async def backlog(self) -> tuple[Backlog, bool]:
        """Return the backlog of the inbox, and whether a message in it is due."""
        return await self._inbox.backlog(), bool(await self._inbox.heads())

    def _groups(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Group adjacent items whose handler takes batches."""
        for handler, neighbours in groupby(items, lambda each: None if each.error else each.handler):
            size = handler.batch or 1 if handler else 1
            same = list(neighbours)
            for start in range(0, len(same), size):
                yield same[start : start + size]

    async def _take_group(self, items: list[Item]) -> None:
        first = items[0]
        if first.error:
            await self._refuse(first)
        elif first.handler is None:
            self._pass_over(first)
        elif self._is_held(first.handler):
            await self._hold(items)
        elif (suspects := self._guard.suspects) and any(_place(each) in suspects for each in items):
            others = [each for each in items if _place(each) not in suspects]
            await self._take_cautiously([each for each in items if _place(each) in suspects])
            if others:
                await self._take_group(others)
        elif len(items) == 1:
            await self._take(first)
        else:
            await self._take_many(first.handler, items)

    def _pass_over(self, item: Item) -> None:
        assert item.event is not None
        self.counts.ignored += 1
        self.types.pass_over(item.event.type)

    async def _hold(self, items: Sequence[Item]) -> None:
        """Write items to the inbox until their paused handler is resumed."""
        where = await self._receive(items)
        self.counts.received += len(where)
        await self._count_duplicates(_not_among(items, where))

    async def _take(self, item: Item) -> None:
        assert item.event is not None
        assert item.handler is not None
        if self._is_held(item.handler):
            await self._hold([item])
            return
        await self._plan.stay()
        event, handler = item.event, item.handler
        given = {
            "id": str(item.message_id),
            "source": self._plan.source,
            "topic": event.topic,
            "key": inbox.key_of(event, item.message_id),
            "block": self._plan.blocks,
            "content": None if item.content is None else str(item.content),
        }

        async def attempt() -> tuple[bool, bool]:
            async with self._database.transaction() as transaction:
                rows = await self._database.rows(transaction, queries.RECORD, given)
                is_new = bool(rows) and bool(await self._marked(transaction, [item]))
                if is_new:
                    self._began(item.message_id, rows[0][0])
                    await self._call(handler, [item], transaction)
                return is_new, not is_new and bool(await self._recorded(transaction, [item.message_id]))

        try:
            is_new, is_known = await self._repeated(attempt)
        except (SetupError, StoppedError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises
            if await self._is_spoilt():
                await self._refuse_spoilt(item, error)
            else:
                await self._put_aside(item, error)
            return
        if is_new:
            await self._works(item.handler)
            self.counts.handled += 1
            self._remember([item])
        elif is_known:
            await self._count_duplicates([item])
            self._remember([item])
        elif await self._receive([item]):
            # It was not recorded because an earlier event of its key has to be handled first.
            self.counts.received += 1
        else:
            await self._count_duplicates([item])

    async def _take_many(self, handler: Handler, items: Sequence[Item]) -> None:
        given = {
            "ids": [str(each.message_id) for each in items],
            "topics": [each.event.topic for each in items if each.event],
            "keys": [inbox.key_of(each.event, each.message_id) for each in items if each.event],
            "source": self._plan.source,
            "block": self._plan.blocks,
            "contents": [inbox.text_of(each.content) for each in items],
        }

        at_work: list[Item] = []

        async def attempt() -> tuple[list[Item], set[uuid.UUID]]:
            async with self._database.transaction() as transaction:
                rows = await self._database.rows(transaction, queries.RECORD_MANY, given)
                recorded = {uuid.UUID(text) for text, _ in rows}
                # The first item of each id.
                new = [*{each.message_id: each for each in reversed(items)}.values()][::-1]
                new = [each for each in new if each.message_id in recorded]
                others = [each.message_id for each in items if each.message_id not in recorded]
                known = await self._recorded(transaction, others)
                if known and new:
                    [(is_taken,)] = await self._database.rows(transaction, queries.TAKEN, given)
                    if is_taken:
                        raise _BehindError
                if new:
                    new = await self._marked(transaction, new)
                at_work[:] = new
                if new:
                    self._began(uuid.UUID(rows[0][0]), rows[0][1])
                    await self._call(handler, new, transaction)
                return new, recorded | known

        try:
            new, known = await self._repeated(attempt)
        except (SetupError, StoppedError):
            raise
        except _BehindError:
            for each in items:
                await self._take(each)
            return
        except Exception as error:  # noqa: BLE001 - whatever a handler raises
            spoilt = {id(each) for each in at_work} if await self._is_spoilt() else set()
            _LOG.warning("%d events failed together and are handled one by one: %s", len(items), told(error))
            for each in items:
                if id(each) in spoilt:
                    await self._refuse_spoilt(each, error)
                else:
                    await self._take(each)
            return
        if new:
            await self._works(handler)
        left = [each for each in items if each.message_id not in known]
        self.counts.handled += len(new)
        others = {id(each) for each in (*new, *left)}
        await self._count_duplicates([each for each in items if id(each) not in others])
        self._remember([each for each in items if each.message_id in known])
        for each in left:
            await self._take(each)

    async def _take_cautiously(self, items: Sequence[Item]) -> None:
        """Handle suspect events one at a time through the inbox, where their attempts are counted."""
        where = await self._receive(items)
        await self._count_duplicates(_not_among(items, where))
        for each in items:
            seq = where.pop(each.message_id, None)
            if seq is not None:
                before = self.counts.handled + self.counts.duplicates
                assert each.event is not None
                await self._attempt_again(Waiting(seq, 0, inbox.readable(each.event.type)))
                self.counts.received += self.counts.handled + self.counts.duplicates == before
                await self._pass(_place(each))

    async def _pass(self, place: Place) -> None:
        if self._guard.passed(place):
            await self._surely(lambda: self._guard.own(place))

    async def _put_aside(self, item: Item, error: Exception) -> None:
        """Write an event to the inbox after its first attempt failed, unless its commit succeeded."""
        text = told(error)
        policy = await self._judge(item, error)
        last = policy == "dead_letter" or (policy == "retry" and self._plan.max_attempts <= 1)
        dead = last and self._has_copy(item.message, 1, text)
        where = await self._receive([item], attempts=0 if policy == "outage" else 1, error=text, dead=dead)
        if not where:
            await self._count_duplicates([item])
            return
        if policy != "dead_letter" and item.handler is not None:
            self._breaker(item.handler).blamed[item.message_id] = where[item.message_id]
        self._count_failure(str(item.event), text, 1, dead=dead)
        self.counts.received += 1

    async def _refuse_spoilt(self, item: Item, error: Exception) -> None:
        """Make a dead letter of an event that is recorded, but whose effects are incomplete."""
        await self._refuse(unreadable(item.message, f"{item.event}: {SPOILT}: {told(error)}"))

    async def _refuse(self, item: Item) -> None:
        """Make a dead letter of an invalid message immediately: another attempt cannot succeed."""
        dead = self._has_copy(item.message, 0, item.error)
        if await self._receive([item], error=item.error, dead=dead):
            self._count_failure("a message", item.error, 0, dead=dead)
        elif item.event is None:
            self.counts.duplicates += 1
        else:
            await self._count_duplicates([item])

    async def _receive(self, items: Sequence[Item], **more: Any) -> dict[uuid.UUID, int]:
        arrivals = [
            Arrival.of(each.event, each.message_id, each.message, each.content)
            if each.event
            else Arrival.of_no_event(each.message_id, each.message)
            for each in items
        ]
        return await self._surely(lambda: self._inbox.receive(arrivals, **more))

    async def _known(self, items: Sequence[Item]) -> set[uuid.UUID]:
        """Return the ids that the cache has and the database confirms."""
        assert self._plan.cache is not None
        told = self._plan.cache.known(self._plan.source, [each.message_id for each in items])

        async def verified() -> set[uuid.UUID]:
            async with self._database.transaction() as transaction:
                return await self._recorded(transaction, list(told))

        return await self._surely(verified) if told else set()

    async def _count_duplicates(self, items: Sequence[Item]) -> None:
        """Count duplicates; an event with the id of a different event becomes a dead letter."""
        same = items
        if again := [each for each in items if each.content is not None]:
            recorded = await self._surely(lambda: self._contents(again))
            others = [each for each in again if recorded.get(each.message_id) != each.content]
            same = items if not others else [each for each in items if all(each is not it for it in others)]
            for each in others:
                await self._refuse(
                    unreadable(
                        each.message,
                        f"{each.event} differs from the event that was handled with this id: "
                        "check whether its producer reuses ids; see origins in docs/consuming.md",
                    )
                )
        self.counts.duplicates += len(same)

    async def _contents(self, items: Sequence[Item]) -> dict[uuid.UUID, uuid.UUID]:
        ids = [each.message_id for each in items]
        async with self._database.transaction() as transaction:
            rows = await self._database.rows(transaction, queries.CONTENTS, self._which(ids))
        return {uuid.UUID(event_id): uuid.UUID(content) for event_id, content in rows}

    async def _recorded(self, transaction: Any, ids: Sequence[uuid.UUID]) -> set[uuid.UUID]:
        """Return the items that were already handled or received."""
        if not ids:
            return set()
        rows = await self._database.rows(transaction, queries.KNOWN, self._which(ids))
        return {uuid.UUID(text) for (text,) in rows}

    def _which(self, ids: Sequence[uuid.UUID]) -> dict[str, Any]:
        return {
            "ids": [str(each) for each in ids],
            "buckets": list({bucket(each) for each in ids}),
            "source": self._plan.source,
        }

    def _remember(self, items: Sequence[Item]) -> None:
        if self._plan.cache is not None:
            self._plan.cache.remember(self._plan.source, [each.message_id for each in items])


def _not_among(items: Sequence[Item], where: Mapping[uuid.UUID, int]) -> list[Item]:
    """Return the items that were not received; of several with one id, the first was received."""
    first = {each.message_id: id(each) for each in reversed(items) if each.message_id in where}
    return [each for each in items if first.get(each.message_id) != id(each)]


def _place(item: Item) -> Place:
    return str(item.message.topic()), item.message.partition()
