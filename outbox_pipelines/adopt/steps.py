"""The steps of `outbox adopt`: plan, prepare, switch, drain, back.

Invariants:
- Each step can be repeated: it reads from the database how far it is, and does the rest. A step that is
  killed leaves a state from which it continues.
- A change of names is one transaction, which waits at most 50 ms for a lock at a time: writers queue behind
  it.
- Events of an aggregate keep their order: the relay of one side continues only after the other side has
  nothing left. The database enforces it: see `relay.adoption`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg
from psycopg import sql

from outbox_pipelines import schema
from outbox_pipelines.adopt import facts as catalog
from outbox_pipelines.adopt import queries, rules
from outbox_pipelines.adopt.facts import Facts
from outbox_pipelines.adopt.state import State
from outbox_pipelines.adopt.state import read as read_state
from outbox_pipelines.adopt.statements import Ddl, Step, kept_name
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.parsers.table_mapping import Mapping
from outbox_pipelines.relay import service
from outbox_pipelines.relay.marked_table import pg_catalog
from outbox_pipelines.relay.marked_table import queries as marked
from outbox_pipelines.relay.marked_table.check import open_mapping
from outbox_pipelines.relay.marked_table.ownership import holding
from outbox_pipelines.relay.marked_table.queries import Statements
from outbox_pipelines.settings import Settings

LOCK_TIMEOUT: Final = "50ms"
# Shorter than a transaction usually is, so that an attempt comes soon after the one it waits for.
_PAUSE: Final = (0.02, 0.2)
_POLL: Final = 0.2
# Rows a second, for the plan.
_KEYS_PER_SECOND: Final = 100_000
_ROWS_PER_SECOND: Final = 40_000
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What `outbox adopt` finds and would do."""

    table: str
    state: str
    rows: int
    """An estimate."""
    pending: int
    judged: rules.Judged
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Switched:
    """The result of a change of names."""

    changed: bool
    """Whether this call has changed the names, and not an earlier one."""
    attempts: int
    state: str


def plan(settings: Settings) -> Plan:
    """Return what the steps would do; change nothing.

    Raises:
        SetupError: the settings do not name a table that can be relayed.
    """
    mapping = mapping_of(settings)
    with session(settings) as connection:
        found, state = _find(connection, mapping)
        _require_relayable(connection, mapping, found, settings)
        judged = _judge(connection, found, mapping, settings)
        pending = count(connection, mapping, found, settings, marked.BACKLOG)
        ddl = Ddl(found, mapping, settings.db_schema, mapping.table)
        steps: tuple[Step, ...] = ()
        if not judged.problems:
            steps = _steps(connection, ddl, found, mapping, settings, pending)
        name = state.state if state is not None else "not prepared"
        return Plan(f"{found.schema}.{mapping.table}", name, found.rows, pending, judged, steps)


def prepare(settings: Settings) -> list[str]:
    """Create the append-only outbox beside the table; return what was done, a line each.

    Raises:
        SetupError: the table cannot be adopted.
    """
    mapping = mapping_of(settings)
    with session(settings) as connection:
        found, state = _find(connection, mapping)
        if state is not None and state.state != "finished":
            return []
        _require_relayable(connection, mapping, found, settings)
        _refuse(_judge(connection, found, mapping, settings), found)
    applied = schema.migrate(settings)
    with session(settings) as connection, connection.transaction():
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
    mapping = mapping_of(settings)
    with session(settings) as connection:
        state = require_state(connection, mapping)
        if state.state in ("draining", "adopted"):
            return Switched(False, 0, state.state)
        require(state, "prepared")
        found = catalog.read(connection, state.relation)
        _require_relayable(connection, mapping, found, settings)
        judged = _judge(connection, found, mapping, settings)
        _refuse(judged, found)
        _require_accepted(judged, accepted)
        if catalog.find(connection, found.schema, state.kept_as) is not None:
            raise SetupError(
                f"{found.schema}.{state.kept_as} exists, the name that the table would get: rename it"
            )
        ddl = Ddl(found, mapping, settings.db_schema, state.name)
        grants = [row[0] for row in connection.execute(queries.GRANTS, {"oid": found.oid, "view": ddl.view})]
        made = ddl.switch(grants, _writers(connection, found))
        kept = replace(mapping, table=state.kept_as)

        def attempt() -> str:
            connection.execute(queries.ONE_COMMAND)
            now = read_state(connection)
            if now is None or now.state != "prepared":
                return now.state if now is not None else ""
            _stop_relays(connection, settings, found)
            connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
            lock = sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE")
            connection.execute(lock.format(sql.Identifier(found.schema, found.name)))
            if catalog.read(connection, found.oid).shape != found.shape:
                raise SetupError(f"{found} was changed while the switch was prepared: run the command again")
            connection.execute(";\n".join(made).encode())
            left = exists(connection, kept, settings, found) or (
                _has_keys(mapping) and _has_rows(connection, found.schema, state.kept_as)
            )
            name = "draining" if left else "adopted"
            values = {"oid": found.oid, "state": name, "accepted": sorted(judged.consequences)}
            connection.execute(queries.SWITCHED, values)
            return name

        name, attempts = retry(connection, attempt, seconds, f"{found}", say)
        return Switched(True, attempts, name)


