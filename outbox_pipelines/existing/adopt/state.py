"""How far `outbox adopt` is: the row of `outbox_adopted`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from outbox_pipelines.database import Connection
from outbox_pipelines.existing.adopt import queries


@dataclass(frozen=True, slots=True)
class State:
    """The row; see `sql/0009_adopted.sql` for the states."""

    relation: int
    schema: str
    name: str
    kept_as: str
    state: str
    accepted: list[str]
    switched_at: datetime | None
    returned: str | None
    file: str | None
    proven_at: datetime | None
    slot: str | None
    switched_lsn: str | None

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


def read(connection: Connection) -> State | None:
    """Return the state; None before `prepare`."""
    if connection.execute(queries.IS_THERE).fetchone() != (True,):
        return None
    row = connection.execute(queries.STATE).fetchone()
    return None if row is None else State(*row)
