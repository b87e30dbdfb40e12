"""Files of several versions as one table: which columns it has, and the SELECT of each file's part.

Invariants:
- A column that a file lacks is NULL. If a column's type has changed, it is the wider integer, or else text.
- Names that differ in case only are one column, as in DuckDB; pyarrow alone tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date
from functools import cached_property

import duckdb
import pyarrow as pa

from outbox_pipelines.days.archive.manifest import EVENT_DATE, SCHEMA, VERSION, Column, Manifest, schema_with
from outbox_pipelines.days.archive.rendering import literal, quoted

Layout = tuple[int, tuple[Column, ...]]
"""What determines the columns of a file: the version, and the columns added by users."""


def layout(manifest: Manifest) -> Layout:
    """Return the layout of a day's file."""
    return manifest.schema_version, manifest.columns


class Layouts:
    """The layouts of an archive.

    Args:
        manifests: of each day.
        read_schema: reads that of a day's file; called for one file of each former version.
    """

    def __init__(self, manifests: Mapping[date, Manifest], read_schema: Callable[[date], pa.Schema]) -> None:
        # A version never changes, so any file of it has all its columns.
        self._schemas: dict[Layout, pa.Schema] = {}
        for day, manifest in manifests.items():
            if manifest.schema_version == VERSION:
                self._schemas[layout(manifest)] = schema_with(manifest.columns)
            elif layout(manifest) not in self._schemas:
                self._schemas[layout(manifest)] = read_schema(day)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of all layouts, and `event_date`."""
        fields: dict[str, pa.Field] = {field.name: field.with_nullable(True) for field in SCHEMA}
        for _, schema in sorted(self._schemas.items(), key=lambda each: each[0][0]):
            for field in schema:
                known = fields.setdefault(field.name.casefold(), field.with_nullable(True))
                fields[field.name.casefold()] = pa.field(known.name, _common(known.type, field.type))
        return pa.schema([*fields.values(), pa.field(EVENT_DATE, pa.date32())])

    @cached_property
    def exact_schema(self) -> pa.Schema:
        """The same for pyarrow, which tells names in lower and upper case apart."""
        fields: dict[str, pa.Field] = {field.name: field for field in self.schema}
        for schema in self._schemas.values():
            for field in schema:
                known = fields.setdefault(field.name, field.with_nullable(True))
                fields[field.name] = pa.field(field.name, _common(known.type, field.type))
        return pa.schema([*fields.values()])

    @cached_property
    def _types(self) -> dict[str, str]:
        """DuckDB's type of each column."""
        with duckdb.connect() as connection:
            columns = connection.from_arrow(self.schema.empty_table())
            return dict(zip(columns.columns, map(str, columns.types), strict=True))

    def select(self, of: Layout, files: str) -> str:
        """Return a SELECT of all columns from these files of one layout, a list in DuckDB's SQL."""
        there = {field.name.casefold(): field.type for field in self._schemas[of]}
        columns = []
        for field in self.schema:
            name, type = quoted(field.name), self._types[field.name]
            stored_type = there.get(field.name.casefold())
            if field.name == EVENT_DATE or stored_type == field.type:
                columns.append(name)
            else:
                columns.append(f"CAST({name if stored_type is not None else 'NULL'} AS {type}) AS {name}")
        return (
            f"SELECT {', '.join(columns)} FROM read_parquet([{files}], "
            f"hive_partitioning = true, hive_types = {{'{EVENT_DATE}': 'DATE'}})"
        )

    def refusal(self, day: date, why: str) -> str:
        """Return a SELECT that fails if a query needs this day."""
        # Of a row, so that it is not evaluated before the filters of the query have excluded the day.
        said = f"error({literal(why)} || left(row::VARCHAR, 0))::VARCHAR"
        columns = [
            f"DATE '{day}' AS {EVENT_DATE}"
            if field.name == EVENT_DATE
            else f"CAST({said} AS {self._types[field.name]}) AS {quoted(field.name)}"
            for field in self.schema
        ]
        return f"SELECT {', '.join(columns)} FROM range(1) AS rows (row)"


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type of a column whose type has changed."""
    if one == other:
        return one
    if pa.types.is_integer(one) and pa.types.is_integer(other):
        return max(one, other, key=lambda type_: type_.bit_width)
    return pa.string()
