"""The last step of `outbox adopt`: the old table as a proven Parquet file; dropped on request.

Invariants:
- The table is dropped only if none of its rows is unpublished, and if file and rows were proven equal after
  the last change of a row: from then on, a trigger refuses changes.
- The two sides of the proof are computed by different engines from different bytes, as for days: PostgreSQL
  from the table, DuckDB from the file in the archive.
- Every value is stored as PostgreSQL prints it: the file needs none of the types of the table.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, LiteralString

from psycopg import sql

from outbox_pipelines.adopt import facts as catalog
from outbox_pipelines.adopt import queries, steps
from outbox_pipelines.adopt.facts import Facts
from outbox_pipelines.adopt.statements import Ddl
from outbox_pipelines.archive.store import Store, open_store
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.relay.marked_table import queries as marked
from outbox_pipelines.settings import NO_ARCHIVE, Settings

if TYPE_CHECKING:
    from outbox_pipelines.adopt.steps import Say

_BATCH_ROWS: Final = 5_000
# With the length of each text: a separator in one text cannot shift into the next. NULL differs from ''.
_TEXT: Final[LiteralString] = "coalesce(length({name}::text) || '=' || {name}::text, '')"
_SUM: Final[LiteralString] = """
SELECT count(*), coalesce(sum(('x' || encode(substring(sha256(convert_to(concat_ws(chr(31), {texts}), 'UTF8'))
                                             FOR 7), 'hex'))::bit(56)::bigint), 0)
FROM {table}"""
_FILE_SUM: Final = """
SELECT count(*), coalesce(sum(('0x' || substr(sha256(concat_ws(chr(31), {texts})), 1, 14))::BIGINT), 0)
FROM read_parquet($file)"""

Sum = tuple[int, int]


def finish(settings: Settings, *, drop: bool, seconds: float, say: Say) -> list[str]:
    """Archive the old table, prove it, and drop it if asked to; return what was done.

    Raises:
        SetupError: there is no archive; the table is not adopted.
        NotReadyError: rows are unpublished; file and rows differ.
    """
    mapping = steps.mapping_of(settings)
    with steps.session(settings) as connection:
        state = steps.require_state(connection, mapping)
        if state.state == "finished":
            return [f"{state} was dropped already; its rows are in {state.file or 'no archive'}"]
        steps.require(state, "adopted")
        found = catalog.read(connection, state.relation)
        ddl = Ddl(found, mapping, settings.db_schema, state.name)
        kept = replace(mapping, table=state.kept_as)
        if drop:
            _freeze(connection, ddl, found, seconds, say)
            if steps.exists(connection, kept, settings, found):
                raise NotReadyError(
                    f"{found} has pending rows: publish them with `outbox relay --until-empty`"
                )
            if failed := steps.count(connection, kept, found, settings, marked.FAILURES):
                raise NotReadyError(
                    f"{found} has {failed:,} dead letters, which are not published: publish them "
                    "(docs/existing-tables.md) or delete them; then run the command again"
                )
        done = []
        if settings.archive != NO_ARCHIVE:
            file, (rows, _) = _archive(connection, open_store(settings), found, state.file)
            with connection.transaction():
                connection.execute(queries.ARCHIVED, {"file": file})
            done.append(f"{rows:,} rows of {found} are in {file}, proven equal")
        elif not drop:
            raise SetupError(
                "OUTBOX_ARCHIVE=none archives nothing: add --drop to drop the table without an archive"
            )
        if drop:

            def attempt() -> str:
                connection.execute(queries.ONE_COMMAND)
                connection.execute(f"SET LOCAL lock_timeout = '{steps.LOCK_TIMEOUT}'")
                connection.execute(";\n".join(ddl.finish()).encode())
                connection.execute(queries.FINISHED)
                return "finished"

            steps.retry(connection, attempt, seconds, str(found), say)
            done.append(f"{found} is dropped; {state} is a view of the append-only outbox")
        return done


def _freeze(connection: Connection, ddl: Ddl, found: Facts, seconds: float, say: Say) -> None:
    """Refuse changes of the rows from now on; the way back removes this."""

    def attempt() -> str:
        connection.execute(f"SET LOCAL lock_timeout = '{steps.LOCK_TIMEOUT}'")
        connection.execute(";\n".join(ddl.freeze()).encode())
        return ""

    steps.retry(connection, attempt, seconds, str(found), say)


def _archive(connection: Connection, store: Store, found: Facts, known: str | None) -> tuple[str, Sum]:
    """Return the file with the rows of the table, and their sum; the file is written if it is not known."""
    of_table = _sum_of_table(connection, found)
    if known is not None and _sum_of_file(store, known, found) == of_table:
        return known, of_table
    digest = hashlib.sha256(f"{of_table} {time.time_ns()}".encode()).hexdigest()[:16]
    name = f"_outbox/adopted/{found.schema}.{found.name}-{digest}.parquet"
    with store.workplace(datetime.now(UTC).date()) as directory:
        file = directory / "rows.parquet"
        _write(connection, found, file)
        store.adopt(file, name)
    of_file = _sum_of_file(store, name, found)
    if of_file != of_table or of_table != _sum_of_table(connection, found):
        raise NotReadyError(
            f"the rows of {found} and {name} differ ({of_table[0]:,} and {of_file[0] if of_file else 0:,} "
            "rows): they were changed in between. Run the command again"
        )
    return name, of_table


def _write(connection: Connection, found: Facts, file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(found.columns)
    types = {name: column.type for name, column in found.columns.items()}
    schema = pa.schema([pa.field(name, pa.string()) for name in names], metadata={"types": repr(types)})
    columns = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in names)
    query = sql.SQL("SELECT {} FROM {}").format(columns, sql.Identifier(found.schema, found.name))
    writer = pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True)
    try:
        with connection.transaction(), connection.cursor("adopted") as cursor:
            cursor.itersize = _BATCH_ROWS
            cursor.execute(query)
            while rows := cursor.fetchmany(_BATCH_ROWS):
                writer.write_batch(_batch(rows, schema))
    except BaseException:
        # A closed writer has written a footer: an incomplete file would be valid.
        writer.close()
        file.unlink()
        raise
    writer.close()


def _batch(rows: Sequence[tuple[Any, ...]], schema: Any) -> Any:
    import pyarrow as pa

    columns = [pa.array(values, pa.string()) for values in zip(*rows, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _sum_of_table(connection: Connection, found: Facts) -> Sum:
    texts = [sql.SQL(_TEXT).format(name=sql.Identifier(name)) for name in found.columns]
    table = sql.Identifier(found.schema, found.name)
    row = connection.execute(sql.SQL(_SUM).format(texts=sql.SQL(", ").join(texts), table=table)).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])


def _sum_of_file(store: Store, name: str, found: Facts) -> Sum | None:
    """Return the sum of a file's rows; None if it does not exist or cannot be read."""
    import duckdb

    quoted = ['"' + column.replace('"', '""') + '"' for column in found.columns]
    query = _FILE_SUM.replace("{texts}", ", ".join(_TEXT.replace("{name}", column) for column in quoted))
    try:
        with store.local(name) as file, duckdb.connect() as connection:
            connection.execute("SET enable_progress_bar = false; SET threads = 2")
            row = connection.execute(query, {"file": str(file)}).fetchone()
    except (FileNotFoundError, duckdb.Error):
        return None
    assert row is not None
    return int(row[0]), int(row[1])
