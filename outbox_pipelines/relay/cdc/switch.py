"""Where a reader reads: from a slot while the shard's row names one that can be read, else between snapshots;
or nowhere, while a connector publishes.

Invariants:
- The source changes at a position, so nothing is read twice or missed, however often it changes.
- A slot that cannot be read never stops a relay: it reads between snapshots, says why, and tries again.
- A slot is left to a connector where everything before is published and settled, and nothing behind is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import psycopg

from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.position import Position, Snapshot
from outbox_pipelines.relay.cdc import queries
from outbox_pipelines.relay.cdc.behind import position_behind
from outbox_pipelines.relay.cdc.followed import FollowedSource
from outbox_pipelines.relay.cdc.skipped import require_publication
from outbox_pipelines.relay.cdc.source import CdcSource
from outbox_pipelines.relay.cdc.stream import SlotLostError, Stream
from outbox_pipelines.relay.core.errors import ShardLostError
from outbox_pipelines.relay.shard import Shard
from outbox_pipelines.relay.shards.resharding import Change
from outbox_pipelines.relay.source import SnapshotSource
from outbox_pipelines.secret import first_line
from outbox_pipelines.settings import Settings

Source = SnapshotSource | CdcSource | FollowedSource

_LOG: Final = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 10.0
# How long the connection of a relay that has just lost the shard may still be there.
_IN_USE_SECONDS: Final = 5.0
_IN_USE_POLL: Final = 0.1
# Until the server has taken note of what it was told.
_CONFIRM_SECONDS: Final = 10.0
_CONFIRM_POLL: Final = 0.01
# Until the end of a connector is looked for again.
_CONNECTOR_SECONDS: Final = 2.0


class Sources:
    """Chooses the source of an owned shard.

    Args:
        connection: the reader's own.
        snapshots: makes the source that reads between snapshots.
        slot: makes the source that reads from a slot.
        ending: whether to stop reading.
    """

    def __init__(
        self,
        settings: Settings,
        shard: Shard,
        connection: Connection,
        *,
        snapshots: Callable[[Position], SnapshotSource],
        slot: Callable[[Stream, Snapshot], CdcSource],
        ending: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._ending = ending
        self._shard = shard
        self._connection = connection
        self._snapshots = snapshots
        self._from_slot = slot
        self._slot = ""
        self._stream: Stream | None = None
        self._try_at = 0.0

    def choose(self, source: Source, change: Change) -> Source:
        """Return the source to read from now; `source` is the one that was read from."""
        slot, begins = change.slot, change.slot_begins
        if isinstance(source, FollowedSource):
            return source if change.connector_state == "publishes" else self._take_back(source, change)
        if change.connector_state in ("publishes", "ends") and slot is not None:
            return self._follow(source, slot)
        if isinstance(source, CdcSource):
            if slot != self._slot:
                return self._leave(source)
            if change.connector_state == "begins" and source.is_at_rest:
                return self._give_away(source, change)
            return source
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

    def lost(self, source: CdcSource, error: SlotLostError, change: Change) -> SnapshotSource:
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

    def _give_away(self, source: CdcSource, change: Change) -> Source:
        """Leave the slot to a connector, once all that was read is settled."""
        while not self._shard.position.done.covers(source.done):
            if self._ending():
                return source
            source.confirm()
            time.sleep(_CONFIRM_POLL)
        row = self._connection.execute(queries.WAITING).fetchone()
        if row is not None and row[0]:
            self._record(f"{row[0]} events are parked, which only a relay publishes", change)
            return source
        position, deadline = source.leave(), time.monotonic() + _CONFIRM_SECONDS
        while self._connection.execute(queries.CONFIRMED, {"slot": self._slot}).fetchone() != (position,):
            if self._ending() or time.monotonic() > deadline:
                return source
            time.sleep(_CONFIRM_POLL)
        source.close()
        self._connection.execute(queries.LEFT, self._shard.key)
        change.look()
        if change.connector_state == "publishes":
            return self._follow(source, self._slot)
        # Cancelled at the last moment.
        return self._snapshots(source.position)

    def _follow(self, source: SnapshotSource | CdcSource, slot: str) -> FollowedSource:
        _LOG.info("a connector publishes what the slot %s delivers; following it", slot)
        self._slot = slot
        return FollowedSource(self._connection, slot, source.done)

    def _take_back(self, source: FollowedSource, change: Change) -> Source:
        """Publish again in place of a connector that was stopped, from where it has stopped."""
        source.has_caught_up = False
        if source.is_ended:
            if not self._shard.position.done.covers(source.done):
                return source
            self._connection.execute(queries.TAKEN_BACK, self._shard.key)
            change.look()
            _LOG.info("the connector has ended; publishing what it has not")
            return self._snapshots(Position(source.done))
        if time.monotonic() >= self._try_at:
            try:
                given = (self._settings, self._connection, self._slot)
                # Without a wait: the lease has to be renewed, and it is tried again.
                end = position_behind(*given, since=source.done, seconds=0)
            except (psycopg.Error, SetupError) as error:
                self._try_at = time.monotonic() + _CONNECTOR_SECONDS
                self._record(first_line(error), change)
            else:
                source.end_at(end)
        return source

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
                self._connection.execute(queries.END_READER, {"slot": slot})
                if time.monotonic() > deadline:
                    raise
                time.sleep(_IN_USE_POLL)
            except BaseException:
                connection.close()
                raise

    def _failed(self, slot: str, why: str, change: Change) -> None:
        self._try_at = time.monotonic() + _AGAIN_SECONDS
        if why != change.slot_error:
            _LOG.warning("reading between snapshots, because the slot %s cannot be read: %s", slot, why)
        self._record(why, change)

    def _record(self, error: str | None, change: Change) -> None:
        if error != change.slot_error:
            self._connection.execute(queries.SLOT_ERROR, {**self._shard.key, "error": error})
            change.slot_error = error
