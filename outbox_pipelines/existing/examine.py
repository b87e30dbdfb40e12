"""Compares a table with its mapping: one list of findings, for the relay's start and `outbox table check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox_pipelines.config.table_mapping import WRITTEN, Mapping
from outbox_pipelines.database import Connection
from outbox_pipelines.existing import existing_sql
from outbox_pipelines.existing.findings import (
    Finding,
    ending,
    forgetful,
    identifier,
    key_of,
    lacking_rights,
    lacks,
    literal,
    missing_indexes,
    missing_table,
    refuse,
    unsuitable,
)
from outbox_pipelines.existing.pg_catalog import (
    KINDS,
    NULLED,
    TEXT,
    Column,
    Relation,
    allows,
    look_up,
    read_columns,
)
from outbox_pipelines.existing.table_statements import Types

# How to add a column, if not simply with its usual type. None: only the application knows its values.
_ADDED: Final[dict[str, str | None]] = {
    "id": "uuid NOT NULL DEFAULT gen_random_uuid()",
    # Not an identity: a partitioned table has one only since PostgreSQL 17.
    "seq": "bigserial",
    "aggregate_type": None,
    "aggregate_id": None,
    "event_type": None,
    "payload": None,
    "created_at": "timestamptz NOT NULL DEFAULT now()",
    "status": "text NOT NULL",
    "retry_count": "int NOT NULL DEFAULT 0",
}
_REMARKS: Final = {
    "id": " (to add one locks the table while all rows are rewritten)",
    "seq": " (to add one locks the table while all rows are rewritten)",
    "published_at": " (all rows are pending in a new one)",
    "status": " (all rows are pending in a new one)",
}
# By entry: what happens to rows that have the same value, and what else to do.
_TWICE: Final = {
    "id": (
        "consumers take rows with the same id for copies of one event and handle one of them",
        "name a column that tells each event",
    ),
    "seq": ("rows with the same number stop the relay", "let the database count it"),
}
# A row without one of these becomes a dead letter. One without a key could not even be marked as such.
NAMES: Final = ("id", "aggregate_type", "aggregate_id", "event_type")


def _mismatches(
    mapping: Mapping, relation: Relation, ours: str, theirs: str, columns: dict[str, Column]
) -> list[Finding]:
    column = columns.get(theirs)
    allowed, usual = KINDS[ours]
    quoted = identifier(theirs)
    if column is None:
        return [_missing_column(mapping, relation, ours, theirs, columns)]
    if column.is_a not in allowed:
        problem = f"column {theirs!r} of {mapping} has type {column.declared}, which cannot be {ours}"
        remedy = f"name a column of a type such as {usual}"
        # Other types have no conversion that is certain to exist, and a default would need one of its own.
        if column.default is not None or not (usual == "text" or column.type in TEXT):
            return [Finding(problem, remedy)]
        change = f"ALTER TABLE {relation.spelled} ALTER COLUMN {quoted} TYPE {usual} USING {quoted}::{usual}"
        return [Finding(problem, f"{remedy}, or", (change,))]
    not_unique = _not_unique(mapping, relation, ours, column)
    if column.never_null:
        return [*not_unique, *_never_null(mapping, relation, ours, column)]
    refuse = (f"ALTER TABLE {relation.spelled} ALTER COLUMN {quoted} SET NOT NULL",)
    meaning = "" if ours == theirs else f" ({ours})"
    allows = f"column {theirs!r} of {mapping}{meaning} allows NULL"
    if ours == key_of(mapping):
        return [Finding(f"{allows}, and such a row cannot be relayed", statements=refuse), *not_unique]
    if ours in NAMES:
        return [Finding(f"{allows}; such a row becomes a dead letter", statements=refuse, is_error=False)]
    if ours == "status":
        return [Finding(f"{allows}; such a row is never published", statements=refuse, is_error=False)]
    return []


def _never_null(mapping: Mapping, relation: Relation, ours: str, column: Column) -> list[Finding]:
    if ours not in NULLED:
        return []
    problem = f"column {column.name!r} of {mapping} ({ours}) is NOT NULL, and must be able to be null"
    change = f"ALTER TABLE {relation.spelled} ALTER COLUMN {identifier(column.name)} DROP NOT NULL"
    remedy = "name another one" if ours == "published_at" else f"remove {ours} from [table.columns]"
    return [Finding(problem, f"{remedy}, or", (change,))]


def _not_unique(mapping: Mapping, relation: Relation, ours: str, column: Column) -> list[Finding]:
    if ours not in _TWICE or column.is_distinct:
        return []
    consequence, remedy = _TWICE[ours]
    problem = f"column {column.name!r} of {mapping} ({ours}) is not unique on its own; {consequence}"
    if relation.kind == "p":
        # A unique index there must contain the columns by which rows are distributed.
        return [Finding(problem, remedy, is_error=False)]
    create = f"CREATE UNIQUE INDEX CONCURRENTLY ON {relation.spelled} ({identifier(column.name)})"
    return [Finding(problem, f"{remedy}, or", (create,), is_error=False)]


def _ageless(mapping: Mapping, relation: Relation) -> list[Finding]:
    """Return a warning if nothing says how old a row is."""
    if "created_at" in mapping.columns:
        return []
    problem = f"{mapping} has no created_at in [table.columns]; the check lag cannot see how long rows wait"
    remedy = (
        f"name the time of the insert as created_at; ALTER TABLE {relation.spelled} ADD COLUMN created_at "
        "timestamptz NOT NULL DEFAULT now() adds one"
    )
    return [Finding(problem, remedy, is_error=False)]


def _missing_column(
    mapping: Mapping, relation: Relation, ours: str, theirs: str, columns: dict[str, Column]
) -> Finding:
    remedy = f"name the correct one as {ours} in [table.columns]"
    if ours == "seq" and any(column.can_be("created_at") for column in columns.values()):
        remedy += ', or write order = "created_at" at the top if only their times order the rows'
    elif ours == "aggregate_type":
        remedy += ', or write aggregate_type = "…", the type of all aggregates, at the top'
    problem = f"{mapping} has no column {theirs!r}"
    definition = _ADDED.get(ours, KINDS[ours][1])
    if definition is None:
        return Finding(problem, remedy)
    if ours == "status":
        definition += f" DEFAULT {literal(mapping.states['pending'])}"
    add = f"ALTER TABLE {relation.spelled} ADD COLUMN {identifier(theirs)} {definition}"
    return Finding(problem, f"{remedy}{_REMARKS.get(ours, '')}, or", (add,))


def _unwritable(mapping: Mapping, relation: Relation, columns: dict[str, Column]) -> list[Finding]:
    written = [mapping.columns[name] for name in WRITTEN if name in mapping.columns]
    refused = [name for name in written if name in columns and not columns[name].may_write]
    if not refused or not relation.may_write:
        # Without a right to any column, the one to the table is missing.
        return []
    names = ", ".join(map(identifier, refused))
    problem = f"role {relation.user} may not mark the rows of {mapping}"
    return [lacks(problem, f"UPDATE ({names}) ON {relation.spelled}", relation.user)]


def _wrong_states(
    connection: Connection, mapping: Mapping, relation: Relation, columns: dict[str, Column]
) -> list[Finding]:
    column = columns.get(mapping.columns.get("status", ""))
    if column is None or not column.can_be("status"):
        return []
    findings: list[Finding] = []
    for meaning, value in mapping.states.items():
        problem = f"column {column.name!r} of {mapping} cannot have the value {value!r}"
        remedy = f'write {meaning} = "…" in [table.status] with one of '
        if column.is_whole and not allows(connection, column, "true", value):
            findings.append(Finding(problem, f'write {meaning} = "…" in [table.status] with a number'))
        if column.kind == "e" and value not in column.labels:
            add = f"ALTER TYPE {column.qualified} ADD VALUE {literal(value)}"
            findings.append(Finding(problem, f"{remedy}{', '.join(column.labels)}, or", (add,)))
    for name, condition in connection.execute(
        existing_sql.CHECKS, {"oid": relation.oid, "column": column.name}
    ).fetchall():
        refused = [
            (meaning, value)
            for meaning, value in mapping.states.items()
            if not column.labels or value in column.labels
            if not allows(connection, column, condition, value)
        ]
        if refused:
            findings.append(_refused_states(mapping, relation, column, name, condition, refused))
    return findings


def _refused_states(
    mapping: Mapping,
    relation: Relation,
    column: Column,
    name: str,
    condition: str,
    refused: list[tuple[str, str]],
) -> Finding:
    values = ", ".join(repr(value) for _, value in refused)
    literals = ", ".join(literal(value) for _, value in refused)
    constraint = f"CONSTRAINT {identifier(name)}"
    change = (
        f"ALTER TABLE {relation.spelled} DROP {constraint}, ADD {constraint} "
        f"CHECK ({condition} OR {identifier(column.name)} IN ({literals})) NOT VALID"
    )
    return Finding(
        f"constraint {name} does not allow {values} in column {column.name!r} of {mapping}",
        f"write {', '.join(meaning for meaning, _ in refused)} in [table.status] with allowed values, or",
        (change,),
    )


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found in a table, in the order in which to correct it."""

    oid: int | None
    """None without such a table."""
    columns: dict[str, Column]
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class CheckedTable:
    """A table that matches its mapping."""

    oid: int
    types: Types
    warnings: list[str]


