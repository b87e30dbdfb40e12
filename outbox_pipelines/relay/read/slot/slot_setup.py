"""Makes the slot and the publication of an outbox, and removes them, while relays run.

Invariants:
- The row of the shard names the slot before it is made, and until it is gone: a process that ends in between
  leaves nothing that the next call does not find.
- A slot is used only once its first snapshot is in the row. A relay that has published everything which that
  snapshot sees continues from the slot, because the slot delivers exactly what the snapshot does not see.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.pq import DiagnosticField, ExecStatus

from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.core.secret import redacted
from outbox_pipelines.database import Connection, connect, slot_reader
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.relay.lease.rebase import refuse_copy
from outbox_pipelines.relay.read.slot import slot_sql
from outbox_pipelines.settings import OutboxSettings

_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")
_POLL: Final = 0.1
_SAY_SECONDS: Final = 2.0
_CANCEL_SECONDS: Final = 2.0
_CLEAN_UP_SECONDS: Final = 10.0
_AGAIN: Final = b"40001"
_FAILOVER_SINCE: Final = 170000
# Older servers have another syntax for the same.
_OPTIONS_SINCE: Final = 150000

Say = Callable[[str], None]


def slot_name(settings: OutboxSettings, database: str) -> str:
    """Return the name of the slot and the publication of an outbox: readable, and no other outbox's."""
    name = f"outbox_{database}_{settings.db_schema}"
    # Two outboxes of one server, a_b.c and a.b_c, would have the same name.
    if _NAME.fullmatch(name) and "_" not in settings.db_schema:
        return name
    digest = hashlib.sha256(f"{database}\0{settings.db_schema}".encode()).hexdigest()[:8]
    return f"{re.sub(r'[^a-z0-9_]', '_', name.lower())[:54]}_{digest}"


def _current_name(settings: OutboxSettings, connection: Connection) -> str:
    """Return the name of this outbox's slot and publication, also after its database was renamed."""
    named, *_ = _one(connection, slot_sql.NAMED)
    database = connection.info.dbname
    row = connection.execute(slot_sql.EXISTING_SLOT, {"slot": named}).fetchone()
    return named if row is not None and _is_ours(row, database) else slot_name(settings, database)


def _is_ours(row: tuple[Any, ...], database: str) -> bool:
    return row[:2] == (database, "pgoutput")


def set_up(settings: OutboxSettings, *, seconds: float, say: Say) -> str | None:
    """Make publication and slot; relays of the outbox then continue from the slot.

    Args:
        seconds: how long to wait for running transactions, at most: a slot begins when those have ended.
        say: called with a line about each step.

    Returns the name of the slot; None if relays use it already.

    Raises:
        SetupError: the database or the role is not set up for it. No slot is left.
        NotReadyError: transactions ran for too long. No slot is left.
    """
    with (
        closing(connect_to_outbox(settings, name="outbox cdc setup")) as connection,
        _lock(connection, settings),
    ):
        slot = _current_name(settings, connection)
        _check(connection, settings)
        is_new = _publish(connection, slot, say)
        named, begins, ends, error = _one(connection, slot_sql.NAMED)
        # A slot is decoded with the publications of its time: one older than its publication is replaced.
        is_wrong = is_new or error is not None
        is_made = named is not None and begins is not None and not ends
        if is_made and not is_wrong and _is_usable(connection, named):
            return None
        connection.execute(slot_sql.END_SLOT)
        _end_maker(connection)
        for left in {named, slot} - {None}:
            _drop(connection, left, say, seconds=seconds)
        if not connection.execute(slot_sql.BEGIN_SLOT, {"slot": slot}).rowcount:
            raise NotReadyError("the number of shards is being changed: wait until `outbox shards` shows one")
        try:
            begins = _make(settings, connection, slot, seconds=seconds, say=say)
            connection.execute(slot_sql.SLOT_IS_MADE, {"slot": slot, "begins": begins})
        except BaseException:
            # What cannot be dropped now stays in the row, and the next call drops it.
            with suppress(psycopg.Error, SetupError):
                _drop(connection, slot, say, seconds=_CLEAN_UP_SECONDS)
                connection.execute(slot_sql.NO_SLOT)
            raise
        say(f"slot {slot}: made")
        _name_left(connection, settings, {slot}, say)
        return slot


