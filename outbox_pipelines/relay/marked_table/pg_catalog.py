"""Checks once, before anything is claimed, that the table matches its mapping.

Invariants:
- A mismatch that would lose an event, or fail at the first one, is a `SetupError` that says how to correct
  it. A mismatch that only costs speed, or loses counts at a restart, is a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from psycopg import sql

from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.parsers.table_mapping import Mapping
from outbox_pipelines.relay.marked_table import queries
from outbox_pipelines.relay.marked_table.queries import Types

_WHOLE: Final = frozenset({"int2", "int4", "int8"})
_TEXT: Final = frozenset({"text", "varchar", "bpchar", "citext", "name"})
_WORD: Final = _TEXT | _WHOLE | {"uuid", "numeric"}
_JSON: Final = frozenset({"json", "jsonb"})
_TIME: Final = frozenset({"timestamptz", "timestamp"})
_ENUM: Final = "enum"

# The types that a column may have, and the statement that would add it.
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
# A row without one of these would never be published, or have no key.
_NEVER_NULL: Final = ("id", "seq", "aggregate_type", "aggregate_id", "event_type")


class _Column(NamedTuple):
    name: str
    type: str
    kind: str
    spelled: str
    declared: str
    never_null: bool
    labels: list[str]

    @property
    def is_a(self) -> str:
        return _ENUM if self.kind == "e" else self.type


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
    oid = _table(connection, mapping)
    rows = connection.execute(queries.COLUMNS, {"oid": oid}).fetchall()
    columns = {row[0]: _Column(*row) for row in rows}
    for ours, theirs in mapping.columns.items():
        _check_column(mapping, ours, theirs, columns)
    if mapping.has_status:
        _check_states(mapping, columns[mapping.columns["status"]])
    last_error = mapping.columns.get("last_error")
    types = Types(
        key="bigint" if mapping.order == "seq" else columns[mapping.columns["id"]].spelled,
        aggregate_type="text"
        if mapping.aggregate_type
        else columns[mapping.columns["aggregate_type"]].spelled,
        aggregate_id=columns[mapping.columns["aggregate_id"]].spelled,
        last_error=columns[last_error].declared if last_error else "text",
    )
    return Found(oid, types, [*_forgetful(mapping), *_slow(connection, mapping, oid)])


def _table(connection: Connection, mapping: Mapping) -> int:
    name = _name(connection, mapping)
    row = connection.execute(queries.TABLE, {"table": name}).fetchone()
    if row is None:
        raise SetupError(
            f"table {mapping} does not exist (OUTBOX_TABLE_FILE): correct `table` in the file"
            + ("" if mapping.schema else '; write "schema.table" if it is not in OUTBOX_SCHEMA')
        )
    oid, kind, shown, may_read, may_write, is_filtered, user, _ = row
    if kind not in ("r", "p"):
        raise SetupError(
            f"{shown} (OUTBOX_TABLE_FILE) is not a table: name the table that has the events. If `outbox "
            "adopt` has made it a view, set OUTBOX_SCHEMA to the schema of the append-only outbox"
        )
    if not (may_read and may_write):
        raise SetupError(f"role {user} may not relay {shown}: GRANT SELECT, UPDATE ON {shown} TO {user}")
    if is_filtered:
        raise SetupError(
            f"row security of {shown} hides rows from role {user}, so their events would be lost: relay as "
            f"the owner of the table, or ALTER ROLE {user} BYPASSRLS"
        )
    return int(oid)


def _check_column(mapping: Mapping, ours: str, theirs: str, columns: dict[str, _Column]) -> None:
    column = columns.get(theirs)
    allowed, usual = _KINDS[ours]
    if column is None:
        mend = f"name the correct one as {ours} in [columns]"
        if ours == "seq":
            mend += ', or write order = "created_at" at the top if only their times order the rows'
        elif ours == "aggregate_type":
            mend += ', or write aggregate_type = "…", the type of all aggregates, at the top'
        raise SetupError(f"{mapping} has no column {theirs!r}: {mend}")
    if column.is_a not in allowed:
        raise SetupError(
            f"column {theirs!r} of {mapping} has type {column.declared}, which cannot be {ours}: name a "
            f"column of a type such as {usual}"
        )
    if ours in _NEVER_NULL and not column.never_null:
        raise SetupError(
            f"column {theirs!r} of {mapping} ({ours}) allows NULL, and such a row cannot be relayed: "
            f"ALTER TABLE {mapping} ALTER COLUMN {theirs} SET NOT NULL"
        )


def _check_states(mapping: Mapping, column: _Column) -> None:
    if column.kind != "e":
        return
    for meaning, value in mapping.states.items():
        if value not in column.labels:
            raise SetupError(
                f"column {column.name!r} of {mapping} cannot have the value {value!r}: write "
                f'{meaning} = "…" in [status] with one of {", ".join(column.labels)}'
            )


def _forgetful(mapping: Mapping) -> list[str]:
    if not mapping.remembers_failures:
        return [
            f"{mapping} has no column that records dead letters: each is tried again after every restart. "
            "Add failed_at timestamptz or retry_count int, and name it in [columns]"
        ]
    if "retry_count" not in mapping.columns:
        return [f"{mapping} has no retry_count: the count of attempts starts from 0 after each restart"]
    return []


def _slow(connection: Connection, mapping: Mapping, oid: int) -> list[str]:
    """Return a warning for each missing index without which a claim or a mark must read the whole table."""
    order = mapping.columns[mapping.order]
    key = mapping.columns["seq" if mapping.order == "seq" else "id"]
    marker = mapping.columns["status" if mapping.has_status else "published_at"]
    # In the form in which pg_get_expr prints it.
    value = f"'{mapping.states['pending']}'" if mapping.has_status else "IS NULL"
    given = {"oid": oid, "order": order, "key": key, "marker": marker, "value": value}
    leaves = connection.execute(queries.LEAVES, {**given, "has_status": mapping.has_status}).fetchall()
    condition = sql.SQL("{} = {}" if mapping.has_status else "{} IS NULL").format(
        *[sql.Identifier(marker), *([sql.Literal(mapping.states["pending"])] if mapping.has_status else [])]
    )
    pending = sql.SQL(" ({}) WHERE {}").format(sql.Identifier(order), condition).as_string(connection)
    keys = sql.SQL(" ({})").format(sql.Identifier(key)).as_string(connection)
    unordered = [leaf for leaf, is_partial, is_by_status, _ in leaves if not (is_partial or is_by_status)]
    unkeyed = [leaf for leaf, _, _, has_key in leaves if not has_key and key != order]
    return [
        *_missing(unordered, "over its pending rows, so each claim reads all of it", pending),
        *_missing(unkeyed, f"over {key!r}, so each mark reads all of it", keys),
    ]


def _missing(leaves: list[str], what: str, index: str) -> list[str]:
    if not leaves:
        return []
    more = f" (likewise for {len(leaves) - 1} more partitions)" if len(leaves) > 1 else ""
    return [f"{leaves[0]} has no index {what}: CREATE INDEX CONCURRENTLY ON {leaves[0]}{index}{more}"]


def _name(connection: Connection, mapping: Mapping) -> str:
    parts: list[Any] = [mapping.schema, mapping.table] if mapping.schema else [mapping.table]
    return sql.Identifier(*parts).as_string(connection)
