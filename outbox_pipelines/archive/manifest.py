"""What is said of a day's file, beside it: how much is in it, its digest, its sums, where it came from.

Invariants:
- A file that no manifest names does not count. The manifest is written last.
- Sums are additive: a bucket's is the sum of its rows' digests, so that two equal errors do not cancel.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, date, datetime
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outbox_pipelines.errors import SetupError


class Sum(NamedTuple):
    """Of the rows of a bucket."""

    rows: int
    total: int
    """Sum of the first 56 bits of each row's sha256."""


class Column(BaseModel):
    """A column that a user has added to the outbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """In the table."""
    type: str
    """In the table, as PostgreSQL prints it."""
    stored: str
    """Its name in the file: another one where the file has a column of that name already."""


class Source(BaseModel):
    """Which outbox it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    system_identifier: int
    """Of the PostgreSQL cluster."""
    database: str
    schema_: str = Field(alias="schema")

    def __str__(self) -> str:
        return f"schema {self.schema_} of database {self.database} (system {self.system_identifier})"


class Manifest(BaseModel):
    """Of one day."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    day: date
    file: str
    """Its name, beside the manifest."""
    size: int
    """Of the file, in bytes."""
    sha256: str
    """Of the file."""
    rows: int
    first_seq: int | None
    last_seq: int | None
    first_created_at: datetime | None
    last_created_at: datetime | None
    first_id: str | None
    """The lowest id of version 7: such ids tell when they were drawn."""
    last_id: str | None
    """The highest id of version 7."""
    statuses: dict[str, int]
    """Rows by what became of them."""
    buckets: dict[int, Sum]
    """By `seq` // 100,000."""
    schema_version: int
    columns: tuple[Column, ...] = ()
    """Those that users have added, in the order of the table; the sums cover them."""
    tool: str
    source: Source
    written_at: datetime

    def to_bytes(self) -> bytes:
        """As it is stored."""
        return self.model_dump_json(indent=1, by_alias=True).encode() + b"\n"


def read_manifest(stored: bytes, day: date) -> Manifest:
    """A manifest as it is stored, of this day.

    Raises:
        SetupError: it is none, or one of another day.
    """
    mend = f"while its rows are there, `outbox archive day {day} --again` writes it anew"
    try:
        manifest = Manifest.model_validate_json(stored)
    except ValidationError as error:
        problem = error.errors()[0]
        what = ": ".join((*map(str, problem["loc"]), problem["msg"]))
        raise SetupError(f"the manifest of {day} cannot be read: {what}; {mend}") from None
    if manifest.day != day:
        raise SetupError(
            f"the manifest of {day} speaks of {manifest.day}: it was put in the wrong place; {mend}"
        )
    return manifest


def digest(stored: bytes) -> str:
    """Of a manifest, as the day keeps it in the database."""
    return hashlib.sha256(stored).hexdigest()


def now() -> datetime:
    """To the second."""
    return datetime.now(UTC).replace(microsecond=0)
