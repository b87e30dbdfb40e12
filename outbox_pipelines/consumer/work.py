"""The work of one consumer: takes the messages of a poll, and puts its parts together.

Invariants:
- An offset is committed only after its event is committed in the database, and in its synchronous standbys:
  handled, or in the inbox.
- After a crash, within batches after the second, as many events of a partition as can have been in progress
  go through the inbox, where attempts are counted before they begin: this detects an event that crashes the
  process; see `CrashGuard`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Container, Sequence
from typing import Any, Final

from outbox_pipelines.consumer.config import Plan
from outbox_pipelines.consumer.consumer_database import Database
from outbox_pipelines.consumer.database_retry import DatabaseRetry
from outbox_pipelines.consumer.deliveries import Deliveries, InboxWorker
from outbox_pipelines.consumer.event_reading import Reader
from outbox_pipelines.consumer.figures import Counts, Figures, Types
from outbox_pipelines.consumer.handler_breakers import Breakers
from outbox_pipelines.consumer.handler_registry import Handlers
from outbox_pipelines.consumer.handler_transactions import HandlerTransactions
from outbox_pipelines.consumer.inbox import Inbox
from outbox_pipelines.consumer.items import Item, ItemReader, Pace, groups
from outbox_pipelines.consumer.kafka_messages import Partition, partition_of
from outbox_pipelines.consumer.membership import Member
from outbox_pipelines.consumer.partition_owners import CrashGuard
from outbox_pipelines.consumer.processed_events import ProcessedEvents
from outbox_pipelines.consumer.settlement import Settlement

_WITH_CACHE: Final = 100
# Of handlers that are called for one event: so many messages are in memory, and the inbox waits as long.
_MOST_POLLED: Final = 32


class Work:
    """The work of one consumer; must be used by one thread or task.

    Args:
        retry: makes what runs operations on the database; tests have others, also for the next two.
        transactions: makes what calls handlers.
        settlement: makes what decides on an event.
    """

    def __init__(
        self,
        plan: Plan,
        handlers: Handlers,
        reader: Reader,
        database: Database,
        *,
        retry: Callable[..., DatabaseRetry] = DatabaseRetry,
        transactions: Callable[..., HandlerTransactions] = HandlerTransactions,
        settlement: Callable[..., Settlement] = Settlement,
    ) -> None:
        self.types = Types(handlers.types)
        self.counts = Counts(ignored_types=self.types.passed_over)
        self.figures = Figures(unseen=self.types.unseen)
        self.retry = retry(plan, database)
        self.guard = CrashGuard(database, plan.source, plan.group)
        self._plan = plan
        self._handlers = handlers
        self._pace = Pace()
        self._polled = Pace(1)
        self._shares = handlers.shares
        self._least = max(handlers.at_once, _WITH_CACHE if plan.cache else 1)
        self._processed = ProcessedEvents(plan, database)
        self._items = ItemReader(plan, reader, handlers, self.types, self._processed.mark)
        inbox = Inbox(database, plan.source, blocks=plan.blocks, retry_seconds=plan.retry_seconds)
        self.breakers = Breakers(plan, handlers, inbox, self.retry, self.counts, self.figures)
        self.transactions = transactions(
            plan, database, self.retry, self._processed, inbox, self._pace, self.figures
        )
        self.settlement = settlement(
            plan, self.retry, self._processed, inbox, self.breakers, self.counts, self.types
        )
        parts = plan, self.retry, self.breakers, self.transactions, self.settlement, self.counts
        self.inbox = InboxWorker(*parts, handlers, inbox, self._items, self.figures)
        self._deliveries = Deliveries(*parts, self.guard, self.inbox)

    @property
    def at_once(self) -> int:
        """How many messages a poll returns at most."""
        return self._least if self._least > 1 else min(self._polled.events, _MOST_POLLED)

    async def begin(self) -> None:
        """Check the consumer's tables, and the service's own one.

        Raises:
            SetupError: they do not exist, or cannot be used.
            UnavailableError: the database refuses the login, or is unavailable and must not be waited for.
            StoppedError: the consumer was stopped while it waited.
        """
        await self.retry.run(self._processed.check)

    async def take(self, messages: Sequence[Any], member: Member) -> None:
        """Handle messages in their order; skip those of a partition that is revoked in between."""
        began = time.monotonic()
        await self._follow(member)
        items = [self._items.read(each) for each in messages]
        known = {str(each) for each in await self._known(items)} if self._plan.cache else set()
        taken = 0
        # A partition that comes back in between has other messages before these.
        skipped: set[Partition] = set()
        for group in groups(items, self._pace, shares=self._shares):
            taken += len(group)
            if self._plan.is_stopped():
                return
            await self._plan.stay()
            await self._follow(member)
            if member.has_left or skipped:
                skipped |= {partition_of(each.message) for each in group if not member.has(each.message)}
                group = [each for each in group if partition_of(each.message) not in skipped]
            new = group
            if known:
                new = [each for each in group if each.id not in known]
                await self.settlement.duplicates([each for each in group if each.id in known])
            if new:
                await self._deliveries.handle(new, _following(items[taken : taken + 1], known))
            await self._done(group, member)
        self._polled.took(len(items), time.monotonic() - began)
        self.figures.lag = member.lag
        self.figures.progress()

    async def receive(self, messages: Sequence[Any], member: Member) -> None:
        """Write messages to the inbox, from where they are handled."""
        items = [self._items.read(each) for each in messages]
        for each in items:
            if not each.error and not each.handler:
                self.settlement.skip(each)
        for each in items:
            if each.error:
                await self.settlement.reject(each)
        if wanted := [each for each in items if each.handler and not each.error]:
            await self.settlement.hold(wanted)
        await self._done(items, member)
        self.figures.lag = member.lag

    async def end(self) -> None:
        """End cleanly: the next owner of the partitions does not need the crash guard."""
        self.retry.awaits = "database"
        await self.guard.end()
        self.retry.awaits = ""

    async def _done(self, items: Sequence[Item], member: Member) -> None:
        """Let the offsets of items be committed, once no failover can undo what is committed."""
        await self.retry.secure()
        member.done([each.message for each in items])
        self.figures.progress()

    async def _follow(self, member: Member) -> None:
        """Disown revoked partitions, and own assigned ones."""
        gone, come = member.changes()
        if gone:
            await self.retry.run(lambda: self.guard.give_up(gone))
        if come:
            self.retry.distrust()
            await self.retry.run(lambda: self.guard.assigned(come, self._handlers.at_once))

    async def _known(self, items: Sequence[Item]) -> set[uuid.UUID]:
        """Return the ids that the cache has and the database confirms."""
        assert self._plan.cache is not None
        ids = [each.message_id for each in items]
        ids = [*await self._plan.blocking(self._plan.cache.known, self._plan.source, ids)]
        return await self.retry.run(lambda: self._processed.confirm(ids)) if ids else set()


def _following(items: Sequence[Item], known: Container[str]) -> Item | None:
    """Return the next item, if it is recorded first in a transaction of its own."""
    return next((each for each in items if each.is_alone and each.id not in known), None)
