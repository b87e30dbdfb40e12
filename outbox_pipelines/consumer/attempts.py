"""Attempts at handling messages, mainly those of the inbox.

Invariants:
- An attempt at a message of the inbox is committed before it begins, and its result when it ends.
- A message of the inbox is handled under the id that it has now: if that is not the id of its row, it is
  recorded in the handler's transaction, and a message that was recorded under it is a duplicate.
"""

from __future__ import annotations

import inspect
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from outbox_pipelines.consumer import consumer_queries as queries
from outbox_pipelines.consumer import inbox
from outbox_pipelines.consumer.breaker import Breaker, is_unreachable, policy_of
from outbox_pipelines.consumer.config import Plan, StoppedError
from outbox_pipelines.consumer.dedupe_table import Marks
from outbox_pipelines.consumer.errors import ConsumerError, Policy, UnreadableError
from outbox_pipelines.consumer.event_reading import NAMESPACE, Event, Reader
from outbox_pipelines.consumer.figures import Counts, Figures, Types
from outbox_pipelines.consumer.handlers import Handler, Handlers
from outbox_pipelines.consumer.inbox import Inbox, Waiting, bucket
from outbox_pipelines.consumer.outages import Outages, told
from outbox_pipelines.consumer.tracing import surroundings
from outbox_pipelines.consumer.transactions import (
    ENDED,
    Database,
    TransactionError,
    left_over,
)
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
SPOILT: Final = "the handler committed part of its work and then failed, so the event is not tried again"


@dataclass(slots=True)
class Item:
    """A current message and its handler; a message that is not a valid event has an error."""

    message: Any
    id: str
    """Identifies it in `processed_events`: a UUID, as text, since most need no other."""
    event: Event | None = None
    handler: Handler | None = None
    error: str = ""
    content: uuid.UUID | None = None
    """A digest of the event's content, if its origin can reuse the id."""
    given: Any = None
    """The handler's argument: the event, its payload, or both."""
    mark: tuple[str, str] = ("", "")
    """Its row in the service's own table of processed events; see `dedupe_marks`."""

    @property
    def message_id(self) -> uuid.UUID:
        """The same as a UUID."""
        return uuid.UUID(self.id)


