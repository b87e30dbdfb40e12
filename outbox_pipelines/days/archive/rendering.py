"""Values of a query as text: for the table, CSV and JSON, and for Parquet where it has no exact type.

Invariants:
- A value is printed as PostgreSQL prints it, with ISO 8601 intervals and hexadecimal bytes; offsets of times
  have minutes (+00:00).
- It imports nothing heavy: the command line does.
- What Python's types cannot hold is text before Python sees it: months of intervals, infinite times, times
  of other millennia or with nanoseconds, the digits of a REAL. In lists, structs and maps, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outbox_pipelines.core.files import replacing
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.text import to_json
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    import duckdb

Scalar = Callable[[str, str], str | None]
"""Gives the expression for a value of a type by its name; None if it needs none."""

ROWS_AT_ONCE: Final = 10_000
_TIMES: Final = frozenset(
    {
        *("date", "time", "time_ns", "time with time zone"),
        *("timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns"),
        *("timestamp with time zone", "timestamptz_ns"),
    }
)
# What a Parquet file holds exactly. Of other types, Arrow writes other values (an unsigned 128-bit integer,
# an offset of a time) or the bytes of DuckDB's memory, or refuses them (intervals, unions).
_EXACT: Final = frozenset(
    {
        *("boolean", "tinyint", "smallint", "integer", "bigint", "hugeint", "utinyint", "usmallint"),
        *("uinteger", "ubigint", "float", "double", "decimal", "varchar", "blob", "uuid", "enum", "null"),
        *("date", "time", "time_ns", "timestamp", "timestamp_ns", "timestamp with time zone"),
    }
)
# The offset has hours alone, unless it has minutes; PostgreSQL prints the era at the end.
_TIME: Final = (
    "regexp_replace(regexp_replace({x}::VARCHAR, '(:[0-9.]+[+-][0-9][0-9])$', '\\1:00'), "
    "'^(.*) [(]BC[)](.*)$', '\\1\\2 BC')"
)
_NESTED: Final = ("list", "array", "struct", "tuple", "map", "union")
_PARTS: Final = (("year", "Y"), ("month", "M"), ("day", "D")), (("hour", "H"), ("minute", "M"))
# datepart(microsecond) has the seconds, too.
_SECONDS: Final = (
    "CASE WHEN datepart('microsecond', {x}) = 0 THEN '' "
    "ELSE CASE WHEN datepart('microsecond', {x}) < 0 THEN '-' ELSE '' END "
    "|| rtrim(rtrim(printf('%d.%06d', abs(datepart('microsecond', {x})) // 1000000, "
    "abs(datepart('microsecond', {x})) % 1000000), '0'), '.') || 'S' END"
)


def rendered(asked: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """Return the rows with every value as Python can hold it, under distinct names."""
    return _project(asked, _for_python)


def storable(asked: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """Return the rows with every value as a Parquet file can hold it, under distinct names."""
    return _project(asked, _for_parquet)


def write_parquet(asked: duckdb.DuckDBPyRelation, file: Path) -> None:
    """Write a result to a Parquet file, which gets its name only when it is complete."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with replacing(file) as begun:
            # DuckDB's own writer is not used: it hangs if a query fails half-way.
            rows = storable(asked).to_arrow_reader(ROWS_AT_ONCE)
            with pq.ParquetWriter(begun, rows.schema, compression="zstd") as writer:
                for batch in rows:
                    writer.write_batch(batch)
    except pa.ArrowException as error:
        raise SetupError(f"{file} cannot be written: {first_line(error)}") from None


def _project(asked: duckdb.DuckDBPyRelation, scalar: Scalar) -> duckdb.DuckDBPyRelation:
    # Of two columns of one name, the second is called name_1.
    named = asked.project("*")
    parts = [
        f"{_expression(quoted(name), kind, scalar)} AS {quoted(name)}"
        for name, kind in zip(named.columns, named.types, strict=True)
    ]
    return named.project(", ".join(parts))


def quoted(name: str) -> str:
    """Return a quoted name for DuckDB's SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text as a literal of DuckDB's SQL."""
    return "'" + text.replace("'", "''") + "'"


