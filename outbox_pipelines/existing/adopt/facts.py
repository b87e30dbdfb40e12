"""What pg_catalog says about a table that is to be adopted.

Invariants:
- One query reads everything that the switch depends on, so that the switch can compare it under its lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import sql

from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing.adopt import queries


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table. `base` is the type below a domain, `type` is the declared one."""

    name: str
    type: str
    base: str
    kind: str
    not_null: bool
    default: str | None
    identity: str
    is_generated: bool
    sequence: str | None
    labels: list[str] | None

    @property
    def is_integer(self) -> bool:
        return self.base in ("int2", "int4", "int8")


@dataclass(frozen=True, slots=True)
class Unique:
    """A unique index; a column is None where it is an expression."""

    name: str
    columns: tuple[str | None, ...]
    is_partial: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """One table."""

    oid: int
    schema: str
    name: str
    kind: str
    owner: str
    is_owner: bool
    may_create: bool
    has_policies: bool
    is_inherited: bool
    is_logged: bool
    rows: int
    """An estimate."""
    columns: dict[str, Column]
    uniques: tuple[Unique, ...]
    checks: tuple[tuple[str, str], ...]
    exclusions: tuple[str, ...]
    references: tuple[str, ...]
    foreign_keys: tuple[str, ...]
    indexed: tuple[str, ...]
    """The columns whose values an index finds."""
    triggers: tuple[str, ...]
    rules: tuple[str, ...]
    rules_elsewhere: tuple[str, ...]
    views: tuple[str, ...]
    functions: tuple[str, ...]
    publications: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        """The name for a statement that a person runs."""
        return sql.Identifier(self.schema, self.name).as_string()

    @property
    def shape(self) -> tuple[object, ...]:
        """What the statements of the switch are made of: the number of rows is not part of it."""
        return tuple(getattr(self, name) for name in self.__slots__ if name not in ("rows", "name"))


def find(connection: Connection, schema: str, table: str) -> int | None:
    """Return the oid of a relation; None if it does not exist."""
    name = sql.Identifier(schema, table).as_string(connection)
    row = connection.execute(queries.OID, {"name": name}).fetchone()
    return None if row is None else row[0]


def read(connection: Connection, oid: int) -> Facts:
    """Return the facts about a relation.

    Raises:
        SetupError: it does not exist.
    """
    row = connection.execute(queries.FACTS, {"oid": oid}).fetchone()
    if row is None:
        raise SetupError(
            f"the table with oid {oid} does not exist: it was dropped since `outbox adopt prepare`"
        )
    found: dict[str, Any] = row[0]
    columns = [Column(**{name: column[name] for name in Column.__slots__}) for column in found["columns"]]

    def names(what: str) -> tuple[str, ...]:
        return tuple(found[what] or ())

    return Facts(
        oid=found["oid"],
        schema=found["schema"],
        name=found["name"],
        kind=found["kind"],
        owner=found["owner"],
        is_owner=found["is_owner"],
        may_create=found["may_create"],
        has_policies=found["has_policies"],
        is_inherited=found["is_inherited"],
        is_logged=found["persistence"] == "p",
        rows=found["rows"],
        columns={column.name: column for column in columns},
        uniques=tuple(
            Unique(each["name"], tuple(each["columns"]), each["is_partial"])
            for each in found["uniques"] or ()
        ),
        checks=tuple((check["name"], check["condition"]) for check in found["checks"] or ()),
        exclusions=names("exclusions"),
        references=names("references"),
        foreign_keys=names("foreign_keys"),
        indexed=names("indexed"),
        triggers=names("triggers"),
        rules=names("rules"),
        rules_elsewhere=names("rules_elsewhere"),
        views=names("views"),
        functions=names("functions"),
        publications=names("publications"),
    )
