"""How a consumer works, and what became of its messages."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from outbox_pipelines.consumer.breaker import Policy
from outbox_pipelines.consumer.dead_letter_topic import DeadLetterTopic


class StoppedError(Exception):
    """The consumer was stopped while it waited for the database."""


class Cache(Protocol):
    """What may know of events that were handled; see `cache`."""

    def known(self, source: str, ids: Sequence[uuid.UUID]) -> set[uuid.UUID]: ...

    def remember(self, source: str, ids: Sequence[uuid.UUID]) -> None: ...


@dataclass(slots=True)
class Counts:
    """What became of the messages of a run."""

    handled: int = 0
    duplicates: int = 0
    """Handled or received before, by this source."""
    ignored: int = 0
    """Of types that nobody asked for."""
    received: int = 0
    """Put into the inbox: failed, behind one that failed, or to be handled from there."""
    failures: int = 0
    """Attempts that failed."""
    dead_letters: int = 0
    outages: int = 0
    """How often a handler was left alone, because what it needs was away."""
    ignored_types: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """The types of those that were ignored, and how many of each."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a consumer works; see `Consumer` for what the fields mean."""

    source: str
    group: str
    max_attempts: int
    retry_seconds: float
    blocks: bool
    by_key: bool
    limit: Callable[[], AbstractAsyncContextManager[object]]
    pause: Callable[[float], Awaitable[None]]
    is_stopped: Callable[[], bool]
    stay: Callable[[], Awaitable[None]]
    """Between two calls of handlers: Kafka hears of us, where it has not for a while."""
    copies: DeadLetterTopic | None = None
    cache: Cache | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    on_error: Mapping[type[BaseException], Policy] = field(default_factory=dict)
    outage_after: int = 0
    measures: bool = False
    """Whether metrics are read: only then the inbox is measured."""
