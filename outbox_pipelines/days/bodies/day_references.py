"""Read references: of the events of a day, from rows or the archive file; of delayed and of parked events.

Invariants:
- All references of a day are read, or it is an error. Rows are read from the partition itself, which is
  complete also while it is detached; a file is read only if it has just been proven.
- A body may be meant wherever its name stands in a payload with the reserved word: in a reference that no
  consumer would accept, within another member, in a path of another spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from datetime import date, datetime
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import psycopg
from psycopg import sql

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.days.bodies import bodies_sql
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.settings import DaySettings
from outbox_pipelines.writer.references import MEMBER, reference_of

# A payload may have a megabyte.
_BATCH: Final = 500
# As keys have them, after the day.
_NAME: Final = re.compile("[0-9A-Za-z._-]+")


class StaysError(NotReadyError):
    """References are not known, or can still come; no action is needed: the bodies stay."""


class DayPlace(NamedTuple):
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


class BodyReference(NamedTuple):
    """A reserved member in an event's payload, or a payload that cannot be read."""

    event_id: str
    member: object
    is_nested: bool = False
    """Whether it is a part of the payload, which a consumer does not fetch."""
    unreadable: str = ""

    @property
    def key(self) -> str | None:
        """None if it has none."""
        key = self.member.get("key") if isinstance(self.member, dict) else None
        return key if isinstance(key, str) else None


def places(connection: Connection) -> list[DayPlace]:
    """Return where all events are, by day."""
    return [DayPlace(*row) for row in connection.execute(bodies_sql.PLACES).fetchall()]


def read(settings: DaySettings, connection: Connection, place: DayPlace) -> Generator[BodyReference]:
    """Yield the references of a place.

    Raises:
        NotReadyError: they cannot be read completely; `StaysError` if no action is needed.
        UnavailableError: the archive does not answer.
    """
    for event_id, payload in _rows_of(settings, connection, place):
        yield from _members(event_id, payload)


def read_delayed(connection: Connection) -> Generator[BodyReference]:
    """Yield those of delayed events; errors as `read`, and the order as `delayed`."""
    for event_id, payload in _rows_in(connection, "outbox_delayed"):
        yield from _members(event_id, payload)


def mentioned(settings: DaySettings, connection: Connection, place: DayPlace) -> Iterator[str]:
    """Yield names in lower case: of each body that events of a place may mean, and others; see `read`."""
    for _, payload in _rows_of(settings, connection, place):
        yield from _names(payload)


def parked(connection: Connection) -> Iterator[str]:
    """Yield the same of parked events and dead letters, which outlive their days."""
    for _, payload in _rows_in(connection, "outbox_parked"):
        yield from _names(payload)


def delayed(connection: Connection) -> Iterator[str]:
    """Yield the same of delayed events; to be read before places, into which they move."""
    for _, payload in _rows_in(connection, "outbox_delayed"):
        yield from _names(payload)


def name_of(key: str) -> str:
    """Return by what name a body is looked for."""
    return key.rpartition("/")[2].lower()


def _names(payload: str) -> Iterator[str]:
    yield from _NAME.findall(payload.lower())
    if "%" in payload:
        yield from _NAME.findall(unquote(payload).lower())


def _members(event_id: str, payload: str) -> Iterator[BodyReference]:
    """Yield the member of a payload, whatever it is, and those of its parts that are references."""
    try:
        whole = json.loads(payload)
    except (ValueError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        yield BodyReference(
            event_id, None, unreadable="its JSON is nested too deeply" if is_deep else str(error)
        )
        return
    left = [whole]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if MEMBER in part and (part is whole or _is_reference(part)):
                yield BodyReference(event_id, part[MEMBER], is_nested=part is not whole)
            left += part.values()
        elif isinstance(part, list):
            left += part


def _is_reference(part: dict[str, object]) -> bool:
    try:
        return reference_of(part) is not None
    except ValueError:
        return False


def _rows_in(connection: Connection, table: str) -> Iterator[tuple[Any, ...]]:
    return _rows(connection, sql.SQL(bodies_sql.MENTIONS).format(table=sql.Identifier(table)))


def _rows_of(settings: DaySettings, connection: Connection, place: DayPlace) -> Iterator[tuple[Any, ...]]:
    if place.schema is None or place.table is None:
        yield from _archived(settings, connection, place)
        return
    table = sql.Identifier(place.schema, place.table)
    try:
        yield from _rows(connection, sql.SQL(bodies_sql.MENTIONS).format(table=table))
    except psycopg.errors.UndefinedTable:
        raise NotReadyError(f"{place.name} was dropped at the same time: run the command again") from None


def _rows(connection: Connection, query: sql.Composed) -> Iterator[tuple[Any, ...]]:
    try:
        with connection.transaction(), connection.cursor("references") as cursor:
            cursor.itersize = _BATCH
            cursor.execute(query)
            yield from cursor
    except psycopg.errors.InsufficientPrivilege as error:
        raise NotReadyError(
            f"{first_line(error)}: only the role that owns the outbox can read all references"
        ) from None


def _archived(settings: DaySettings, connection: Connection, place: DayPlace) -> list[tuple[Any, ...]]:
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
            return proof.read_file(bodies_sql.FILE_MENTIONS, file, {})
    except (NotReadyError, UnavailableError):
        raise
    except (FileNotFoundError, SetupError, proof.UnreadableError) as error:
        raise NotReadyError(
            f"the references in the archive file of {day} cannot be read: {first_line(error)}"
        ) from None
