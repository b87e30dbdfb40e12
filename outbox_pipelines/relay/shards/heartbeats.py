"""Keeps a session alive while its thread does other work.

Invariants:
- A separate thread of this process sends the heartbeats, so a stopped process sends none.
- A failed heartbeat ends only the heartbeats: the session is lost, and its next statement raises the error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from outbox_pipelines.core import log
from outbox_pipelines.relay.core.outcomes import ShardLostError


@contextmanager
def beating(beat: Callable[[], object], every: float) -> Iterator[None]:
    """Call `beat` at this interval, in seconds, while the block runs.

    Without it, work that takes longer than the lease (such as recovering a transaction over a slow network)
    would lose the shard, and so would every further attempt.
    """
    end = threading.Event()

    def run() -> None:
        while not end.wait(every):
            try:
                beat()
            except (ShardLostError, psycopg.Error):
                return

    thread = threading.Thread(target=log.inherit(run), name="outbox-heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
