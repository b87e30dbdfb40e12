"""Makes the partitions of the current and of coming months of an existing table.

Invariants:
- No writer waits for it, except for a default partition: that one is locked for at most 40 ms at a time.
- Each month is made whole, in one transaction, or not at all; and once, even if several processes make it.
- The first one begins where the newest partition ends, so that there is neither a gap nor an overlap. The
  others are months of UTC.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection, connect, locks, refuse_standby
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.existing import examine, existing_sql, findings, pg_catalog
from outbox_pipelines.existing.check import open_mapping
from outbox_pipelines.settings import DaySettings

_LOCK: Final = 0x6F62_7806
_ATTEMPTS: Final = 100
_TIMES: Final = ("timestamp with time zone", "timestamp without time zone", "date")
_LONGEST_NAME: Final = 63
# A newest partition that ends in the middle of a month, or at midnight of another zone, is followed by one
# that is longer than a month.
_SHORTEST: Final = timedelta(days=28)
# The usual names, the most precise first.
_FORMATS: Final = ("%Y_%m_%d", "%Y%m%d", "%Y-%m-%d", "y%Ym%m", "%Y_%m", "%Y-%m", "%Y%m")


@dataclass(frozen=True, slots=True)
class Month:
    """A partition to be made: its bounds, in UTC."""

    since: datetime
    until: datetime

    @property
    def middle(self) -> datetime:
        """A time in the month after which it is named."""
        return self.since + (self.until - self.since) / 2


def missing(now: datetime, newest_end: datetime | None, ahead: int) -> Iterator[Month]:
    """Return the months up to `ahead` months after the current one that no partition contains.

    Months before the current one are none: an event of now belongs to none of them.
    """
    current = beginning(now)
    since = current if newest_end is None else max(newest_end, current)
    end = current
    for _ in range(ahead + 1):
        end = next_month(end)
    while since < end:
        until = next_month(since)
        while until - since < _SHORTEST:
            until = next_month(until)
        yield Month(since, until)
        since = until


def beginning(time: datetime) -> datetime:
    """Return the begin of the month of a time."""
    return time.replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def next_month(time: datetime) -> datetime:
    """Return the begin of the month after that of a time."""
    return beginning(beginning(time) + timedelta(days=32))


def partition_name(month: Month, table: str, newest: str | None, newest_since: datetime | None) -> str:
    """Return the name of a partition: as that of the newest one, or the table's with `_p2026_11`."""
    if newest is not None and newest_since is not None:
        # Bounds at midnight of another zone may be the evening before.
        for begin in (newest_since, newest_since + timedelta(hours=14)):
            for pattern in _FORMATS:
                if (date := begin.strftime(pattern)) in newest:
                    return newest.replace(date, beginning(month.middle).strftime(pattern))
    suffix = month.middle.strftime("_p%Y_%m")
    return table.encode()[: _LONGEST_NAME - len(suffix)].decode(errors="ignore") + suffix


@dataclass(slots=True)
class Made:
    """What was made."""

    table: str
    made: list[str] = field(default_factory=list)
    """Names of partitions."""
    until: datetime | None = None
    """The end of the newest partition, in UTC."""


class _Table(NamedTuple):
    oid: int
    schema: str
    name: str
    is_by_range: bool | None
    type: str | None
    is_owner: bool
    user: str
    owner: str
    now: datetime

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


class _Newest(NamedTuple):
    schema: str
    name: str
    since: datetime | None
    until: datetime | None
    options: list[str] | None
    tablespace: str | None
    has_full_identity: bool


def ensure(settings: DaySettings, ahead: int | None = None) -> Made:
    """Make the months of OUTBOX_TABLE's table that are missing: the current one, and those ahead.

    Args:
        ahead: the number of months after the current one; by default `months_ahead` of the settings.

    Raises:
        SetupError: the table has no months, another program makes them, or one cannot be made before
            something is corrected. Those before it are made.
        NotReadyError: transactions held what has to be locked through all attempts; another run makes them.
    """
    wanted = settings.months_ahead if ahead is None else ahead
    if wanted is None:
        raise SetupError("OUTBOX_MONTHS_AHEAD is not set: set the number of months to make ahead")
    mapping = open_mapping(settings)
    with connect(settings, name="outbox table months") as connection:
        refuse_standby(connection)
        table = _find(connection, mapping)
        if (who := existing_sql.MONTHS_LOCK.take(connection, {"key": _LOCK << 32 | table.oid})) is not None:
            raise NotReadyError(f"the months of {table} are being made by {who}: wait for its end")
        row = connection.execute(existing_sql.NEWEST_PARTITION, {"oid": table.oid}).fetchone()
        newest = None if row is None else _Newest(*row)
        if newest is not None and newest.until is None:
            raise SetupError(
                f"partition {newest.schema}.{newest.name} of {table} has no end, so none can follow: unset "
                "OUTBOX_MONTHS_AHEAD"
            )
        made = Made(str(table), until=None if newest is None else newest.until)
        for month in missing(table.now, made.until, wanted):
            made.made.append(_make(connection, table, newest, month))
            made.until = month.until
        return made