def drain(settings: Settings, *, seconds: float, say: Say) -> int:
    """Publish the remaining rows of the table, and let the relay of the outbox continue; return how many.

    Repeated later, it publishes what was marked as pending since, such as corrected dead letters.

    Raises:
        SetupError: there was no switch.
        NotReadyError: some rows could not be published in time.
    """
    mapping = mapping_of(settings)
    with session(settings) as connection:
        state = require_state(connection, mapping)
        require(state, "draining", "adopted")
        found = catalog.read(connection, state.relation)
        kept = replace(mapping, table=state.kept_as)
        published, until = 0, time.monotonic() + seconds
        while exists(connection, kept, settings, found):
            published += _publish(
                settings.model_copy(update={"delivery": "at_least_once"}), until, str(found), say
            )
            if time.monotonic() > until:
                left = count(connection, kept, found, settings, marked.BACKLOG)
                wait = "; new events wait for them" if state.state == "draining" else ""
                raise NotReadyError(
                    f"{found} still has {left:,} pending rows{wait}. Run the command again; see `outbox "
                    "status` for refused rows"
                )
        failed = count(connection, kept, found, settings, marked.FAILURES)
        if failed and settings.on_dead_letter != "block":
            say(f"{failed:,} dead letters stay in {found}: publish or delete them before `finish --drop`")
        if state.state == "adopted":
            return published
        if failed and settings.on_dead_letter == "block":
            raise NotReadyError(
                f"{found} has {failed:,} dead letters, which block their aggregates "
                f"(OUTBOX_ON_DEAD_LETTER=block): "
                "publish them (docs/existing-tables.md), or set their aggregates free with continue"
            )
        if (key := mapping.columns.get("idempotency_key")) is not None:
            copied = _copy_keys(connection, mapping, found, key)
            say(f"{copied:,} idempotency keys copied")
        with connection.transaction():
            connection.execute(queries.ONE_COMMAND)
            connection.execute(queries.DRAINED)
        return published


def back(settings: Settings, *, seconds: float, say: Say) -> Switched:
    """Give the table its name again, and publish what is left in the outbox before the table's new rows.

    Raises:
        SetupError: there was no switch.
        NotReadyError: the table is not drained yet; a relay owns it; not all events were published in time.
    """
    mapping = mapping_of(settings)
    until = time.monotonic() + seconds
    with session(settings) as connection:
        state = require_state(connection, mapping)
        if state.state == "prepared":
            return Switched(False, 0, "prepared")
        if state.state == "draining":
            raise NotReadyError(
                f"{state} has pending rows of before the switch: run `outbox adopt drain` first. Writers "
                f"do not wait"
            )
        require(state, "adopted", "returning")
        found = catalog.read(connection, state.relation)
        ddl = Ddl(found, mapping, settings.db_schema, state.name)
        attempts = 0
        if state.state == "adopted":
            made = ddl.back()

            def attempt() -> str:
                connection.execute(queries.ONE_COMMAND)
                now = read_state(connection)
                if now is None or now.state != "adopted":
                    return now.state if now is not None else ""
                _stop_relay_of_table(connection, found)
                connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
                connection.execute(";\n".join(made).encode())
                connection.execute(queries.RETURNING)
                return "returning"

            _, attempts = retry(connection, attempt, seconds, str(state), say)
            say(f"{state} is a table again")
        while left := _left(connection, settings):
            _publish(settings.model_copy(update={"table_file": None}), until, "the outbox", say)
            if time.monotonic() > until and (left := _left(connection, settings)):
                raise NotReadyError(
                    f"{left} of the outbox are not published; rows of {state} wait for them. Run the "
                    f"command again"
                )

        def complete() -> str:
            connection.execute(queries.ONE_COMMAND)
            connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
            connection.execute(";\n".join(ddl.returned()).encode())
            connection.execute(queries.RETURNED)
            return "prepared"

        retry(connection, complete, seconds, str(state), say)
        return Switched(attempts > 0, attempts, "prepared")


