"""What becomes of an event: handled, a duplicate, in the inbox, or a dead letter.

Invariants:
- A failed event is in the inbox before the next one is handled, and later events of its key go behind it.
- An attempt at a message of the inbox has its result recorded when it ends.
- A message becomes a dead letter only after its copy, if one is configured, was sent.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from outbox_pipelines.consumer.config import Plan
from outbox_pipelines.consumer.database_retry import DatabaseRetry
from outbox_pipelines.consumer.errors import ConsumerError, error_text
from outbox_pipelines.consumer.figures import Counts, Types
from outbox_pipelines.consumer.handler_breakers import Breakers
from outbox_pipelines.consumer.inbox import Arrival, Inbox, Waiting
from outbox_pipelines.consumer.items import Item, unreadable
from outbox_pipelines.consumer.processed_events import ProcessedEvents
from outbox_pipelines.core.log import RepeatedLines

_LOG: Final = logging.getLogger(__name__)
_SPOILT: Final = "the handler committed part of its work and then failed, so the event is not tried again"


@dataclass
class Settlement:
    """Settles the events of a consumer, and counts them; must be used by one thread or task."""

    plan: Plan
    retry: DatabaseRetry
    processed: ProcessedEvents
    inbox: Inbox
    breakers: Breakers
    counts: Counts
    types: Types
    _lines: RepeatedLines = field(default_factory=lambda: RepeatedLines(_LOG))

    async def handled(self, items: Sequence[Item]) -> None:
        """Count items whose handlers succeeded."""
        if self.breakers:
            for handler in {id(each.handler): each.handler for each in items}.values():
                await self.breakers.succeeded(handler)
        self.counts.handled += len(items)

    def skip(self, item: Item) -> None:
        """Count an event that no handler takes."""
        assert item.event is not None
        if item.event.replay is not None:
            self.counts.skipped_replays += 1
            return
        self.counts.ignored += 1
        self.types.pass_over(item.event.type)

    async def duplicates(self, items: Sequence[Item]) -> None:
        """Count duplicates; an event with the id of a different event becomes a dead letter."""
        same = items
        if again := [each for each in items if each.content is not None]:
            ids = [each.message_id for each in again]
            recorded = await self.retry.run(lambda: self.processed.contents(ids))
            others = [each for each in again if recorded.get(each.message_id) != each.content]
            same = items if not others else [each for each in items if all(each is not it for it in others)]
            for each in others:
                await self.reject(
                    unreadable(
                        each.message,
                        f"{each.event} differs from the event that was handled with this id: "
                        "check whether its producer reuses ids; see origins in docs/consuming-failures.md",
                    )
                )
        self.counts.duplicates += len(same)

    async def hold(self, items: Sequence[Item]) -> None:
        """Write items to the inbox, from where they are handled later."""
        where = await self.receive(items)
        self.counts.received += len(where)
        await self.duplicates(not_among(items, where))

    async def receive(self, items: Sequence[Item], **more: Any) -> dict[uuid.UUID, int]:
        """Write items to the inbox; return where those are that are new."""
        arrivals = [
            Arrival.of(each.event, each.message_id, each.message, each.content)
            if each.event
            else Arrival.of_no_event(each.message_id, each.message)
            for each in items
        ]
        return await self.retry.run(lambda: self.inbox.receive(arrivals, **more))

    async def reject(self, item: Item) -> None:
        """Make a dead letter of an invalid message immediately: another attempt cannot succeed."""
        dead = await self._has_copy(item.message, 0, item.error)
        if await self.receive([item], error=item.error, dead=dead):
            self._failed("a message", item.error, 0, dead=dead)
        elif item.event is None:
            self.counts.duplicates += 1
        else:
            await self.duplicates([item])

    async def fail(self, item: Item, error: Exception) -> None:
        """Write an event to the inbox after its first attempt failed, unless its commit succeeded."""
        text = error_text(error)
        policy = await self.breakers.judge(item, error, 1)
        last = policy == "dead_letter" or (policy == "retry" and self.plan.max_attempts <= 1)
        dead = last and await self._has_copy(item.message, 1, text)
        pause = self.breakers.pause(item.handler) if policy == "outage" else None
        attempts = 1 if pause is None else 0
        where = await self.receive([item], attempts=attempts, error=text, dead=dead, pause=pause)
        if not where:
            await self.duplicates([item])
            return
        if policy != "dead_letter" and item.handler is not None:
            self.breakers.of(item.handler).blamed[item.message_id] = where[item.message_id]
        self._failed(str(item.event), text, attempts, dead=dead)
        self.counts.received += 1

    async def spoil(self, item: Item, error: Exception) -> None:
        """Make a dead letter of an event that is recorded, but whose effects are incomplete."""
        refused = unreadable(item.message, f"{item.event}: {_SPOILT}: {error_text(error)}")
        dead = await self._has_copy(item.message, 0, refused.error)
        # With its own id, so that a replay handles it.
        arrival = Arrival.of_no_event(refused.message_id, item.message, kept_id=item.message_id)
        if await self.retry.run(lambda: self.inbox.receive([arrival], error=refused.error, dead=dead)):
            self._failed("a message", refused.error, 0, dead=dead)
        else:
            self.counts.duplicates += 1

    async def fail_stored(self, seq: int, attempts: int, item: Item, error: Exception) -> None:
        """Record that an attempt at a message of the inbox failed."""
        text = error_text(error)
        policy = await self.breakers.judge(item, error, attempts, seq)
        last = attempts >= self.plan.max_attempts or policy == "dead_letter"
        pause = self.breakers.pause(item.handler) if policy == "outage" else None
        dead = last and pause is None and await self._has_copy(item.message, attempts, text)
        await self.retry.run(lambda: self.inbox.missed(seq, attempts, text, dead=dead, pause=pause))
        counted = attempts if pause is None else 0
        self._failed(f"the message {seq} of the inbox", text, counted, dead=dead)

    async def spoil_stored(self, seq: int, attempts: int, item: Item, error: Exception) -> None:
        """As `spoil`, of a message of the inbox."""
        text = f"{_SPOILT}: {error_text(error)}"
        await self.retry.run(lambda: self.inbox.spoilt(seq, item.id, text))
        self._failed(f"the message {seq} of the inbox", text, attempts, dead=True)

    async def exhaust(self, waiting: Waiting) -> None:
        """Make a dead letter if all attempts began and none ended, or its copy could not be sent before."""
        seq, attempts = waiting.seq, waiting.attempts
        found = await self.retry.run(lambda: self.inbox.read(waiting))
        if found is None:
            return
        message, error = found
        dead = await self._has_copy(message, attempts, error)
        await self.retry.run(lambda: self.inbox.missed(seq, attempts, error, dead=dead))
        if dead:
            self._failed(f"the message {seq} of the inbox", error, attempts, dead=True)

    async def _has_copy(self, message: Any, attempts: int, error: str) -> bool:
        """Return whether a message can become a dead letter: its copy, if configured, is sent."""
        if self.plan.copies is None:
            return True
        try:
            await self.plan.blocking(
                self.plan.copies.send, message, source=self.plan.source, attempts=attempts, error=error
            )
        except ConsumerError as problem:
            self._lines.log("copies", "messages cannot become dead letters yet: %s", problem)
            return False
        self._lines.end("copies", "messages can become dead letters again")
        return True

    def _failed(self, what: str, error: str, attempts: int, *, dead: bool) -> None:
        self.counts.failures += 1
        self.counts.dead_letters += dead
        if dead:
            _LOG.error("%s is a dead letter after %d attempts: %s", what, attempts, error)
        elif attempts:
            _LOG.warning("%s was not handled in attempt %d: %s", what, attempts, error)
        else:
            _LOG.warning("%s was not handled, and no attempt counts: %s", what, error)


def not_among(items: Sequence[Item], where: Mapping[uuid.UUID, int]) -> list[Item]:
    """Return the items that were not received; of several with one id, the first was received."""
    first = {each.message_id: id(each) for each in reversed(items) if each.message_id in where}
    return [each for each in items if first.get(each.message_id) != id(each)]
