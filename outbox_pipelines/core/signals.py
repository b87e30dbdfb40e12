"""Stop events that signals set.

Invariants:
- Nothing waits for a lock in a handler: the code that it interrupted may hold it, in this thread.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from outbox_pipelines.core.answers import limited_after

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


def set_from_handler(stop: threading.Event) -> None:
    """Set an event from a signal handler.

    `Event.set` takes the event's lock. If the main thread has it, because it is about to wait for the event
    or an earlier signal's handler is setting it, the handler would wait for itself for ever.
    """
    # Starting a `threading.Thread` takes a lock too.
    _thread.start_new_thread(stop.set, ())


@contextmanager
def until_signal() -> Iterator[threading.Event]:
    """Yield what Ctrl-C or SIGTERM sets; at the end, the handlers of before are back.

    Once it is set, sessions opened in the block wait for answers for a limited time: see `core.answers`.
    """
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: set_from_handler(stop)) for number in _STOPPING}
    try:
        with limited_after(stop):
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
