"""Blocked aggregates whose next event has nowhere to go: they wait for their topic, not each for itself.

Invariants:
- While a topic is unavailable, what waits for it costs nothing: no statement, no message. A missing topic is
  looked for by `Topics`; one that refuses messages is tried with one event at a time.
- When a topic is available again, all that waited for it is looked after at once.
- For the thread that retries parked events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from outbox_pipelines.relay.core.blocked import BlockedAggregates
from outbox_pipelines.relay.core.parked import Verdict
from outbox_pipelines.relay.core.producers import Clock

_LOOK_SECONDS: Final = 0.05

Name = tuple[str, str]


class Topics(Protocol):
    """What is known of topics."""

    def unavailable(self, name: str) -> str | None:
        """Why nothing can be published to it now; None if something can, empty if nothing is known yet."""

    def may_be_found(self, name: str) -> bool:
        """Whether it is available, or may be any moment."""

    def due_for_trial(self) -> Iterable[str]:
        """Those that refuse messages and are due to be tried with one."""

    def accept(self, name: str) -> None:
        """It has taken a message, or has refused one for the message's own sake."""


class Quarantine:
    """What waits for topics."""

    def __init__(self, topics: Topics, blocked: BlockedAggregates, clock: Clock) -> None:
        self._clock = clock
        self._topics = topics
        self._blocked = blocked
        # In order: who has waited longest is tried first.
        self._waiting: dict[str, dict[Name, None]] = {}
        self._trials: dict[Name, str] = {}
        self._cleared: set[Name] = set()
        self._look_at = 0.0

    def holds(self, topic: str, aggregate: Name) -> str | None:
        """Why the aggregate must wait for this topic; then it does, until it is woken. None if it need not,
        empty if nothing is known of the topic yet."""
        if not topic or aggregate in self._trials or (reason := self._topics.unavailable(topic)) is None:
            return None
        self._waiting.setdefault(topic, {})[aggregate] = None
        self._blocked.look_again(aggregate, None)
        return f"topic {topic} {reason}" if reason else ""

    def is_trial(self, aggregate: Name) -> bool:
        """Whether its first event is to be tried for its topic's sake."""
        return aggregate in self._trials

    def has_cleared(self, aggregate: Name) -> bool:
        """Whether it has waited for its topic alone, which is available now; said once."""
        if aggregate not in self._cleared:
            return False
        self._cleared.discard(aggregate)
        return True

    @property
    def is_quiet(self) -> bool:
        """Whether nothing that waits is about to go on."""
        return not any(self._topics.may_be_found(topic) for topic in list(self._waiting))

    @property
    def pause(self) -> float:
        """How long until something may have changed, in seconds."""
        return max(self._look_at - self._clock(), 0.001) if self._waiting else 3600.0

    def look(self) -> None:
        """Wakes what may go on, and of each refusing topic one event as a trial, when it is time."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        for topic in [topic for topic in self._waiting if self._topics.unavailable(topic) is None]:
            self._release(topic)
        for topic in self._topics.due_for_trial():
            waiting = self._waiting.get(topic)
            if not waiting:
                # Nothing is left to try it with: the next event will tell.
                self._topics.accept(topic)
                continue
            aggregate = next(iter(waiting))
            del waiting[aggregate]
            self._trials[aggregate] = topic
            self._blocked.wake(aggregate)

    def judge(self, aggregate: Name, verdict: Verdict) -> None:
        """What came of trying the first event of an aggregate."""
        topic = self._trials.pop(aggregate, None)
        if topic is not None and verdict not in (Verdict.UNAVAILABLE, Verdict.UNKNOWN):
            self._topics.accept(topic)

    def forget(self, aggregate: Name) -> None:
        """It is not blocked any more."""
        self._trials.pop(aggregate, None)
        self._cleared.discard(aggregate)

    def _release(self, topic: str) -> None:
        for aggregate in self._waiting.pop(topic):
            self._cleared.add(aggregate)
            self._blocked.wake(aggregate)
