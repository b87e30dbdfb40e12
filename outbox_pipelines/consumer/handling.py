"""Handle new events, each in one transaction with its record; several can share one.

Invariants:
- The event is recorded first, then handled; then the database commits.
- Events of one transaction are all committed or none. If one fails, they are handled again one by one, so
  that attempts and dead letters are those of single events.
- A failed event is in the inbox before the next one is handled, and later events of its key go behind it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from outbox_pipelines.consumer import consumer_queries as queries
from outbox_pipelines.consumer import inbox
from outbox_pipelines.consumer.attempts import SPOILT, Item, unreadable
from outbox_pipelines.consumer.config import Plan, StoppedError
from outbox_pipelines.consumer.crash_guard import CrashGuard
from outbox_pipelines.consumer.event_reading import Place, Reader, place_of
from outbox_pipelines.consumer.handlers import Handlers
from outbox_pipelines.consumer.inbox import Arrival, Waiting, bucket
from outbox_pipelines.consumer.outages import told
from outbox_pipelines.consumer.pace import Pace
from outbox_pipelines.consumer.recording import BehindError, Recording
from outbox_pipelines.consumer.transactions import Database
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)


class _TooLongError(Exception):
    """Handlers that share a transaction are slower than expected."""

    def __init__(self, events: int) -> None:
        super().__init__(events)
        self.events = events


class Handling(Recording):
    """Handles new messages; must be used by one thread or task."""

    def __init__(self, plan: Plan, handlers: Handlers, reader: Reader, database: Database) -> None:
        super().__init__(plan, handlers, reader, database)
        self._guard = CrashGuard(database, plan.source, plan.group)
        self._pace = Pace()

    async def _take_group(self, items: Sequence[Item]) -> None:
        """Handle items of one handler that takes batches, or of handlers that can share a transaction."""
        first = items[0]
        if first.error:
            await self._refuse(first)
            return
        for each in items:
            if each.handler is None:
                self._pass_over(each)
        items = [each for each in items if each.handler is not None]
        if self._breakers and any(self._is_held(each.handler) for each in items):
            await self._take_held(items)
        elif self._guard.suspects and any(place_of(each.message) in self._guard.suspects for each in items):
            suspects = self._guard.suspects
            others = [each for each in items if place_of(each.message) not in suspects]
            await self._take_cautiously([each for each in items if place_of(each.message) in suspects])
            if others:
                await self._take_group(others)
        elif len(items) == 1 and first.handler and first.handler.per_transaction == 1:
            await self._take(items[0])
        elif items:
            # Also one that could share: the pace must learn that its handler is no longer slow.
            await self._take_many(items)

    async def _take_held(self, items: Sequence[Item]) -> None:
        """Hold the items of a paused handler; the others of the group do not wait for it."""
        if all(each.handler is items[0].handler for each in items):
            await self._hold(items)
        else:
            for each in items:
                await self._take_group([each])

    def _pass_over(self, item: Item) -> None:
        assert item.event is not None
        self.counts.ignored += 1
        self.types.pass_over(item.event.type)

    async def _hold(self, items: Sequence[Item]) -> None:
        """Write items to the inbox until their paused handler is resumed."""
        where = await self._receive(items)
        self.counts.received += len(where)
        await self._count_duplicates(not_among(items, where))

    async def _take(self, item: Item) -> None:
        assert item.event is not None
        assert item.handler is not None
        if self._is_held(item.handler):
            await self._hold([item])
            return
        await self._plan.stay()
        event, handler = item.event, item.handler
        given = {
            "id": item.id,
            "source": self._plan.source,
            "bucket": bucket(item.id),
            "topic": event.topic,
            "key": inbox.key_of(event, item.id),
            "block": self._plan.blocks,
            "content": None if item.content is None else str(item.content),
        }

        async def attempt() -> tuple[bool, bool]:
            async with self._database.transaction() as transaction:
                rows = await self._database.rows(transaction, queries.RECORD, given)
                is_new = bool(rows) and bool(await self._marked(transaction, [item]))
                if is_new:
                    self._began(item.id, rows[0][0])
                    await self._call(handler, [item], transaction)
                    await self._release(transaction)
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

    async def _take_many(self, items: Sequence[Item]) -> None:
        """Handle items in one transaction; if that fails, one by one."""
        given = self._given(items)
        is_shared = items[0].handler is not None and not items[0].handler.batch
        at_work: list[Item] = []

        async def attempt() -> tuple[Sequence[Item], Sequence[Item]]:
            began = time.monotonic()
            async with self._database.transaction() as transaction:
                new, left = await self._record(transaction, items, given)
                at_work[:] = new
                if new:
                    await self._call_in_turn(new, transaction)
            if is_shared:
                self._pace.took(len(new), time.monotonic() - began)
            return new, left

        try:
            new, left = await self._repeated(attempt)
        except (SetupError, StoppedError):
            raise
        except BehindError:
            await self._take_singly(items)
            return
        except _TooLongError as error:
            _LOG.info("handlers that share a transaction are slow: it was rolled back after %s events", error)
            self._open = None
            self._pace.too_long(error.events)
            await self._take_singly(items)
            return
        except Exception as error:  # noqa: BLE001 - whatever a handler raises
            await self._take_failed(items, at_work, error)
            return
        if self._breakers:
            for handler in {id(each.handler): each.handler for each in new}.values():
                await self._works(handler)
        self.counts.handled += len(new)
        if len(new) < len(items):
            others = {id(each) for each in (*new, *left)}
            await self._count_duplicates([each for each in items if id(each) not in others])
        if self._plan.cache is not None:
            self._remember([each for each in items if each not in left])
        await self._take_singly(left)

    async def _take_failed(self, items: Sequence[Item], at_work: Sequence[Item], error: Exception) -> None:
        """Handle the items of a transaction that failed one by one; a single one goes into the inbox."""
        spoilt = {id(each) for each in at_work} if await self._is_spoilt() else set()
        if len(items) > 1:
            _LOG.warning("%d events failed together and are handled one by one: %s", len(items), told(error))
        for each in items:
            if id(each) in spoilt:
                await self._refuse_spoilt(each, error)
            elif len(items) == 1:
                await self._put_aside(each, error)
            else:
                await self._take(each)

    async def _take_singly(self, items: Sequence[Item]) -> None:
        for each in items:
            await self._take(each)

    async def _call_in_turn(self, items: Sequence[Item], transaction: Any) -> None:
        """Call the handlers of a transaction, and release it."""
        first = items[0].handler
        assert first is not None
        if first.batch:
            await self._call(first, items, transaction)
        else:
            until = time.monotonic() + self._plan.shared_seconds
            for n, each in enumerate(items):
                if time.monotonic() > until:
                    raise _TooLongError(n)
                assert each.handler is not None
                await self._call(each.handler, [each], transaction)
                # Otherwise the next handler would work outside of the transaction.
                await self._database.require_open(transaction)
        await self._release(transaction)

    async def _take_cautiously(self, items: Sequence[Item]) -> None:
        """Handle suspect events one at a time through the inbox, where their attempts are counted."""
        where = await self._receive(items)
        await self._count_duplicates(not_among(items, where))
        for each in items:
            seq = where.pop(each.message_id, None)
            if seq is not None:
                before = self.counts.handled + self.counts.duplicates
                assert each.event is not None
                await self._attempt_again(Waiting(seq, 0, inbox.readable(each.event.type)))
                self.counts.received += self.counts.handled + self.counts.duplicates == before
                await self._pass(place_of(each.message))

    async def _pass(self, place: Place) -> None:
        if self._guard.passed(place):
            await self._surely(lambda: self._guard.own(place))

    async def _put_aside(self, item: Item, error: Exception) -> None:
        """Write an event to the inbox after its first attempt failed, unless its commit succeeded."""
        text = told(error)
        policy = await self._judge(item, error, 1)
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
        refused = unreadable(item.message, f"{item.event}: {SPOILT}: {told(error)}")
        dead = self._has_copy(item.message, 0, refused.error)
        # With its own id, so that a replay handles it.
        arrival = Arrival.of_no_event(refused.message_id, item.message, kept_id=item.message_id)
        if await self._surely(lambda: self._inbox.receive([arrival], error=refused.error, dead=dead)):
            self._count_failure("a message", refused.error, 0, dead=dead)
        else:
            self.counts.duplicates += 1

    async def _refuse(self, item: Item) -> None:
        """Make a dead letter of an invalid message immediately: another attempt cannot succeed."""
        dead = self._has_copy(item.message, 0, item.error)
        if await self._receive([item], error=item.error, dead=dead):
            self._count_failure("a message", item.error, 0, dead=dead)
        elif item.event is None:
            self.counts.duplicates += 1
        else:
            await self._count_duplicates([item])

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
                        "check whether its producer reuses ids; see origins in docs/consuming-failures.md",
                    )
                )
        self.counts.duplicates += len(same)

    def _remember(self, items: Sequence[Item]) -> None:
        if self._plan.cache is not None:
            self._plan.cache.remember(self._plan.source, [each.message_id for each in items])


def not_among(items: Sequence[Item], where: Mapping[uuid.UUID, int]) -> list[Item]:
    """Return the items that were not received; of several with one id, the first was received."""
    first = {each.message_id: id(each) for each in reversed(items) if each.message_id in where}
    return [each for each in items if first.get(each.message_id) != id(each)]
