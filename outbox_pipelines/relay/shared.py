"""Objects that the threads of a relay share, and the threads.

Invariants:
- Each call of a shared object is atomic.
- The first failure of any thread is the failure of the worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import psycopg

from outbox_pipelines.core import log
from outbox_pipelines.core.event import Event
from outbox_pipelines.core.outages import is_outage
from outbox_pipelines.relay.core.batch import Batch, BatchQueue
from outbox_pipelines.relay.core.blocked import Aggregate, BlockedAggregates
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.core.ledger import Ledger, SettleRequest
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.core.settler import MANY_EVENTS


class SharedBlockedAggregates(BlockedAggregates):
    """The blocked aggregates, for the publishing and the settling thread."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self._lock = threading.Lock()

    def park(self, event: Event, *, suspect: bool = False) -> bool:
        with self._lock:
            return super().park(event, suspect=suspect)

    def parked(self, events: Iterable[Event]) -> None:
        with self._lock:
            super().parked(events)

    def load(self, aggregates: Iterable[tuple[str, str]]) -> None:
        with self._lock:
            super().load(aggregates)

    def due(self, limit: int) -> list[Aggregate]:
        with self._lock:
            return super().due(limit)

    def schedule(self, aggregate: tuple[str, str], seconds: float | None = 0.0) -> None:
        with self._lock:
            super().schedule(aggregate, seconds)

    def wake(self, aggregate: tuple[str, str]) -> None:
        with self._lock:
            super().wake(aggregate)

    def free(self, aggregate: tuple[str, str]) -> None:
        with self._lock:
            super().free(aggregate)

    @property
    def is_settled(self) -> bool:
        with self._lock:
            return super().is_settled


class SharedLedger(Ledger):
    """Complete batches and requests, from the publishing to the settling thread, which waits for them.

    Args:
        patience: seconds that few complete events wait for a request, so that one statement does both.
    """

    def __init__(self, patience: float = 0.0) -> None:
        super().__init__()
        self._patience = patience
        self._changed = threading.Condition()
        self._is_finished = False
        self._has_failed = False

    def hand_over(self, batches: list[Complete]) -> None:
        with self._changed:
            super().hand_over(batches)
            self._changed.notify()

    def request(self, request: SettleRequest) -> None:
        with self._changed:
            super().request(request)
            self._changed.notify()

    def take(self) -> tuple[list[Complete], list[SettleRequest]]:
        with self._changed:
            return super().take()

    def settled(self, batches: list[Complete]) -> None:
        with self._changed:
            super().settled(batches)

    def answer(self, requests: list[SettleRequest]) -> None:
        with self._changed:
            super().answer(requests)
            self._changed.notify_all()

    def wait_for(self, request: SettleRequest) -> None:
        with self._changed:
            self._changed.wait_for(lambda: request.is_done or self._has_failed)
        if not request.is_done:
            raise ShardLostError("the shard was lost within a transaction")

    def wait_for_work(self, seconds: float) -> bool:
        """Wait up to `seconds` until there is work; return whether nothing more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_work or self._is_finished, timeout=seconds)
            if 0 < self._unsettled_events < MANY_EVENTS:
                self._changed.wait_for(lambda: self._requests or self._is_finished, timeout=self._patience)
            return self._is_finished

    def finish(self) -> None:
        """Record that nothing more will come."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def fail(self) -> None:
        """Record that nothing more will be settled."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()


class SharedBatchQueue(BatchQueue):
    """Read batches, from the reading to the publishing thread; each waits for the other.

    Args:
        patience: factor for the seconds that `get` waits.
    """

    def __init__(self, patience: float = 1.0) -> None:
        super().__init__()
        self._patience = patience
        self._changed = threading.Condition()
        self._wanted = threading.Event()

    def add(self, batch: Batch | None) -> None:
        with self._changed:
            super().add(batch)
            self._changed.notify_all()

    def put(self, batch: Batch | None, seconds: float) -> bool:
        """Add a batch; return False if there was no room within `seconds`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.takes(batch), seconds):
                return False
            self.add(batch)
            return True

    def get(self, seconds: float, wanted: Callable[[Batch], bool]) -> Batch | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.has(wanted), seconds * self._patience):
                raise LookupError
            batch = self.pop()
            self._wanted.clear()
            self._changed.notify_all()
            return batch

    def want(self) -> None:
        self._wanted.set()

    def await_demand(self, seconds: float) -> bool:
        """Wait until a batch is wanted, for so long at most; return whether one is wanted since then."""
        return not self._wanted.is_set() and self._wanted.wait(seconds)


class Threads:
    """Threads that report their failure.

    Args:
        on_failure: called after each failure.

    Attributes:
        failure: the first one.
    """

    def __init__(self, on_failure: Callable[[], None] = lambda: None) -> None:
        self._on_failure = on_failure
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Report a failure."""
        self.failure = self.failure or error
        self._on_failure()

    def guard(self, body: Callable[[], None]) -> None:
        """Call this, and report its failure."""
        try:
            body()
        except psycopg.OperationalError as error:
            self.fail(
                ShardLostError(f"the connection to the database is lost: {error}")
                if is_outage(error)
                else error
            )
        except BaseException as error:  # noqa: BLE001 - raised by the worker
            self.fail(error)

    def start(self, body: Callable[[], None], name: str) -> threading.Thread:
        """Start a thread."""
        thread = threading.Thread(target=log.inherit(partial(self.guard, body)), name=name, daemon=True)
        thread.start()
        return thread