def require_slots(settings: OutboxSettings) -> None:
    """Raise SetupError if `set_up` could not make a slot now, without changing anything."""
    with closing(connect(settings, name="outbox cdc setup")) as connection:
        refuse_copy(connection)
        _check(connection, settings)


def remove(settings: OutboxSettings, *, seconds: float, say: Say, publication: bool = False) -> bool:
    """Let relays read between snapshots again, and drop the slot; return False if there is none.

    Args:
        seconds: how long to wait for the relay to leave the slot, at most.
        publication: drop the publication as well.

    Raises:
        NotReadyError: a session still reads the slot.
        SetupError: the publication belongs to another role; nothing has changed.
    """
    with (
        closing(connect_to_outbox(settings, name="outbox cdc drop")) as connection,
        _lock(connection, settings),
    ):
        slot = _current_name(settings, connection)
        named, _, _, _ = _one(connection, slot_sql.NAMED)
        # After a renaming of the database, one name may be that of the slot, and one that of a publication.
        names = {named, slot, slot_name(settings, connection.info.dbname)} - {None}
        if publication:
            for each in names:
                _require_owner(connection, each)
        connection.execute(slot_sql.END_SLOT)
        _end_maker(connection)
        dropped = [_drop(connection, left, say, seconds=seconds) for left in {named, slot} - {None}]
        connection.execute(slot_sql.NO_SLOT)
        for each in names if publication else ():
            if connection.execute(slot_sql.PUBLICATION, {"slot": each}).fetchone():
                connection.execute(sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(each)))
                say(f"publication {each}: dropped")
        if publication:
            _name_left(connection, settings, names, say)
        return named is not None or any(dropped)


@contextmanager
def _lock(connection: Connection, settings: OutboxSettings) -> Iterator[None]:
    """Let no other process change the slot within the block.

    Raises:
        SetupError: the position was made in another database.
        NotReadyError: another one does.
    """
    refuse_copy(connection)
    key = {"lock": f"{settings.db_schema}.outbox_cdc"}
    if (who := slot_sql.SETUP.take(connection, key)) is not None:
        raise NotReadyError(f"the source of events is being changed by {who}: wait until it has ended")
    try:
        yield
    finally:
        # Not left to the end of the session, which the server notices later.
        with suppress(psycopg.Error):
            slot_sql.SETUP.unlock(connection, key)


def _check(connection: Connection, settings: OutboxSettings) -> None:
    wal_level, role, has_shards = _one(connection, slot_sql.FACTS)
    if wal_level != "logical":
        raise SetupError(
            f"wal_level is {wal_level}, and slots need logical: run ALTER SYSTEM SET wal_level = 'logical', "
            "then restart PostgreSQL (a managed service has a parameter for it, often logical_replication)"
        )
    if slot_reader.barred_role(connection) is not None:
        raise SetupError(
            f"the role {role} may not use slots: run ALTER ROLE {role} REPLICATION as a superuser (a managed "
            "service has a role for it, such as rds_replication)"
        )
    if has_shards:
        raise SetupError("a slot has one shard: run `outbox shards set 1` first")
    slot = _current_name(settings, connection)
    row = connection.execute(slot_sql.EXISTING_SLOT, {"slot": slot}).fetchone()
    if row is not None and not _is_ours(row, connection.info.dbname):
        raise SetupError(
            f"the slot {slot} exists and is not this outbox's ({_kind(row)}): find out what reads it, drop "
            "it, then run the command again"
        )
    if connection.execute(slot_sql.PUBLICATION, {"slot": slot}).fetchone() is None:
        owner, owns, database, may_create = _one(connection, slot_sql.MAY_PUBLISH)
        if not owns:
            raise SetupError(
                f"the role {role} does not own the outbox and cannot publish it: run the command as {owner}"
            )
        if not may_create:
            raise SetupError(
                f"the role {role} may not make a publication: run GRANT CREATE ON DATABASE {database} TO "
                f"{role} as the owner of the database"
            )
    # Nothing is made where the relay could not read it.
    connect(settings, name="outbox cdc setup", replication=True).close()


