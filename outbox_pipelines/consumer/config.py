"""The plan of a consumer, and the counts of its messages."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from outbox_pipelines.consumer.breaker import Policy
from outbox_pipelines.consumer.dead_letter_topic import DeadLetterTopic
from outbox_pipelines.consumer.dedupe_table import DedupeTable


class StoppedError(Exception):
    """The consumer was stopped while it waited for the database."""


class Cache(Protocol):
    """A cache of handled events; see `cache`."""

    def known(self, source: str, ids: Sequence[uuid.UUID]) -> set[uuid.UUID]: ...

    def remember(self, source: str, ids: Sequence[uuid.UUID]) -> None: ...


@dataclass(slots=True)
class Counts:
    """Counts of the messages of a run, by result."""

    handled: int = 0
    duplicates: int = 0
    """Already handled or received by this source."""
    ignored: int = 0
    """Of types without a handler."""
    received: int = 0
    """Written to the inbox: failed, behind a failed event, or by `receive`."""
    failures: int = 0
    """Failed attempts."""
    dead_letters: int = 0
    outages: int = 0
    """How often a handler was paused because a service it needs was unavailable."""
    ignored_types: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """The ignored types, with their counts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a consumer; see `Consumer` for their meanings."""

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
    """Called between two calls of handlers: poll Kafka if it was not polled for a while."""
    waits: bool = True
    """Whether a start waits for a database that is unavailable."""
    shared_seconds: float = 1.0
    """How long calls that share a transaction may take before its events are handled one by one instead."""
    copies: DeadLetterTopic | None = None
    cache: Cache | None = None
    dedupe_table: DedupeTable | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    on_error: Mapping[type[BaseException], Policy] = field(default_factory=dict)
    outage_after: int = 0
    measures: bool = False
    """Whether metrics are read: only then is the inbox measured."""
