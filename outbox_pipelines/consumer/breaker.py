"""A circuit breaker for each handler, for outages of a service that the handler needs.

Invariants:
- Pure: it decides from the time and the results whether the handler may be called.
- closed → open when an event raises an outage, or the failures look like one (`Breaker`); then one event is
  tried after each pause; open → closed when the handler succeeds.
- An event that fails while the others succeed is never taken for an outage: it has its attempts.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Final
from uuid import UUID

from outbox_pipelines.consumer.errors import (
    HandlerTimeoutError,
    OutageError,
    Policy,
    RefusedError,
    UnreadableError,
)

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


def policy_of(error: BaseException, given: Mapping[type[BaseException], Policy]) -> Policy:
    """Return what an exception means; its nearest class decides."""
    for each in type(error).__mro__:
        if (found := given.get(each) or _OURS.get(each)) is not None:
            return found
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

    def works(self) -> None:
        """Record that the handler succeeded, or rejected an event because of its content."""
        self.is_open, self.pause, self.unreached, self.has_worked = False, _FIRST_PAUSE, 0, True
        self.blamed.clear()
        self.errors.clear()
