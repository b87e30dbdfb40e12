"""The steps of `outbox adopt` after the plan: prepare, switch, drain, back, finish.

Invariants:
- Each step can be repeated: it reads from the database what is done, and does the rest. A step that is
  killed leaves a state from which it continues.
- A change of names is one transaction: see `renaming`.
- On the way back, the reader of a slot cannot start before the end: see `slot`.
- Events of an aggregate keep their order: the relay of one side continues only after the other side has
  nothing left. The database enforces it: see `relay.adoption`.
- The table is dropped only if none of its rows is unpublished, and if file and rows were proven equal after
  the last change of a row: from then on, a trigger refuses changes. A refused drop leaves the table as it
  was: rows can be marked again.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import psycopg
from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.text import counted
from outbox_pipelines.database import Connection, schema, slot_reader
from outbox_pipelines.days.archive import rows
from outbox_pipelines.days.archive.store import Store, open_store
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.existing import existing_sql as marked
from outbox_pipelines.existing.adopt import (
    adopt_sql,
    adopted_table,
    planning,
    renaming,
)
from outbox_pipelines.existing.adopt import slot as slots
from outbox_pipelines.existing.adopt.adopted_table import Facts, State, read_state
from outbox_pipelines.existing.adopt.ddl import Ddl, TableChange, kept_name
from outbox_pipelines.existing.adopt.drain import (
    Rest,
    Table,
    drain_marks,
    drain_slot,
    has_rows_to_drain,
    publish_due,
)
from outbox_pipelines.existing.adopt.renaming import Say
from outbox_pipelines.settings import NO_ARCHIVE, DaySettings, ProcessSettings, RelaySettings


@dataclass(frozen=True, slots=True)
class Switched:
    """The result of a change of names."""

    changed: bool
    """Whether this call has completed the step, and not an earlier one."""
    attempts: int
    state: str


def prepare(settings: DaySettings) -> list[str]:
    """Create the append-only outbox beside the table; return what was done, a line each.

    Raises:
        SetupError: the table cannot be adopted.
    """
    mapping = adopted_table.mapping_of(settings)
    with adopted_table.session(settings) as connection:
        found, state = adopted_table.find_adopted(connection, mapping, settings)
        if state is not None and state.state != "finished":
            return []
        adopted_table.require_relayable(connection, mapping, found)
        planning.refuse(planning.judge(connection, found, mapping, settings))
    applied = schema.migrate(settings)
    with adopted_table.session(settings) as connection, connection.transaction():
        connection.execute(adopt_sql.ONE_COMMAND)
        state = read_state(connection)
        if state is not None and state.state != "finished":
            return []
        connection.execute(adopt_sql.FORGET_FINISHED)
        names = {"schema": found.schema, "name": found.name, "kept_as": kept_name(found.name)}
        connection.execute(adopt_sql.PREPARED, {"oid": found.oid, **names})
    made = [f"applied {', '.join(applied)} in schema {settings.db_schema}"] if applied else []
    return [*made, f"{found} can be switched"]


def switch(settings: RelaySettings, accepted: list[str], *, seconds: float, say: Say) -> Switched:
    """Give the table's name to a view over the append-only outbox.

    Args:
        accepted: the names of the consequences that the operator accepts.
        seconds: stop after this time and change nothing.

    Raises:
        SetupError: it was not prepared, the table cannot be adopted, or a consequence is not accepted.
        NotReadyError: a relay owns the table or a shard; transactions held the table all the time.
    """
    mapping = adopted_table.mapping_of(settings)
    with adopted_table.session(settings) as connection:
        state = adopted_table.require_state(connection, mapping, settings)
        if state.state in ("draining", "adopted"):
            return Switched(False, 0, state.state)
        adopted_table.require(state, "prepared")
        found = adopted_table.read_facts(connection, state.relation)
        if not found.is_owner:
            raise SetupError(found.not_the_owner)
        adopted_table.require_relayable(connection, mapping, found)
        judged = planning.judge(connection, found, mapping, settings)
        planning.refuse(judged)
        planning.require_accepted(judged, accepted)
        if adopted_table.find_relation(connection, found.schema, state.kept_as) is not None:
            raise SetupError(
                f"{found.schema}.{state.kept_as} exists, the name that the table would get: rename it"
            )
        ddl = Ddl(found, mapping, settings.db_schema, state.name)

        def begin() -> bool:
            now = read_state(connection)
            if now is None or now.state != "prepared":
                return False
            renaming.stop_relays(connection, settings, found)
            connection.execute(adopt_sql.PATIENT)
            connection.execute(ddl.hold().encode())
            if adopted_table.read_facts(connection, found.oid).shape != found.shape:
                raise SetupError(f"{found} was changed while the switch was prepared: run the command again")
            return True

        given = {"oid": sql.Literal(found.oid), "accepted": sql.Literal(sorted(judged.consequences))}
        attempts = renaming.change_names(
            connection,
            begin,
            planning.change_of_switch(connection, ddl, found),
            sql.SQL(adopt_sql.SWITCHED).format(**given, slot=sql.Literal(mapping.slot)),
            seconds=seconds,
            what=str(found),
            held=[found.oid],
            say=say,
        )
        # Outside of the lock: without an index it reads the whole table.
        kept = replace(mapping, table=state.kept_as)
        if attempts and mapping.slot is None and not has_rows_to_drain(connection, kept, settings, found):
            with connection.transaction():
                connection.execute(adopt_sql.ONE_COMMAND)
                connection.execute(adopt_sql.DRAINED)
        now = adopted_table.require_state(connection, mapping, settings)
        return Switched(bool(attempts), attempts, now.state)


def drain(settings: ProcessSettings, *, seconds: float, say: Say, rest: Rest = Rest.WAIT) -> int:
    """Publish the remaining rows of the table, and let the relay of the outbox continue; return how many.

    Repeated later, it publishes what was marked as pending since, such as corrected dead letters. A table
    with a slot has no marks: it waits until the reader of the slot has published all of before the switch.

    Args:
        rest: what happens to events that the reader of the slot has not published.

    Raises:
        SetupError: there was no switch.
        NotReadyError: some rows could not be published in time.
    """
    mapping = adopted_table.mapping_of(settings)
    with adopted_table.session(settings) as connection:
        state = adopted_table.require_state(connection, mapping, settings)
        adopted_table.require(state, "draining", "adopted")
        found = adopted_table.read_facts(connection, state.relation)
        until = time.monotonic() + seconds
        table = Table(settings, connection, mapping, found, state)
        if state.slot is None:
            published = drain_marks(table, until=until, say=say)
        elif rest is not Rest.WAIT and not found.is_owner:
            raise SetupError(found.not_the_owner)
        elif state.state == "draining":
            published = drain_slot(table, rest, until=until, say=say)
        else:
            published = 0
        if state.state == "adopted":
            return published
        with connection.transaction():
            connection.execute(adopt_sql.ONE_COMMAND)
            connection.execute(adopt_sql.DRAINED)
        # The view looks for the keys of old rows in the table, so that new events need not wait for this.
        if adopted_table.has_keys(mapping):
            say(f"{counted(_copy_keys(connection, mapping, found), 'idempotency key')} copied")
        return published


def back(settings: ProcessSettings, *, seconds: float, say: Say) -> Switched:
    """Give the table its name again, and publish what is left in the outbox before the table's new rows.

    Raises:
        SetupError: there was no switch.
        NotReadyError: the table is not drained yet; a relay owns it; not all events were published in time.
    """
    mapping = adopted_table.mapping_of(settings)
    until = time.monotonic() + seconds
    with adopted_table.session(settings) as connection, ExitStack() as hold:
        state = adopted_table.require_state(connection, mapping, settings)
        if state.state == "prepared":
            return Switched(False, 0, "prepared")
        if state.state == "draining":
            raise NotReadyError(
                f"{state} has pending rows of before the switch: run `outbox adopt drain` first. Writers "
                f"do not wait"
            )
        adopted_table.require(state, "adopted", "returning")
        ((*_, delayed),) = connection.execute(adopt_sql.PARKED).fetchall()
        if delayed and state.state == "adopted":
            # Afterwards rows of the table would wait for them.
            raise NotReadyError(
                f"the outbox has {counted(delayed, 'delayed event')}, and the table cannot delay events: "
                "wait until they are due, or run `outbox delayed cancel`"
            )
        slots.require_stopped(connection, state, seconds=min(seconds, slot_reader.LEAVE_SECONDS))
        found = adopted_table.read_facts(connection, state.relation)
        holder = hold.enter_context(slots.held(settings, connection, state, found, say))
        ddl = Ddl(found, mapping, settings.db_schema, state.name)

        def is_still(name: str) -> bool:
            now = read_state(connection)
            if now is None or now.state != name:
                return False
            slots.require_stopped(connection, now, holder=holder)
            return True

        def begin() -> bool:
            if not is_still("adopted"):
                return False
            renaming.stop_relay_of_table(connection, found)
            return True

        attempts = 0
        if state.state == "adopted":
            view = adopted_table.find_relation(connection, state.schema, state.name)
            ours = adopted_table.find_relation(connection, settings.db_schema, "outbox")
            attempts = renaming.change_names(
                connection,
                begin,
                ddl.back(),
                sql.SQL(adopt_sql.RETURNING),
                seconds=seconds,
                what=str(state),
                held=[oid for oid in (view, ours, found.oid) if oid is not None],
                say=say,
            )
            say(f"{state} is a table again")
        while left := _left(connection, settings):
            slots.require_stopped(connection, replace(state, state="returning"), holder=holder)
            publish_due(settings.model_copy(update={"table": {}}), until, say)
            if time.monotonic() > until and (left := _left(connection, settings)):
                raise NotReadyError(
                    f"{left} of the outbox are not published; rows of {state} wait for them. Run the "
                    f"command again"
                )
        renaming.change_names(
            connection,
            lambda: is_still("returning"),
            ddl.returned(),
            sql.SQL(adopt_sql.RETURNED),
            seconds=seconds,
            what=str(state),
            held=[found.oid],
            say=say,
        )
        hold.close()
        if state.slot is not None:
            say(slots.next_step(connection, state))
        return Switched(True, attempts, "prepared")


def _copy_keys(connection: Connection, mapping: Mapping, found: Facts) -> int:
    """Let the keys of old rows count in the outbox without the table; return how many were not there."""
    id_column = found.columns[mapping.columns["id"]]
    of_id = sql.Identifier(id_column.name)
    number = sql.SQL("('00000000-0000-8000-8000-' || lpad(to_hex({}), 12, '0'))::uuid").format(of_id)
    key = sql.Identifier(mapping.columns["idempotency_key"])
    names = {"key": key, "table": sql.Identifier(found.schema, found.name)}
    value = number if id_column.is_integer else of_id
    return connection.execute(sql.SQL(adopt_sql.COPY_KEYS).format(**names, id=value)).rowcount


def _left(connection: Connection, settings: RelaySettings) -> str:
    """Return what of the outbox must be published before the table continues; empty if nothing."""
    ((unpublished,),) = connection.execute(adopt_sql.LEFT).fetchall()
    ((waiting, failed, delayed),) = connection.execute(adopt_sql.PARKED).fetchall()
    if unpublished or waiting:
        return f"{counted(unpublished, 'event')} and {counted(waiting, 'parked event')}"
    if delayed:
        return f"{counted(delayed, 'delayed event')} (`outbox delayed list`)"
    if failed and settings.on_dead_letter == "block":
        return f"{counted(failed, 'dead letter')} (OUTBOX_ON_DEAD_LETTER=block)"
    return ""


def finish(settings: ProcessSettings, *, drop: bool, seconds: float, say: Say) -> list[str]:
    """Archive the old table, prove it, and drop it if asked to; return what was done.

    Raises:
        SetupError: there is no archive; the table is not adopted.
        NotReadyError: rows are unpublished; file and rows differ.
    """
    mapping = adopted_table.mapping_of(settings)
    with adopted_table.session(settings) as connection:
        state = adopted_table.require_state(connection, mapping, settings)
        if state.state == "finished":
            return [f"{state} was dropped already; its rows are in {state.file or 'no archive'}"]
        adopted_table.require(state, "adopted")
        found = adopted_table.read_facts(connection, state.relation)
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
        view = adopted_table.find_relation(connection, state.schema, state.name)

        def run(change: TableChange, then: str = "SELECT 1") -> None:
            _run(connection, change, then, state, [oid for oid in (found.oid, view) if oid], seconds, say)

        run(ddl.freeze())
        try:
            # Marks of between the look and the freeze.
            if state.slot is None:
                _require_published(connection, kept, found, settings)
            done = []
            if settings.archive != NO_ARCHIVE:
                done.append(_archived(connection, settings, found, state.file))
            if adopted_table.has_keys(mapping):
                # Again, because `drain` may have been killed before.
                _copy_keys(connection, mapping, found)
            if state.slot is not None:
                done += slots.drop(connection, state, found, settings.db_schema)
            # Two transactions: to drop a table with many partitions takes longer than writers may wait.
            run(ddl.leave())
            try:
                run(ddl.drop(), adopt_sql.FINISHED)
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


def _require_published(connection: Connection, kept: Mapping, found: Facts, settings: RelaySettings) -> None:
    """Raise `NotReadyError` if a row is pending or a dead letter."""
    if adopted_table.exists(connection, kept, settings, found):
        raise NotReadyError(f"{found} has pending rows: publish them with `outbox adopt drain`")
    if failed := adopted_table.count(connection, kept, found, settings, marked.FAILURES):
        raise NotReadyError(
            f"{found} has {counted(failed, 'dead letter')}, not published: publish "
            "(docs/existing-tables.md) or delete what failed; then run the command again"
        )


def _run(
    connection: Connection,
    change: TableChange,
    then: str,
    state: State,
    held: list[int],
    seconds: float,
    say: Say,
) -> None:
    def is_adopted() -> bool:
        now = read_state(connection)
        if now is None or now.state != "adopted":
            raise NotReadyError(f"another command has changed {state} in between: run the command again")
        return True

    renaming.change_names(
        connection, is_adopted, change, sql.SQL(then), seconds=seconds, what=str(state), held=held, say=say
    )


def _archived(connection: Connection, settings: DaySettings, found: Facts, known: str | None) -> str:
    """Archive the table; return what was done."""
    file, (count, _) = _archive(connection, open_store(settings), found, known)
    with connection.transaction():
        connection.execute(adopt_sql.ARCHIVED, {"file": file})
    return f"{counted(count, 'row')} of {found} in {file}, proven equal"


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
