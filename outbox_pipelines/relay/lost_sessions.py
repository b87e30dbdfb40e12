"""Notices that the server does no work for the session that owns a shard, where the network is silent.

Invariants:
- What a proxy or a pooler acknowledges and does not pass on looks like a statement that takes long. A second
  connection asks the server; without its answer nothing is concluded.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import AbstractContextManager, closing

import psycopg

from outbox_pipelines.database import connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import queries
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.ownership import Ownership
from outbox_pipelines.relay.shards.heartbeats import beating
from outbox_pipelines.settings import Settings

_LOG = logging.getLogger(__name__)


def noticing(settings: Settings, place: Ownership, lost: threading.Event) -> AbstractContextManager[None]:
    """Set `lost` when the session has waited for twice the lease for an answer that cannot come."""

    def look() -> None:
        since = place.waits_since()
        is_late = since is not None and time.monotonic() - since > 2 * settings.lease_seconds
        if is_late and not _is_worked_for(settings, place.pid):
            _LOG.warning("the database has no statement of this relay, which waits for its answer")
            lost.set()
            raise ShardLostError("nothing is left to look at")

    return beating(look, settings.lease_seconds)


def _is_worked_for(settings: Settings, pid: int) -> bool:
    try:
        with closing(connect(settings, name="outbox relay: lost?")) as connection:
            return connection.execute(queries.IS_WORKED_FOR, {"pid": pid}).fetchone() != (False,)
    except (SetupError, psycopg.Error):
        return True
