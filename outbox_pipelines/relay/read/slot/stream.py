"""The replication protocol: everything that is sent to PostgreSQL on a replication connection, and received.

Invariants:
- Only `confirm` reports a position as settled; from there the server delivers again after a restart.
- psycopg has no interface for this protocol: what is used of `psycopg.pq` is used in this file alone.
- A connection that is silent is answered before the server ends it (`wal_sender_timeout`).
- When a slot was borrowed, the server has noticed the end: the reader that is started next finds it free.

Source: "Streaming Replication Protocol" in PostgreSQL's manual.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from struct import Struct
from typing import Final

import psycopg
from psycopg import generators, sql
from psycopg.pq import ExecStatus

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection, connect, slot_reader
from outbox_pipelines.settings import OutboxSettings

# Much more often than the shortest timeout that anyone sets.
_STATUS_SECONDS: Final = 5.0
# While positions move.
_CONFIRM_SECONDS: Final = 0.5
_DATA: Final = ord("w")
_DATA_HEADER: Final = 25
_ALIVE: Final = Struct(">cQQB")
_STATUS: Final = Struct(">cQQQQB")
# PostgreSQL counts microseconds from the year 2000.
_EPOCH: Final = 946_684_800
# For a session that reads nothing: the server would end it after a minute.
_NO_TIMEOUT: Final = "SET wal_sender_timeout = 0"


class SlotLostError(Exception):
    """The slot's connection has ended; the message says why."""


class Stream:
    """What a slot delivers.

    Args:
        connection: a replication connection, which nothing else uses.
    """

    def __init__(self, connection: Connection, slot: str, publication: str) -> None:
        """
        Raises:
            psycopg.Error: the slot cannot be read: it is missing, lost, or another session reads it.
        """
        self.slot = slot
        self._connection = connection
        self._pgconn = connection.pgconn
        start = sql.SQL(
            "START_REPLICATION SLOT {} LOGICAL 0/0 (proto_version '1', publication_names {})"
        ).format(sql.Identifier(slot), sql.Literal(sql.Identifier(publication).as_string(connection)))
        self._pgconn.send_query(start.as_bytes(connection))
        *_, result = connection.wait(generators.execute(self._pgconn))
        if result.status != ExecStatus.COPY_BOTH:
            raise psycopg.errors.lookup(_state(result))(result.get_error_message())
        self._get = self._pgconn.get_copy_data
        self.position = 0
        """How far the server is: everything that it has to deliver up to here was received."""
        self._confirmed = 0
        self._said_at = time.monotonic()
        self._must_answer = False

    def receive(self) -> bytes | None:
        """Return the next message of pgoutput; None if there is none now.

        Raises:
            SlotLostError: the connection has ended.
        """
        has_looked = False
        while True:
            size, data = self._get(1)
            if size > 0:
                # The hot loop. Two copies take half the time of a slice of the view, and of its copy.
                message: bytes = data.tobytes()
                if message[0] == _DATA:
                    return message[_DATA_HEADER:]
                self._keep_alive(message)
            elif size < 0:
                raise SlotLostError(self._reason())
            elif has_looked or not self._has_input():
                return None
            else:
                self._consume()
                has_looked = True

    def wait(self, seconds: float) -> None:
        """Wait until something can be received, at most so long."""
        select.select([self._pgconn.socket], [], [], seconds)

    def confirm(self, position: int, *, at_once: bool = False) -> None:
        """Tell the server that everything before this position is settled, at most twice a second.

        Args:
            at_once: tell it now.

        Raises:
            SlotLostError: the connection has ended.
        """
        clock = time.monotonic()
        since = clock - self._said_at
        moves = position > self._confirmed and since >= _CONFIRM_SECONDS
        if not (moves or at_once or self._must_answer or since >= _STATUS_SECONDS):
            return
        self._confirmed = max(position, self._confirmed)
        at = self._confirmed
        clock_time = int((time.time() - _EPOCH) * 1_000_000)
        try:
            self._pgconn.put_copy_data(_STATUS.pack(b"r", max(at, self.position), at, at, clock_time, 0))
            self._pgconn.flush()
        except psycopg.Error as error:
            raise SlotLostError(first_line(error)) from None
        self._said_at, self._must_answer = clock, False

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _keep_alive(self, message: bytes) -> None:
        _, position, _, wants_answer = _ALIVE.unpack_from(message)
        self.position = max(self.position, position)
        self._must_answer = self._must_answer or bool(wants_answer)

    def _has_input(self) -> bool:
        return bool(select.select([self._pgconn.socket], [], [], 0)[0])

    def _consume(self) -> None:
        try:
            self._pgconn.consume_input()
        except psycopg.Error as error:
            raise SlotLostError(first_line(error)) from None

    def _reason(self) -> str:
        result = self._pgconn.get_result()
        return result.get_error_message() if result is not None else "the server closed it"


def _state(result: psycopg.pq.abc.PGresult) -> str:
    found = result.error_field(psycopg.pq.DiagnosticField.SQLSTATE)
    return "XX000" if found is None else bytes(found).decode()


class InUseError(Exception):
    """Another session reads the slot; the message is who."""


@contextmanager
def borrowed(
    settings: OutboxSettings,
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
