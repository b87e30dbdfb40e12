"""Whether the table is as the mapping says: asked once, before anything is claimed.

Invariants:
- What would lose an event, or fail at the first one, is a `SetupError` that says how to mend it. What is only
  slow, or forgotten at a restart, is a warning.
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
    "version": (_WORD, "int"),
    "published_at": (_TIME, "timestamptz"),
    "status": (_TEXT | {_ENUM}, "text"),
    "processed_at": (_TIME, "timestamptz"),
    "failed_at": (_TIME, "timestamptz"),
    "retry_count": (_WHOLE, "int"),
    "last_error": (_TEXT, "text"),
    "next_attempt_at": (_TIME, "timestamptz"),
}
# A row without one of these would be passed over for ever, or have no key.
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
    """A table that fits its mapping."""

    oid: int
    types: Types
    warnings: list[str]


def check(connection: Connection, mapping: Mapping) -> Found:
    """Compares the table with its mapping.

    Raises:
        SetupError: it does not fit.
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
        aggregate_type=columns[mapping.columns["aggregate_type"]].spelled,
        aggregate_id=columns[mapping.columns["aggregate_id"]].spelled,
        last_error=columns[last_error].declared if last_error else "text",
    )
    return Found(oid, types, [*_forgetful(mapping), *_slow(connection, mapping, oid)])


def _table(connection: Connection, mapping: Mapping) -> int:
    name = _name(connection, mapping)
    row = connection.execute(queries.TABLE, {"table": name}).fetchone()
    if row is None:
        raise SetupError(
            f"there is no table {mapping} (OUTBOX_TABLE_FILE): correct `table` in the file"
            + ("" if mapping.schema else ', as "schema.table" where it is not in OUTBOX_SCHEMA')
        )
    oid, kind, shown, may_read, may_write, is_filtered, user, _ = row
    if kind not in ("r", "p"):
        raise SetupError(f"{shown} (OUTBOX_TABLE_FILE) is not a table: name the table that the events are in")
    if not (may_read and may_write):
        raise SetupError(f"{user} may not relay {shown}: GRANT SELECT, UPDATE ON {shown} TO {user}")
    if is_filtered:
        raise SetupError(
            f"row security of {shown} hides rows from role {user}, whose events would be lost: relay as the "
            f"owner of the table, or ALTER ROLE {user} BYPASSRLS"
        )
    return int(oid)


def _check_column(mapping: Mapping, ours: str, theirs: str, columns: dict[str, _Column]) -> None:
    column = columns.get(theirs)
    allowed, usual = _KINDS[ours]
    if column is None:
        mend = f"name the right one as {ours} in [columns]"
        if ours == "seq":
            mend += (
                f", or add one: ALTER TABLE {mapping} ADD COLUMN {theirs} bigint GENERATED ALWAYS AS IDENTITY"
            )
        raise SetupError(f"{mapping} has no column {theirs!r}: {mend}")
    if column.is_a not in allowed:
        raise SetupError(
            f"column {theirs!r} of {mapping} is {column.declared}, and cannot be {ours}: that is a column "
            f"such as {usual}"
        )
    if ours in _NEVER_NULL and not column.never_null:
        raise SetupError(
            f"column {theirs!r} of {mapping} ({ours}) may be null, and such a row could not be relayed: "
            f"ALTER TABLE {mapping} ALTER COLUMN {theirs} SET NOT NULL"
        )


def _check_states(mapping: Mapping, column: _Column) -> None:
    if column.kind != "e":
        return
    for meaning, value in mapping.states.items():
        if value not in column.labels:
            raise SetupError(
                f'column {column.name!r} of {mapping} cannot be {value!r}: write {meaning} = "…" in '
                f"[status], one of {', '.join(column.labels)}"
            )


def _forgetful(mapping: Mapping) -> list[str]:
    if not mapping.remembers_failures:
        return [
            f"{mapping} has no column that could say that an event was given up: it is tried again after "
            "each restart; add failed_at timestamptz, or retry_count int, and name it in [columns]"
        ]
    if "retry_count" not in mapping.columns:
        return [f"{mapping} has no retry_count: attempts are counted from 0 after each restart"]
    return []


def _slow(connection: Connection, mapping: Mapping, oid: int) -> list[str]:
    """Claims without an index over the pending rows read the whole table each time."""
    seq = mapping.columns["seq"]
    marker = mapping.columns["status" if mapping.has_status else "published_at"]
    # As pg_get_expr prints it.
    value = f"'{mapping.states['pending']}'" if mapping.has_status else "IS NULL"
    rows = connection.execute(
        queries.LEAVES, {"oid": oid, "seq": seq, "marker": marker, "value": value}
    ).fetchall()
    condition = sql.SQL("{} = {}" if mapping.has_status else "{} IS NULL").format(
        *[sql.Identifier(marker), *([sql.Literal(mapping.states["pending"])] if mapping.has_status else [])]
    )
    index = sql.SQL(" ({}) WHERE {}").format(sql.Identifier(seq), condition).as_string(connection)
    missing = [leaf for leaf, has_index in rows if not has_index]
    if not missing:
        return []
    more = f" (and so for {len(missing) - 1} more partitions)" if len(missing) > 1 else ""
    return [
        f"{missing[0]} has no index over its pending rows, so each claim reads all of it: "
        f"CREATE INDEX CONCURRENTLY ON {missing[0]}{index}{more}"
    ]


def _name(connection: Connection, mapping: Mapping) -> str:
    parts: list[Any] = [mapping.schema, mapping.table] if mapping.schema else [mapping.table]
    return sql.Identifier(*parts).as_string(connection)