def _publish(connection: Connection, slot: str, say: Say) -> bool:
    """Make the publication if it is missing; return whether it was."""
    row = connection.execute(slot_sql.PUBLICATION, {"slot": slot}).fetchone()
    name = sql.Identifier(slot)
    if row is None:
        connection.execute(
            sql.SQL(
                "CREATE PUBLICATION {} FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root)"
            ).format(name)
        )
        say(f"publication {slot}: made")
        return True
    if row != (True, True, True):
        raise SetupError(
            f"the publication {slot} does not publish the outbox as it must (inserts, by its root table, "
            "without a filter of rows or a list of columns): "
            f"run DROP PUBLICATION {name.as_string(connection)} if it is not needed elsewhere, then run the "
            "command again"
        )
    return False


def _name_left(connection: Connection, settings: OutboxSettings, known: set[str], say: Say) -> None:
    """Name publications of the time before the database was renamed; something else may read them."""
    pattern = rf"^outbox_[a-z0-9_]+_({re.escape(settings.db_schema)}|[0-9a-f]{{8}})$"
    given = {"pattern": pattern, "names": list(known)}
    for (name,) in connection.execute(slot_sql.SIMILAR_PUBLICATIONS, given).fetchall():
        say(
            f"publication {name}: left, from a time when the database had another name; if nothing else "
            f"reads it, run DROP PUBLICATION {sql.Identifier(name).as_string(connection)}"
        )


def _require_owner(connection: Connection, slot: str) -> None:
    """Raise if the role may not drop the publication: without it, the slot alone would be dropped."""
    row = connection.execute(slot_sql.PUBLICATION_OWNER, {"slot": slot}).fetchone()
    if row is not None and not row[1]:
        raise SetupError(
            f"the publication {slot} belongs to {row[0]}, and only its owner may drop it: run the command as "
            f"{row[0]}, or as a superuser"
        )


def _is_usable(connection: Connection, slot: str) -> bool:
    row = connection.execute(slot_sql.EXISTING_SLOT, {"slot": slot}).fetchone()
    return row is not None and _is_ours(row, connection.info.dbname) and not row[2]


def _end_maker(connection: Connection) -> None:
    """End the server's process that still makes a slot for a command that was killed.

    It waits for transactions, perhaps for hours, and does not notice that its client has ended.
    """
    with suppress(psycopg.errors.InsufficientPrivilege):
        connection.execute(slot_sql.END_MAKER)


def _kind(row: tuple[Any, ...]) -> str:
    return "physical" if row[0] is None else f"database {row[0]}, plugin {row[1]}"


def _drop(connection: Connection, slot: str, say: Say, *, seconds: float) -> bool:
    """Drop the outbox's slot of this name when no session reads it any more; return whether there was one."""
    row = connection.execute(slot_sql.EXISTING_SLOT, {"slot": slot}).fetchone()
    if row is None:
        return False
    if not _is_ours(row, connection.info.dbname):
        say(f"slot {slot}: left, because it is not this outbox's ({_kind(row)})")
        return False
    if reader := slot_reader.drop(connection, slot, seconds=seconds):
        raise NotReadyError(
            f"{reader} still reads the slot {slot}: is it a relay of this outbox? Run the command again, or "
            "end it with SELECT pg_terminate_backend(…)"
        )
    say(f"slot {slot}: dropped")
    return True