def check(connection: Connection, mapping: Mapping) -> CheckedTable:
    """Compare the table with its mapping.

    Raises:
        SetupError: it does not match.
    """
    found = examine(connection, mapping)
    refuse(found.findings)
    assert found.oid is not None
    return CheckedTable(
        found.oid, _types(mapping, found.columns), [str(finding) for finding in found.findings]
    )


def examine(connection: Connection, mapping: Mapping) -> Examined:
    """Return everything that is to be corrected in the table or in the mapping."""
    relation = look_up(connection, mapping.schema, mapping.table)
    if relation is None:
        return Examined(None, {}, [missing_table(connection, mapping)])
    if finding := unsuitable(relation):
        return Examined(None, {}, [finding])
    columns = read_columns(connection, relation.oid)
    of_columns = [
        finding
        for ours, theirs in mapping.columns.items()
        # One column may be both; what a seq must be is enough for an id.
        if not (ours == "id" and theirs == mapping.columns.get("seq"))
        for finding in _mismatches(mapping, relation, ours, theirs, columns)
    ]
    if mapping.slot is not None:
        # Nothing is marked or claimed.
        return Examined(relation.oid, columns, [*lacking_rights(relation), *of_columns])
    findings = [
        *lacking_rights(relation),
        *of_columns,
        *_unwritable(mapping, relation, columns),
        *_wrong_states(connection, mapping, relation, columns),
        *forgetful(mapping, relation, columns),
        *_ageless(mapping, relation),
        *missing_indexes(connection, mapping, relation, columns),
        *ending(connection, relation),
    ]
    return Examined(relation.oid, columns, findings)


def _types(mapping: Mapping, columns: dict[str, Column]) -> Types:
    theirs = {ours: columns[name] for ours, name in mapping.columns.items()}
    nullable = [ours for ours in NAMES if ours in theirs and not theirs[ours].never_null]

    def compared(ours: str) -> str:
        # The statements read "" for NULL, which is no value of other types.
        return theirs[ours].spelled if ours in theirs and ours not in nullable else "text"

    last_error = theirs.get("last_error")
    return Types(
        key="bigint" if mapping.order == "seq" else theirs["id"].spelled,
        aggregate_type=compared("aggregate_type"),
        aggregate_id=compared("aggregate_id"),
        last_error=last_error.declared if last_error else "text",
        nullable=tuple(nullable),
        has_text_payload=theirs["payload"].is_text,
    )