# --- what the steps have in common ------------------------------------------------------------------------


def mapping_of(settings: Settings) -> Mapping:
    """Return the mapping of OUTBOX_TABLE_FILE, which names the schema of the table."""
    if settings.table_file is None:
        raise SetupError("no table to adopt: set OUTBOX_TABLE_FILE to the file that describes it")
    mapping = open_mapping(settings)
    if mapping.schema is None:
        raise SetupError(
            f'OUTBOX_TABLE_FILE={settings.table_file}: table = "{mapping.table}" has no schema: write '
            f'table = "public.{mapping.table}", because OUTBOX_SCHEMA is the schema of the new tables'
        )
    return mapping


@contextmanager
def session(settings: Settings) -> Iterator[Connection]:
    """Open a session of the command."""
    with connect(settings, name="outbox adopt") as connection:
        yield connection


def _find(connection: Connection, mapping: Mapping) -> tuple[Facts, State | None]:
    state = read_state(connection)
    if state is not None and state.state != "finished":
        if (state.schema, state.name) != (mapping.schema, mapping.table):
            raise SetupError(
                f"schema OUTBOX_SCHEMA has adopted {state}, and takes one table: name another schema for "
                f"{mapping}"
            )
        return catalog.read(connection, state.relation), state
    assert mapping.schema is not None
    oid = catalog.find(connection, mapping.schema, mapping.table)
    if oid is None:
        raise SetupError(f"table {mapping} does not exist (OUTBOX_TABLE_FILE): correct `table` in the file")
    found = catalog.read(connection, oid)
    if found.kind not in ("r", "p"):
        if state is not None and (state.schema, state.name) == (mapping.schema, mapping.table):
            require(state)
        raise SetupError(f"{mapping} (OUTBOX_TABLE_FILE) is not a table: name the table that has the events")
    return found, state


def _require_relayable(connection: Connection, mapping: Mapping, found: Facts, settings: Settings) -> None:
    """Check what the relay of the table checks: columns, types, rights."""
    pg_catalog.check(connection, replace(mapping, table=found.name))


def require_state(connection: Connection, mapping: Mapping) -> State:
    """Return the state of this table; raise `SetupError` if it is not prepared."""
    state = read_state(connection)
    if state is None:
        raise SetupError(f"{mapping} is not prepared: run `outbox adopt plan`, then `outbox adopt prepare`")
    if (state.schema, state.name) != (mapping.schema, mapping.table):
        raise SetupError(
            f"the schema of OUTBOX_SCHEMA has adopted {state}, not {mapping}: correct one of them"
        )
    return state


def require(state: State, *names: str) -> None:
    """Raise `SetupError` that says what to do first, unless the state is one of these."""
    if state.state in names:
        return
    said = {
        "prepared": f"{state} is not switched: run `outbox adopt switch` first",
        "returning": f"the way back of {state} is not complete: run `outbox adopt back` again",
        "finished": f"{state} is adopted and its old table is dropped: nothing is left to do or to undo",
        "draining": f"{state} has pending rows of before the switch: run `outbox adopt drain` first",
        "adopted": f"{state} is adopted already",
    }
    raise SetupError(said[state.state])


def _judge(connection: Connection, found: Facts, mapping: Mapping, settings: Settings) -> rules.Judged:
    refused = _refused_rows(connection, mapping, found)
    return rules.judge(found, mapping, settings.db_schema, _conflicts(connection, mapping.table), refused)


