"""Compares a table with its mapping: one list of findings for the relay's start and for `outbox table check`.

Invariants:
- A mismatch that would lose an event, or fail at the first one, is an error; one that only costs speed, loses
  counts at a restart, or concerns rows that the table allows and may not have, is a warning.
- Each finding says how to correct it. Its statements can be run as they are, in their order, one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import psycopg
from psycopg import sql

from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.parsers.table_mapping import WRITTEN, Mapping
from outbox_pipelines.relay.marked_table import queries
from outbox_pipelines.relay.marked_table.queries import Types

_WHOLE: Final = frozenset({"int2", "int4", "int8"})
_TEXT: Final = frozenset({"text", "varchar", "bpchar", "citext", "name"})
_WORD: Final = _TEXT | _WHOLE | {"uuid", "numeric"}
_JSON: Final = frozenset({"json", "jsonb"})
_TIME: Final = frozenset({"timestamptz", "timestamp"})
_ENUM: Final = "enum"

# The types that a column may have, and the usual one.
_KINDS: Final[dict[str, tuple[frozenset[str], str]]] = {
    "id": (_WORD, "uuid"),
    "seq": (_WHOLE, "bigint"),
    "aggregate_type": (_WORD | {_ENUM}, "text"),
    "aggregate_id": (_WORD, "text"),
    "event_type": (_WORD | {_ENUM}, "text"),
    "payload": (_JSON | _TEXT, "jsonb"),
    "created_at": (_TIME, "timestamptz"),
    "headers": (_JSON, "jsonb"),
    "idempotency_key": (_WORD, "text"),
    "correlation_id": (_WORD, "text"),
    "causation_id": (_WORD, "text"),
    "traceparent": (_WORD, "text"),
    "trace_id": (_WORD, "text"),
    "version": (_WORD, "int"),
    "published_at": (_TIME, "timestamptz"),
    "status": (_TEXT | {_ENUM}, "text"),
    "processed_at": (_TIME, "timestamptz"),
    "failed_at": (_TIME, "timestamptz"),
    "retry_count": (_WHOLE, "int"),
    "last_error": (_TEXT, "text"),
    "next_attempt_at": (_TIME, "timestamptz"),
}
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
# A row without one of these becomes a dead letter. One without a key could not even be marked as such.
NAMES: Final = ("id", "aggregate_type", "aggregate_id", "event_type")

_RELATIONS: Final = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "i": "an index",
    "I": "an index",
    "S": "a sequence",
    "c": "a composite type",
    "t": "a TOAST table",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to correct in a table or in its description."""

    problem: str
    remedy: str = ""
    """What to do; with `statements`, the words before the first of them."""
    statements: tuple[str, ...] = ()
    is_error: bool = True

    @property
    def text(self) -> str:
        """The problem and the remedy, without the statements."""
        return f"{self.problem}: {self.remedy}".removesuffix(": ")

    def __str__(self) -> str:
        if not self.statements:
            return self.text
        more = len(self.statements) - 1
        space = " " if self.remedy else ": "
        likewise = f" (likewise for {more} more partitions)" if more else ""
        return f"{self.text}{space}{self.statements[0]}{likewise}"


class Place(NamedTuple):
    """A relation, as `pg_catalog` describes it to this role."""

    oid: int
    kind: str
    schema: str
    name: str
    spelled: str
    """Its name with the schema, as SQL."""
    root: str | None
    """The partitioned table that it is a partition of, as SQL."""
    may_use: bool
    may_read: bool
    may_write: bool
    is_filtered: bool
    user: str
    """As SQL."""


