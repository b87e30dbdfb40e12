"""Process messages: handle them, or write them to the inbox.

Invariants:
- An offset is committed only after its event is committed in the database, and in its synchronous standbys:
  handled, or in the inbox.
- After a crash, as many events of a partition as can have been in progress go through the inbox, where
  attempts are counted before they begin: this detects an event that crashes the process; see `crash_guard`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from outbox_pipelines.consumer import consumer_queries as queries
from outbox_pipelines.consumer import dedupe_table
from outbox_pipelines.consumer.attempts import Item
from outbox_pipelines.consumer.config import Plan
from outbox_pipelines.consumer.event_reading import Reader
from outbox_pipelines.consumer.handlers import Handler, Handlers
from outbox_pipelines.consumer.handling import Handling, not_among
from outbox_pipelines.consumer.inbox import Backlog, Waiting
from outbox_pipelines.consumer.membership import Member
from outbox_pipelines.consumer.transactions import Database
from outbox_pipelines.errors import SetupError

_SHARED: Final = "shared"
_SINGLE: Final = "single"
# How often the inbox is checked while nothing in it is due, and how long it can delay polling Kafka.
_LOOK_SECONDS: Final = 1.0
_DRAIN_SECONDS: Final = 1.0
# Maximum age of the inbox's metrics.
_MEASURE_SECONDS: Final = 10.0


class Work(Handling):
    """The work of one consumer; must be used by one thread or task."""

    def __init__(self, plan: Plan, handlers: Handlers, reader: Reader, database: Database) -> None:
        super().__init__(plan, handlers, reader, database)
        self._look_at = 0.0
        self._measure_at = 0.0

    async def begin(self) -> None:
        """Check the consumer's tables, and the service's own one.

        Raises:
            SetupError: they do not exist, or cannot be used.
            UnavailableError: the database refuses the login, or is unavailable and must not be waited for.
            StoppedError: the consumer was stopped while it waited.
        """
        await self._surely(self._check)
        self._has_begun = True

    async def _check(self) -> None:
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
            self._marks = await dedupe_table.load(self._database, table, source)

    async def take(self, messages: Sequence[Any], member: Member) -> None:
        """Handle messages in their order; skip those of a partition that is revoked in between."""
        await self._follow(member)
        items = [self._item(each) for each in messages]
        known = {str(each) for each in await self._known(items)} if self._plan.cache else set()
        for group in self._groups(items):
            if self._plan.is_stopped():
                return
            await self._plan.stay()
            await self._follow(member)
            if member.has_left:
                group = [each for each in group if member.has(each.message)]
            new = group
            if known:
                new = [each for each in group if each.id not in known]
                await self._count_duplicates([each for each in group if each.id in known])
            if new:
                await self._take_group(new)
            await self._secure()
            member.done([each.message for each in group])
            self.figures.progress()
        self.figures.lag = member.lag
        self.figures.progress()

    async def _follow(self, member: Member) -> None:
        """Disown revoked partitions, and own assigned ones."""
        gone, come = member.changes()
        if gone:
            await self._surely(lambda: self._guard.give_up(gone))
        if come:
            self._safe_at = -1
            await self._surely(lambda: self._guard.assigned(come, self._handlers.at_once))

    async def end(self) -> None:
        """End cleanly: the next owner of the partitions does not need the crash guard."""
        self.awaits = "database"
        await self._guard.end()
        self.awaits = ""

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
            await self._count_duplicates(not_among(wanted, new))
        await self._secure()
        member.done([each.message for each in items])
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

    def _groups(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """Group adjacent items that one transaction can have."""
        if len(items) == 1:
            yield items
            return
        for kind, neighbours in groupby(items, self._kind):
            same = list(neighbours)
            limit = 1
            if isinstance(kind, Handler):
                limit = kind.batch or 1
            elif kind == _SHARED:
                limit = min(
                    (each.handler.per_transaction for each in same if each.handler), default=len(same)
                )
            start = 0
            while start < len(same):
                # Asked for each time: it changes with each transaction.
                size = min(limit, self._pace.events) if kind == _SHARED else limit
                yield same[start : start + size]
                start += size

    def _kind(self, item: Item) -> Handler | str:
        """Return what adjacent items have in common if one transaction can have them."""
        if item.error:
            return _SINGLE
        if item.handler is None:
            # Between two events that share a transaction it separates nothing.
            return _SHARED if self._handlers.shares else _SINGLE
        if item.handler.batch:
            return item.handler
        return _SHARED if item.handler.per_transaction > 1 else _SINGLE

    async def _known(self, items: Sequence[Item]) -> set[uuid.UUID]:
        """Return the ids that the cache has and the database confirms."""
        assert self._plan.cache is not None
        told = self._plan.cache.known(self._plan.source, [each.message_id for each in items])

        async def verified() -> set[uuid.UUID]:
            async with self._database.transaction() as transaction:
                return await self._recorded(transaction, list(told))

        return await self._surely(verified) if told else set()
