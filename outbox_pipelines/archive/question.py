"""What a query of the archive may be: something that only reads.

Invariants:
- DuckDB's lock-down lets a query open the archive's files, and a file that may be opened may be written: a
  statement that could write is refused before it runs.
- SQL that a query makes of texts (`query`, `json_execute_serialized_sql`) is judged by its plan.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import duckdb

from outbox_pipelines.errors import SetupError

_SELECT: Final = duckdb.StatementType.SELECT
# A PIVOT whose columns are not listed: its values are looked up first.
_PIVOT: Final = duckdb.StatementType.MULTI
_EXPLAIN: Final = re.compile(
    r"\s*EXPLAIN\s+(?:ANALYZE\s+)?(?:\(\s*(?:ANALYZE|FORMAT)\b[^()]*\)\s*)?", re.IGNORECASE
)
# What can write, or make SQL of a text, has one of these in its name. Names have no escapes in DuckDB.
_SUSPICIOUS: Final = re.compile("copy|query|serialized", re.IGNORECASE)
_WRITING: Final = re.compile("COPY|SERIALIZED")


def require(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise `SetupError` unless this is one SELECT or PIVOT, or EXPLAIN of one.

    Raises:
        duckdb.Error: it is no SQL.
    """
    kind = _kind(sql)
    if prefix := _EXPLAIN.match(sql):
        sql = sql[prefix.end() :]
        # Of EXPLAIN of a PIVOT the type is that of the PIVOT.
        kind = _kind(sql) if kind in (duckdb.StatementType.EXPLAIN, _PIVOT) else None
    elif kind == duckdb.StatementType.EXPLAIN:
        raise SetupError("the query must begin with EXPLAIN, without a comment before it")
    if kind == _PIVOT and _is_subquery(sql):
        if _SUSPICIOUS.search(sql):
            raise SetupError(
                "a PIVOT with the words copy, query or serialized is refused: list its columns (ON … IN (…))"
            )
    elif kind != _SELECT or (_SUSPICIOUS.search(sql) and _writes(connection, sql)):
        raise SetupError("one SELECT is asked for: the archive is only read")


def _kind(sql: str) -> duckdb.StatementType | None:
    """None where it is not one statement."""
    statements = duckdb.extract_statements(sql)
    return statements[0].type if len(statements) == 1 else None


def _is_subquery(sql: str) -> bool:
    """Not COPY, or CREATE TABLE AS, of a PIVOT."""
    try:
        return _kind(f"SELECT * FROM (\n{sql.rstrip().rstrip(';')}\n)") == _PIVOT
    except duckdb.Error:
        return False


def _writes(connection: duckdb.DuckDBPyConnection, sql: str) -> bool:
    """Whether its plan has a step that writes, or one that hides what it does."""
    plans = connection.execute(f"EXPLAIN (FORMAT json) {sql}").fetchall()
    return any(_has_writer(json.loads(plan)) for _, plan in plans)


def _has_writer(steps: list[dict[str, Any]]) -> bool:
    return any(_WRITING.search(step["name"].upper()) or _has_writer(step["children"]) for step in steps)
