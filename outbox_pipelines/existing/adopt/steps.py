"""The steps of `outbox adopt` after the plan: prepare, switch, drain, back.

Invariants:
- Each step can be repeated: it reads from the database how far it is, and does the rest. A step that is
  killed leaves a state from which it continues.
- A change of names is one transaction: see `renaming`.
- On the way back, the reader of a slot cannot start before the end: see `holding`.
- Events of an aggregate keep their order: the relay of one side continues only after the other side has
  nothing left. The database enforces it: see `relay.adoption`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.database import Connection, schema, slot_reader
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.existing.adopt import by_marks, by_slot, holding, planning, queries, renaming, rules
from outbox_pipelines.existing.adopt import facts as catalog
from outbox_pipelines.existing.adopt import slot as slots
from outbox_pipelines.existing.adopt import table as existing
from outbox_pipelines.existing.adopt.by_slot import Rest
from outbox_pipelines.existing.adopt.facts import Facts
from outbox_pipelines.existing.adopt.renaming import Say
from outbox_pipelines.existing.adopt.state import read as read_state
from outbox_pipelines.existing.adopt.statements import Ddl, kept_name
from outbox_pipelines.settings import Settings


@dataclass(frozen=True, slots=True)
class Switched:
    """The result of a change of names."""

    changed: bool
    """Whether this call has completed the step, and not an earlier one."""
    attempts: int
    state: str


def prepare(settings: Settings) -> list[str]:
    """Create the append-only outbox beside the table; return what was done, a line each.

    Raises:
        SetupError: the table cannot be adopted.
    """
    mapping = existing.mapping_of(settings)
    with existing.session(settings) as connection:
        found, state = existing.find(connection, mapping, settings)
        if state is not None and state.state != "finished":
            return []
        existing.require_relayable(connection, mapping, found)
        planning.refuse(planning.judge(connection, found, mapping, settings))
    applied = schema.migrate(settings)
    with existing.session(settings) as connection, connection.transaction():
        connection.execute(queries.ONE_COMMAND)
        state = read_state(connection)
        if state is not None and state.state != "finished":
            return []
        connection.execute(queries.FORGET_FINISHED)
        names = {"schema": found.schema, "name": found.name, "kept_as": kept_name(found.name)}
        connection.execute(queries.PREPARED, {"oid": found.oid, **names})
    made = [f"applied {', '.join(applied)} in schema {settings.db_schema}"] if applied else []
    return [*made, f"{found} can be switched"]


def switch(settings: Settings, accepted: list[str], *, seconds: float, say: Say) -> Switched:
    """Give the table's name to a view over the append-only outbox.

    Args:
        accepted: the names of the consequences that the operator accepts.
        seconds: stop after this time and change nothing.

    Raises:
        SetupError: it was not prepared, the table cannot be adopted, or a consequence is not accepted.
        NotReadyError: a relay owns the table or a shard; transactions held the table all the time.
    """
    mapping = existing.mapping_of(settings)
    with existing.session(settings) as connection:
        state = existing.require_state(connection, mapping, settings)
        if state.state in ("draining", "adopted"):
            return Switched(False, 0, state.state)
        existing.require(state, "prepared")
        found = catalog.read(connection, state.relation)
        if not found.is_owner:
            raise SetupError(rules.not_the_owner(found))
        existing.require_relayable(connection, mapping, found)
        judged = planning.judge(connection, found, mapping, settings)
        planning.refuse(judged)
        planning.require_accepted(judged, accepted)
        if catalog.find(connection, found.schema, state.kept_as) is not None:
            raise SetupError(
                f"{found.schema}.{state.kept_as} exists, the name that the table would get: rename it"
            )
        ddl = Ddl(found, mapping, settings.db_schema, state.name)

        def begin() -> bool:
            now = read_state(connection)
            if now is None or now.state != "prepared":
                return False
            renaming.stop_relays(connection, settings, found)
            connection.execute(queries.PATIENT)
            connection.execute(ddl.hold().encode())
            if catalog.read(connection, found.oid).shape != found.shape:
                raise SetupError(f"{found} was changed while the switch was prepared: run the command again")
            return True

        given = {"oid": sql.Literal(found.oid), "accepted": sql.Literal(sorted(judged.consequences))}
        attempts = renaming.change_names(
            connection,
            begin,
            planning.change_of_switch(connection, ddl, found),
            sql.SQL(queries.SWITCHED).format(**given, slot=sql.Literal(mapping.slot)),
            seconds=seconds,
            what=str(found),
            held=[found.oid],
            say=say,
        )
        # Outside of the lock: without an index it reads the whole table.
        kept = replace(mapping, table=state.kept_as)
        if (
            attempts
            and mapping.slot is None
            and not by_marks.has_rows_to_drain(connection, kept, settings, found)
        ):
            with connection.transaction():
                connection.execute(queries.ONE_COMMAND)
                connection.execute(queries.DRAINED)
        now = existing.require_state(connection, mapping, settings)
        return Switched(bool(attempts), attempts, now.state)


def drain(settings: Settings, *, seconds: float, say: Say, rest: Rest = Rest.WAIT) -> int:
    """Publish the remaining rows of the table, and let the relay of the outbox continue; return how many.

    Repeated later, it publishes what was marked as pending since, such as corrected dead letters. A table
    with a slot has no marks: it waits until the reader of the slot has published all of before the switch.

    Args:
        rest: what happens to events that the reader of the slot has not published.

    Raises:
        SetupError: there was no switch.
        NotReadyError: some rows could not be published in time.
    """
    mapping = existing.mapping_of(settings)
    with existing.session(settings) as connection:
        state = existing.require_state(connection, mapping, settings)
        existing.require(state, "draining", "adopted")
        found = catalog.read(connection, state.relation)
        until = time.monotonic() + seconds
        if state.slot is None:
            published = by_marks.drain(settings, connection, mapping, state, found, until, say)
        elif rest is not Rest.WAIT and not found.is_owner:
            raise SetupError(rules.not_the_owner(found))
        elif state.state == "draining":
            table = by_slot.Table(settings, connection, mapping, found, state)
            published = by_slot.drain(table, rest, until=until, say=say)
        else:
            published = 0
        if state.state == "adopted":
            return published
        with connection.transaction():
            connection.execute(queries.ONE_COMMAND)
            connection.execute(queries.DRAINED)
        # The view looks for the keys of old rows in the table, so that new events need not wait for this.
        if existing.has_keys(mapping):
            say(f"{copy_keys(connection, mapping, found):,} idempotency keys copied")
        return published


def back(settings: Settings, *, seconds: float, say: Say) -> Switched:
    """Give the table its name again, and publish what is left in the outbox before the table's new rows.

    Raises:
        SetupError: there was no switch.
        NotReadyError: the table is not drained yet; a relay owns it; not all events were published in time.
    """
    mapping = existing.mapping_of(settings)
    until = time.monotonic() + seconds
    with existing.session(settings) as connection, ExitStack() as hold:
        state = existing.require_state(connection, mapping, settings)
        if state.state == "prepared":
            return Switched(False, 0, "prepared")
        if state.state == "draining":
            raise NotReadyError(
                f"{state} has pending rows of before the switch: run `outbox adopt drain` first. Writers "
                f"do not wait"
            )
        existing.require(state, "adopted", "returning")
        slots.require_stopped(connection, state, seconds=min(seconds, slot_reader.LEAVE_SECONDS))
        found = catalog.read(connection, state.relation)
        holder = hold.enter_context(holding.held(settings, connection, state, found, say))
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
            view = catalog.find(connection, state.schema, state.name)
            ours = catalog.find(connection, settings.db_schema, "outbox")
            attempts = renaming.change_names(
                connection,
                begin,
                ddl.back(),
                sql.SQL(queries.RETURNING),
                seconds=seconds,
                what=str(state),
                held=[oid for oid in (view, ours, found.oid) if oid is not None],
                say=say,
            )
            say(f"{state} is a table again")
        while left := _left(connection, settings):
            slots.require_stopped(connection, replace(state, state="returning"), holder=holder)
            by_marks.publish(settings.model_copy(update={"table": {}}), until, "the outbox", say)
            if time.monotonic() > until and (left := _left(connection, settings)):
                raise NotReadyError(
                    f"{left} of the outbox are not published; rows of {state} wait for them. Run the "
                    f"command again"
                )
        renaming.change_names(
            connection,
            lambda: is_still("returning"),
            ddl.returned(),
            sql.SQL(queries.RETURNED),
            seconds=seconds,
            what=str(state),
            held=[found.oid],
            say=say,
        )
        hold.close()
        if state.slot is not None:
            say(slots.next_step(connection, state))
        return Switched(True, attempts, "prepared")


def copy_keys(connection: Connection, mapping: Mapping, found: Facts) -> int:
    """Let the keys of old rows count in the outbox without the table; return how many were not there."""
    id_column = found.columns[mapping.columns["id"]]
    of_id = sql.Identifier(id_column.name)
    number = sql.SQL("('00000000-0000-8000-8000-' || lpad(to_hex({}), 12, '0'))::uuid").format(of_id)
    key = sql.Identifier(mapping.columns["idempotency_key"])
    names = {"key": key, "table": sql.Identifier(found.schema, found.name)}
    value = number if id_column.is_integer else of_id
    return connection.execute(sql.SQL(queries.COPY_KEYS).format(**names, id=value)).rowcount


def _left(connection: Connection, settings: Settings) -> str:
    """Return what of the outbox must be published before the table continues; empty if nothing."""
    ((unpublished,),) = connection.execute(queries.LEFT).fetchall()
    ((waiting, failed),) = connection.execute(queries.PARKED).fetchall()
    if unpublished or waiting:
        return f"{unpublished:,} events and {waiting:,} parked events"
    if failed and settings.on_dead_letter == "block":
        return f"{failed:,} dead letters (OUTBOX_ON_DEAD_LETTER=block)"
    return ""
