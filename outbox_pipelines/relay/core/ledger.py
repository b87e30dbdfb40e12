"""Complete batches that are not settled yet: passed from the publishing to the settling part.

Invariants:
- Batches leave in the order in which they arrived. An order is carried out after everything before it.
- Each call is atomic: see `relay.shared`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from outbox_pipelines.core.position import Position
from outbox_pipelines.relay.core.delivery import Complete

# What is complete and waits to be settled: a slow database must not fill the memory. Many small batches have
# room, because the settling part also retries parked events, for a second where many are large.
_MOST_UNSETTLED: Final = 1_000
_MOST_UNSETTLED_EVENTS: Final = 80_000
_MOST_UNSETTLED_BYTES: Final = 16_000_000

Parked = Mapping[int, tuple[str, str | None]]
"""Events to park, by seq: the state and the reason."""


@dataclass(slots=True)
class Order:
    """What the settling part must write before the publishing part can continue."""

    position: Position | None = None
    tick_id: str | None = None
    parked: list[Parked] = field(default_factory=list)
    is_done: bool = False


class Ledger(ABC):
    """Complete batches and orders."""

    def __init__(self) -> None:
        self._completed: list[Complete] = []
        self._orders: list[Order] = []
        self.unsettled = 0
        """Complete batches with events that have not been dealt with."""
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
        return bool(self._orders or any(batch.batch.events for batch in self._completed))

    def hand_over(self, batches: list[Complete]) -> None:
        """Add complete batches."""
        self._completed += batches
        self.unsettled += sum(1 for batch in batches if batch.batch.events)
        self._unsettled_events += sum(len(batch.batch.events) for batch in batches)
        self._unsettled_bytes += sum(batch.batch.size for batch in batches)

    def order(self, order: Order) -> None:
        """Have something written."""
        self._orders.append(order)

    def take(self) -> tuple[list[Complete], list[Order]]:
        """Return all that is to be dealt with."""
        batches, self._completed = self._completed, []
        orders, self._orders = self._orders, []
        return batches, orders

    def settled(self, batches: list[Complete]) -> None:
        """Record these batches as settled."""
        self.unsettled -= sum(1 for batch in batches if batch.batch.events)
        self._unsettled_events -= sum(len(batch.batch.events) for batch in batches)
        self._unsettled_bytes -= sum(batch.batch.size for batch in batches)

    def carried_out(self, orders: list[Order]) -> None:
        """Record these orders as written."""
        for order in orders:
            order.is_done = True

    @abstractmethod
    def wait_for(self, order: Order) -> None:
        """Return when it has been carried out.

        Raises:
            ShardLostError: it never will be.
        """
