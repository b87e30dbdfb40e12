"""A condition in DuckDB's SQL on the columns of the archive, as an operator writes it.

Invariants:
- It is one expression that selects the same events whenever it is evaluated.
- It can read the files that it is given, and nothing else: no other file, no extension, no other table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import duckdb

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.days.archive.question import refusal
from outbox_pipelines.days.archive.rendering import literal
from outbox_pipelines.errors import SetupError

# DuckDB knows this of functions, but not of its macros, and not of names without parentheses.
_UNSTABLE: Final = """
SELECT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT'
UNION SELECT unnest(['ago', 'current_localtime', 'current_localtimestamp', 'current_time',
                     'current_timestamp', 'localtime', 'localtimestamp', 'pg_conf_load_time',
                     'pg_postmaster_start_time'])"""
_CONFIG: Final[dict[str, Any]] = {
    # Each thread keeps a row group.
    "threads": 1,
    "memory_limit": "160MB",
    "preserve_insertion_order": False,
    "python_enable_replacements": False,
    "autoload_known_extensions": False,
    "autoinstall_known_extensions": False,
}


def require(where: str) -> None:
    """Raise `SetupError` unless this is a condition that can be asked again."""
    try:
        duckdb.SQLExpression(where)
    except duckdb.Error as error:
        raise SetupError(
            f"--where is not a condition in SQL ({first_line(error)}): write for example "
            "\"payload->>'total' = '5'\""
        ) from None
    if found := _unstable(where):
        raise SetupError(
            f"--where has {found}, whose value changes: repeated, it would select other events. Write a "
            "value, such as TIMESTAMPTZ '2026-11-21 08:30Z'"
        )


def rejected(error: Exception) -> SetupError:
    """Return the error of a condition that DuckDB does not evaluate, or of events that it does not read."""
    if not isinstance(error, duckdb.Error):
        return SetupError(f"the selected events cannot be read: {first_line(error)}. Check --where")
    return SetupError(str(refusal(error)).replace("the query failed", "--where cannot be evaluated"))


@contextmanager
def locked(files: Sequence[str], folder: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a DuckDB that can read these files and nothing else.

    Args:
        folder: where it may spill rows to disk.
    """
    with duckdb.connect(config={**_CONFIG, "temp_directory": folder}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"SET allowed_paths = [{', '.join(map(literal, files))}]")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        yield connection


def _unstable(where: str) -> str:
    """Return a function in a condition that gives another value at another time; empty if there is none."""
    with duckdb.connect() as connection:
        unstable = {name for (name,) in connection.execute(_UNSTABLE).fetchall()}
        ((parsed,),) = connection.execute("SELECT json_serialize_sql(?)", [f"SELECT {where}\n"]).fetchall()
    return next((name for name in _names(json.loads(parsed)) if name in unstable), "")


def _names(node: Any) -> Iterator[str]:
    """Yield the functions and columns of a statement as DuckDB gives it."""
    if isinstance(node, list):
        for each in node:
            yield from _names(each)
    elif isinstance(node, dict):
        name = str(node.get("function_name", "")).casefold()
        # Of one time: up to today.
        arguments = node.get("arguments") or node.get("children") or ()
        yield "current_date" if name == "age" and len(arguments) == 1 else name
        if node.get("type") == "COLUMN_REF":
            yield node["column_names"][-1].casefold()
        for each in node.values():
            yield from _names(each)
