"""What a signal handler may do to a stop event.

Invariants:
- Nothing waits for a lock in a handler: the code that it interrupted may hold it, in this thread.
"""

from __future__ import annotations

import _thread
import threading


def set_from_handler(stop: threading.Event) -> None:
    """Set an event from a signal handler.

    `Event.set` takes the event's lock. If the main thread has it, because it is about to wait for the event
    or an earlier signal's handler is setting it, the handler would wait for itself for ever.
    """
    # Starting a `threading.Thread` takes a lock too.
    _thread.start_new_thread(stop.set, ())
