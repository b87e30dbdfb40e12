"""Slots of a test's outbox, and sources that read them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.database import connect
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.read.contents import Guard, Unguarded
from outbox_pipelines.relay.read.slot.slot_setup import set_up
from outbox_pipelines.relay.read.slot.slot_source import CdcSource
from outbox_pipelines.relay.read.slot.stream import Stream
from outbox_pipelines.relay.read.snapshots import SnapshotSource
from tests.conftest import Outbox, wait_until


def make(outbox: Outbox) -> str:
    """Make the slot; return its name."""
    slot = set_up(outbox.settings, seconds=30, say=lambda line: None)
    assert slot is not None
    return slot


def begins(outbox: Outbox) -> Snapshot:
    """The snapshot from which on the slot delivers."""
    with outbox.connect() as connection:
        row = connection.execute("SELECT slot_snapshot::text FROM outbox_shards").fetchone()
    assert row is not None
    return Snapshot.parse(row[0])


class Reading:
    """A source that reads a slot, and settles on request."""

    def __init__(self, outbox: Outbox, slot: str, done: Snapshot, **more: Any) -> None:
        self.settled = done
        self.connection = outbox.connect()
        guard: Guard = more.pop("guard", None) or Unguarded()
        given = {"batch_events": 5000, "batch_bytes": 8_000_000, "with_time": False} | more
        replication = connect(outbox.settings, name="test", replication=True)
        self.source = CdcSource(
            self.connection,
            Stream(replication, slot, slot),
            done,
            lambda: self.settled,
            guard=guard,
            may_take_large=lambda: True,
            **given,
        )
        self._lsn = 0

    def batches(self) -> list[Batch]:
        """Everything that is committed now."""
        self.source._catch_up_to = self.source._ask_end()
        found: list[Batch] = []

        def all_read() -> bool:
            while (batch := self.source.read()) is not None:
                found.append(batch)
            self.source.wait(threading.Event())
            return self.source.has_caught_up

        wait_until(all_read, what="all that is committed", pace=0.01)
        return found

    def events(self) -> list[Event]:
        return [event for batch in self.batches() for event in batch.events]

    def settle(self) -> None:
        """Let the server forget what was read."""
        self.settled = self.source.done

    def close(self) -> None:
        self.source.close()
        self.connection.close()


@contextmanager
def reading(outbox: Outbox, slot: str, done: Snapshot, **more: Any) -> Iterator[Reading]:
    one = Reading(outbox, slot, done, **more)
    try:
        yield one
    finally:
        one.close()


def between_snapshots(
    connection: psycopg.Connection[Any], position: Position, *, with_time: bool = False
) -> list[Event]:
    """What a reader of snapshots finds behind a position."""
    source = SnapshotSource(
        connection, position, batch_events=5000, batch_bytes=8_000_000, with_time=with_time
    )
    upto = source.now()
    return [event for batch in iter(lambda: source.read(upto), None) for event in batch.events]