class Attempts(Outages):
    """Handles single messages; must be used by one thread or task."""

    def __init__(self, plan: Plan, handlers: Handlers, reader: Reader, database: Database) -> None:
        self.types = Types(handlers.types)
        self.counts = Counts(ignored_types=self.types.passed_over)
        self.figures = Figures(unseen=self.types.unseen)
        super().__init__(plan, database)
        self._handlers = handlers
        self._reader = reader
        # The query that tells whether the transaction in which a handler runs is committed: only the handler
        # can have committed it.
        self._open: tuple[str, Mapping[str, Any]] | None = None
        self._breakers: dict[int, Breaker] = {}
        self._marks: Marks | None = None
        self._inbox = Inbox(database, plan.source, blocks=plan.blocks, retry_seconds=plan.retry_seconds)

    def _item(self, message: Any) -> Item:
        try:
            event = self._reader.read(message)
            handler = self._handlers.handler(event.type)
            if handler is None and not event.type:
                raise UnreadableError(f"{event} has no type: handle it with on_other, or send event-type")
        except UnreadableError as error:
            return unreadable(message, str(error))
        if handler is not None:
            self.types.handled(event.type)
        origin = self._plan.origins.get(event.topic, event.topic)
        event_id, content = event.identified(origin, by_key=self._plan.by_key)
        given, misfit, mark = None, "", ("", "")
        if handler is not None:
            try:
                given = handler.give(event)
                if self._marks is not None:
                    mark = self._marks.mark(event)
            except UnreadableError as error:
                misfit = inbox.readable(str(error))
        return Item(message, event_id, event, handler, misfit, content, given, mark)

    async def _attempt_again(self, waiting: Waiting) -> Waiting | None:
        """Handle a message of the inbox. Return the next due one of its key after a success."""
        if waiting.attempts >= self._plan.max_attempts:
            await self._give_up(waiting)
            return None
        if self._is_held(self._handlers.handler(waiting.event_type)):
            return None
        # Before the claim: other processes take over a claimed message when its next attempt is due.
        await self._plan.stay()
        message = await self._surely(lambda: self._inbox.claim(waiting))
        if message is None:
            return None
        attempts = waiting.attempts + 1
        item = self._item(message)
        try:
            done = await self._repeated(lambda: self._handle_stored(waiting.seq, attempts, item))
            if not done:
                return None
        except (SetupError, StoppedError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises
            if await self._is_spoilt():
                text = f"{SPOILT}: {told(error)}"
                await self._surely(lambda: self._inbox.spoilt(waiting.seq, item.id, text))
                self._count_failure(f"the message {waiting.seq} of the inbox", text, attempts, dead=True)
            else:
                await self._miss(waiting.seq, attempts, item, error)
            return None
        if done == "handled":
            await self._works(item.handler)
            self.counts.handled += 1
        else:
            _LOG.info("the message %d of the inbox is a duplicate: %s", waiting.seq, item.event)
            self.counts.duplicates += 1
        return await self._surely(lambda: self._inbox.next(waiting.seq))

    async def _handle_stored(
        self, seq: int, attempts: int, item: Item
    ) -> Literal["handled", "duplicate", ""]:
        """Settle a message of the inbox; return nothing if another process has it."""
        if item.error:
            raise UnreadableError(item.error)
        if item.event is None or item.handler is None:
            raise UnreadableError(f"{item.event} no longer has a handler: register one, or discard the event")
        async with self._database.transaction() as transaction:
            began = await self._inbox.finish(transaction, seq, attempts)
            if not began:
                return ""
            if item.id != item.message.message_id and await self._is_known(transaction, item):
                await self._database.rows(transaction, queries.RELEASE, {})
                return "duplicate"
            if not await self._marked(transaction, [item]):
                return "duplicate"
            self._open = queries.IS_SETTLED, {"seq": seq, "began": began}
            await self._call(item.handler, [item], transaction)
            await self._release(transaction)
        return "handled"

    async def _is_known(self, transaction: Any, item: Item) -> bool:
        """Record the id that a message of the inbox has now; return whether the event was recorded under it.

        An event with the id of a different event is not: the operator who replays it has decided so.
        """
        given = {
            "id": item.id,
            "source": self._plan.source,
            "bucket": bucket(item.id),
            "content": None if item.content is None else str(item.content),
        }
        if await self._database.rows(transaction, queries.RECORD_ID, given):
            return False
        return any(same for (same,) in await self._database.rows(transaction, queries.IS_SAME, given))

    async def _marked(self, transaction: Any, items: Sequence[Item]) -> list[Item]:
        """Return the items that are not in the service's own table of processed events; they are now.

        If there are none, no handler follows, and the transaction can be committed.
        """
        if self._marks is None:
            return list(items)
        new = await self._marks.write(self._database, transaction, [each.mark for each in items])
        # The first item of each value.
        first = {each.mark[0]: each for each in reversed(items) if each.mark[0] in new}
        unmarked = [each for each in items if first.get(each.mark[0]) is each]
        if not unmarked:
            await self._database.rows(transaction, queries.RELEASE, {})
        return unmarked

    async def _miss(self, seq: int, attempts: int, item: Item, error: Exception) -> None:
        text = told(error)
        policy = await self._judge(item, error, attempts, seq)
        last = attempts >= self._plan.max_attempts or policy == "dead_letter"
        dead = last and policy != "outage" and self._has_copy(item.message, attempts, text)
        counts = policy != "outage"
        await self._surely(lambda: self._inbox.missed(seq, attempts, text, dead=dead, counts=counts))
        self._count_failure(f"the message {seq} of the inbox", text, attempts, dead=dead)

    def _breaker(self, handler: Handler) -> Breaker:
        # The id is stable: the consumer keeps its handlers in a dictionary.
        given = self._plan.outage_after, self._plan.max_attempts
        return self._breakers.setdefault(id(handler), Breaker(*given, has_worked=self.counts.handled > 0))

    def _is_held(self, handler: Handler | None) -> bool:
        """Return whether a handler is paused because a service it needs is unavailable."""
        if handler is None or not self._breakers:
            return False
        return not self._breaker(handler).may_call(time.monotonic())

    async def _judge(self, item: Item, error: Exception, attempts: int, seq: int | None = None) -> Policy:
        """Return what a failure means for the event.

        Args:
            attempts: begun so far, including this one.
            seq: the event's number in the inbox.
        """
        policy = policy_of(error, self._plan.on_error)
        if item.handler is None or item.error:
            return policy
        if policy == "dead_letter":
            await self._works(item.handler)
            return policy
        breaker = self._breaker(item.handler)
        before = [each for each in breaker.blamed.values() if each is not None and each != seq]
        is_new = breaker.failed(
            item.message_id,
            time.monotonic(),
            type(error),
            outage=policy == "outage",
            unreached=is_unreachable(error, self._plan.on_error),
            last=attempts >= self._plan.max_attempts,
        )
        if seq is not None:
            breaker.blamed[item.message_id] = seq
        if is_new:
            self.counts.outages += 1
            self.figures.breakers[item.handler.name] = True
            _LOG.error(
                "the handler of %s is paused, and its events stay in the inbox: all attempts at %d event(s) "
                "failed, the last with %s. The next attempt is in %g s, later ones less often",
                item.event and item.event.type,
                len(breaker.blamed),
                told(error),
                breaker.pause,
            )
            if before:
                await self._surely(lambda: self._inbox.take_back(before))
        return "outage" if breaker.is_open else policy

    async def _works(self, handler: Handler | None) -> None:
        """Record that the handler succeeded."""
        if handler is None or not self._breakers:
            return
        breaker = self._breaker(handler)
        seqs = [each for each in breaker.blamed.values() if each is not None]
        was_open = breaker.is_open
        breaker.works()
        if was_open:
            self.figures.breakers[handler.name] = False
            _LOG.warning("a paused handler succeeded and is resumed")
            await self._surely(lambda: self._inbox.hurry(seqs))

    async def _give_up(self, waiting: Waiting) -> None:
        """Make a dead letter if all attempts began and none ended, or its copy could not be sent before."""
        seq, attempts = waiting.seq, waiting.attempts
        found = await self._surely(lambda: self._inbox.read(waiting))
        if found is None:
            return
        message, error = found
        dead = self._has_copy(message, attempts, error)
        await self._surely(lambda: self._inbox.missed(seq, attempts, error, dead=dead))
        self._count_failure(f"the message {seq} of the inbox", error, attempts, dead=dead)

    def _has_copy(self, message: Any, attempts: int, error: str) -> bool:
        """Return whether a message can become a dead letter: its copy, if configured, is sent."""
        if self._plan.copies is None:
            return True
        try:
            self._plan.copies.send(message, source=self._plan.source, attempts=attempts, error=error)
        except ConsumerError as problem:
            self._lines.log("copies", "messages cannot become dead letters yet: %s", problem)
            return False
        self._lines.end("copies", "messages can become dead letters again")
        return True

    def _count_failure(self, what: str, error: str, attempts: int, *, dead: bool) -> None:
        self.counts.failures += 1
        self.counts.dead_letters += dead
        if dead:
            _LOG.error("%s is a dead letter after %d attempts: %s", what, attempts, error)
        else:
            _LOG.warning("%s was not handled in attempt %d: %s", what, attempts, error)

    async def _call(self, handler: Handler, items: Sequence[Item], transaction: Any) -> None:
        """Call a handler; `_release` must follow before the commit."""
        given = [each.given for each in items]
        self._is_called, self.awaits = True, "handler"
        began = time.monotonic()
        try:
            with surroundings([each.event for each in items if each.event], self._plan.source):
                async with self._plan.limit():
                    done = handler.function(given if handler.batch else given[0], transaction)
                    if inspect.isawaitable(done):
                        await done
        finally:
            self.awaits = "database"
            self.figures.called(handler.name, time.monotonic() - began)

    async def _release(self, transaction: Any) -> None:
        """Let the transaction be committed.

        Raises:
            TransactionError: a handler ended it, or ignored an error of the database.
        """
        try:
            is_ours = await self._database.release(transaction)
        except Exception as error:
            if (left := left_over(error)) is not None:
                raise left from error
            # It may be committed, by us.
            self._open = None
            raise
        if not is_ours:
            raise TransactionError(ENDED)
        self._open = None

    async def _is_spoilt(self) -> bool:
        """Return whether the failed handler had committed its transaction despite the guard."""
        if self._open is None:
            return False
        (query, given), self._open = self._open, None

        async def answer() -> bool:
            async with self._database.transaction() as transaction:
                [(is_committed,)] = await self._database.rows(transaction, query, given)
            return bool(is_committed)

        return await self._surely(answer)

    def _began(self, event_id: str, began: str) -> None:
        """Remember how to look up the record of an event whose handler is about to run."""
        given = {"id": event_id, "source": self._plan.source, "began": began}
        self._open = queries.IS_RECORDED, given


def unreadable(message: Any, error: str) -> Item:
    """Return a message that becomes a dead letter, identified by its place because it has no valid id."""
    place = f"{message.topic()}/{message.partition()}/{message.offset()}"
    return Item(message, str(uuid.uuid5(NAMESPACE, place)), error=inbox.readable(error))
