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

import psycopg
from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.days.archive import rows
from outbox_pipelines.days.archive.store import Store, open_store
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.existing import existing_sql as marked
from outbox_pipelines.existing.adopt import facts as catalog
from outbox_pipelines.existing.adopt import queries, renaming, steps
from outbox_pipelines.existing.adopt import slot as slots
from outbox_pipelines.existing.adopt import table as existing
from outbox_pipelines.existing.adopt.facts import Facts
from outbox_pipelines.existing.adopt.renaming import Say
from outbox_pipelines.existing.adopt.state import State
from outbox_pipelines.existing.adopt.state import read as read_state
from outbox_pipelines.existing.adopt.statements import Change, Ddl
from outbox_pipelines.settings import NO_ARCHIVE, Settings


def finish(settings: Settings, *, drop: bool, seconds: float, say: Say) -> list[str]:
    """Archive the old table, prove it, and drop it if asked to; return what was done.

    Raises:
        SetupError: there is no archive; the table is not adopted.
        NotReadyError: rows are unpublished; file and rows differ.
    """
    mapping = existing.mapping_of(settings)
    with existing.session(settings) as connection:
        state = existing.require_state(connection, mapping, settings)
        if state.state == "finished":
            return [f"{state} was dropped already; its rows are in {state.file or 'no archive'}"]
        existing.require(state, "adopted")
        found = catalog.read(connection, state.relation)
        ddl = Ddl(found, mapping, settings.db_schema, state.name)
        kept = replace(mapping, table=state.kept_as)
        if not drop:
            if settings.archive == NO_ARCHIVE:
                raise SetupError(
                    "OUTBOX_ARCHIVE=none archives nothing: add --drop to drop the table without an archive"
                )
            return [_archived(connection, settings, found, state.file)]
        if state.slot is None:
            _require_published(connection, kept, found, settings)
        view = catalog.find(connection, state.schema, state.name)

        def run(change: Change, then: str = "SELECT 1") -> None:
            _run(connection, change, then, state, [oid for oid in (found.oid, view) if oid], seconds, say)

        run(ddl.freeze())
        try:
            # Marks of between the look and the freeze.
            if state.slot is None:
                _require_published(connection, kept, found, settings)
            done = []
            if settings.archive != NO_ARCHIVE:
                done.append(_archived(connection, settings, found, state.file))
            if existing.has_keys(mapping):
                # Again, because `drain` may have been killed before.
                steps.copy_keys(connection, mapping, found)
            if state.slot is not None:
                done += slots.drop(connection, state, found, settings.db_schema)
            # Two transactions: to drop a table with many partitions takes longer than writers may wait.
            run(ddl.leave())
            try:
                run(ddl.drop(), queries.FINISHED)
            except Exception:
                if not connection.closed:
                    run(ddl.join())
                raise
        except Exception as error:
            if not connection.closed:
                run(ddl.thaw())
            if not isinstance(error, psycopg.errors.DependentObjectsStillExist):
                raise
            needed = (error.diag.message_detail or first_line(error)).replace("\n", "; ")
            raise SetupError(f"{found} is not dropped ({needed}): drop what depends on it first") from None
        return [*done, f"{found} is dropped; {state} is a view of the append-only outbox"]


def _require_published(connection: Connection, kept: Mapping, found: Facts, settings: Settings) -> None:
    """Raise `NotReadyError` if a row is pending or a dead letter."""
    if existing.exists(connection, kept, settings, found):
        raise NotReadyError(f"{found} has pending rows: publish them with `outbox adopt drain`")
    if failed := existing.count(connection, kept, found, settings, marked.FAILURES):
        raise NotReadyError(
            f"{found} has {failed:,} dead letters, which are not published: publish them "
            "(docs/existing-tables.md) or delete them; then run the command again"
        )


def _run(
    connection: Connection, change: Change, then: str, state: State, held: list[int], seconds: float, say: Say
) -> None:
    def is_adopted() -> bool:
        now = read_state(connection)
        if now is None or now.state != "adopted":
            raise NotReadyError(f"another command has changed {state} in between: run the command again")
        return True

    renaming.change_names(
        connection, is_adopted, change, sql.SQL(then), seconds=seconds, what=str(state), held=held, say=say
    )


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
