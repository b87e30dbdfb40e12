"""Accept only queries of the archive that read.

Invariants:
- DuckDB's lock-down allows a query to open the archive's files, and an allowed file can also be written: a
  statement that could write is rejected before it runs.
- SQL that a query builds from text (`query`, `json_execute_serialized_sql`) is checked by its plan.
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
# Whatever writes, or executes text as SQL, has one of these words in its name. Names have no escapes.
_SUSPICIOUS: Final = re.compile("copy|query|serialized", re.IGNORECASE)
_WRITING: Final = re.compile("COPY|SERIALIZED")


def require(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise `SetupError` unless this is one SELECT or PIVOT, or EXPLAIN of one.

    Raises:
        duckdb.Error: it is not valid SQL.
    """
    kind = _kind(sql)
    if prefix := _EXPLAIN.match(sql):
        sql = sql[prefix.end() :]
        # EXPLAIN of a PIVOT has the type of the PIVOT.
        kind = _kind(sql) if kind in (duckdb.StatementType.EXPLAIN, _PIVOT) else None
    elif kind == duckdb.StatementType.EXPLAIN:
        raise SetupError("the query must begin with EXPLAIN, without a comment before it")
    if kind == _PIVOT and _is_subquery(sql):
        if _SUSPICIOUS.search(sql):
            raise SetupError(
                "a PIVOT with the words copy, query or serialized is rejected: list its columns (ON … IN (…))"
            )
    elif kind != _SELECT or (_SUSPICIOUS.search(sql) and _writes(connection, sql)):
        raise SetupError("only a single SELECT is allowed: the archive is read-only")


def _kind(sql: str) -> duckdb.StatementType | None:
    """Return the type of the statement; None unless it is exactly one statement."""
    statements = duckdb.extract_statements(sql)
    return statements[0].type if len(statements) == 1 else None


def _is_subquery(sql: str) -> bool:
    """Return whether this is a plain PIVOT, not COPY or CREATE TABLE AS of one."""
    try:
        return _kind(f"SELECT * FROM (\n{sql.rstrip().rstrip(';')}\n)") == _PIVOT
    except duckdb.Error:
        return False


def _writes(connection: duckdb.DuckDBPyConnection, sql: str) -> bool:
    """Return whether its plan has a step that writes, or one that hides what it does."""
    plans = connection.execute(f"EXPLAIN (FORMAT json) {sql}").fetchall()
    return any(_has_writer(json.loads(plan)) for _, plan in plans)


def _has_writer(steps: list[dict[str, Any]]) -> bool:
    return any(_WRITING.search(step["name"].upper()) or _has_writer(step["children"]) for step in steps)
