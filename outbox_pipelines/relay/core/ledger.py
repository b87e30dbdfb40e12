"""Complete batches that are not settled yet: passed from the publishing to the settling part.

Invariants:
- Batches leave in the order in which they arrived. A request is carried out after everything before it.
- Each call is atomic: see `relay.shared`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Final

from outbox_pipelines.core.position import Position
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.core.outcomes import ParkedStates

# Limits of complete batches that are not settled: a slow database must not fill the memory. Many small
# batches have room, because the settling part also retries parked events: a second if many are large.
_MOST_UNSETTLED: Final = 1_000
_MOST_UNSETTLED_EVENTS: Final = 80_000
_MOST_UNSETTLED_BYTES: Final = 16_000_000


@dataclass(slots=True)
class SettleRequest:
    """A request of the publishing part, which waits until the settling part has written it.

    Everything that was complete before the request is settled first.
    """

    position: Position | None = None
    tick_id: str | None = None
    parked: list[ParkedStates] = field(default_factory=list)
    is_done: bool = False


class Ledger(ABC):
    """Complete batches and requests."""

    def __init__(self) -> None:
        self._completed: list[Complete] = []
        self._requests: list[SettleRequest] = []
        self.unsettled = 0
        """Number of complete batches with events that are not settled."""
        self._unsettled_events = 0
        self._unsettled_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether more may be published before something is settled."""
        return (
            self.unsettled < _MOST_UNSETTLED
            and self._unsettled_events < _MOST_UNSETTLED_EVENTS
            and self._unsettled_bytes < _MOST_UNSETTLED_BYTES
        )

    @property
    def has_work(self) -> bool:
        """Whether there is something to settle now.

        A position without events can wait for the heartbeat: settling it uses a transaction id, which would
        make the next snapshot differ, and so on without end.
        """
        return bool(self._requests or any(batch.batch.events for batch in self._completed))

    def hand_over(self, batches: list[Complete]) -> None:
        """Add complete batches."""
        self._completed += batches
        self.unsettled += sum(1 for batch in batches if batch.batch.events)
        self._unsettled_events += sum(len(batch.batch.events) for batch in batches)
        self._unsettled_bytes += sum(batch.batch.size for batch in batches)

    def request(self, request: SettleRequest) -> None:
        """Add a request for the settling part."""
        self._requests.append(request)

    def take(self) -> tuple[list[Complete], list[SettleRequest]]:
        """Remove and return all complete batches and requests."""
        batches, self._completed = self._completed, []
        requests, self._requests = self._requests, []
        return batches, requests

    def settled(self, batches: list[Complete]) -> None:
        """Record these batches as settled."""
        self.unsettled -= sum(1 for batch in batches if batch.batch.events)
        self._unsettled_events -= sum(len(batch.batch.events) for batch in batches)
        self._unsettled_bytes -= sum(batch.batch.size for batch in batches)

    def answer(self, requests: list[SettleRequest]) -> None:
        """Record these requests as written."""
        for request in requests:
            request.is_done = True

    @abstractmethod
    def wait_for(self, request: SettleRequest) -> None:
        """Return when the request is written.

        Raises:
            ShardLostError: it will never be written.
        """
