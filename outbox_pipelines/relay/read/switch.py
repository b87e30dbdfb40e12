"""Where a reader reads: from a slot while the shard's row names one that can be read, else between snapshots.

Invariants:
- The source changes at a position, so nothing is read twice or missed, however often it changes.
- A slot that cannot be read never stops a relay: it reads between snapshots, says why, and tries again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import psycopg

from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.lease.resharding import OperatorChange
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.read.slot import slot_sql
from outbox_pipelines.relay.read.slot.slot_source import CdcSource, require_publication
from outbox_pipelines.relay.read.slot.stream import SlotLostError, Stream
from outbox_pipelines.relay.read.snapshots import SnapshotSource

Source = SnapshotSource | CdcSource

_LOG: Final = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 10.0
# How long the connection of a relay that has just lost the shard may still be there.
_IN_USE_SECONDS: Final = 5.0
_IN_USE_POLL: Final = 0.1


class Sources:
    """Chooses the source of an owned shard.

    Args:
        connection: the reader's own.
        snapshots: makes the source that reads between snapshots.
        slot: makes the source that reads from a slot.
    """

    def __init__(
        self,
        shard: Shard,
        connection: Connection,
        *,
        snapshots: Callable[[Position], SnapshotSource],
        slot: Callable[[Stream, Snapshot], CdcSource],
    ) -> None:
        self._shard = shard
        self._connection = connection
        self._snapshots = snapshots
        self._from_slot = slot
        self._slot = ""
        self._stream: Stream | None = None
        self._try_at = 0.0

    def choose(self, source: Source, change: OperatorChange) -> Source:
        """Return the source to read from now; `source` is the one that was read from."""
        slot, begins = change.slot, change.slot_begins
        if isinstance(source, CdcSource):
            return source if slot == self._slot else self._leave(source)
        if slot is None or begins is None or not source.is_between_ticks or time.monotonic() < self._try_at:
            return source
        if not source.done.covers(begins):
            return source
        try:
            stream = self._open(slot)
        except (psycopg.Error, SetupError, ShardLostError) as error:
            self._failed(slot, first_line(error), change)
            return source
        # A slot that is read stays: whether it is still the one that was looked at can be known only now.
        change.look()
        if (change.slot, change.slot_begins) != (slot, begins):
            stream.close()
            return source
        self._slot = slot
        self._stream = stream
        self._record(None, change)
        _LOG.info("reading from the slot %s", slot)
        return self._from_slot(stream, source.done)

    def lost(self, source: CdcSource, error: SlotLostError, change: OperatorChange) -> SnapshotSource:
        """Return the source that continues where a slot's connection has ended."""
        self._failed(self._slot, str(error), change)
        source.close()
        return self._snapshots(source.position)

    def close(self) -> None:
        """End the connection that reads the slot: another relay may read it then."""
        if self._stream is not None:
            self._stream.close()

    def _leave(self, source: CdcSource) -> SnapshotSource:
        source.close()
        _LOG.info("reading between snapshots again, because the slot %s is no longer used", self._slot)
        return self._snapshots(source.position)

    def _open(self, slot: str) -> Stream:
        require_publication(self._connection, slot)
        deadline = time.monotonic() + _IN_USE_SECONDS
        while True:
            connection = self._shard.connect("slot", replication=True)
            try:
                return Stream(connection, slot, slot)
            except psycopg.errors.ObjectInUse:
                connection.close()
                # This relay owns the shard: any other reader of the slot is a relay that does not.
                self._connection.execute(slot_sql.END_READER, {"slot": slot})
                if time.monotonic() > deadline:
                    raise
                time.sleep(_IN_USE_POLL)
            except BaseException:
                connection.close()
                raise

    def _failed(self, slot: str, why: str, change: OperatorChange) -> None:
        self._try_at = time.monotonic() + _AGAIN_SECONDS
        if why != change.slot_error:
            _LOG.warning("reading between snapshots, because the slot %s cannot be read: %s", slot, why)
        self._record(why, change)

    def _record(self, error: str | None, change: OperatorChange) -> None:
        if error != change.slot_error:
            self._connection.execute(slot_sql.SLOT_ERROR, {**self._shard.key, "error": error})
            change.slot_error = error
