"""A circuit breaker for each handler, for outages of a service that the handler needs.

Invariants:
- Pure: it decides from the time and the results whether the handler may be called.
- closed → open when different events fail in a row, or one raises an outage; then one event is tried after
  each pause; open → closed when the handler succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal
from uuid import UUID

from outbox_pipelines.consumer.errors import OutageError, RefusedError, UnreadableError

Policy = Literal["retry", "dead_letter", "outage"]
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
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


class Breaker:
    """The state of one handler.

    Args:
        limit: the number of different events in a row whose failure opens it; 0: only an `OutageError` does.
    """

    def __init__(self, limit: int) -> None:
        self.is_open = False
        self.pause = _FIRST_PAUSE
        self.blamed: dict[UUID, int | None] = {}
        """Events that failed since the handler's last success, with their numbers in the inbox."""
        self._limit = limit
        self._try_at = 0.0

    def may_call(self, now: float) -> bool:
        """Return whether the handler may be called, at least for one try."""
        return not self.is_open or now >= self._try_at

    def failed(self, message_id: UUID, now: float, *, outage: bool) -> bool:
        """Record that an event failed.

        Returns:
            Whether the failure opened the breaker.
        """
        self.blamed.setdefault(message_id, None)
        was_open = self.is_open
        if was_open:
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
        elif outage or len(self.blamed) == self._limit:
            self.is_open = True
        self._try_at = now + self.pause
        return self.is_open and not was_open

    def works(self) -> None:
        """Record that the handler succeeded, or rejected an event because of its content."""
        self.is_open, self.pause = False, _FIRST_PAUSE
        self.blamed.clear()
