"""Keeps a session alive while its thread is busy elsewhere.

Invariants:
- A thread of its own sends the heartbeats, so a process that was stopped sends none.
- A heartbeat that fails ends the heartbeats only: the session is lost, and its next user finds that out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from outbox_pipelines.relay.core.errors import ShardLostError


@contextmanager
def beating(beat: Callable[[], object], every: float) -> Iterator[None]:
    """Call `beat` every so many seconds for the length of the block.

    Without it, work that takes longer than the lease (recovering a transaction over a slow network) loses
    the shard that it was done for, and so does every further attempt.
    """
    end = threading.Event()

    def run() -> None:
        while not end.wait(every):
            try:
                beat()
            except (ShardLostError, psycopg.Error):
                return

    thread = threading.Thread(target=run, name="outbox-heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