def _refused_rows(connection: Connection, mapping: Mapping, found: Facts) -> int:
    names = ("aggregate_type", "aggregate_id", "event_type", "idempotency_key")
    columns = [mapping.columns[name] for name in names if name in mapping.columns]
    query = sql.SQL(queries.REFUSED).format(
        table=sql.Identifier(found.schema, found.name),
        names=sql.SQL(", ").join(sql.SQL("t.{}::text").format(sql.Identifier(name)) for name in columns),
        payload=sql.Identifier(mapping.columns["payload"]),
        most=sql.Literal(rules.MOST_PAYLOAD_BYTES),
    )
    ((rows,),) = connection.execute(query).fetchall()
    return int(rows)


def _writers(connection: Connection, found: Facts) -> list[str]:
    return [name for (name,) in connection.execute(queries.WRITERS, {"oid": found.oid})]


def _conflicts(connection: Connection, table: str) -> list[str]:
    """Return statements with ON CONFLICT that the server has counted."""
    try:
        if connection.execute(queries.HAS_STATEMENTS).fetchone() != (True,):
            return []
        return [text for (text,) in connection.execute(queries.CONFLICTS, {"name": table})]
    except psycopg.Error:
        # It is installed and not loaded, or this role may not read it.
        return []


def _refuse(judged: rules.Judged, found: Facts) -> None:
    if judged.problems:
        more = f" ({len(judged.problems) - 1} more: see `outbox adopt plan`)" if judged.problems[1:] else ""
        raise SetupError(f"{judged.problems[0]}{more}")


def _require_accepted(judged: rules.Judged, accepted: list[str]) -> None:
    if missing := [name for name in judged.consequences if name not in accepted]:
        options = " ".join(f"--accept {name}" for name in missing)
        raise SetupError(
            f"{judged.consequences[missing[0]]}. If this and what `outbox adopt plan` says about the "
            f"others is acceptable: {options}"
        )


def _stop_relays(connection: Connection, settings: Settings, found: Facts) -> None:
    """Take the place of the relays until the transaction ends; they see its result before they relay.

    Raises:
        NotReadyError: one is running.
    """
    _stop_relay_of_table(connection, found)
    for (shard,) in connection.execute(queries.SHARDS).fetchall():
        given: dict[str, Any] = {"lock": f"{settings.db_schema}.outbox_shards", "shard": shard}
        if connection.execute(queries.TRY_SHARD, given).fetchone() != (True,):
            ((owner,),) = connection.execute(queries.SHARD_OWNER, {"shard": shard}).fetchall()
            raise NotReadyError(
                f"a relay has shard {shard} of the append-only outbox ({owner}): stop it. It may start again "
                "right after the switch, and waits until the old rows are published"
            )


def _stop_relay_of_table(connection: Connection, found: Facts) -> None:
    key = holding(found.oid)
    if connection.execute(queries.TRY_TABLE, {"key": key}).fetchone() != (True,):
        rows = connection.execute(marked.OWNER, {"key": key}).fetchall()
        owner = f" ({rows[0][1]}, process {rows[0][0]} of the database)" if rows else ""
        raise NotReadyError(
            f"a relay of {found.schema}.{found.name} is running{owner}: stop it and its standbys"
        )


def retry(
    connection: Connection, attempt: Callable[[], str], seconds: float, what: str, say: Say
) -> tuple[str, int]:
    """Run a transaction until it gets its locks."""
    until, attempts = time.monotonic() + seconds, 0
    while True:
        attempts += 1
        try:
            with connection.transaction():
                return attempt(), attempts
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            if time.monotonic() > until:
                raise NotReadyError(
                    f"transactions held {what} for {seconds:.0f} s; nothing was changed. End the longest one "
                    "(pg_stat_activity), or run the command again with more --seconds"
                ) from None
            if attempts == 10:
                say(f"waiting for transactions that hold {what}")
        time.sleep(random.uniform(*_PAUSE))


def _statements(connection: Connection, mapping: Mapping, found: Facts, settings: Settings) -> Statements:
    # Under its name of now.
    kept = replace(mapping, table=found.name)
    types = pg_catalog.check(connection, kept).types
    return Statements(kept, types, max_attempts=settings.max_attempts, with_time=False)


