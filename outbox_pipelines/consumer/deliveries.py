"""Handle events, each in one transaction with its record: new ones, and the due messages of the inbox.

Invariants:
- Events of one transaction are all committed or none. If one fails, they are handled again one by one, so
  that attempts and dead letters are those of single events.
- An attempt at a message of the inbox is committed before it begins, and its result when it ends.
- While a handler is paused, its events go to the inbox; events that can crash the process go through it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from outbox_pipelines.consumer.config import Plan
from outbox_pipelines.consumer.database_retry import DatabaseRetry
from outbox_pipelines.consumer.errors import StoppedError, error_text, readable
from outbox_pipelines.consumer.figures import Counts, Figures
from outbox_pipelines.consumer.handler_breakers import Breakers
from outbox_pipelines.consumer.handler_registry import Handlers
from outbox_pipelines.consumer.handler_transactions import HandlerTransactions, TooLongError
from outbox_pipelines.consumer.inbox import Backlog, Inbox, Waiting
from outbox_pipelines.consumer.items import Item, ItemReader
from outbox_pipelines.consumer.kafka_messages import partition_of
from outbox_pipelines.consumer.partition_owners import CrashGuard
from outbox_pipelines.consumer.processed_events import BehindError
from outbox_pipelines.consumer.settlement import Settlement, not_among
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
# How often the inbox is checked while nothing in it is due, and how long it can delay polling Kafka.
_LOOK_SECONDS: Final = 1.0
_DRAIN_SECONDS: Final = 1.0
# Maximum age of the inbox's metrics.
_MEASURE_SECONDS: Final = 10.0


@dataclass
class Deliveries:
    """Handles new events; must be used by one thread or task."""

    plan: Plan
    retry: DatabaseRetry
    breakers: Breakers
    transactions: HandlerTransactions
    settlement: Settlement
    counts: Counts
    guard: CrashGuard
    inbox: InboxWorker

    async def handle(self, items: Sequence[Item], following: Item | None = None) -> None:
        """Handle items of one handler that takes batches, or of handlers that can share a transaction.

        Args:
            following: the item behind them, if it will have a transaction of its own.
        """
        first = items[0]
        if first.error:
            await self.settlement.reject(first)
            return
        for each in items:
            if each.handler is None:
                self.settlement.skip(each)
        items = [each for each in items if each.handler is not None]
        suspects = self.guard.suspects
        if self.breakers and any(self.breakers.is_paused(each.handler) for each in items):
            await self._paused(items)
        elif suspects and any(partition_of(each.message) in suspects for each in items):
            others = [each for each in items if partition_of(each.message) not in suspects]
            await self._suspect([each for each in items if partition_of(each.message) in suspects])
            if others:
                await self.handle(others)
        elif len(items) == 1 and first.handler and first.handler.per_transaction == 1:
            await self._one(items[0], following)
        elif items:
            # Also one that could share: the pace must learn that its handler is no longer slow.
            await self._many(items)

    async def _paused(self, items: Sequence[Item]) -> None:
        """Hold the items of a paused handler; the others of the group do not wait for it."""
        if all(each.handler is items[0].handler for each in items):
            await self.settlement.hold(items)
        else:
            for each in items:
                await self.handle([each])

    async def _suspect(self, items: Sequence[Item]) -> None:
        """Handle suspect events one at a time through the inbox, where their attempts are counted."""
        where = await self.settlement.receive(items)
        await self.settlement.duplicates(not_among(items, where))
        for each in items:
            seq = where.pop(each.message_id, None)
            if seq is not None:
                before = self.counts.handled + self.counts.duplicates
                assert each.event is not None
                await self.inbox.attempt(Waiting(seq, 0, readable(each.event.type)))
                self.counts.received += self.counts.handled + self.counts.duplicates == before
                await self._passed([each])

    async def _passed(self, items: Sequence[Item]) -> None:
        """Count new items of partitions whose last owner crashed."""
        for each in items if self.guard.is_unsure else ():
            partition = partition_of(each.message)
            if self.guard.passed(partition):
                await self.retry.run(partial(self.guard.own, partition))

    async def _one(self, item: Item, following: Item | None = None) -> None:
        if self.breakers.is_paused(item.handler):
            await self.settlement.hold([item])
            return
        await self.plan.stay()
        try:
            done = await self.transactions.one(item, following)
        except (SetupError, StoppedError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises
            if await self.transactions.spoilt():
                await self.settlement.spoil(item, error)
            else:
                await self.settlement.fail(item, error)
            return
        if done == "handled":
            await self._handled([item])
            await self._remember([item])
        elif done == "duplicate":
            await self.settlement.duplicates([item])
            await self._remember([item])
        else:
            # It was not recorded because an earlier event of its key has to be handled first.
            await self.settlement.hold([item])

    async def _many(self, items: Sequence[Item]) -> None:
        """Handle items in one transaction; if that fails, one by one."""
        try:
            new, behind = await self.transactions.many(items)
        except (SetupError, StoppedError):
            raise
        except BehindError:
            await self._one_by_one(items)
            return
        except TooLongError as error:
            _LOG.info("handlers that share a transaction are slow: it was rolled back after %s events", error)
            await self._one_by_one(items)
            return
        except Exception as error:  # noqa: BLE001 - whatever a handler raises
            await self._failed(items, error)
            return
        await self._handled(new)
        if len(new) < len(items):
            others = {id(each) for each in (*new, *behind)}
            await self.settlement.duplicates([each for each in items if id(each) not in others])
        await self._remember([each for each in items if each not in behind])
        await self._one_by_one(behind)

    async def _failed(self, items: Sequence[Item], error: Exception) -> None:
        """Handle the items of a transaction that failed one by one; a single one goes into the inbox."""
        spoilt = {id(each) for each in await self.transactions.spoilt()}
        if len(items) > 1:
            _LOG.warning(
                "%d events failed together and are handled one by one: %s", len(items), error_text(error)
            )
        for each in items:
            if id(each) in spoilt:
                await self.settlement.spoil(each, error)
            elif len(items) == 1:
                await self.settlement.fail(each, error)
            else:
                await self._one(each)

    async def _one_by_one(self, items: Sequence[Item]) -> None:
        for each in items:
            await self._one(each)

    async def _handled(self, items: Sequence[Item]) -> None:
        await self.settlement.handled(items)
        await self._passed(items)

    async def _remember(self, items: Sequence[Item]) -> None:
        if self.plan.cache is not None:
            ids = [each.message_id for each in items]
            await self.plan.blocking(self.plan.cache.remember, self.plan.source, ids)


@dataclass
class InboxWorker:
    """Handles the inbox of one consumer; must be used by one thread or task."""

    plan: Plan
    retry: DatabaseRetry
    breakers: Breakers
    transactions: HandlerTransactions
    settlement: Settlement
    counts: Counts
    handlers: Handlers
    inbox: Inbox
    items: ItemReader
    figures: Figures
    look_at: float = 0.0
    measure_at: float = 0.0

    async def look(self, every: float = _LOOK_SECONDS) -> bool:
        """Handle due messages of the inbox; if there were none, check again after this many seconds.

        Returns:
            Whether there was a due message that no other process had.
        """
        if time.monotonic() < self.look_at:
            return False
        until = time.monotonic() + _DRAIN_SECONDS
        before = self._settled()
        for head in await self.retry.run(self.breakers.heads):
            due: Waiting | None = head
            while due and not self.plan.is_stopped() and time.monotonic() < until:
                due = await self._next(due) if await self.attempt(due) else None
                self.figures.progress()
        is_idle = self._settled() == before
        self.look_at = time.monotonic() + every if is_idle else 0.0
        self.figures.progress()
        return not is_idle

    def _settled(self) -> tuple[int, int, int]:
        return self.counts.handled, self.counts.duplicates, self.counts.failures

    async def attempt(self, waiting: Waiting) -> bool:
        """Handle a message of the inbox; return whether it was handled, or was a duplicate."""
        if waiting.attempts >= self.plan.max_attempts:
            await self.settlement.exhaust(waiting)
            return False
        if self.breakers.is_paused(self.handlers.handler(waiting.event_type)):
            return False
        # Before the claim: other processes take over a claimed message when its next attempt is due.
        await self.plan.stay()
        message = await self.retry.run(lambda: self.inbox.claim(waiting))
        if message is None:
            return False
        seq, attempts = waiting.seq, waiting.attempts + 1
        item = self.items.read(message)
        try:
            done = await self.transactions.stored(seq, attempts, item)
        except (SetupError, StoppedError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises
            if await self.transactions.spoilt():
                await self.settlement.spoil_stored(seq, attempts, item, error)
            else:
                await self.settlement.fail_stored(seq, attempts, item, error)
            return False
        if not done:
            return False
        if done == "handled":
            await self.settlement.handled([item])
        else:
            _LOG.info("the message %d of the inbox is a duplicate: %s", seq, item.event)
            self.counts.duplicates += 1
        return True

    async def _next(self, settled: Waiting) -> Waiting | None:
        """Return the due message behind one of its key."""
        return await self.retry.run(lambda: self.inbox.next(settled.seq))

    async def measure(self) -> None:
        """Measure the inbox if its metrics are too old."""
        if self.plan.measures and time.monotonic() >= self.measure_at:
            self.figures.backlog = await self.retry.run(self.inbox.backlog)
            self.measure_at = time.monotonic() + _MEASURE_SECONDS

    async def backlog(self) -> tuple[Backlog, bool]:
        """Return the backlog of the inbox, and whether a message in it is due."""
        return await self.inbox.backlog(), bool(await self.inbox.heads())
