"""Notices that the server does no work for the session that owns a shard, where the network is silent.

Invariants:
- What a proxy or a pooler acknowledges and does not pass on looks like a statement that takes long. A second
  connection asks the server; without its answer nothing is concluded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg

from outbox_pipelines import log
from outbox_pipelines.database import connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import queries
from outbox_pipelines.relay.ownership import Ownership
from outbox_pipelines.settings import Settings

_LOG = logging.getLogger(__name__)


@contextmanager
def noticing(settings: Settings, place: Ownership, lost: threading.Event) -> Iterator[None]:
    """Set `lost` when the session has waited for twice the lease for an answer that cannot come."""
    end = threading.Event()

    def run() -> None:
        while not end.wait(settings.lease_seconds):
            since = place.waits_since()
            if since is None or time.monotonic() - since < 2 * settings.lease_seconds:
                continue
            if not _is_worked_for(settings, place.pid):
                _LOG.warning("the database has no statement of this relay, which waits for its answer")
                lost.set()
                return

    thread = threading.Thread(target=log.inherit(run), name="outbox-lost-sessions", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _is_worked_for(settings: Settings, pid: int) -> bool:
    try:
        with closing(connect(settings, name="outbox relay: lost?")) as connection:
            return connection.execute(queries.IS_WORKED_FOR, {"pid": pid}).fetchone() != (False,)
    except (SetupError, psycopg.Error):
        return True