def exists(connection: Connection, kept: Mapping, settings: Settings, found: Facts) -> bool:
    """Return whether the table has pending rows."""
    statements = _statements(connection, kept, replace(found, name=kept.table), settings)
    return connection.execute(statements(marked.ANY)).fetchone() == (True,)


def count(connection: Connection, mapping: Mapping, found: Facts, settings: Settings, query: Any) -> int:
    """Return the number that a query of the relay of the table counts, up to a cap."""
    statements = _statements(connection, mapping, found, settings)
    row = connection.execute(statements(query), {"cap": 100_000}).fetchone()
    assert row is not None
    return int(row[0])


def _has_keys(mapping: Mapping) -> bool:
    return "idempotency_key" in mapping.columns


def _has_rows(connection: Connection, schema: str, table: str) -> bool:
    query = sql.SQL("SELECT EXISTS (SELECT FROM {})").format(sql.Identifier(schema, table))
    return connection.execute(query).fetchone() == (True,)


def _copy_keys(connection: Connection, mapping: Mapping, found: Facts, key: str) -> int:
    """Let the keys of old rows count in the outbox."""
    id_column = found.columns[mapping.columns["id"]]
    of_id = sql.Identifier(id_column.name)
    number = sql.SQL("('00000000-0000-8000-8000-' || lpad(to_hex({}), 12, '0'))::uuid").format(of_id)
    names = {"key": sql.Identifier(key), "table": sql.Identifier(found.schema, found.name)}
    value = number if id_column.is_integer else of_id
    return connection.execute(sql.SQL(queries.COPY_KEYS).format(**names, id=value)).rowcount


def _publish(settings: Settings, until: float, what: str, say: Say) -> int:
    """Publish everything that is due now, or wait for the relay that does."""
    try:
        events = service.relay(settings, until_empty=True, standby=service.Standby.REFUSE).events
    except service.ShardOwnedError as error:
        say(f"waiting: {error}")
        events = 0
    if not events:
        time.sleep(min(_POLL, max(0.0, until - time.monotonic())))
    return events


def _left(connection: Connection, settings: Settings) -> str:
    """Return what of the outbox must be published before the table continues; empty if nothing."""
    ((unpublished,),) = connection.execute(queries.LEFT).fetchall()
    ((waiting, failed),) = connection.execute(queries.PARKED).fetchall()
    if unpublished or waiting:
        return f"{unpublished:,} events and {waiting:,} parked events"
    if failed and settings.on_dead_letter == "block":
        return f"{failed:,} dead letters (OUTBOX_ON_DEAD_LETTER=block)"
    return ""


def _steps(
    connection: Connection, ddl: Ddl, found: Facts, mapping: Mapping, settings: Settings, pending: int
) -> tuple[Step, ...]:
    grants = [row[0] for row in connection.execute(queries.GRANTS, {"oid": found.oid, "view": ddl.view})]
    made = ddl.switch(grants, _writers(connection, found))
    lock = f"LOCK TABLE {sql.Identifier(found.schema, mapping.table).as_string()} IN ACCESS EXCLUSIVE MODE"
    short = (
        f"ACCESS EXCLUSIVE on {found.schema}.{mapping.table}, waits at most 50 ms at a time; held for "
        "about 20 ms, in which writers wait"
    )
    keys = (
        f"; copies the idempotency keys, about {found.rows / _KEYS_PER_SECOND:.0f} s"
        if _has_keys(mapping)
        else ""
    )
    return (
        Step(
            "prepare",
            f"create the append-only outbox in schema {settings.db_schema}",
            "none that writers notice; about 1 s",
            ("-- the files of sql/: see `outbox migrate`",),
        ),
        Step(
            "switch",
            "one transaction; stop the relays first",
            short,
            (lock, *made),
        ),
        Step(
            "drain",
            f"publish the {pending:,} pending rows first, about {pending / _ROWS_PER_SECOND:.0f} s{keys}; "
            "new events wait until then, writers do not",
            "as the relay",
            (),
        ),
        Step("back", "undoes the switch, until `finish --drop`", short, tuple(ddl.back())),
        Step("finish", "archive the table with proof; with --drop, then drop it", short, tuple(ddl.finish())),
    )
