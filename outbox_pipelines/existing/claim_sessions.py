"""Claims pending rows and marks those that are published: the core's `Claims` over PostgreSQL.

Invariants:
- Each claim is a transaction in its own session, which checks at its beginning that the table is still owned.
- Memory stays bounded: large rows are read one at a time, as many as fit into a batch. No row stays locked
  behind them, since the next claim would take it for one that another session has locked.
- No claim waits for a lock of the table: the session that waits for it may wait for rows of an earlier claim.
- Every relay that starts publishes a row again that cannot be marked. So the mark is tried, and rolled back,
  before the first rows are published. If a mark fails later, nothing more is published.
- If one row cannot be marked, the other rows are still marked.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from outbox_pipelines.config.table_mapping import WRITTEN, Mapping
from outbox_pipelines.core.event import Event, weigh, weigh_one
from outbox_pipelines.core.outages import is_outage
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import existing_sql
from outbox_pipelines.existing.core.claims import (
    MOST_CLAIMS,
    Claims,
    LockedError,
    MarkError,
    Name,
    Rows,
    TableLockedError,
    Wanted,
)
from outbox_pipelines.existing.table_ownership import TableOwnership
from outbox_pipelines.existing.table_statements import Statements
from outbox_pipelines.relay.read import contents
from outbox_pipelines.settings import RelaySettings

_LOG = logging.getLogger(__name__)
# Most rows fetched at once: this bounds memory if all are nearly large.
_FEW: Final = 500
_COMPLAIN_SECONDS: Final = 60.0
# The search for rows that cannot be marked stops at this number: more are not a problem of single rows.
_MOST_BROKEN: Final = 20
_NONE: Final = (None, "")
# Otherwise a deferred constraint or trigger would raise its error only at the commit.
_NOW: Final = "SET CONSTRAINTS ALL IMMEDIATE"
_LOOK: Final = "look for a trigger, a rule or a policy that prevents or undoes the UPDATE"


class MarkedTableSource(Claims):
    """The pending rows of an owned table."""

    def __init__(self, settings: RelaySettings, ownership: TableOwnership) -> None:
        self.sessions = ClaimSessions(settings, ownership)
        super().__init__(
            self.sessions,
            clock=time.monotonic,
            most_seconds=settings.breaker_seconds,
            is_shared=ownership.mapping.is_shared,
        )


class ClaimSessions:
    """The sessions that claim: implements the core's `Sessions`. For one thread, except `beat`."""

    def __init__(self, settings: RelaySettings, ownership: TableOwnership) -> None:
        self._settings = settings
        self._ownership = ownership
        self._statements = ownership.statements
        self._keys = ownership.statements.keys
        self._connections: list[Connection] = []
        self._complained_at = 0.0
        # Rows fetched at once until their size is known: as many as fit into a batch, by the last claim.
        self._width = _FEW
        self.free: deque[Connection] = deque()
        for _ in range(MOST_CLAIMS):
            connection = ownership.connect()
            connection.execute(existing_sql.BRIEFLY)
            self._connections.append(connection)
            self.free.append(connection)

    def rehearse_rights(self) -> None:
        """Check that this role has the necessary rights to write; the first claim checks the rows.

        Raises:
            MarkError: the role does not have them.
        """
        connection, statements = self._connections[0], self._statements
        nothing: dict[str, Any] = {"keys": "{}", "errors": [], "pauses": [], "lasts": []}
        with connection.transaction(force_rollback=True), explained(self._ownership.mapping):
            # Nothing is claimed yet.
            connection.execute(existing_sql.AT_LENGTH)
            rehearse(connection, statements, self._ownership.mapping, [])
            if statements.writes_refusals:
                connection.execute(statements(existing_sql.REFUSED), nothing)

    def last(self) -> str:
        ((last,),) = self._ownership.execute(self._statements(existing_sql.LAST), {})
        return str(last)

    def any(self, wanted: Wanted) -> bool:
        # Needs no transaction if there is nothing to claim.
        conditions, parameters = self._conditions(wanted)
        try:
            row = self.free[0].execute(self._statements(existing_sql.ANY, *conditions), parameters).fetchone()
        except psycopg.errors.LockNotAvailable:
            raise self._table_is_locked() from None
        return row == (True,)

    def claim(self, wanted: Wanted) -> Rows:
        connection = self.free[0]
        self._ownership.begin_claim(connection)
        try:
            rows = self._fetch(connection, wanted)
        except psycopg.errors.LockNotAvailable:
            connection.execute("ROLLBACK")
            raise LockedError from None
        self.free.popleft()
        return rows

    def rehearse(self, rows: Rows) -> None:
        seqs = [event.seq for event in rows.events]
        rehearse(rows.session, self._statements, self._ownership.mapping, seqs)

    def mark(self, rows: Rows, seqs: list[int], *, is_locked: bool) -> None:
        try:
            self._mark(rows.session, seqs, is_locked=is_locked)
        except psycopg.errors.LockNotAvailable:
            if not is_locked:
                raise
            # A trigger waits: not for the table, which this transaction had locked.
            rows.session.execute("ROLLBACK")
            self._mark(rows.session, seqs, is_locked=False)
        except MarkError:
            rows.session.execute("ROLLBACK")
            raise
        self._keys.forget(seqs)

    def _mark(self, connection: Connection, seqs: list[int], *, is_locked: bool) -> None:
        if not is_locked:
            self._ownership.begin_claim(connection)
            connection.execute(existing_sql.PATIENTLY)
        with explained(self._ownership.mapping):
            mark(connection, self._statements, self._ownership.mapping, seqs)
            connection.execute("COMMIT")

    def mark_what_can_be(self, rows: Rows, seqs: list[int]) -> None:
        self._ownership.begin_claim(rows.session)
        rows.session.execute(existing_sql.PATIENTLY)
        mark_what_can_be(rows.session, self._statements, seqs)
        rows.session.execute("COMMIT")

    def unlock(self, rows: Rows) -> None:
        rows.session.execute("ROLLBACK")

    def give_back(self, rows: Rows) -> None:
        self.free.append(rows.session)

    def beat(self) -> None:
        """Send a heartbeat on each connection that is not busy. Any thread may call it."""
        for connection in self._connections:
            if connection.info.transaction_status != psycopg.pq.TransactionStatus.ACTIVE:
                # A claim that has just failed at another session's lock is about to be rolled back.
                with suppress(psycopg.errors.InFailedSqlTransaction):
                    connection.execute("SELECT 1")

    def close(self) -> None:
        """Release what is claimed, and close the connections."""
        for connection in self._connections:
            connection.close()

    def locked(self, wanted: Wanted) -> set[Name]:
        conditions, parameters = self._conditions(wanted)
        connection = self.free[0]
        self._ownership.begin_claim(connection)
        try:
            rows = connection.execute(
                self._statements(existing_sql.LOCKED, *conditions), parameters
            ).fetchall()
        except psycopg.errors.LockNotAvailable:
            # Locked rows are skipped, so it is the table.
            raise self._table_is_locked() from None
        finally:
            connection.execute("ROLLBACK")
        if rows and self._may_complain():
            _LOG.warning(
                "another session has locked pending rows of %d aggregates of %s; they are published after it "
                "ends. Check whether the old publisher is still running",
                *(len(rows), self._ownership.mapping),
            )
        return {(kind, name) for kind, name in rows}

    def _table_is_locked(self) -> TableLockedError:
        if self._may_complain():
            _LOG.warning(
                "another session has locked %s, or waits for its lock: nothing is published until it ends",
                self._ownership.mapping,
            )
        return TableLockedError()

    def _may_complain(self) -> bool:
        may = time.monotonic() - self._complained_at > _COMPLAIN_SECONDS
        if may:
            self._complained_at = time.monotonic()
        return may

    def _fetch(self, connection: Connection, wanted: Wanted) -> Rows:
        limit, most = self._settings.batch_events, contents.FEW
        while isinstance(rows := self._read(connection, wanted, limit, most), int):
            connection.execute("ROLLBACK")
            self._ownership.begin_claim(connection)
            if rows:
                limit = rows
            else:
                limit, most = min(_FEW, limit), contents.NOTHING
        return rows

    def _read(self, connection: Connection, wanted: Wanted, limit: int, most: int) -> Rows | int:
        """Claim rows with their content: those of at most `most` bytes together, the others one at a time.

        Returns:
            The rows; or how many there are before one that does not fit into the batch, or before some that
            can be read only one at a time.
        """
        self._open(connection, wanted, most=most)
        batch_bytes = self._settings.batch_bytes
        events: list[Event] = []
        unreadable: dict[int, str] = {}
        size, width, is_more = 0, min(self._width, limit), True
        while is_more and width > 0:
            try:
                rows = self._some(connection, width)
            except psycopg.Error as error:
                self._forget(events)
                if most == contents.NOTHING or not contents.is_about_a_row(error):
                    raise
                return len(events)
            if not contents.any_listed(rows):
                events += rows
                size += weigh(rows)
            else:
                with closing(self._with_content(connection, rows)) as found:
                    for row in rows:
                        if size > batch_bytes and contents.is_listed(row):
                            self._forget(events + rows)
                            self._width = len(events)
                            return len(events)
                        event = next(found)
                        if isinstance(event, str):
                            unreadable[row.seq] = event
                            event = row._replace(payload="", metadata=None)
                        if event is not None:
                            events.append(event)
                            size += weigh_one(event)
            is_more = len(rows) == width
            width = min(_FEW, limit - len(events))
            if size:
                width = min(width, len(events) * (batch_bytes - size) // size)
                self._width = max(1, min(_FEW, len(events) * batch_bytes // size))
        return Rows(events, size, is_more, connection, unreadable)

    def _with_content(self, connection: Connection, rows: list[Event]) -> Generator[Event | str | None]:
        """Yield each row with its content, or why that cannot be read; None for a row that is gone."""
        numbers = [row.seq for row in rows if contents.is_listed(row)]
        given = {"numbers": numbers, "keys": self._keys.array(numbers)}
        statement = self._statements(existing_sql.EVENTS)
        with closing(contents.read(connection, statement, given, numbers)) as found:
            seq, content = next(found, _NONE)
            for row in rows:
                if not contents.is_listed(row):
                    yield row
                elif seq != row.seq:
                    yield self._without_name(row)
                else:
                    yield content if isinstance(content, str) else Event._make(content[: len(Event._fields)])
                    seq, content = next(found, _NONE)

    def _forget(self, events: list[Event]) -> None:
        self._keys.forget(event.seq for event in events)

    def _without_name(self, event: Event) -> str | None:
        """Return which NULL is the reason why a claimed row has no content; None if there is none."""
        empty = [name for name in self._statements.nullable if not getattr(event, name)]
        columns = [repr(self._ownership.mapping.columns[name]) for name in empty]
        return f"column {' or '.join(columns)} is NULL" if columns else None

    def _open(self, connection: Connection, wanted: Wanted, *, most: int) -> None:
        """Open the cursor of a claim, with the content of rows of at most `most` bytes."""
        conditions, parameters = self._conditions(wanted)
        connection.execute(self._statements(existing_sql.CLAIM, *conditions), parameters | {"most": most})

    def _conditions(self, wanted: Wanted) -> tuple[list[LiteralString], dict[str, Any]]:
        conditions: list[LiteralString] = []
        parameters: dict[str, Any] = {"limit": self._settings.batch_events}
        if wanted.not_seqs:
            conditions.append(existing_sql.NOT_BUSY)
            parameters["busy"] = self._keys.array(wanted.not_seqs)
        if wanted.not_of:
            conditions.append(existing_sql.NOT_AMONG)
            parameters |= names(wanted.not_of)
        if wanted.upto is not None:
            conditions.append(existing_sql.UP_TO)
            parameters["last"] = wanted.upto
        return conditions, parameters

    def _some(self, connection: Connection, count: int) -> list[Event]:
        """Return the next rows of the claim."""
        with connection.cursor(binary=True) as cursor:
            rows = cursor.execute(sql.SQL(existing_sql.FETCH).format(count=count)).fetchall()
        return self._keys.numbered(list(map(Event._make, rows)))


def names(aggregates: Iterable[Name]) -> dict[str, list[str]]:
    """Return aggregates as the parameters of a condition."""
    types, ids = zip(*aggregates, strict=True)
    return {"types": list(types), "ids": list(ids)}


@contextmanager
def explained(table: Mapping) -> Iterator[None]:
    """Raise the database's error about an UPDATE as a `MarkError`."""
    try:
        yield
    except psycopg.DatabaseError as error:
        if is_outage(error):
            raise
        raise MarkError(_explain(table, error)) from error


def rehearse(connection: Connection, statements: Statements, table: Mapping, seqs: list[int]) -> None:
    """Mark rows in the open transaction, and roll the mark back.

    Raises:
        MarkError: the table does not allow these rows to be marked.
    """
    with connection.transaction(force_rollback=True), explained(table):
        connection.execute(statements(existing_sql.MARK), {"keys": statements.keys.array(seqs)})
        connection.execute(_NOW)
        if left := _unmarked(connection, statements, seqs):
            raise MarkError(
                f"{table} does not allow {left} of {len(seqs)} rows to be marked, so nothing is "
                f"published: {_LOOK}"
            )


def mark(connection: Connection, statements: Statements, table: Mapping, seqs: list[int]) -> None:
    """Mark published rows in the open transaction; log a warning if rows are missing. Call in `explained`.

    Raises:
        MarkError: the table does not allow all of them to be marked.
        SetupError: several rows have the same key.
    """
    marked = connection.execute(statements(existing_sql.MARK), {"keys": statements.keys.array(seqs)}).rowcount
    if marked == len(seqs):
        return
    key = table.columns["seq" if table.order == "seq" else "id"]
    left = _unmarked(connection, statements, seqs)
    if marked > len(seqs):
        raise SetupError(
            f"{key!r} is not unique in {table}: {len(seqs)} events have {marked} rows. Give each row its own"
        )
    if left:
        raise MarkError(f"{table} does not allow {left} published rows to be marked: {_LOOK}")
    _LOG.warning(
        "%d published events are no longer in %s, or another session has marked them: check for deleted "
        "rows, a detached partition, or another publisher",
        *(len(seqs) - marked, table),
    )


def _unmarked(connection: Connection, statements: Statements, seqs: list[int]) -> int:
    """Return how many of these are still pending: the others were deleted, or marked by another session."""
    ((left,),) = connection.execute(
        statements(existing_sql.UNMARKED), {"keys": statements.keys.array(seqs)}
    ).fetchall()
    return int(left)


def mark_what_can_be(connection: Connection, statements: Statements, seqs: list[int]) -> None:
    """Mark those of the rows that can be marked, in the open transaction."""
    broken = 0
    left = [seqs]
    while left and broken < _MOST_BROKEN:
        some = left.pop()
        try:
            with connection.transaction():
                connection.execute(statements(existing_sql.MARK), {"keys": statements.keys.array(some)})
                connection.execute(_NOW)
        except psycopg.DatabaseError as error:
            if is_outage(error):
                raise
            middle = len(some) // 2
            if middle:
                left += [some[middle:], some[:middle]]
            else:
                broken += 1


def _explain(table: Mapping, error: psycopg.DatabaseError) -> str:
    diagnosis = error.diag
    said = diagnosis.message_primary or first_line(error)
    if diagnosis.constraint_name:
        remedy = f"change constraint {diagnosis.constraint_name} of {diagnosis.table_name or table}"
    elif isinstance(error, psycopg.errors.InsufficientPrivilege):
        columns = ", ".join(table.columns[name] for name in WRITTEN if name in table.columns)
        remedy = f"GRANT UPDATE ({columns}) ON {table} to the relay's role, and what its triggers need"
    else:
        where = (diagnosis.context or "").splitlines()
        remedy = "change what rejects the UPDATE" + (f" ({where[0]})" if where else "")
    return (
        f"{table} does not allow rows to be marked as published, so nothing more is published: {said}: "
        f"{remedy}, then start the relay again"
    )
