"""What another program that reads a slot has not published, as a position: to continue where it has stopped.

Invariants:
- The slot is only read. Nothing is confirmed, so the other program can continue as well.
- The position covers what is committed, but for the transactions that the slot would deliver again and that
  are not in their topics: Debezium leaves its last transaction unconfirmed, and more if it was killed.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg

from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import queries as relay_queries
from outbox_pipelines.relay.cdc import pgoutput, queries
from outbox_pipelines.relay.cdc.borrowed import InUseError, borrowed
from outbox_pipelines.relay.cdc.sent import published
from outbox_pipelines.relay.cdc.stream import SlotLostError, Stream
from outbox_pipelines.settings import Settings

_WAIT_SECONDS: Final = 1.0


def position_behind(
    settings: Settings,
    connection: Connection,
    slot: str,
    *,
    seconds: float,
) -> Snapshot:
    """Return the snapshot that sees everything committed now, except what the program has not published.

    Args:
        seconds: how long to wait for the end of a session that reads the slot.

    Raises:
        UnavailableError: Kafka does not answer.
        SetupError: the slot cannot be read: it is missing, in use, or has no publication of the outbox.
    """
    now = connection.execute(relay_queries.SNAPSHOT).fetchone()
    open_from = connection.execute(relay_queries.OPEN_FROM).fetchone()
    assert now is not None
    assert open_from is not None
    snapshot = Snapshot.parse(now[0])
    found = connection.execute(queries.EXISTING_SLOT, {"slot": slot}).fetchone()
    behind = {tx for tx in _delivered(settings, connection, slot, found, seconds) if snapshot.sees(tx)}
    if behind:
        behind -= published(settings, connection, behind, open_from=open_from[0])
    missing = tuple(sorted({*snapshot.xip, *behind}))
    return Snapshot(missing[0] if missing else snapshot.xmax, snapshot.xmax, missing)


def _delivered(
    settings: Settings,
    connection: Connection,
    slot: str,
    found: tuple[Any, ...] | None,
    seconds: float,
) -> set[int]:
    """The transactions with events that the slot delivers up to now."""
    if found is None or found[0] != connection.info.dbname:
        raise SetupError(f"this database has no slot {slot!r}: see SELECT * FROM pg_replication_slots")
    if found[1] != "pgoutput":
        raise SetupError(f"the slot {slot} is read by the plugin {found[1]}: only pgoutput can be continued")
    publication = connection.execute(queries.OLDEST_PUBLICATION).fetchone()
    if publication is None:
        raise SetupError("no publication has the table outbox: which program reads the slot?")
    end = connection.execute(queries.END_OF_LOG).fetchone()
    assert end is not None
    name = "outbox relay: start"
    try:
        with borrowed(settings, connection, slot, publication[0], name=name, seconds=seconds) as (stream, _):
            return _read(stream, end[0])
    except InUseError as error:
        raise SetupError(
            f"{error} still reads the slot {slot}: stop the program that reads it first"
        ) from None
    except (psycopg.Error, SlotLostError) as error:
        raise SetupError(f"the slot {slot} cannot be read: {first_line(error)}") from None


def _read(stream: Stream, end: int) -> set[int]:
    """The transactions with events that the slot delivers up to a position in the log."""
    decoder = pgoutput.Decoder(with_time=False)
    found: set[int] = set()
    position = 0
    while max(position, stream.position) < end:
        message = stream.receive()
        if message is None:
            # From the begin: only a sign of life.
            stream.confirm(0)
            stream.wait(_WAIT_SECONDS)
        elif message[0] == pgoutput.RELATION:
            decoder.relation(message, is_strict=False)
        elif message[0] == pgoutput.INSERT and decoder.knows(message):
            found.add(int(decoder.row(message, 0)[1]))
        elif message[0] == pgoutput.COMMIT:
            position = pgoutput.end_of_commit(message)
    return found
