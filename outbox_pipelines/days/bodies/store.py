"""The store of bodies as operators use it, and which outbox's bodies it has.

Invariants:
- Bodies are removed only from a store that an operator has declared to be this outbox's. Another outbox, such
  as a copy of the database for tests, has none of the events that refer to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outbox_pipelines.bodies import Bodies, UnlistableError
from outbox_pipelines.database import Connection
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.days.bodies import bodies_sql
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.settings import DaySettings
from outbox_pipelines.writer.errors import BodyStoreError


class Owner(BaseModel):
    """The outbox whose events refer to the bodies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    system_identifier: int
    database: str
    schema_: str = Field(alias="schema")

    def __str__(self) -> str:
        return f"schema {self.schema_} of database {self.database} (system {self.system_identifier})"


def open_bodies(settings: DaySettings) -> Bodies:
    """Open the store of the settings.

    Raises:
        SetupError: OUTBOX_BODIES is not set, or leads to no directory.
    """
    if not settings.bodies:
        raise SetupError(
            "no store of large payloads configured: set OUTBOX_BODIES to what writers pass to `Bodies`, a "
            "directory, s3://bucket/path, gs://… or az://…"
        )
    return Bodies(settings.bodies)


@contextmanager
def available() -> Iterator[None]:
    """Convert what a store reports into an `UnavailableError`, a refused name into a `NotReadyError`."""
    try:
        yield
    except UnlistableError as error:
        raise NotReadyError(f"OUTBOX_BODIES: {error}") from None
    except BodyStoreError as error:
        raise UnavailableError(f"OUTBOX_BODIES: {error}") from None


def require_own(bodies: Bodies, connection: Connection) -> None:
    """Raise `SetupError` unless the store is this outbox's."""
    with available():
        stored = bodies.owner()
    if stored is None:
        raise SetupError(
            f"{bodies.url} (OUTBOX_BODIES) is not declared to be this outbox's: if only its writers store "
            "bodies there, run `outbox bodies adopt`"
        )
    found, ours = _owner(bodies, stored), _owner_of(connection)
    if found != ours:
        raise _others(bodies, found)


def adopt(settings: DaySettings, force: bool = False) -> str:
    """Declare that the store has the bodies of this outbox alone; return the store's address.

    Args:
        force: also if it is another outbox's.

    Raises:
        SetupError: it is another outbox's; OUTBOX_BODIES is not set.
        UnavailableError: the database or the store does not answer.
    """
    bodies = open_bodies(settings)
    with connect_to_outbox(settings, name="outbox bodies adopt") as connection, available():
        stored, ours = bodies.owner(), _owner_of(connection)
        if stored is not None and not force and (found := _owner(bodies, stored)) != ours:
            raise _others(bodies, found)
        bodies.own(ours.model_dump_json(by_alias=True).encode() + b"\n")
    return bodies.url


def _owner_of(connection: Connection) -> Owner:
    ((system, database, schema),) = connection.execute(bodies_sql.OWNER)
    return Owner(system_identifier=system, database=database, schema=schema)


def _owner(bodies: Bodies, stored: bytes) -> Owner:
    try:
        return Owner.model_validate_json(stored)
    except ValidationError:
        raise SetupError(
            f"_outbox/bodies.json in {bodies.url} (OUTBOX_BODIES) cannot be read: if only this outbox's "
            "writers store bodies there, run `outbox bodies adopt --force`"
        ) from None


def _others(bodies: Bodies, owner: Owner) -> SetupError:
    return SetupError(
        f"{bodies.url} (OUTBOX_BODIES) has the bodies of another outbox, {owner}: give each outbox its own "
        "store. If this database replaces that one, run `outbox bodies adopt --force`"
    )