def _find(connection: Connection, mapping: Mapping) -> _Table:
    relation = pg_catalog.look_up(connection, mapping.schema, mapping.table)
    if relation is None:
        findings.refuse(examine.examine(connection, mapping).findings)
    assert relation is not None
    if finding := findings.unsuitable(relation):
        raise SetupError(str(finding))
    (row,) = connection.execute(existing_sql.PARTITIONED, {"oid": relation.oid}).fetchall()
    table = _Table(*row)
    if not table.is_by_range or table.type not in _TIMES:
        raise SetupError(
            f"{table} is not partitioned by ranges of one time, so it has no months: unset "
            "OUTBOX_MONTHS_AHEAD"
        )
    if not table.is_owner:
        raise SetupError(
            f"role {table.user} does not own {table}, so it cannot make partitions: run it as {table.owner}, "
            f"or GRANT {table.owner} TO {table.user}"
        )
    partman = connection.execute(existing_sql.PARTMAN).fetchone()
    if partman is not None and partman[1]:
        query = sql.SQL(existing_sql.IS_PARTMANS).format(config=sql.SQL(partman[0]))
        if connection.execute(query, {"table": str(table)}).fetchone() == (True,):
            raise SetupError(f"pg_partman makes the partitions of {table}: unset OUTBOX_MONTHS_AHEAD")
    return table


def _make(connection: Connection, table: _Table, newest: _Newest | None, month: Month) -> str:
    schema = table.schema if newest is None else newest.schema
    like = (None, None) if newest is None else (newest.name, newest.since)
    name = partition_name(month, table.name, *like)
    leaf = sql.Identifier(schema, name)
    statement = sql.SQL(";\n").join(_statements(connection, table, newest, month, leaf))
    try:
        for attempt in locks.briefly(times=_ATTEMPTS, is_cut=True):
            with attempt:
                # Several statements in one message are one transaction, which no network holds open.
                connection.execute(statement)
                return f"{schema}.{name}"
    except psycopg.errors.DuplicateTable:
        raise SetupError(
            f"table {schema}.{name} exists and is no partition of {table}: rename it, or attach it"
        ) from None
    except psycopg.errors.CheckViolation as error:
        raise SetupError(
            f"{schema}.{name} cannot be made, because its rows are in the default partition "
            f"({first_line(error)}): move them as docs/existing-tables.md says"
        ) from None
    except psycopg.errors.InsufficientPrivilege as error:
        raise SetupError(f"{schema}.{name} cannot be made: {first_line(error)}") from None
    raise NotReadyError(
        f"{schema}.{name} cannot be made now: transactions hold {table}, its default partition or a table "
        "that it references; or the default partition has so many rows that it takes too long to read them"
    )


def _statements(
    connection: Connection, table: _Table, newest: _Newest | None, month: Month, leaf: sql.Identifier
) -> list[sql.Composable]:
    storage = tablespace = sql.Composed([])
    if newest is not None and newest.options:
        storage = sql.SQL(" WITH ({})").format(sql.SQL(", ").join(map(_trusted, newest.options)))
    if newest is not None and newest.tablespace:
        tablespace = sql.SQL(" TABLESPACE {}").format(sql.Identifier(newest.tablespace))
    names = {"leaf": leaf, "table": sql.Identifier(table.schema, table.name)}
    made: list[sql.Composable] = [
        sql.SQL(existing_sql.CREATE_PARTITION).format(storage=storage, tablespace=tablespace, **names)
    ]
    for privilege, grantee, option in connection.execute(existing_sql.GRANTS, {"oid": table.oid}).fetchall():
        parts = {"privilege": _trusted(privilege), "grantee": _trusted(grantee), "option": _trusted(option)}
        made.append(sql.SQL(existing_sql.GRANT).format(leaf=leaf, **parts))
    if newest is not None and newest.has_full_identity:
        made.append(sql.SQL(existing_sql.REPLICA_IDENTITY).format(leaf=leaf))
    made.append(sql.SQL(existing_sql.SET_OWNER).format(leaf=leaf, owner=_trusted(table.owner)))
    made.append(sql.SQL(existing_sql.ATTACH_BRIEFLY))
    # Times without a zone are those of UTC, as the relay reads them.
    zone = UTC if table.type == _TIMES[0] else None
    bounds = {"since": month.since.replace(tzinfo=zone), "until": month.until.replace(tzinfo=zone)}
    literals = {name: sql.Literal(bound) for name, bound in bounds.items()}
    made.append(sql.SQL(existing_sql.ATTACH).format(**names, **literals))
    return made


def _trusted(text: Any) -> sql.SQL:
    """Return a text that the database has quoted, as SQL."""
    return sql.SQL(text)