def _make(settings: OutboxSettings, connection: Connection, slot: str, *, seconds: float, say: Say) -> str:
    """Make the slot; return its first snapshot."""
    version = connection.info.server_version
    options = "SNAPSHOT 'use'" + (", FAILOVER true" if version >= _FAILOVER_SINCE else "")
    what = f"({options})" if version >= _OPTIONS_SINCE else "USE_SNAPSHOT"
    with closing(connect(settings, name="outbox cdc setup", replication=True)) as replication:
        command = f'CREATE_REPLICATION_SLOT "{slot}" LOGICAL pgoutput {what}'
        deadline = time.monotonic() + seconds
        replication.execute(slot_sql.BEGIN_SNAPSHOT)
        while not _run(replication, command, connection, seconds=seconds, deadline=deadline, say=say):
            # Its snapshot holds so many transactions that run or were rolled back since the oldest began.
            if time.monotonic() > deadline:
                raise NotReadyError(
                    f"no slot was made within {seconds:.0f} s: too many transactions are rolled back while "
                    "long ones run; run the command again when there are fewer"
                )
            say("too many transactions were rolled back while others ran: trying again")
            replication.execute("ROLLBACK")
            replication.execute(slot_sql.BEGIN_SNAPSHOT)
        row = replication.execute(slot_sql.FIRST_SNAPSHOT).fetchone()
        assert row is not None
        first = Snapshot.parse(row[0])
        # If nothing ran when the slot began, its end may lie before its begin, and all before that has ended.
        # PostgreSQL prints such a text, and does not read it.
        return str(first._replace(xmax=max(first.xmin, first.xmax)))


def _run(
    replication: Connection,
    command: str,
    connection: Connection,
    *,
    seconds: float,
    deadline: float,
    say: Say,
) -> bool:
    """Run a command that waits for running transactions; say which, and end it when the time is over.

    Returns False if the same command may succeed now (SQLSTATE 40001).
    """
    pgconn = replication.pgconn
    pgconn.send_query(command.encode())
    say_at = time.monotonic() + _SAY_SECONDS
    try:
        while pgconn.is_busy():
            time.sleep(_POLL / 10)
            pgconn.consume_input()
            if time.monotonic() > min(deadline, say_at) and pgconn.is_busy():
                waits = _waits_for(connection, replication.info.backend_pid)
                if time.monotonic() > deadline:
                    raise NotReadyError(f"no slot was made within {seconds:.0f} s: it waits for {waits}")
                say(f"waiting for {waits}")
                say_at = time.monotonic() + _SAY_SECONDS
        results = []
        while (result := pgconn.get_result()) is not None:
            results.append(result)
    except BaseException:
        # Not waited for: the server drops a slot that is not finished when its session ends.
        with suppress(psycopg.Error):
            replication.cancel_safe(timeout=_CANCEL_SECONDS)
        raise
    if results[0].error_field(DiagnosticField.SQLSTATE) == _AGAIN:
        return False
    if results[0].status != ExecStatus.TUPLES_OK:
        # With the hint: without it, a server that has no slot left does not say which setting to raise.
        message = " ".join(results[0].get_error_message().split())
        raise SetupError(f"PostgreSQL makes no slot: {redacted(message)}")
    return True


def _waits_for(connection: Connection, own: int) -> str:
    row = connection.execute(slot_sql.LONGEST_TRANSACTIONS, {"pid": own}).fetchone()
    if row is None:
        return "transactions that run now"
    pid, role, application, age = row
    return (
        f"all transactions that run now; the oldest is that of process {pid} ({application}, role {role}), "
        f"for {age} s"
    )


def _one(connection: Connection, query: Any) -> tuple[Any, ...]:
    row = connection.execute(query).fetchone()
    assert row is not None
    return tuple(row)
