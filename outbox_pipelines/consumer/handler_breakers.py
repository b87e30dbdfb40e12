"""A circuit breaker for each handler, for outages of a service that the handler needs.

Invariants:
- `Breaker` is pure: it decides from the time and the results whether the handler may be called.
- closed → open when an event raises an outage, or the failures look like one (`Breaker`); then one event is
  tried after each pause; open → closed when the handler succeeds.
- An event that fails while the others succeed is never taken for an outage: it has its attempts.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from outbox_pipelines.consumer.config import Plan
from outbox_pipelines.consumer.database_retry import DatabaseRetry
from outbox_pipelines.consumer.errors import (
    HandlerTimeoutError,
    OutageError,
    Policy,
    RefusedError,
    UnreadableError,
    error_text,
)
from outbox_pipelines.consumer.figures import Counts, Figures
from outbox_pipelines.consumer.handler_registry import Handler, Handlers
from outbox_pipelines.consumer.inbox import Inbox, Waiting
from outbox_pipelines.consumer.items import Item

_LOG: Final = logging.getLogger(__name__)
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
# How many attempts in a row, and how many events, an outage is believed after: see `Breaker`.
_UNREACHED: Final = 3
_ALIKE: Final = 3
# Classes of clients whose errors are no OSError: requests, redis, botocore, aiohttp, httpx.
_UNREACHABLE: Final = frozenset(
    {
        "ConnectionError",
        "ClientConnectionError",
        "TransportError",
        "Timeout",
        "TimeoutError",
        "TimeoutException",
    }
)
_OURS: Final[Mapping[type[BaseException], Policy]] = {
    OutageError: "outage",
    RefusedError: "dead_letter",
    UnreadableError: "dead_letter",
}


def policy_of(error: BaseException, policies: Mapping[type[BaseException], Policy]) -> Policy:
    """Return what an exception means; its nearest class decides."""
    for kind in type(error).__mro__:
        if (policy := policies.get(kind) or _OURS.get(kind)) is not None:
            return policy
    return "retry"


def is_unreachable(error: BaseException, given: Mapping[type[BaseException], Policy]) -> bool:
    """Return whether an exception says that a service cannot be reached; not if its meaning is given.

    Not an error of PostgreSQL: the event may be what ended the connection of its own transaction.
    """
    classes = type(error).__mro__
    if isinstance(error, HandlerTimeoutError) or any(each in given for each in classes):
        return False
    names = {each.__name__ for each in classes}
    return isinstance(error, ConnectionError | TimeoutError | socket.gaierror) or bool(_UNREACHABLE & names)


class Breaker:
    """The state of one handler.

    It opens if the handler has no success between the failures of `limit` different events; or of three
    attempts, even at one event, if each error says that a service cannot be reached; or of at least three
    events, all with errors of one class, when one of them would become a dead letter.

    Args:
        limit: see above; 0: only an `OutageError` opens it.
        attempts: how many an event has.
        has_worked: whether this process has handled events; otherwise it does not know of earlier attempts.
    """

    def __init__(self, limit: int, attempts: int, *, has_worked: bool = False) -> None:
        self.is_open = False
        self.pause = _FIRST_PAUSE
        self.blamed: dict[UUID, int | None] = {}
        """Events that failed since the handler's last success, with their numbers in the inbox."""
        self.errors: set[type[BaseException]] = set()
        """The classes of their errors."""
        self.unreached = 0
        """Attempts in a row that did not reach a service; -1: one of them had another error."""
        self.has_worked = has_worked
        self._limit = limit
        self._attempts = attempts
        self._try_at = 0.0

    def may_call(self, now: float) -> bool:
        """Return whether the handler may be called, at least for one try."""
        return not self.is_open or now >= self._try_at

    def failed(
        self,
        message_id: UUID,
        now: float,
        kind: type[BaseException],
        *,
        outage: bool = False,
        unreached: bool = False,
        last: bool = False,
    ) -> bool:
        """Record that an event failed.

        Args:
            kind: the class of the error.
            outage: the error is defined to mean an outage.
            unreached: it says that a service cannot be reached.
            last: it was the event's last attempt.

        Returns:
            Whether the failure opened the breaker.
        """
        self.blamed.setdefault(message_id, None)
        self.errors.add(kind)
        # More than needed are not counted.
        self.unreached = min(self.unreached + 1, _UNREACHED) if unreached and self.unreached >= 0 else -1
        was_open = self.is_open
        if was_open:
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
        else:
            self.is_open = outage or (self._limit > 0 and self._is_outage(last))
        self._try_at = now + self.pause
        return self.is_open and not was_open

    def _is_outage(self, last: bool) -> bool:
        return (
            len(self.blamed) >= self._limit
            or self.unreached >= min(_UNREACHED, self._attempts)
            or (last and self.unreached > 0 and not self.has_worked)
            or (last and len(self.blamed) >= _ALIKE and len(self.errors) == 1)
        )

    def succeeded(self) -> None:
        """Record that the handler succeeded, or rejected an event because of its content."""
        self.is_open, self.pause, self.unreached, self.has_worked = False, _FIRST_PAUSE, 0, True
        self.blamed.clear()
        self.errors.clear()


