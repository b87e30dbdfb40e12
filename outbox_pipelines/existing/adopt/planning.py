"""`outbox adopt plan`: what the steps would do, and what speaks against them.

Invariants:
- Nothing is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.core.text import counted
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import existing_sql as marked
from outbox_pipelines.existing.adopt import adopt_sql, adopted_table, objections
from outbox_pipelines.existing.adopt import slot as slots
from outbox_pipelines.existing.adopt.adopted_table import Facts
from outbox_pipelines.existing.adopt.ddl import Ddl, TableChange
from outbox_pipelines.settings import OutboxSettings, RelaySettings

# Rows a second, for the plan.
_KEYS_PER_SECOND: Final = 100_000
_ROWS_PER_SECOND: Final = 40_000


@dataclass(frozen=True, slots=True)
class Step:
    """Statements that run together, and what they lock."""

    name: str
    what: str
    locks: str
    statements: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What `outbox adopt` finds and would do."""

    table: str
    state: str
    rows: int
    """An estimate."""
    pending: int | None
    """None for a table with a slot: what its reader has not published is in the log."""
    judged: objections.Judged
    steps: tuple[Step, ...]


def plan(settings: RelaySettings) -> Plan:
    """Return what the steps would do.

    Raises:
        SetupError: the settings do not name a table that can be relayed.
    """
    mapping = adopted_table.mapping_of(settings)
    with adopted_table.session(settings) as connection:
        found, state = adopted_table.find_adopted(connection, mapping, settings)
        adopted_table.require_relayable(connection, mapping, found)
        judged = judge(connection, found, mapping, settings)
        pending = None
        if mapping.slot is None:
            pending = adopted_table.count(connection, mapping, found, settings, marked.BACKLOG)
        ddl = Ddl(found, mapping, settings.db_schema, mapping.table)
        steps: tuple[Step, ...] = ()
        if not judged.problems:
            steps = _steps(connection, ddl, found, mapping, settings, pending)
        name = state.state if state is not None else "not prepared"
        return Plan(f"{found.schema}.{mapping.table}", name, found.rows, pending, judged, steps)


def judge(
    connection: Connection, found: Facts, mapping: Mapping, settings: OutboxSettings
) -> objections.Judged:
    """Return what speaks against the switch."""
    refused = _refused_rows(connection, mapping, found)
    conflicts = _conflicts(connection, mapping.table)
    judged = objections.judge(found, mapping, settings.db_schema, conflicts, refused)
    if mapping.slot is None:
        return judged
    given = (connection, mapping.slot, found, settings.db_schema)
    accepted = {**judged.consequences, **slots.consequences(*given)}
    if adopted_table.has_rows(connection, found.schema, found.name):
        accepted["rows"] = (
            "a SELECT shows old rows, and of new events only those of its own transaction: read others in "
            f"{settings.db_schema}.outbox_events"
        )
    return objections.Judged(
        (*judged.problems, *slots.problems(*given)),
        accepted,
        (*judged.notes, *slots.notes(connection, mapping.slot)),
    )


def _refused_rows(connection: Connection, mapping: Mapping, found: Facts) -> int:
    names = ("aggregate_type", "aggregate_id", "event_type", "idempotency_key")
    columns = [mapping.columns[name] for name in names if name in mapping.columns]
    query = sql.SQL(adopt_sql.REFUSED).format(
        table=sql.Identifier(found.schema, found.name),
        names=sql.SQL(", ").join(sql.SQL("t.{}::text").format(sql.Identifier(name)) for name in columns),
        payload=sql.Identifier(mapping.columns["payload"]),
        most=sql.Literal(objections.MOST_PAYLOAD_BYTES),
    )
    ((rows,),) = connection.execute(query).fetchall()
    return int(rows)


def _conflicts(connection: Connection, table: str) -> list[str]:
    """Return statements with ON CONFLICT that the server has counted."""
    try:
        if connection.execute(adopt_sql.HAS_STATEMENTS).fetchone() != (True,):
            return []
        return [text for (text,) in connection.execute(adopt_sql.CONFLICTS, {"name": table})]
    except psycopg.Error:
        # It is installed and not loaded, or this role may not read it.
        return []


def refuse(judged: objections.Judged) -> None:
    """Raise `SetupError` if something must be corrected first."""
    if judged.problems:
        more = f" ({len(judged.problems) - 1} more: see `outbox adopt plan`)" if judged.problems[1:] else ""
        raise SetupError(f"{judged.problems[0]}{more}")


def require_accepted(judged: objections.Judged, accepted: list[str]) -> None:
    """Raise `SetupError` if the operator has not accepted a consequence."""
    if missing := [name for name in judged.consequences if name not in accepted]:
        options = " ".join(f"--accept {name}" for name in missing)
        raise SetupError(
            f"{judged.consequences[missing[0]]}. If this and what `outbox adopt plan` says about the "
            f"others is acceptable: {options}"
        )


def change_of_switch(connection: Connection, ddl: Ddl, found: Facts) -> TableChange:
    """Return the statements of the switch."""
    given = {"oid": found.oid, "view": ddl.made}
    grants = [row[0] for row in connection.execute(adopt_sql.GRANTS, given)]
    writers = [row[0] for row in connection.execute(adopt_sql.WRITERS, {"oid": found.oid})]
    return ddl.switch(grants, writers)


def _steps(
    connection: Connection,
    ddl: Ddl,
    found: Facts,
    mapping: Mapping,
    settings: OutboxSettings,
    pending: int | None,
) -> tuple[Step, ...]:
    short = (
        f"ACCESS EXCLUSIVE on {found.schema}.{mapping.table}, in its last part: waits at most 50 ms at a "
        "time; wait and change are canceled after 100 ms"
    )
    keys = (
        f"; then copies the idempotency keys, about {found.rows / _KEYS_PER_SECOND:.0f} s"
        if adopted_table.has_keys(mapping)
        else ""
    )
    if pending is None:
        drain = f"wait until what reads the slot {mapping.slot} has published everything of before the switch"
    else:
        drain = f"publish {counted(pending, 'pending row')} first, about {pending / _ROWS_PER_SECOND:.0f} s"
    return (
        Step(
            "prepare",
            f"create the append-only outbox in schema {settings.db_schema}",
            "none that writers notice; about 1 s",
            ("-- the files of sql/: see `outbox migrate`",),
        ),
        Step(
            "switch",
            "one transaction; stop the relays first" if mapping.slot is None else "one transaction",
            short,
            change_of_switch(connection, ddl, found).statements,
        ),
        Step(
            "drain",
            f"{drain}; new events wait until then, writers do not{keys}",
            "as the relay" if mapping.slot is None else "none",
            (),
        ),
        Step("back", "undoes the switch, until `finish --drop`", short, ddl.back().statements),
        Step(
            "finish",
            "archive the table with proof; with --drop, then drop it"
            + ("" if mapping.slot is None else f" and the slot {mapping.slot}"),
            short,
            (*ddl.freeze().statements, *ddl.leave().statements, *ddl.drop().statements),
        ),
    )
