"""The table of OUTBOX_TABLE for the steps of `outbox adopt`: where and how far it is, what is left.

Invariants:
- The table is found by the oid that `prepare` has recorded: names change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import examine
from outbox_pipelines.existing import existing_sql as marked
from outbox_pipelines.existing.adopt import facts as catalog
from outbox_pipelines.existing.adopt import queries, rules
from outbox_pipelines.existing.adopt.facts import Facts
from outbox_pipelines.existing.adopt.state import State
from outbox_pipelines.existing.adopt.state import read as read_state
from outbox_pipelines.existing.check import open_mapping
from outbox_pipelines.existing.table_statements import Statements
from outbox_pipelines.settings import Settings


def mapping_of(settings: Settings) -> Mapping:
    """Return the mapping of OUTBOX_TABLE, which names the schema of the table."""
    mapping = open_mapping(settings, has_slot=True)
    if mapping.schema is None:
        raise SetupError(
            f'OUTBOX_TABLE: name = "{mapping.table}" has no schema: write name = '
            f'"public.{mapping.table}", because OUTBOX_SCHEMA is the schema of the new tables'
        )
    return mapping


@contextmanager
def session(settings: Settings) -> Iterator[Connection]:
    """Open a session of the command."""
    with connect(settings, name="outbox adopt") as connection:
        yield connection


def find(connection: Connection, mapping: Mapping, settings: Settings) -> tuple[Facts, State | None]:
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
        found = catalog.read(connection, state.relation)
    else:
        assert mapping.schema is not None
        oid = catalog.find(connection, mapping.schema, mapping.table)
        if oid is None:
            raise SetupError(f"table {mapping} does not exist (OUTBOX_TABLE): correct `name` there")
        found = catalog.read(connection, oid)
        if found.kind not in ("r", "p"):
            if state is not None and (state.schema, state.name) == (mapping.schema, mapping.table):
                require(state)
            _refuse_elsewhere(connection, mapping, settings)
            raise SetupError(f"{mapping} (OUTBOX_TABLE) is not a table: name the table that has the events")
    if not found.is_owner:
        raise SetupError(rules.not_the_owner(found))
    return found, state


def require_relayable(connection: Connection, mapping: Mapping, found: Facts) -> None:
    """Check what the relay of the table checks: columns, types, rights."""
    examine.check(connection, replace(mapping, table=found.name))


def require_state(connection: Connection, mapping: Mapping, settings: Settings) -> State:
    """Return the state of this table; raise `SetupError` if it is not prepared."""
    state = read_state(connection)
    if state is None:
        _refuse_elsewhere(connection, mapping, settings)
        if connection.execute(queries.MAY_USE, {"schema": settings.db_schema}).fetchone() == (False,):
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


def _refuse_elsewhere(connection: Connection, mapping: Mapping, settings: Settings) -> None:
    """Raise `SetupError` if the table was adopted with another OUTBOX_SCHEMA."""
    name = sql.Identifier(mapping.schema or "", mapping.table).as_string(connection)
    row = connection.execute(queries.ADOPTED_BY, {"name": name}).fetchone()
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


def _statements(connection: Connection, mapping: Mapping, found: Facts, settings: Settings) -> Statements:
    # Under its name of now.
    kept = replace(mapping, table=found.name)
    types = examine.check(connection, kept).types
    return Statements(kept, types, max_attempts=settings.max_attempts, with_time=False)


def exists(connection: Connection, kept: Mapping, settings: Settings, found: Facts) -> bool:
    """Return whether the table has pending rows."""
    statements = _statements(connection, kept, replace(found, name=kept.table), settings)
    return connection.execute(statements(marked.ANY)).fetchone() == (True,)


def count(connection: Connection, mapping: Mapping, found: Facts, settings: Settings, query: Any) -> int:
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
