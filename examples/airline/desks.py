"""The airline at work: a desk at each airport writes what happens to its flights, all at the same time.

Invariants:
- A desk is a thread with a connection of its own. A flight belongs to the desk of the airport it leaves, so
  its operations keep their order. An aircraft is served by all desks; its row's lock decides who is first.
- The desks stay close together in time: each has a short inbox, and the slowest holds the others up.
- Some transactions do all their work and are then rolled back. Their events contain times that never occur,
  so a consumer that receives one can prove it false from the tables.
- The same seed rolls back the same transactions.
"""

# Threads, not processes: most of a writer's time passes in the server. Measured on two cores, three threads
# write as fast as two processes, which would each have to read the flights.
from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from queue import Empty, Full, Queue
from typing import Final

from examples.airline import airline, flights
from examples.airline.flights import AIRPORTS, Operation
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.settings import Settings

ROLLED_BACK_SHARE: Final = 0.05
REASONS: Final = ("crew timed out", "weather", "slot withdrawn", "aircraft changed")

_INBOX = 50
_LOOK_UP = 0.1


class CalledOffError(Exception):
    """The operation does not take place after all; its message is the reason."""


class Desks:
    """Writes a stream of operations with one thread an airport.

    Args:
        per_second: how many operations at most; None for as many as there is power for.
    """

    def __init__(
        self, settings: Settings, stream: Iterator[Operation], *, seed: int, per_second: float | None = None
    ) -> None:
        self._stream = stream
        self._pause = 1 / per_second if per_second else 0.0
        self._stop = threading.Event()
        self._desks = {airport: _Desk(settings, airport, seed, self._stop) for airport in AIRPORTS}
        self._threads = [threading.Thread(target=self._hand_out, name="airline", daemon=True)]
        self._threads += [
            threading.Thread(target=desk.work, name=desk.name, daemon=True) for desk in self._desks.values()
        ]
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Begins."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends after the transactions of this moment; returns when all desks are closed."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def working(self) -> bool:
        """Return whether there is something left to write.

        Raises:
            psycopg.Error: the database refused, or is gone.
        """
        for failure in (self._failure, *(desk.failure for desk in self._desks.values())):
            if failure is not None:
                raise failure
        return any(thread.is_alive() for thread in self._threads)

    @property
    def transactions(self) -> int:
        """Committed."""
        return sum(desk.transactions for desk in self._desks.values())

    @property
    def events(self) -> int:
        """Committed."""
        return sum(desk.events for desk in self._desks.values())

    @property
    def called_off(self) -> Counter[str]:
        """Transactions rolled back, by reason."""
        return sum((desk.called_off for desk in self._desks.values()), Counter[str]())

    @property
    def latest(self) -> datetime | None:
        """How far the airline is in its year."""
        return max((desk.latest for desk in self._desks.values() if desk.latest), default=None)

    def _hand_out(self) -> None:
        try:
            for operation in self._stream:
                self._desks[operation.flights[0].origin].take(operation)
                if self._stop.wait(self._pause):
                    return
            for desk in self._desks.values():
                desk.take(None)
        except BaseException as error:  # noqa: BLE001 - raised again by `working`
            self._failure = error
            self._stop.set()


class _Desk:
    def __init__(self, settings: Settings, airport: str, seed: int, stop: threading.Event) -> None:
        self.name = f"airline: {airport}"
        self.transactions = 0
        self.events = 0
        self.called_off: Counter[str] = Counter()
        self.latest: datetime | None = None
        self.failure: BaseException | None = None
        self._settings = settings
        self._stop = stop
        self._inbox: Queue[Operation | None] = Queue(_INBOX)
        self._chance = random.Random(f"{seed} {airport}")

    def take(self, operation: Operation | None) -> None:
        """Puts an operation into the inbox, when there is room; None closes the desk."""
        while not self._stop.is_set():
            try:
                return self._inbox.put(operation, timeout=_LOOK_UP)
            except Full:
                continue
        return None

    def work(self) -> None:
        """Carries out what comes in, until the desk is closed."""
        try:
            with connect(self._settings, name=self.name) as connection:
                while not self._stop.is_set():
                    try:
                        operation = self._inbox.get(timeout=_LOOK_UP)
                    except Empty:
                        continue
                    if operation is None:
                        return
                    self._carry_out(connection, operation)
        except BaseException as error:  # noqa: BLE001 - raised again by `Desks.working`
            self.failure = error
            self._stop.set()

    def _carry_out(self, connection: Connection, operation: Operation) -> None:
        if self._chance.random() < ROLLED_BACK_SHARE:
            self._call_off(connection, operation)
        with connection.transaction():
            _write(connection, operation)
        self.transactions += 1
        self.events += len(operation.flights)
        self.latest = operation.at

    def _call_off(self, connection: Connection, operation: Operation) -> None:
        reason = self._chance.choice(REASONS)
        hoped_for = _earlier(operation, timedelta(minutes=self._chance.randint(1, 30)))
        try:
            with connection.transaction():
                _write(connection, hoped_for)
                raise CalledOffError(reason)
        except CalledOffError:
            self.called_off[reason] += 1


def _write(connection: Connection, operation: Operation) -> None:
    flight = operation.flights[0]
    match operation.event_type:
        case flights.SCHEDULED:
            airline.schedule(connection, operation.flights)
        case flights.DEPARTED:
            airline.depart(connection, flight)
        case flights.ARRIVED:
            airline.arrive(connection, flight)
        case flights.CANCELLED:
            airline.cancel(connection, flight)


def _earlier(operation: Operation, by: timedelta) -> Operation:
    """The same at other times: what was hoped for."""
    other = tuple(
        replace(
            flight,
            scheduled_for=flight.scheduled_for - by,
            departed_at=flight.departed_at and flight.departed_at - by,
            arrived_at=flight.arrived_at and flight.arrived_at - by,
        )
        for flight in operation.flights
    )
    return replace(operation, flights=other)
