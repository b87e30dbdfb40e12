"""The limits of what a consumer waits for: handlers, and the end of the process.

Invariants:
- A handler's limit is shorter than Kafka's poll interval: a handler that hangs is a failed attempt and does
  not cost the group membership, also if the handler catches the interruption and returns.
- The time without a poll before a handler is called, that of earlier calls in the same transaction, and the
  limit of the call are together less than that interval.
- Nothing is cut before a stop. Afterwards, statements of the consumer wait for `PATIENCE` seconds in all, and
  handlers for their time limit, whatever a network or a pooler does to the database's answers. Then the
  connection is broken, and its events come again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from types import FrameType
from typing import Any, Final

from outbox_pipelines.consumer.config import require_number
from outbox_pipelines.consumer.consumer_database import Database
from outbox_pipelines.consumer.database_retry import DatabaseRetry
from outbox_pipelines.consumer.errors import HandlerTimeoutError
from outbox_pipelines.core.answers import PATIENCE
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
_INTERVAL: Final = "max.poll.interval.ms"
_DEFAULT_INTERVAL_MS: Final = 300_000
_SHARE: Final = 0.8
_MOST: Final = 0.9
_SILENT_SHARE: Final = 0.05
_LONGEST_SILENCE: Final = 10.0
_SHARED_SHARE: Final = 0.04
_LONGEST_SHARED: Final = 1.0
_AGAIN_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.5


def seconds(given: float | None, kafka: Mapping[str, Any]) -> float:
    """Return the limit: the given one, by default 80 % of Kafka's poll interval.

    Raises:
        SetupError: it is not within 90 % of that time, or that time is no number.
    """
    interval = _interval(kafka)
    if given is None:
        return interval * _SHARE
    if not 0 < require_number("handler_seconds", given) <= interval * _MOST:
        raise SetupError(
            f"handler_seconds is {given:g}: give more than 0 and at most {interval * _MOST:g}, "
            f"which is 90 % of {_INTERVAL}"
        )
    return given


def silence(kafka: Mapping[str, Any]) -> float:
    """Return the seconds after which a member polls Kafka before it starts a call that can take long."""
    return min(_LONGEST_SILENCE, _interval(kafka) * _SILENT_SHARE)


def shared(kafka: Mapping[str, Any]) -> float:
    """Return the seconds after which no other handler is called in a shared transaction."""
    return min(_LONGEST_SHARED, _interval(kafka) * _SHARED_SHARE)


def _interval(kafka: Mapping[str, Any]) -> float:
    given = kafka.get(_INTERVAL, _DEFAULT_INTERVAL_MS)
    if isinstance(given, bool) or not re.fullmatch("[1-9][0-9]*", str(given)):
        raise SetupError(f"kafka has {_INTERVAL}={given!r}: give milliseconds, as {_DEFAULT_INTERVAL_MS}")
    return int(given) / 1000


@contextmanager
def alarms(seconds: float) -> Iterator[AbstractAsyncContextManager[object]]:
    """Provide a context manager, reusable, that raises `HandlerTimeoutError` when its block takes longer.

    Only in the main thread, where signals come; in another one nothing can interrupt what blocks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield nullcontext()
        return

    alarm = _Alarm(seconds)
    before = signal.signal(signal.SIGALRM, alarm.ring)
    try:
        yield alarm
    finally:
        signal.signal(signal.SIGALRM, before)


class _Alarm:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._has_rung = False
        self._block: FrameType | None = None

    def ring(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the block."""
        while frame is not None and frame is not self._block:
            frame = frame.f_back
        if frame is None:
            # The one before came just when the block ended, and left the timer on.
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        self._has_rung = True
        raise _timeout(self._seconds)

    async def __aenter__(self) -> None:
        self._has_rung = False
        self._block = sys._getframe(1)
        # Again and again: one may come while a library cleans up after itself and swallows it.
        signal.setitimer(signal.ITIMER_REAL, self._seconds, _AGAIN_SECONDS)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._block = None
        if kind is None and self._has_rung:
            # The handler has caught it.
            raise _timeout(self._seconds)


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """Limit a block in an event loop; entered once."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if limit.expired():
            raise _timeout(seconds) from error
        raise
    if limit.expired():
        # The handler has caught the cancellation.
        raise _timeout(seconds)


def _timeout(seconds: float) -> HandlerTimeoutError:
    return HandlerTimeoutError(f"the handler took longer than {seconds:g} s and was interrupted")


@contextmanager
def limited_stop(
    retry: DatabaseRetry, database: Database, is_stopped: Callable[[], bool], seconds: float
) -> Iterator[None]:
    """Limit what the block waits for once it must stop.

    Args:
        seconds: the time limit of handlers.
    """
    has_ended = threading.Event()

    def watch() -> None:
        left = {"database": PATIENCE, "handler": seconds}
        while not has_ended.wait(_LOOK_SECONDS):
            what = retry.awaits
            if not what or not is_stopped():
                continue
            left[what] -= _LOOK_SECONDS
            if left[what] <= 0:
                _LOG.warning("the consumer stops, but the database does not answer: the connection is closed")
                left[what] = _LOOK_SECONDS
                database.abort()

    watcher = threading.Thread(target=watch, name="outbox-stop", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        has_ended.set()
        watcher.join()