def text_of(value: object) -> str:
    """Return a value as CSV and the table print it; lists and structs are printed as JSON."""
    if isinstance(value, dict | list | tuple):
        return json_of(value)
    return value if isinstance(value, str) else _scalar(value)


def json_of(value: object) -> str:
    """Return JSON with every digit of a decimal; NaN and infinities become strings.

    Characters that control a terminal are escapes, which JSON has for every character.
    """
    if isinstance(value, dict):
        members = (f"{to_json(text_of(name))}: {json_of(member)}" for name, member in value.items())
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(json_of, value)) + "]"
    is_number = isinstance(value, int) or (isinstance(value, float | Decimal) and math.isfinite(value))
    if value is None or isinstance(value, bool | str):
        return to_json(value)
    return _scalar(value) if is_number else to_json(_scalar(value))


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # From PostgreSQL, not from a query of the archive.
    if isinstance(value, datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal) and value.is_finite():
        return format(value, "f")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes | bytearray | memoryview):
        return "\\x" + bytes(value).hex()
    return str(value)


def _for_python(x: str, name: str) -> str | None:
    if name in _TIMES:
        return _TIME.format(x=x)
    if name == "interval":
        return _interval(x)
    return f"{x}::VARCHAR::DOUBLE" if name == "float" else None


def _for_parquet(x: str, name: str) -> str | None:
    if name in _EXACT:
        return None
    # In seconds and milliseconds, infinity has no place.
    if name in ("timestamp_s", "timestamp_ms"):
        return f"{x}::TIMESTAMP"
    return _for_python(x, name) or f"{x}::VARCHAR"


def _expression(x: str, kind: Any, scalar: Scalar) -> str:
    """Return what makes a value of this type one that Python, or a Parquet file, can hold."""
    if not _is_lossy(kind, scalar):
        return x
    name = str(kind.id)
    if name not in _NESTED:
        return scalar(x, name) or x
    parts: list[tuple[str, Any]] = kind.children
    if name in ("list", "array"):
        each = _expression("e", parts[0][1], scalar)
        return f"list_transform({x}::{parts[0][1]}[], lambda e: {each})"
    if name == "struct":
        members = (
            f"{quoted(member)} := {_expression(f'({x}).{quoted(member)}', each, scalar)}"
            for member, each in parts
        )
        return f"CASE WHEN {x} IS NOT NULL THEN struct_pack({', '.join(members)}) END"
    if name == "tuple":
        members = (
            _expression(f"struct_extract_at({x}, {number})", each, scalar)
            for number, (_, each) in enumerate(parts, 1)
        )
        return f"CASE WHEN {x} IS NOT NULL THEN row({', '.join(members)}) END"
    if name == "map":
        keys, values = (
            f"list_transform(map_{part}({x}), lambda e: {_expression('e', each, scalar)})"
            for part, (_, each) in zip(("keys", "values"), parts, strict=True)
        )
        return f"CASE WHEN {x} IS NOT NULL THEN map({keys}, {values}) END"
    return f"{x}::VARCHAR"


def _is_lossy(kind: Any, scalar: Scalar) -> bool:
    name = str(kind.id)
    if name not in _NESTED:
        return scalar("", name) is not None
    if name == "union" and scalar is _for_parquet:
        return True
    return any(_is_lossy(each, scalar) for each in _types(kind))


def _types(kind: Any) -> Iterable[Any]:
    # An array has its size, too.
    return [each for name, each in kind.children if name != "size"]


def _interval(x: str) -> str:
    days, hours = (
        " || ".join(f"coalesce(nullif(datepart('{part}', {x}), 0) || '{unit}', '')" for part, unit in parts)
        for parts in _PARTS
    )
    times = f"{hours} || {_SECONDS.format(x=x)}"
    # All parts, since two intervals of other parts can be equal: 30 days and 1 month.
    return (
        f"CASE WHEN {x} IS NULL THEN NULL WHEN ({days} || {times}) = '' THEN 'PT0S' "
        f"ELSE 'P' || {days} || CASE WHEN ({times}) = '' THEN '' ELSE 'T' || {times} END END"
    )
