"""A change of names while writers write: one transaction, whose locks they hardly notice.

Invariants:
- The locks that writers notice are taken, used and released by one message to the server: writers wait for
  no answer of this process, however slow it or the network is.
- The server cancels that message after 50 ms of waiting for a lock, and after 100 ms in any case. Then
  nothing has changed, and the next attempt follows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import psycopg
from psycopg import sql

from outbox_pipelines.database import Connection, locks
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.adopt import adopt_sql
from outbox_pipelines.existing.adopt.adopted_table import Facts
from outbox_pipelines.existing.adopt.ddl import TableChange
from outbox_pipelines.existing.table_ownership import holding
from outbox_pipelines.settings import OutboxSettings

# Attempts before the first line about it.
_QUIET: Final = 10
Say = Callable[[str], None]


def change_names(
    connection: Connection,
    begin: Callable[[], bool],
    change: TableChange,
    then: sql.Composable,
    *,
    seconds: float,
    what: str,
    held: Sequence[int],
    say: Say,
) -> int:
    """Run a change in one transaction as soon as it gets its locks; return the number of attempts, or 0.

    Args:
        begin: what the transaction does first, without locks that writers notice; whether to go on.
        then: the last statement.
        what: for people, what is waited for.
        held: the relations that transactions may hold.

    Raises:
        NotReadyError: it did not get its locks in time.
    """
    # Pauses are shorter than a transaction usually is: an attempt comes soon after the one it waits for.
    for attempts, attempt in enumerate(locks.briefly(seconds=seconds, is_cut=True), 1):
        with attempt:
            return attempts if _attempt(connection, begin, change, then) else 0
        if attempts == _QUIET:
            say(f"waiting for transactions that hold {what}{_holders(connection, held)}")
    raise NotReadyError(
        f"transactions held {what} for {seconds:.0f} s, or the server was too busy to change it in 100 ms; "
        f"nothing was changed. End the longest one{_holders(connection, held)}, or run the command again "
        "with more --wait-seconds"
    )


def _attempt(
    connection: Connection, begin: Callable[[], bool], change: TableChange, then: sql.Composable
) -> bool:
    connection.execute("BEGIN")
    try:
        connection.execute(adopt_sql.ONE_COMMAND)
        if not begin():
            connection.execute("ROLLBACK")
            return False
        # This wait is for other changes of the table and for its vacuum, which gives way after a second.
        connection.execute(adopt_sql.PATIENT)
        connection.execute(";\n".join(change.before).encode())
        connection.execute(adopt_sql.IMPATIENT)
        # One statement, so that one timeout is for all of it; and the locks end without an answer from here.
        short = [sql.SQL("EXECUTE {};\n").format(each) for each in (*change.short, then.as_string())]
        body = sql.Literal(f"BEGIN\n{sql.SQL('').join(short).as_string()}END").as_string()
        connection.execute(f"DO {body};\nCOMMIT".encode())
    except BaseException:
        # After an interrupt the session may be closed already.
        with contextlib.suppress(psycopg.Error):
            connection.execute("ROLLBACK")
        raise
    return True


def _holders(connection: Connection, relations: Sequence[int]) -> str:
    """Return who holds the relations, in parentheses; empty if no session does."""
    found = [who for (who,) in connection.execute(adopt_sql.HOLDERS, {"oids": list(relations)})]
    return f" ({'; '.join(found)})" if found else ""


def stop_relays(connection: Connection, settings: OutboxSettings, found: Facts) -> None:
    """Take the place of the relays until the transaction ends; they see its result before they relay.

    Raises:
        NotReadyError: one is running.
    """
    stop_relay_of_table(connection, found)
    for (shard,) in connection.execute(adopt_sql.SHARDS).fetchall():
        given: dict[str, Any] = {"lock": f"{settings.db_schema}.outbox_shards", "shard": shard}
        if (who := adopt_sql.SHARD.take(connection, given, for_transaction=True)) is not None:
            ((owner,),) = connection.execute(adopt_sql.SHARD_OWNER, {"shard": shard}).fetchall()
            raise NotReadyError(
                f"a relay has shard {shard} of the append-only outbox ({owner}; {who}): stop it. It may "
                "start again right after the switch, and waits until the old rows are published"
            )


def stop_relay_of_table(connection: Connection, found: Facts) -> None:
    """Take the place of the table's relay until the transaction ends.

    Raises:
        NotReadyError: one is running.
    """
    key = holding(found.oid)
    if (who := adopt_sql.TABLE_OWNED.take(connection, {"key": key}, for_transaction=True)) is not None:
        raise NotReadyError(
            f"a relay of {found.schema}.{found.name} is running ({who}): stop it and its standbys"
        )
