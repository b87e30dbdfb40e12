"""The manifest of a day's file: its number of rows, digest, sums and source.

Invariants:
- A file that no manifest names is ignored. The manifest is written last.
- Sums are additive: a bucket's is the sum of its rows' digests, so that two equal errors do not cancel.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, date, datetime
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outbox_pipelines.errors import SetupError


class Sum(NamedTuple):
    """The sum of a bucket's rows."""

    rows: int
    total: int
    """Sum of the first 56 bits of each row's sha256."""


class Column(BaseModel):
    """A column that a user has added to the outbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """The name in the table."""
    type: str
    """The type in the table, as PostgreSQL prints it."""
    stored: str
    """The name in the file; it differs from `name` if the file already has a column of that name."""


class Source(BaseModel):
    """The outbox that a manifest or an archive comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    system_identifier: int
    """The system identifier of the PostgreSQL cluster."""
    database: str
    schema_: str = Field(alias="schema")

    def __str__(self) -> str:
        return f"schema {self.schema_} of database {self.database} (system {self.system_identifier})"


class Manifest(BaseModel):
    """The manifest of one day."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    day: date
    file: str
    """The name of the file, without its directory."""
    size: int
    """The size of the file in bytes."""
    sha256: str
    """The checksum of the file."""
    rows: int
    first_seq: int | None
    last_seq: int | None
    first_created_at: datetime | None
    last_created_at: datetime | None
    first_id: str | None
    """The lowest id of version 7; such ids contain the time when they were generated."""
    last_id: str | None
    """The highest id of version 7."""
    statuses: dict[str, int]
    """Number of rows by status."""
    buckets: dict[int, Sum]
    """Sums by `seq` // 100,000."""
    schema_version: int
    columns: tuple[Column, ...] = ()
    """Columns added by users, in the order of the table; the sums include them."""
    tool: str
    source: Source
    written_at: datetime

    def to_bytes(self) -> bytes:
        """Return the stored form."""
        return self.model_dump_json(indent=1, by_alias=True).encode() + b"\n"


def read_manifest(stored: bytes, day: date) -> Manifest:
    """Return the manifest of this day from its stored form.

    Raises:
        SetupError: it is not a manifest, or it is one of another day.
    """
    mend = f"if its rows still exist, rewrite it with `outbox archive day {day} --again`"
    try:
        manifest = Manifest.model_validate_json(stored)
    except ValidationError as error:
        problem = error.errors()[0]
        what = ": ".join((*map(str, problem["loc"]), problem["msg"]))
        raise SetupError(f"the manifest of {day} cannot be read: {what}; {mend}") from None
    if manifest.day != day:
        raise SetupError(
            f"the manifest of {day} is the one of {manifest.day}: it is in the wrong location; {mend}"
        )
    return manifest


def digest(stored: bytes) -> str:
    """Return the digest of a manifest, as the database records it."""
    return hashlib.sha256(stored).hexdigest()


def now() -> datetime:
    """Return the current time in UTC, to the second."""
    return datetime.now(UTC).replace(microsecond=0)
