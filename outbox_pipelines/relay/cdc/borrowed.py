"""Reads a slot for a while: after the end of its last reader, and so that the next one can start.

Invariants:
- When the block has ended, the server has noticed it: the reader that is started next finds the slot free.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Final

import psycopg

from outbox_pipelines.database import Connection, connect, slot_reader
from outbox_pipelines.relay.cdc.stream import Stream
from outbox_pipelines.settings import Settings

# For a session that reads nothing: the server would end it after a minute.
_NO_TIMEOUT: Final = "SET wal_sender_timeout = 0"


class InUseError(Exception):
    """Another session reads the slot; the message is who."""


@contextmanager
def borrowed(
    settings: Settings,
    connection: Connection,
    slot: str,
    publication: str,
    *,
    name: str,
    seconds: float,
    is_idle: bool = False,
) -> Iterator[tuple[Stream, int]]:
    """Read the slot for the length of the block; yield what it delivers, and the server's process.

    Args:
        name: in pg_stat_activity.
        seconds: how long to wait for the end of another reader, and for the own end.
        is_idle: whether the block neither receives nor confirms.

    Raises:
        InUseError: another session reads it.
        psycopg.Error: it cannot be read: it is missing or lost.
    """
    with closing(connect(settings, name=name, replication=True)) as replication:
        pid = replication.info.backend_pid
        if is_idle:
            replication.execute(_NO_TIMEOUT)
        stream = _start(connection, replication, slot, publication, seconds)
        try:
            yield stream, pid
        finally:
            stream.close()
            # If the server has ended, it has no reader either.
            with suppress(psycopg.Error):
                slot_reader.await_end(connection, slot, seconds=seconds, pid=pid)


def _start(
    connection: Connection, replication: Connection, slot: str, publication: str, seconds: float
) -> Stream:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return Stream(replication, slot, publication)
        except psycopg.errors.ObjectInUse:
            by = slot_reader.await_end(connection, slot, seconds=deadline - time.monotonic())
            if by is not None or time.monotonic() > deadline:
                raise InUseError(by or "another session") from None
