"""One relay in a separate thread, and its progress.

Invariants:
- After the `with` block, whatever error or signal ended it, the relay has ended: the events it had read are
  published and settled, and the shard is free.
- Signals reach the main thread, and the relay runs in another: they end the waiting, not the publishing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.relay.lease.shard import Settled


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a session since it acquired its shard."""

    events: int
    seconds: float
    waited: float
    """How long it waited for the shard before that, in seconds."""
    latency: float | None
    """Age of the newest event when it was last settled, in seconds."""
    greatest_latency: float | None
    topics: frozenset[str] = frozenset()
    """The topics it has published to."""


class RelaySession:
    """A relay that runs from entering the `with` block until leaving it."""

    def __init__(
        self, settings: Settings, *, shard: int, owner: str, until_empty: bool, hand_over_after: float | None
    ) -> None:
        self._settings = settings
        self._shard = shard
        self._owner = owner
        self._until_empty = until_empty
        self._hand_over_after = hand_over_after
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox-session")
        self._error: BaseException | None = None
        self._started = time.monotonic()
        self._taken: float | None = None
        self._finished: float | None = None
        self._events = 0
        self._latency: float | None = None
        self._greatest_latency: float | None = None
        self._latency_peak: float | None = None
        self._topics: frozenset[str] = frozenset()

    def __enter__(self) -> RelaySession:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def wait(self, seconds: float) -> bool:
        """Wait for the relay to end; return False if it still runs after so many seconds."""
        return self._ended.wait(seconds)

    def progress(self) -> Progress | None:
        """Return the progress so far; None before the shard is acquired."""
        if self._taken is None:
            return None
        seconds = (self._finished or time.monotonic()) - self._taken
        waited = self._taken - self._started
        return Progress(self._events, seconds, waited, self._latency, self._greatest_latency, self._topics)

    def take_greatest_latency(self) -> float | None:
        """Return the greatest age of an event when it was settled, in seconds, since the last call."""
        peak, self._latency_peak = self._latency_peak, None
        return peak

    def result(self) -> Progress | None:
        """Return the totals, or raise the error that ended the relay. Call this after the block."""
        if self._error is not None:
            raise self._error
        return self.progress()

    def _run(self) -> None:
        try:
            from outbox_pipelines.relay import service

            service.relay(
                self._settings,
                shard=self._shard,
                owner=self._owner,
                stop=self._stop,
                standby=service.Standby.REFUSE if self._until_empty else service.Standby.NEXT,
                until_empty=self._until_empty,
                hand_over_after=self._hand_over_after,
                on_take=self._on_take,
                on_progress=self._on_progress,
            )
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self._error = error
        finally:
            self._finished = time.monotonic()
            self._ended.set()

    def _on_take(self, shard: int) -> None:
        # Set only once: a relay that lost its shard and acquired it again is the same session.
        self._taken = self._taken or time.monotonic()

    def _on_progress(self, settled: Settled) -> None:
        # Topics first: a reader that sees the event count must also see the topics.
        self._topics |= settled.topics
        self._events += settled.events
        if settled.latency is not None:
            self._latency = settled.latency
            self._greatest_latency = max(settled.latency, self._greatest_latency or 0.0)
            self._latency_peak = max(settled.latency, self._latency_peak or 0.0)
