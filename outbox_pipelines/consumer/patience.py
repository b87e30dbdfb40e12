"""A stop that ends, whatever a network or a pooler does to the database's answers.

Invariants:
- Nothing is cut before the stop. Afterwards, statements of the consumer wait for `PATIENCE` seconds in all,
  and handlers for their time limit. Then the connection is broken, and its events come again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from outbox_pipelines.consumer.attempts import Attempts
from outbox_pipelines.consumer.transactions import Database
from outbox_pipelines.core.answers import PATIENCE

_LOG: Final = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.5


@contextmanager
def limited_stop(
    work: Attempts, database: Database, is_stopped: Callable[[], bool], seconds: float
) -> Iterator[None]:
    """Limit what the block waits for once it must stop.

    Args:
        seconds: the time limit of handlers.
    """
    has_ended = threading.Event()

    def watch() -> None:
        left = {"database": PATIENCE, "handler": seconds}
        while not has_ended.wait(_LOOK_SECONDS):
            what = work.awaits
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