class Column(NamedTuple):
    """A column of a table; a domain counts as its base type."""

    name: str
    type: str
    kind: str
    spelled: str
    qualified: str
    """The type with its schema, for statements that other sessions run."""
    declared: str
    never_null: bool
    default: str | None
    """As SQL."""
    is_counted: bool
    """Whether the database counts it: an identity, or a default from a sequence."""
    is_unique: bool
    """Whether it is unique on its own, at least among some rows such as the pending ones."""
    may_write: bool
    labels: list[str]

    @property
    def is_a(self) -> str:
        """The type, or `enum`."""
        return _ENUM if self.kind == "e" else self.type

    @property
    def is_text(self) -> bool:
        """Whether its values are words: a text or an enum."""
        return self.is_a in _TEXT | {_ENUM}

    def can_be(self, ours: str) -> bool:
        """Return whether the type is one that this entry of [columns] allows."""
        return self.is_a in _KINDS[ours][0]


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found in a table, in the order in which to correct it."""

    oid: int | None
    """None without such a table."""
    columns: dict[str, Column]
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class Found:
    """A table that matches its mapping."""

    oid: int
    types: Types
    warnings: list[str]


def check(connection: Connection, mapping: Mapping) -> Found:
    """Compare the table with its mapping.

    Raises:
        SetupError: it does not match.
    """
    found = examine(connection, mapping)
    refuse(found.findings)
    assert found.oid is not None
    return Found(found.oid, _types(mapping, found.columns), [str(finding) for finding in found.findings])


def refuse(findings: list[Finding]) -> None:
    """Raise the first error as a `SetupError`."""
    for finding in findings:
        if finding.is_error:
            raise SetupError(str(finding))


def examine(connection: Connection, mapping: Mapping) -> Examined:
    """Return everything that is to be corrected in the table or in the mapping."""
    place = look_up(connection, mapping.schema, mapping.table)
    if place is None:
        return Examined(None, {}, [_missing_table(connection, mapping)])
    if finding := unsuitable(place):
        return Examined(None, {}, [finding])
    columns = read_columns(connection, place.oid)
    of_columns = [
        finding
        for ours, theirs in mapping.columns.items()
        # One column may be both; what a seq must be is enough for an id.
        if not (ours == "id" and theirs == mapping.columns.get("seq"))
        for finding in _column(mapping, place, ours, theirs, columns)
    ]
    findings = [
        *lacking_rights(place),
        *of_columns,
        *_unwritable(mapping, place, columns),
        *_states(connection, mapping, place, columns),
        *_forgetful(mapping, place),
        *_slow(connection, mapping, place),
        *_ending(connection, place),
    ]
    return Examined(place.oid, columns, findings)


def look_up(connection: Connection, schema: str | None, name: str) -> Place | None:
    """Return the relation of this name; without a schema, the one in OUTBOX_SCHEMA."""
    row = connection.execute(queries.TABLE, {"schema": schema, "table": name}).fetchone()
    return None if row is None else Place(*row)


def read_columns(connection: Connection, oid: int) -> dict[str, Column]:
    """Return the columns of a table by their names, in their order."""
    rows = connection.execute(queries.COLUMNS, {"oid": oid}).fetchall()
    return {row[0]: Column(*row) for row in rows}


def unsuitable(place: Place) -> Finding | None:
    """Return why a relation cannot be a marked table."""
    if place.root is not None:
        return Finding(f"{place.spelled} is a partition", f"name its parent, {place.root}")
    if place.kind not in ("r", "p"):
        what = _RELATIONS.get(place.kind, "something different")
        remedy = "name the table that has the events"
        if place.kind == "v":
            remedy += (
                ", or, if `outbox adopt` has made it a view, set OUTBOX_SCHEMA to the schema of the "
                "append-only outbox"
            )
        return Finding(f"{place.spelled} is not a table but {what}", remedy)
    return None


def lacking_rights(place: Place) -> list[Finding]:
    """Return the rights to the whole table that the role lacks."""
    table, user = place.spelled, place.user
    findings: list[Finding] = []
    if not place.may_use:
        schema = _identifier(place.schema)
        findings.append(_right(f"role {user} may not use schema {schema}", f"USAGE ON SCHEMA {schema}", user))
    if not (place.may_read and place.may_write):
        findings.append(_right(f"role {user} may not relay {table}", f"SELECT, UPDATE ON {table}", user))
    if place.is_filtered:
        findings.append(
            Finding(
                f"row security of {table} hides rows from role {user}, so their events would be lost",
                "relay as the owner of the table, or",
                (f"ALTER ROLE {user} BYPASSRLS",),
            )
        )
    return findings


def _right(problem: str, right: str, user: str) -> Finding:
    return Finding(problem, statements=(f"GRANT {right} TO {user}",))


def _missing_table(connection: Connection, mapping: Mapping) -> Finding:
    problem = f"table {mapping} does not exist (OUTBOX_TABLE_FILE)"
    remedy = "correct `table` in the file"
    if others := elsewhere(connection, mapping.table):
        return Finding(problem, f"{remedy}; there is {', '.join(others)}")
    return Finding(
        problem, remedy + ("" if mapping.schema else '; write "schema.table" if it is not in OUTBOX_SCHEMA')
    )


def elsewhere(connection: Connection, name: str) -> list[str]:
    """Return tables of this name in all schemas, in upper and lower case."""
    return [found for (found,) in connection.execute(queries.ELSEWHERE, {"table": name}).fetchall()]


def _column(
    mapping: Mapping, place: Place, ours: str, theirs: str, columns: dict[str, Column]
) -> list[Finding]:
    column = columns.get(theirs)
    allowed, usual = _KINDS[ours]
    quoted = _identifier(theirs)
    if column is None:
        return [_missing_column(mapping, place, ours, theirs, columns)]
    if column.is_a not in allowed:
        problem = f"column {theirs!r} of {mapping} has type {column.declared}, which cannot be {ours}"
        remedy = f"name a column of a type such as {usual}"
        # Other types have no conversion that is certain to exist, and a default would need one of its own.
        if column.default is not None or not (usual == "text" or column.type in _TEXT):
            return [Finding(problem, remedy)]
        change = f"ALTER TABLE {place.spelled} ALTER COLUMN {quoted} TYPE {usual} USING {quoted}::{usual}"
        return [Finding(problem, f"{remedy}, or", (change,))]
    not_unique = _not_unique(mapping, place, column) if ours == "seq" else []
    if column.never_null:
        return not_unique
    refuse = (f"ALTER TABLE {place.spelled} ALTER COLUMN {quoted} SET NOT NULL",)
    meaning = "" if ours == theirs else f" ({ours})"
    allows = f"column {theirs!r} of {mapping}{meaning} allows NULL"
    if ours == _key(mapping):
        return [Finding(f"{allows}, and such a row cannot be relayed", statements=refuse), *not_unique]
    if ours in NAMES:
        return [Finding(f"{allows}; such a row becomes a dead letter", statements=refuse, is_error=False)]
    if ours == "status":
        return [Finding(f"{allows}; such a row is never published", statements=refuse, is_error=False)]
    return []


def _not_unique(mapping: Mapping, place: Place, column: Column) -> list[Finding]:
    if column.is_counted or column.is_unique:
        return []
    problem = (
        f"column {column.name!r} of {mapping} (seq) is not unique; rows with the same number stop the relay"
    )
    if place.kind == "p":
        # A unique index there must contain the columns by which rows are distributed.
        return [Finding(problem, "let the database count it", is_error=False)]
    create = f"CREATE UNIQUE INDEX CONCURRENTLY ON {place.spelled} ({_identifier(column.name)})"
    return [Finding(problem, statements=(create,), is_error=False)]


def _missing_column(
    mapping: Mapping, place: Place, ours: str, theirs: str, columns: dict[str, Column]
) -> Finding:
    remedy = f"name the correct one as {ours} in [columns]"
    if ours == "seq" and any(column.can_be("created_at") for column in columns.values()):
        remedy += ', or write order = "created_at" at the top if only their times order the rows'
    elif ours == "aggregate_type":
        remedy += ', or write aggregate_type = "…", the type of all aggregates, at the top'
    problem = f"{mapping} has no column {theirs!r}"
    definition = _ADDED.get(ours, _KINDS[ours][1])
    if definition is None:
        return Finding(problem, remedy)
    if ours == "status":
        definition += f" DEFAULT {_literal(mapping.states['pending'])}"
    add = f"ALTER TABLE {place.spelled} ADD COLUMN {_identifier(theirs)} {definition}"
    return Finding(problem, f"{remedy}{_REMARKS.get(ours, '')}, or", (add,))


def _unwritable(mapping: Mapping, place: Place, columns: dict[str, Column]) -> list[Finding]:
    written = [mapping.columns[name] for name in WRITTEN if name in mapping.columns]
    refused = [name for name in written if name in columns and not columns[name].may_write]
    if not refused or not place.may_write:
        # Without a right to any column, the one to the table is missing.
        return []
    names = ", ".join(map(_identifier, refused))
    problem = f"role {place.user} may not mark the rows of {mapping}"
    return [_right(problem, f"UPDATE ({names}) ON {place.spelled}", place.user)]


def _states(
    connection: Connection, mapping: Mapping, place: Place, columns: dict[str, Column]
) -> list[Finding]:
    column = columns.get(mapping.columns.get("status", ""))
    if column is None or not column.can_be("status"):
        return []
    findings: list[Finding] = []
    for meaning, value in mapping.states.items():
        problem = f"column {column.name!r} of {mapping} cannot have the value {value!r}"
        remedy = f'write {meaning} = "…" in [status] with one of '
        if column.kind == "e" and value not in column.labels:
            add = f"ALTER TYPE {column.qualified} ADD VALUE {_literal(value)}"
            findings.append(Finding(problem, f"{remedy}{', '.join(column.labels)}, or", (add,)))
    for name, condition in connection.execute(
        queries.CHECKS, {"oid": place.oid, "column": column.name}
    ).fetchall():
        refused = [
            (meaning, value)
            for meaning, value in mapping.states.items()
            if not column.labels or value in column.labels
            if not allows(connection, column, condition, value)
        ]
        if refused:
            findings.append(_refused_states(mapping, place, column, name, condition, refused))
    return findings


def _refused_states(
    mapping: Mapping, place: Place, column: Column, name: str, condition: str, refused: list[tuple[str, str]]
) -> Finding:
    values = ", ".join(repr(value) for _, value in refused)
    literals = ", ".join(_literal(value) for _, value in refused)
    constraint = f"CONSTRAINT {_identifier(name)}"
    change = (
        f"ALTER TABLE {place.spelled} DROP {constraint}, ADD {constraint} "
        f"CHECK ({condition} OR {_identifier(column.name)} IN ({literals})) NOT VALID"
    )
    return Finding(
        f"constraint {name} does not allow {values} in column {column.name!r} of {mapping}",
        f"write {', '.join(meaning for meaning, _ in refused)} in [status] with values that it allows, or",
        (change,),
    )


def allows(connection: Connection, column: Column, condition: str, value: str) -> bool:
    """Return whether a CHECK constraint of one column allows a value in it."""
    query = sql.SQL("SELECT ({condition}) IS NOT FALSE FROM (SELECT {value}::{type} AS {column}) AS row")
    try:
        row = connection.execute(
            query.format(
                condition=sql.SQL(condition),
                value=sql.Literal(value),
                type=sql.SQL(column.spelled),
                column=sql.Identifier(column.name),
            )
        ).fetchone()
    except psycopg.errors.DataError:
        return False
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.RaiseException):
        # A condition that calls a function: a mark is tried before the first event is published.
        return True
    return row == (True,)


def _forgetful(mapping: Mapping, place: Place) -> list[Finding]:
    add = f"ALTER TABLE {place.spelled} ADD COLUMN"
    name_it = "name the column in [columns], if necessary after"
    if not mapping.remembers_failures:
        return [
            Finding(
                f"{mapping} has no failed_at and no retry_count that record dead letters: each is tried "
                "again after every restart",
                name_it,
                (f"{add} failed_at timestamptz",),
                is_error=False,
            )
        ]
    if "retry_count" not in mapping.columns:
        return [
            Finding(
                f"{mapping} has no retry_count: the count of attempts starts from 0 after each restart",
                name_it,
                (f"{add} retry_count int NOT NULL DEFAULT 0",),
                is_error=False,
            )
        ]
    return []


def _slow(connection: Connection, mapping: Mapping, place: Place) -> list[Finding]:
    """Return the indexes without which a claim or a mark must read the whole table."""
    order = mapping.columns[mapping.order]
    key = mapping.columns[_key(mapping)]
    marker = mapping.columns["status" if mapping.has_status else "published_at"]
    pending = mapping.states["pending"]
    # In the form in which pg_get_expr prints it.
    value = f"'{pending}'" if mapping.has_status else "IS NULL"
    given = {"oid": place.oid, "order": order, "key": key, "marker": marker, "value": value}
    leaves = connection.execute(queries.LEAVES, {**given, "has_status": mapping.has_status}).fetchall()
    condition = f"{_identifier(marker)} {f'= {_literal(pending)}' if mapping.has_status else value}"
    over_pending = f" ({_identifier(order)}) WHERE {condition}"
    over_keys = f" ({_identifier(key)})"
    unordered = [leaf for leaf, is_partial, is_by_status, _ in leaves if not (is_partial or is_by_status)]
    unkeyed = [leaf for leaf, _, _, has_key in leaves if not has_key and key != order]
    return [
        *_missing_index(unordered, "over its pending rows, so each claim reads all of it", over_pending),
        *_missing_index(unkeyed, f"over {key!r}, so each mark reads all of it", over_keys),
    ]


def _ending(connection: Connection, place: Place) -> list[Finding]:
    row = connection.execute(queries.ENDING, {"oid": place.oid}).fetchone()
    if row is None:
        return []
    end, is_over = row
    problem = (
        f"the newest partition of {place.spelled} {'ended' if is_over else 'ends'} on {end} UTC, and there "
        f"is no default one: writers {'are' if is_over else 'will then be'} refused"
    )
    remedy = "make the next one, or let `outbox table months` make them (OUTBOX_MONTHS_AHEAD)"
    return [Finding(problem, remedy, is_error=False)]


def _missing_index(leaves: list[str], what: str, index: str) -> list[Finding]:
    if not leaves:
        return []
    statements = tuple(f"CREATE INDEX CONCURRENTLY ON {leaf}{index}" for leaf in leaves)
    return [Finding(f"{leaves[0]} has no index {what}", statements=statements, is_error=False)]


def _key(mapping: Mapping) -> str:
    """Return our name of the column by which rows are marked."""
    return "seq" if mapping.order == "seq" else "id"


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
    )


def _identifier(name: str) -> str:
    return sql.Identifier(name).as_string()


def _literal(text: str) -> str:
    return sql.Literal(text).as_string()
