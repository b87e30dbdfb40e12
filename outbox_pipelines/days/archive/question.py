"""What a query of the archive, or a condition on its columns, may do and see.

Invariants:
- DuckDB's lock-down allows a query to open the archive's files, and an allowed file can also be written: a
  statement that could write is rejected before it runs.
- A query has a view for each documented event type.
- SQL that a query builds from text (`query`, `json_execute_serialized_sql`) is checked by its plan.
- A member of a payload is a column of the type that its JSON Schema names, nested ones in structs and lists;
  a value that is not of that type is NULL there, and stays in `payload`.
- A condition is one expression that selects the same events whenever it is evaluated. It can read the files
  that it is given, and nothing else: no other file, no extension, no other table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import duckdb
import pyarrow as pa

from outbox_pipelines.catalog.document import Catalog
from outbox_pipelines.catalog.schemas import followed
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.days.archive.rendering import literal, quoted
from outbox_pipelines.errors import SetupError, UnavailableError

_SELECT: Final = duckdb.StatementType.SELECT
# A PIVOT whose columns are not listed: its values are looked up first.
_PIVOT: Final = duckdb.StatementType.MULTI
_EXPLAIN: Final = re.compile(
    r"\s*EXPLAIN\s+(?:ANALYZE\s+)?(?:\(\s*(?:ANALYZE|FORMAT)\b[^()]*\)\s*)?", re.IGNORECASE
)
# Whatever writes, or executes text as SQL, has one of these words in its name. Names have no escapes.
_SUSPICIOUS: Final = re.compile("copy|query|serialized", re.IGNORECASE)
_WRITING: Final = re.compile("COPY|SERIALIZED")
_OF_FILE: Final = re.compile(r"event_date=(\d{4}-\d\d-\d\d)/events-")
_DEEPEST: Final = 5
_TEXTS: Final = {"date-time": "TIMESTAMPTZ", "date": "DATE", "uuid": "UUID"}
_OTHERS: Final = {"integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN"}


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


@contextmanager
def refusing() -> Iterator[None]:
    """Convert an error of reading the archive into that of `refusal`."""
    try:
        yield
    # What DuckDB finds while rows are read is an error of pyarrow.
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise refusal(error) from None


def refusal(error: Exception) -> SetupError:
    """Return an error of a query for an operator; `UnavailableError` if the bucket does not answer."""
    # DuckDB wraps an error that its file reader raises, with a stack trace.
    if unavailable := re.search(r"^UnavailableError: (.*)$", str(error), re.MULTILINE):
        return UnavailableError(unavailable[1])
    # As a function of Python's raises it.
    if of_keys := re.search(r"KeyStoreError: (.*)", str(error)):
        return UnavailableError(of_keys[1])
    # The text from LINE on shows the position in the query or a suggested name; it is not printed.
    text = str(error).split("\n\nLINE")[0]
    said = " ".join(line.strip() for line in text.splitlines() if line.strip())
    if of_file := _OF_FILE.search(text):
        return SetupError(
            f"the file of {of_file[1]} cannot be read: run `outbox archive verify {of_file[1]}`: {said}"
        )
    if "Function with name decrypted does not exist" in said:
        return SetupError("there is no function decrypted: set OUTBOX_KEYS_DSN and a master key")
    # What the decompression and the parts of a file raise names no file.
    damaged = duckdb.IOException | duckdb.SerializationException | pa.ArrowException | OSError
    if isinstance(error, damaged) or type(error) is duckdb.Error:
        return SetupError(
            "a file of the archive cannot be read: run `outbox archive verify DAY` for each day that the "
            f"query reads: {said}"
        )
    return SetupError(f"the query failed: {said}")


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


def of_catalog(catalog: Catalog, columns: Iterable[str], *, decrypts: bool) -> Iterator[str]:
    """Yield a CREATE VIEW for each event type with members, and for each earlier version of one.

    The view of a type has all of its events, that of an earlier version, ``order.placed@1``, only its own.

    Args:
        columns: those of `events`; a member with such a name gets the suffix `_`.
        decrypts: whether there is a function `decrypted`, for types that have protected members.
    """
    views, known = {"events", "latest"}, {name.casefold() for name in columns}
    for view, event_type, documented in catalog.each_version():
        structure = _structure(documented.payload or {}, documented.payload or {}, 0)
        if not isinstance(structure, dict):
            continue
        taken = {*known}
        members = [f"__members.{quoted(name)} AS {quoted(_free(name, taken))}" for name in structure]
        form, name = json.dumps(structure).replace("'", "''"), event_type.replace("'", "''")
        of_version = "" if view == event_type else f" AND version = {documented.version:d}"
        payload = "decrypted(payload)" if decrypts and documented.protected else "payload"
        yield (
            f"CREATE VIEW {quoted(_free(view, views))} AS "
            f"SELECT * EXCLUDE (__members), {', '.join(members)} FROM ("
            f"SELECT *, json_transform({payload}, '{form}') AS __members "
            f"FROM events WHERE event_type = '{name}'{of_version})"
        )


def _free(name: str, taken: set[str]) -> str:
    """Return the name with as many `_` as make it a new one: DuckDB's names are case-insensitive."""
    while name.casefold() in taken:
        name += "_"
    taken.add(name.casefold())
    return name


def _structure(root: dict[str, Any], schema: Any, depth: int) -> Any:
    """Return the types of a value in the form that json_transform takes."""
    schema = followed(root, schema)
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return "JSON"
    kind = schema.get("type", "object" if "properties" in schema else None)
    if isinstance(kind, list):
        (kind, *others) = [each for each in kind if each != "null"] or [None]
        if others:
            return "JSON"
    if kind == "object" and (members := schema.get("properties")):
        # A struct cannot tell them apart.
        if len({name.casefold() for name in members}) < len(members):
            return "JSON"
        return {name: _structure(root, member, depth + 1) for name, member in members.items()}
    if kind == "array" and isinstance(schema.get("items"), dict):
        return [_structure(root, schema["items"], depth + 1)]
    if kind == "string" or (kind is None and all(isinstance(each, str) for each in schema.get("enum", [0]))):
        return _TEXTS.get(schema.get("format", ""), "VARCHAR")
    return _OTHERS.get(str(kind), "JSON")


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


def require_condition(where: str) -> None:
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


def rejected_condition(error: Exception) -> SetupError:
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
        for child in node:
            yield from _names(child)
    elif isinstance(node, dict):
        name = str(node.get("function_name", "")).casefold()
        # Of one time: up to today.
        arguments = node.get("arguments") or node.get("children") or ()
        yield "current_date" if name == "age" and len(arguments) == 1 else name
        if node.get("type") == "COLUMN_REF":
            yield node["column_names"][-1].casefold()
        for child in node.values():
            yield from _names(child)
