"""The table that is adopted: what pg_catalog says about it, how far the adoption is, what is left.

Invariants:
- One query reads everything that the switch depends on, so that the switch can compare it under its lock.
- The table is found by the oid that `prepare` has recorded: names change.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import examine
from outbox_pipelines.existing import existing_sql as marked
from outbox_pipelines.existing.adopt import adopt_sql
from outbox_pipelines.existing.check import open_mapping
from outbox_pipelines.existing.table_statements import Statements
from outbox_pipelines.relay import adoption
from outbox_pipelines.settings import OutboxSettings, RelaySettings


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
    def not_the_owner(self) -> str:
        """What a role that is not the owner of the table should do."""
        return (
            f"{self} belongs to role {self.owner}: run the command as this role, or as a role that is a "
            "member of it"
        )

    @property
    def shape(self) -> tuple[object, ...]:
        """What the statements of the switch are made of: the number of rows is not part of it."""
        return tuple(getattr(self, name) for name in self.__slots__ if name not in ("rows", "name"))


def find_relation(connection: Connection, schema: str, table: str) -> int | None:
    """Return the oid of a relation; None if it does not exist."""
    name = sql.Identifier(schema, table).as_string(connection)
    row = connection.execute(adopt_sql.OID, {"name": name}).fetchone()
    return None if row is None else row[0]


def read_facts(connection: Connection, oid: int) -> Facts:
    """Return the facts about a relation.

    Raises:
        SetupError: it does not exist.
    """
    row = connection.execute(adopt_sql.FACTS, {"oid": oid}).fetchone()
    if row is None:
        raise SetupError(
            f"the table with oid {oid} does not exist: it was dropped since `outbox adopt prepare`"
        )
    found: dict[str, Any] = row[0]
    listed = {
        name: tuple(value or ()) for name, value in found.items() if value is None or isinstance(value, list)
    }
    converted = {
        "columns": {each["name"]: Column(**each) for each in listed["columns"]},
        "uniques": tuple(
            Unique(each["name"], tuple(each["columns"]), each["is_partial"]) for each in listed["uniques"]
        ),
        "checks": tuple((check["name"], check["condition"]) for check in listed["checks"]),
    }
    return Facts(**found | listed | converted)


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


def read_state(connection: Connection) -> State | None:
    """Return the state; None before `prepare`."""
    if connection.execute(adopt_sql.IS_THERE).fetchone() != (True,):
        return None
    row = connection.execute(adopt_sql.STATE).fetchone()
    return None if row is None else State(*row)


def mapping_of(settings: OutboxSettings) -> Mapping:
    """Return the mapping of OUTBOX_TABLE, which names the schema of the table."""
    mapping = open_mapping(settings, has_slot=True)
    if mapping.schema is None:
        raise SetupError(
            f'OUTBOX_TABLE: name = "{mapping.table}" has no schema: write name = '
            f'"public.{mapping.table}", because OUTBOX_SCHEMA is the schema of the new tables'
        )
    return mapping


def session(settings: OutboxSettings) -> AbstractContextManager[Connection]:
    """Open a session of the command."""
    return connect(settings, name="outbox adopt")


def find_adopted(
    connection: Connection, mapping: Mapping, settings: OutboxSettings
) -> tuple[Facts, State | None]:
    """Return the table and its state, None before `prepare`.

    Raises:
        SetupError: it does not exist, is not a table, or belongs to another role; the schema has another one.
    """
    state = read_state(connection)
    if state is not None and state.state != "finished":
        if (state.schema, state.name) != (mapping.schema, mapping.table):
            raise SetupError(
                f"schema OUTBOX_SCHEMA has adopted {state}, and takes one table: name another schema for "
                f"{mapping}"
            )
        found = read_facts(connection, state.relation)
    else:
        assert mapping.schema is not None
        oid = find_relation(connection, mapping.schema, mapping.table)
        if oid is None:
            raise SetupError(f"table {mapping} does not exist (OUTBOX_TABLE): correct `name` there")
        found = read_facts(connection, oid)
        if found.kind not in ("r", "p"):
            if state is not None and (state.schema, state.name) == (mapping.schema, mapping.table):
                require(state)
            _refuse_elsewhere(connection, mapping, settings)
            raise SetupError(f"{mapping} (OUTBOX_TABLE) is not a table: name the table that has the events")
    if not found.is_owner:
        raise SetupError(found.not_the_owner)
    return found, state


def require_relayable(connection: Connection, mapping: Mapping, found: Facts) -> None:
    """Check what the relay of the table checks: columns, types, rights."""
    examine.check(connection, replace(mapping, table=found.name))


def require_state(connection: Connection, mapping: Mapping, settings: OutboxSettings) -> State:
    """Return the state of this table; raise `SetupError` if it is not prepared."""
    state = read_state(connection)
    if state is None:
        _refuse_elsewhere(connection, mapping, settings)
        if connection.execute(adopt_sql.MAY_USE, {"schema": settings.db_schema}).fetchone() == (False,):
            raise SetupError(
                f"this role may not use schema {settings.db_schema} (OUTBOX_SCHEMA): run the command as the "
                "role that ran `outbox adopt prepare`"
            )
        raise SetupError(f"{mapping} is not prepared: run `outbox adopt plan`, then `outbox adopt prepare`")
    if (state.schema, state.name) != (mapping.schema, mapping.table):
        raise SetupError(
            f"the schema of OUTBOX_SCHEMA has adopted {state}, not {mapping}: correct one of them"
        )
    if state.state in ("draining", "adopted", "returning") and state.slot != mapping.slot:
        was = "without a slot" if state.slot is None else f'with slot = "{state.slot}"'
        raise SetupError(f"{state} was switched {was}: write the same into [table]")
    return state


def _refuse_elsewhere(connection: Connection, mapping: Mapping, settings: OutboxSettings) -> None:
    """Raise `SetupError` if the table was adopted with another OUTBOX_SCHEMA."""
    given = {"schema": mapping.schema, "name": mapping.table}
    row = connection.execute(adoption.BEHIND_VIEW, given).fetchone()
    if row is not None and row[0] != settings.db_schema:
        raise SetupError(
            f"{mapping} is a view of the append-only outbox in schema {row[0]}: set OUTBOX_SCHEMA={row[0]}"
        )


def require(state: State, *names: str) -> None:
    """Raise `SetupError` that says what to do first, unless the state is one of these."""
    if state.state in names:
        return
    said = {
        "prepared": f"{state} is not switched: run `outbox adopt switch` first",
        "returning": f"the way back of {state} is not complete: run `outbox adopt back` again",
        "finished": f"{state} is adopted and its old table is dropped: nothing is left to do or to undo",
        "draining": f"{state} has pending rows of before the switch: run `outbox adopt drain` first",
        "adopted": f"{state} is adopted already",
    }
    raise SetupError(said[state.state])


def _statements(
    connection: Connection, mapping: Mapping, found: Facts, settings: RelaySettings
) -> Statements:
    # Under its name of now.
    kept = replace(mapping, table=found.name)
    types = examine.check(connection, kept).types
    return Statements(kept, types, max_attempts=settings.max_attempts, with_time=False)


def exists(connection: Connection, kept: Mapping, settings: RelaySettings, found: Facts) -> bool:
    """Return whether the table has pending rows."""
    statements = _statements(connection, kept, replace(found, name=kept.table), settings)
    return connection.execute(statements(marked.ANY)).fetchone() == (True,)


def count(connection: Connection, mapping: Mapping, found: Facts, settings: RelaySettings, query: Any) -> int:
    """Return the number that a query of the relay of the table counts, up to a cap."""
    statements = _statements(connection, mapping, found, settings)
    row = connection.execute(statements(query), {"cap": 100_000}).fetchone()
    assert row is not None
    return int(row[0])


def has_keys(mapping: Mapping) -> bool:
    return "idempotency_key" in mapping.columns


def has_rows(connection: Connection, schema: str, table: str) -> bool:
    query = sql.SQL("SELECT EXISTS (SELECT FROM {})").format(sql.Identifier(schema, table))
    return connection.execute(query).fetchone() == (True,)
