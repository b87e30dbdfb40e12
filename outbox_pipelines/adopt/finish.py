"""The last step of `outbox adopt`: the old table as a proven Parquet file; dropped on request.

Invariants:
- The table is dropped only if none of its rows is unpublished, and if file and rows were proven equal after
  the last change of a row: from then on, a trigger refuses changes.
- A refused drop leaves the table as it was: rows can be marked again.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from outbox_pipelines.adopt import facts as catalog
from outbox_pipelines.adopt import queries, steps
from outbox_pipelines.adopt.facts import Facts
from outbox_pipelines.adopt.statements import Ddl
from outbox_pipelines.archive import rows
from outbox_pipelines.archive.store import Store, open_store
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.parsers.table_mapping import Mapping
from outbox_pipelines.relay.marked_table import queries as marked
from outbox_pipelines.secret import first_line
from outbox_pipelines.settings import NO_ARCHIVE, Settings

if TYPE_CHECKING:
    from outbox_pipelines.adopt.steps import Say


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
        if not drop:
            if settings.archive == NO_ARCHIVE:
                raise SetupError(
                    "OUTBOX_ARCHIVE=none archives nothing: add --drop to drop the table without an archive"
                )
            return [_archived(connection, settings, found, state.file)]
        _require_published(connection, kept, found, settings)
        _run(connection, ddl.freeze(), found, seconds, say)
        try:
            # Marks of between the look and the freeze.
            _require_published(connection, kept, found, settings)
            done = []
            if settings.archive != NO_ARCHIVE:
                done.append(_archived(connection, settings, found, state.file))
            _run(connection, ddl.finish(), found, seconds, say, queries.FINISHED)
        except psycopg.errors.DependentObjectsStillExist as error:
            _run(connection, ddl.thaw(), found, seconds, say)
            needed = (error.diag.message_detail or first_line(error)).replace("\n", "; ")
            raise SetupError(f"{found} is not dropped ({needed}): drop what depends on it first") from None
        except Exception:
            if not connection.closed:
                _run(connection, ddl.thaw(), found, seconds, say)
            raise
        return [*done, f"{found} is dropped; {state} is a view of the append-only outbox"]


def _require_published(connection: Connection, kept: Mapping, found: Facts, settings: Settings) -> None:
    """Raise `NotReadyError` if a row is pending or a dead letter."""
    if steps.exists(connection, kept, settings, found):
        raise NotReadyError(f"{found} has pending rows: publish them with `outbox adopt drain`")
    if failed := steps.count(connection, kept, found, settings, marked.FAILURES):
        raise NotReadyError(
            f"{found} has {failed:,} dead letters, which are not published: publish them "
            "(docs/existing-tables.md) or delete them; then run the command again"
        )


def _run(
    connection: Connection, made: list[str], found: Facts, seconds: float, say: Say, then: str | None = None
) -> None:
    """Run statements in one transaction, as soon as they get their locks."""

    def attempt() -> str:
        connection.execute(queries.ONE_COMMAND)
        connection.execute(f"SET LOCAL lock_timeout = '{steps.LOCK_TIMEOUT}'")
        connection.execute(";\n".join(made).encode())
        if then is not None:
            connection.execute(then.encode())
        return ""

    steps.retry(connection, attempt, seconds, str(found), say)


def _archived(connection: Connection, settings: Settings, found: Facts, known: str | None) -> str:
    """Archive the table; return what was done."""
    file, (count, _) = _archive(connection, open_store(settings), found, known)
    with connection.transaction():
        connection.execute(queries.ARCHIVED, {"file": file})
    return f"{count:,} rows of {found} are in {file}, proven equal"


def _archive(connection: Connection, store: Store, found: Facts, known: str | None) -> tuple[str, rows.Sum]:
    """Return the file with the rows of the table, and their sum; the file is written if it is not known."""
    table = sql.Identifier(found.schema, found.name)
    columns = {name: column.type for name, column in found.columns.items()}
    of_table = rows.sum_of_rows(connection, columns, table)
    if known is not None and rows.sum_of_file(store, known, columns) == of_table:
        return known, of_table
    digest = hashlib.sha256(f"{of_table} {time.time_ns()}".encode()).hexdigest()[:16]
    name = f"_outbox/adopted/{found.schema}.{found.name}-{digest}.parquet"
    with store.workplace(datetime.now(UTC).date()) as directory:
        file = directory / "rows.parquet"
        rows.write(connection, columns, table, file)
        store.adopt(file, name)
    of_file = rows.sum_of_file(store, name, columns)
    if of_file != of_table or of_table != rows.sum_of_rows(connection, columns, table):
        raise NotReadyError(
            f"the rows of {found} and {name} differ ({of_table[0]:,} and {of_file[0] if of_file else 0:,} "
            "rows): they were changed in between. Run the command again"
        )
    return name, of_table
