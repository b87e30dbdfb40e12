"""Blocked aggregates whose next event's topic is unavailable: they wait for the topic together.

Invariants:
- While a topic is unavailable, its waiting aggregates cause no statement and no message. `TopicStates` looks
  up a missing topic; a topic that refuses messages is tried with one event at a time.
- When a topic is available again, all aggregates that wait for it are scheduled immediately.
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


class TopicStates(Protocol):
    """Which topics are available."""

    def unavailable(self, name: str) -> str | None:
        """Return why the topic is unavailable; None if it is available, empty if no broker has answered yet.

        Does not wait.
        """

    def may_be_found(self, name: str) -> bool:
        """Return whether the topic is available, or may become available at any moment."""

    def due_for_trial(self) -> Iterable[str]:
        """Return the refusing topics that are due for a trial, and schedule their next trial."""

    def accept(self, name: str) -> None:
        """Mark the topic as available: it has accepted a message, or refused one because of its content."""


class Quarantine:
    """Blocked aggregates that wait for their topics."""

    def __init__(self, topics: TopicStates, blocked: BlockedAggregates, clock: Clock) -> None:
        self._clock = clock
        self._topics = topics
        self._blocked = blocked
        # In order: the aggregate that has waited longest is tried first.
        self._waiting: dict[str, dict[Name, None]] = {}
        self._trials: dict[Name, str] = {}
        self._cleared: set[Name] = set()
        self._look_at = 0.0

    def reason_to_wait(self, topic: str, aggregate: Name) -> str | None:
        """Let an aggregate wait for this topic if the topic is unavailable.

        Returns:
            The reason; empty if no broker has answered yet; None if the aggregate need not wait.
        """
        if not topic or aggregate in self._trials or (reason := self._topics.unavailable(topic)) is None:
            return None
        self._waiting.setdefault(topic, {})[aggregate] = None
        self._blocked.schedule(aggregate, None)
        return f"topic {topic} {reason}" if reason else ""

    def is_trial(self, aggregate: Name) -> bool:
        """Return whether its first event is the trial for its topic."""
        return aggregate in self._trials

    def has_cleared(self, aggregate: Name) -> bool:
        """Return once whether it waited only for its topic, which is available again."""
        if aggregate not in self._cleared:
            return False
        self._cleared.discard(aggregate)
        return True

    @property
    def is_quiet(self) -> bool:
        """Whether no waiting aggregate may continue at any moment."""
        return not any(self._topics.may_be_found(topic) for topic in list(self._waiting))

    @property
    def pause(self) -> float:
        """Seconds until the next check of the topics is due."""
        return max(self._look_at - self._clock(), 0.001) if self._waiting else 3600.0

    def advance(self) -> None:
        """Schedule the aggregates of available topics, and a trial for each refusing topic that is due."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        for topic in [topic for topic in self._waiting if self._topics.unavailable(topic) is None]:
            self._wake(topic)
        for topic in self._topics.due_for_trial():
            waiting = self._waiting.get(topic)
            if not waiting:
                # No event waits for it: the next event is the trial.
                self._topics.accept(topic)
                continue
            aggregate = next(iter(waiting))
            del waiting[aggregate]
            self._trials[aggregate] = topic
            self._blocked.wake(aggregate)

    def judge(self, aggregate: Name, verdict: Verdict) -> None:
        """Record the verdict on the first event of an aggregate."""
        topic = self._trials.pop(aggregate, None)
        if topic is not None and verdict not in (Verdict.UNAVAILABLE, Verdict.UNKNOWN):
            self._topics.accept(topic)

    def forget(self, aggregate: Name) -> None:
        """Forget an aggregate that is no longer blocked."""
        self._trials.pop(aggregate, None)
        self._cleared.discard(aggregate)

    def _wake(self, topic: str) -> None:
        for aggregate in self._waiting.pop(topic):
            self._cleared.add(aggregate)
            self._blocked.wake(aggregate)