@dataclass
class Breakers:
    """The breakers of a consumer's handlers, and what they mean for its inbox.

    Its truth is whether there is any: without a failure, nothing is looked up.
    """

    plan: Plan
    handlers: Handlers
    inbox: Inbox
    retry: DatabaseRetry
    counts: Counts
    figures: Figures
    _of: dict[int, Breaker] = field(default_factory=dict)
    # By the handler's id, which is stable: the consumer keeps its handlers in a dictionary.

    def __bool__(self) -> bool:
        return bool(self._of)

    def of(self, handler: Handler) -> Breaker:
        """Return the breaker of a handler."""
        given = self.plan.outage_after, self.plan.max_attempts
        return self._of.setdefault(id(handler), Breaker(*given, has_worked=self.counts.handled > 0))

    def is_paused(self, handler: Handler | None) -> bool:
        """Return whether a handler is paused because a service it needs is unavailable."""
        if handler is None or not self._of:
            return False
        return not self.of(handler).may_call(time.monotonic())

    def pause(self, handler: Handler | None) -> float:
        """Return the seconds after which a handler is tried again that is paused."""
        return _LONGEST_PAUSE if handler is None else self.of(handler).pause

    async def heads(self) -> list[Waiting]:
        """Return due messages of the inbox whose handlers are not paused."""
        if not self._of:
            return await self.inbox.heads()
        named = self.handlers.types
        held = [each for each in named if self.is_paused(self.handlers.handler(each))]
        return await self.inbox.heads(held, named, other_held=self.is_paused(self.handlers.other))

    async def judge(self, item: Item, error: Exception, attempts: int, seq: int | None = None) -> Policy:
        """Return what a failure means for the event.

        Args:
            attempts: begun so far, including this one.
            seq: the event's number in the inbox.
        """
        policy = policy_of(error, self.plan.on_error)
        if item.handler is None or item.error:
            return policy
        if policy == "dead_letter":
            await self.succeeded(item.handler)
            return policy
        breaker = self.of(item.handler)
        before = [each for each in breaker.blamed.values() if each is not None and each != seq]
        is_new = breaker.failed(
            item.message_id,
            time.monotonic(),
            type(error),
            outage=policy == "outage",
            unreached=is_unreachable(error, self.plan.on_error),
            last=attempts >= self.plan.max_attempts,
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
                error_text(error),
                breaker.pause,
            )
            if before:
                await self.retry.run(lambda: self.inbox.take_back(before, breaker.pause))
        return "outage" if breaker.is_open else policy

    async def succeeded(self, handler: Handler | None) -> None:
        """Record that a handler succeeded, or rejected an event because of its content."""
        if handler is None or not self._of:
            return
        breaker = self.of(handler)
        seqs = [each for each in breaker.blamed.values() if each is not None]
        was_open = breaker.is_open
        breaker.succeeded()
        if was_open:
            self.figures.breakers[handler.name] = False
            _LOG.warning("a paused handler succeeded and is resumed")
            await self.retry.run(lambda: self.inbox.hurry(seqs))
