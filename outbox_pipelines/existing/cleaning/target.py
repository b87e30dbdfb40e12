"""What is cleaned: one marked table, and the conditions that a row of it must meet.

Invariants:
- A row is published if its mark says so; pending rows and dead letters never are.
- The age of a row counts from its mark. Times without a zone are read as UTC, as the relay writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, LiteralString
from urllib.parse import quote

from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import examine, findings, pg_catalog
from outbox_pipelines.existing.check import open_mapping
from outbox_pipelines.existing.cleaning import cleaning_sql
from outbox_pipelines.existing.pg_catalog import Column
from outbox_pipelines.relay import adoption
from outbox_pipelines.settings import DaySettings

_TIMES: Final = ("published_at", "processed_at", "created_at")


@dataclass(frozen=True, slots=True)
class Target:
    """A table, and rows of it that may be removed: those published before the cutoff."""

    oid: int
    schema: str
    name: str
    database: str
    """The identity of the server and the database."""
    mapping: Mapping
    columns: dict[str, str]
    """Types by names."""
    cutoff: datetime
    published: sql.Composable
    unpublished: sql.Composable
    """The opposite, in words that an index answers."""
    time: sql.Composable

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def file_name(self) -> str:
        """Its name as part of a path, whatever characters it has."""
        return quote(str(self), safe="")

    @property
    def table(self) -> sql.Identifier:
        """The quoted name."""
        return sql.Identifier(self.schema, self.name)

    def statement(self, query: LiteralString, leaf: sql.Identifier, **more: sql.Composable) -> sql.Composed:
        """Return a statement for one of the tables that contain the rows."""
        old = sql.SQL("{} < {}").format(self.time, sql.Literal(self.cutoff))
        return sql.SQL(query).format(
            table=self.table,
            leaf=leaf,
            id=sql.Identifier(self.mapping.columns["id"]),
            published=self.published,
            unpublished=self.unpublished,
            old=old,
            **more,
        )


def find_target(connection: Connection, settings: DaySettings) -> Target:
    """Return the table of OUTBOX_TABLE, and what may be removed of it.

    Raises:
        SetupError: it cannot be cleaned, or the clean-up is not configured.
    """
    mapping = open_mapping(settings)
    if settings.clean_after_hours is None:
        raise SetupError(
            "OUTBOX_CLEAN_AFTER_HOURS is not set: set the number of hours after which published rows are "
            "removed"
        )
    for problem in problems(settings, mapping):
        raise SetupError(problem)
    if adoption.followed(connection, mapping, has_ended=True).table != mapping.table:
        raise SetupError(
            f"{mapping} is a view of the append-only outbox, whose days are dropped by `outbox partitions "
            "drop`; `outbox adopt finish` removes the old table"
        )
    examined = examine.examine(connection, mapping)
    findings.refuse(examined.findings)
    assert examined.oid is not None
    place = pg_catalog.look_up(connection, mapping.schema, mapping.table)
    assert place is not None
    _require_rights(connection, place.oid)
    ((cutoff, database),) = connection.execute(
        cleaning_sql.CUTOFF, {"seconds": settings.clean_after_hours * 3600}
    ).fetchall()
    published, unpublished = _conditions(mapping)
    return Target(
        oid=place.oid,
        schema=place.schema,
        name=place.name,
        database=database,
        mapping=mapping,
        columns={name: column.declared for name, column in examined.columns.items()},
        cutoff=cutoff,
        published=published,
        unpublished=unpublished,
        time=_time(mapping, examined.columns),
    )


def problems(settings: DaySettings, mapping: Mapping) -> Iterator[str]:
    """Yield why the settings do not allow a clean-up."""
    if not settings.archive:
        yield (
            "OUTBOX_ARCHIVE is not set: name a directory or bucket for the rows that are removed, or none to "
            "remove them without an archive"
        )
    if not any(name in mapping.columns for name in _TIMES):
        yield f"{mapping} has no time of publishing: name processed_at or created_at in [table.columns]"


def _require_rights(connection: Connection, oid: int) -> None:
    lacking = connection.execute(cleaning_sql.LACKING, {"oid": oid}).fetchall()
    if lacking:
        table, user = lacking[0]
        likewise = f" (likewise for {len(lacking) - 1} more partitions)" if len(lacking) > 1 else ""
        raise SetupError(
            f"role {user} may not delete rows of {table}: GRANT SELECT, UPDATE, DELETE ON {table} TO {user}"
            f"{likewise}"
        )


def _conditions(mapping: Mapping) -> tuple[sql.Composable, sql.Composable]:
    if not mapping.has_status:
        mark = sql.Identifier("t", mapping.columns["published_at"])
        return sql.SQL("{} IS NOT NULL").format(mark), sql.SQL("{} IS NULL").format(mark)
    status = sql.Identifier("t", mapping.columns["status"])
    processed = sql.Literal(mapping.states["processed"])
    # Not "is one of the others": rows can have states that only their publisher knows. In words that an index
    # over the status answers, which "is not" does not.
    others = sql.SQL("{} < {} OR {} > {} OR {} IS NULL").format(status, processed, status, processed, status)
    return sql.SQL("{} = {}").format(status, processed), others


def _time(mapping: Mapping, columns: dict[str, Column]) -> sql.Composable:
    named = [mapping.columns[name] for name in _TIMES if name in mapping.columns]
    times = [
        sql.SQL("({} AT TIME ZONE 'UTC')" if columns[name].type == "timestamp" else "{}").format(
            sql.Identifier("t", name)
        )
        for name in named
    ]
    return sql.SQL("coalesce({})").format(sql.SQL(", ").join(times))
