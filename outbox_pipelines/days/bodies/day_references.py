"""Read the references of the events of a day: from its rows, or from its archive file if it is dropped.

Invariants:
- All references of a day are read, or it is an error. Rows are read from the partition itself, which is
  complete also while it is detached; a file is read only if it has just been proven.
- What has the reserved member counts, also if it is no reference that a consumer would accept.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime
from typing import Final, NamedTuple

import psycopg
from psycopg import sql

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.days.bodies import bodies_sql
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.settings import DaySettings

_BATCH: Final = 5_000


class StaysError(NotReadyError):
    """References are not known, or can still come; no action is needed: the bodies stay."""


class Place(NamedTuple):
    """Where events of a day are, or of a partition that belongs to no day."""

    day: date | None
    state: str
    """open, closed, archived or dropped."""
    manifest_sha256: str | None
    closed_at: datetime | None
    schema: str | None
    table: str | None
    """The partition; None if it does not exist."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.day or self.table)


class Found(NamedTuple):
    """The reserved member of an event's payload."""

    event_id: str
    key: str | None
    """None if it has none."""
    member: str
    """JSON."""


def places(connection: Connection) -> list[Place]:
    """Return where all events are, by day."""
    return [Place(*row) for row in connection.execute(bodies_sql.PLACES).fetchall()]


def read(
    settings: DaySettings, connection: Connection, place: Place, keys: list[str] | None = None
) -> Iterator[Found]:
    """Yield the references of a place.

    Args:
        keys: only of these bodies.

    Raises:
        NotReadyError: they cannot be read completely; `StaysError` if no action is needed.
        UnavailableError: the archive does not answer.
    """
    if place.schema is None or place.table is None:
        yield from _archived(settings, connection, place, keys)
        return
    query = bodies_sql.REFERENCES if keys is None else bodies_sql.OF_KEYS
    table = sql.Identifier(place.schema, place.table)
    try:
        yield from _rows(connection, sql.SQL(query).format(table=table), keys)
    except psycopg.errors.UndefinedTable:
        raise NotReadyError(f"{place.name} was dropped at the same time: run the command again") from None


def parked(connection: Connection, keys: list[str]) -> Iterator[Found]:
    """Yield the references of parked events and dead letters to these bodies, which outlive their days."""
    query = sql.SQL(bodies_sql.OF_KEYS).format(table=sql.Identifier("outbox_parked"))
    yield from _rows(connection, query, keys)


def delayed(connection: Connection, keys: list[str]) -> Iterator[Found]:
    """Yield the references of events that are not due yet; to be read before places, into which they move."""
    query = sql.SQL(bodies_sql.OF_KEYS).format(table=sql.Identifier("outbox_delayed"))
    yield from _rows(connection, query, keys)


def _rows(connection: Connection, query: sql.Composed, keys: list[str] | None) -> Iterator[Found]:
    try:
        with connection.transaction(), connection.cursor("references") as cursor:
            cursor.itersize = _BATCH
            cursor.execute(query, {"keys": keys})
            yield from (Found(*row) for row in cursor)
    except psycopg.errors.InsufficientPrivilege as error:
        raise NotReadyError(
            f"{first_line(error)}: only the role that owns the outbox can read all references"
        ) from None


def _archived(
    settings: DaySettings, connection: Connection, place: Place, keys: list[str] | None
) -> Iterator[Found]:
    # Of the extra of the archive, which writers of bodies need not have.
    from outbox_pipelines.days.archive import identity, proof
    from outbox_pipelines.days.archive.store import key, open_store

    day = place.day
    if place.manifest_sha256 is None or day is None:
        if place.state == "dropped":
            raise StaysError(f"{day} was dropped without an archive: its references are not known")
        raise NotReadyError(
            f"the partition of {day} does not exist, and it has no archive file: its references are not known"
        )
    try:
        store = open_store(settings)
        identity.require(store, connection)
        found = proof.verify(store, day, place.manifest_sha256)
        loaded = proof.load(store, day)
        if loaded is None or not found.equal:
            raise NotReadyError(f"the archive file of {day} is not proven: {'; '.join(found.differences)}")
        with store.local(key(day, loaded[0].file)) as file:
            rows = proof.read_file(bodies_sql.FILE_REFERENCES, file, {})
    except (NotReadyError, UnavailableError):
        raise
    except (FileNotFoundError, SetupError, proof.UnreadableError) as error:
        raise NotReadyError(
            f"the references in the archive file of {day} cannot be read: {first_line(error)}"
        ) from None
    wanted = None if keys is None else {*keys}
    for row in rows:
        if wanted is None or row[1] in wanted:
            yield Found(*row)
