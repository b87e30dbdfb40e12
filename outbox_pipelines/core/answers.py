"""Sessions that do not wait for an answer without end once their program must stop.

Invariants:
- Until a stop is asked for, or the session is known to be lost, a statement may take any time: it may wait
  for a lock, or read much.
- Afterwards, a session waits for answers for `PATIENCE` seconds in all; then it is closed, and its statement
  fails. A network, or a pooler in between, may acknowledge everything and answer nothing or late: the kernel
  sees no fault.
- A commit whose wait for a synchronous standby was canceled is an error, as if its answer were lost: Kafka, a
  connector or a file does not change after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import psycopg

from outbox_pipelines.core.session import is_canceled_wait

PATIENCE: Final = 10.0
_stops: Final[ContextVar[tuple[threading.Event, ...]]] = ContextVar("stops", default=())


@contextmanager
def limited_after(*stops: threading.Event) -> Iterator[None]:
    """Limit the waits of sessions that the block opens, also in threads that inherit its context.

    Args:
        stops: after any of these; in addition to those of an outer block.
    """
    token = _stops.set((*_stops.get(), *stops))
    try:
        yield
    finally:
        _stops.reset(token)


class Session(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose waits have this limit; a statement that reaches it raises `OperationalError`."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._stops = _stops.get()
        self._waited = 0.0
        """Seconds, since the stop."""
        self.waits_since: float | None = None
        """Since when it waits for an answer, by the monotonic clock."""
        self._is_canceled_wait = False
        self.add_notice_handler(self._heard)

    def _heard(self, notice: psycopg.errors.Diagnostic) -> None:
        self._is_canceled_wait |= is_canceled_wait(notice)

    def wait(self, gen: Any, *given: Any, **named: Any) -> Any:
        """Have psycopg wait for the end of one exchange with the server."""
        if self._stops:
            gen = self._limited(gen, self._stops)
        self.waits_since = time.monotonic()
        try:
            answer = super().wait(gen, *given, **named)
        finally:
            self.waits_since = None
        if self._is_canceled_wait:
            self.pgconn.finish()
            raise psycopg.OperationalError(
                "the wait for a synchronous standby was canceled: the transaction is committed in this "
                "server alone, and a failover can undo it"
            )
        return answer

    def _limited(self, gen: Any, stops: Sequence[threading.Event]) -> Generator[Any, Any, Any]:
        try:
            wanted = next(gen)
            while True:
                began = time.monotonic()
                # psycopg comes back every 0.1 s, if only with nothing.
                ready = yield wanted
                if any(stop.is_set() for stop in stops):
                    self._waited += time.monotonic() - began
                    if self._waited >= PATIENCE:
                        self.pgconn.finish()
                        raise psycopg.OperationalError(
                            f"no answer of the database for {PATIENCE:g} s, after which it is not waited for"
                        )
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value
