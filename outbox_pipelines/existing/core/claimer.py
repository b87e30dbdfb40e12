"""The claiming part of a relay: settles complete claims, retries refused events, makes new claims.

Invariants:
- Claims are settled in the order in which they were made, which is the order of publishing.
- If a row cannot be marked, nothing more is claimed or published. Events in flight are awaited, and their
  rows are marked as far as the table allows it.
- A run until empty ends when a claim finds nothing, and nothing is in flight, locked or due.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from outbox_pipelines.existing.core.claims import Claims, MarkError
from outbox_pipelines.existing.core.row_retries import RowRetries
from outbox_pipelines.relay.core.batch import BatchQueue, ReleasedBatch
from outbox_pipelines.relay.core.blocked import BlockedAggregates
from outbox_pipelines.relay.core.breaker import Breaker, State
from outbox_pipelines.relay.core.ledger import Ledger
from outbox_pipelines.relay.core.producers import Clock

# Polling: fast for a second after the last event.
_FAST_POLL: Final = 0.002
_SLOW_POLL: Final = 0.025
_FAST_FOR: Final = 1.0
# If nothing can be claimed.
_IDLE_POLL: Final = 0.2


class Claimer:
    """The claiming part of a relay; for one thread.

    Args:
        is_asked_to_stop: whether the relay was asked to stop.
        on_settled: called with the number of published events of a settled claim.

    Attributes:
        broken: why rows cannot be marked; each published event would be published again.
    """

    def __init__(
        self,
        claims: Claims,
        batches: BatchQueue,
        ledger: Ledger,
        blocked: BlockedAggregates,
        retries: RowRetries,
        breaker: Breaker,
        *,
        clock: Clock,
        is_asked_to_stop: Callable[[], bool],
        until_empty: bool,
        on_settled: Callable[[int], None],
    ) -> None:
        self._claims = claims
        self._batches = batches
        self._ledger = ledger
        self._blocked = blocked
        self._retries = retries
        self._breaker = breaker
        self._clock = clock
        self._is_asked_to_stop = is_asked_to_stop
        self._until_empty = until_empty
        self._on_settled = on_settled
        self._is_claiming = True
        self._active_at = -math.inf
        self.broken: MarkError | None = None
        self.released: deque[ReleasedBatch] = deque()
        """Always empty: events of a free aggregate are claimed as usual."""

    def is_stopped(self) -> bool:
        """Return whether nothing more is to be published."""
        return self.broken is not None or self._is_asked_to_stop()

    def begin(self) -> None:
        """Take over what the predecessor left."""
        self._retries.begin()
        if self._until_empty:
            self._claims.stop_at_now()

    def settle(self) -> None:
        """Mark the published rows of complete claims."""
        batches, _ = self._ledger.take()
        for complete in batches:
            claim = self._claims.in_flight[0]
            assert claim.batch is complete.batch, "claims are settled in order"
            published = complete.published()
            with self._breaking_off():
                self._claims.settle(claim, published)
            self._retries.settled(complete)
            self._on_settled(len(published))
        self._ledger.settled(batches)

    def advance(self) -> None:
        """Do one round of retries, and unlock claims that Kafka takes too long for."""
        with self._breaking_off():
            self._retries.advance(may_try=self.may_try)
        self._claims.let_go()

    def claim(self) -> bool:
        """Claim rows if possible; return whether something was claimed."""
        if not self._is_claiming:
            return False
        if self.is_stopped():
            self._end()
        elif self._claims.may_claim:
            claim = None
            with self._breaking_off():
                claim = self._claims.claim(list(self._blocked.aggregates))
            if claim is not None:
                self._active_at = self._clock()
                self._batches.add(claim.batch)
                return True
            if self._until_empty and self._is_empty():
                self._end()
        return False

    def _is_empty(self) -> bool:
        """Return whether a claim that found nothing means that nothing is left."""
        is_ours = not self._claims.in_flight and not self._claims.was_locked_out
        return is_ours and self._retries.is_settled

    @contextmanager
    def _breaking_off(self) -> Iterator[None]:
        try:
            yield
        except MarkError as error:
            self.broken = self.broken or error

    def _end(self) -> None:
        self._is_claiming = False
        self._batches.add(None)

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will be claimed."""
        return not self._is_claiming

    @property
    def may_try(self) -> bool:
        """Whether refused events may be tried now: the rows behind them must be claimed afterwards."""
        return self._is_claiming and self._breaker.state is State.CLOSED and not self.is_stopped()

    @property
    def rest(self) -> float:
        """Seconds until the next work, unless a claim becomes complete before."""
        poll = _FAST_POLL if self._clock() - self._active_at < _FAST_FOR else _SLOW_POLL
        if not (self._is_claiming and self._claims.may_claim):
            poll = _IDLE_POLL
        # While Kafka is unavailable nothing is tried, even if it is due.
        return min(poll, self._retries.pause) if self.may_try else poll
