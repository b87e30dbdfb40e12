"""Claims pending rows, and marks those that Kafka has.

Invariants:
- A claim is the lowest pending rows in order of `seq`, without those of blocked aggregates. No row is passed
  over because somebody else has it locked: its whole aggregate is left out until it is free.
- What was acknowledged is marked, by its `seq`, and nothing else; if the count differs, somebody is told.
- A claim's transaction is open for `breaker_seconds` at most. A claim that Kafka is slow with then goes on
  without its locks: it still stands in the way of nobody but itself.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.event import Event, Piece, weigh
from outbox_pipelines.relay import bodies
from outbox_pipelines.relay.claims import queries
from outbox_pipelines.relay.claims.holder import Holder
from outbox_pipelines.relay.claims.marks import MarkError, array, explained, mark_what_can_be, rehearse
from outbox_pipelines.relay.core.position import Snapshot
from outbox_pipelines.settings import Settings

_LOG = logging.getLogger(__name__)
# One is being claimed or marked while Kafka works on the other two.
_CONNECTIONS: Final = 3
# Rows fetched at once until their size is known: bounds memory where payloads are large.
_FEW: Final = 500
# Rows that are claimed at once where some are large or cannot be read: what is claimed is also read, and one
# may fill the batch.
_LARGE: Final = 1
# Text of the claims that are not settled, in bytes, up to which another may be made.
_MOST_BYTES: Final = 16_000_000
# Claims that are made so once there was need.
_CAREFUL_CLAIMS: Final = 20
# Foreign locks come and go between two statements.
_TRIES: Final = 5
_COMPLAIN_SECONDS: Final = 60.0
# A claim has no position: its rows are marked one by one.
_NOWHERE: Final = Snapshot(0, 0, ())


@dataclass(slots=True)
class Claim:
    """Rows that nobody else relays."""

    number: int
    piece: Piece
    connection: Connection
    at: float
    is_locked: bool = True


class ClaimSource:
    """The pending rows of a table that has been taken. For one thread, but for `beat`.

    Attributes:
        in_flight: the claims that are not settled, the oldest first.
        claimed: the number of the last claim.
        passed_over: the `seq` of events that were given up, where no column can tell.
        upto: the last `seq` to claim; None: there is none.
        was_locked_out: whether the last claim left rows to somebody else who has locked them.
    """

    def __init__(self, settings: Settings, holder: Holder) -> None:
        self._settings = settings
        self._holder = holder
        self._statements = holder.statements
        self._connections: list[Connection] = []
        self._free: deque[Connection] = deque()
        self._is_more = False
        self._complained_at = 0.0
        self._is_rehearsed = False
        self._careful = 0
        self.in_flight: deque[Claim] = deque()
        self.claimed = 0
        self.passed_over: set[int] = set()
        self.upto: int | None = None
        self.was_locked_out = False
        for _ in range(_CONNECTIONS):
            self._connections.append(holder.connect())
            self._free.append(self._connections[-1])

    def rehearse(self) -> None:
        """Finds out whether this role may write what has to be written; the first claim tells about the rows.

        Raises:
            MarkError: it may not.
        """
        connection, statements = self._connections[0], self._statements
        rehearse(connection, statements, self._holder.mapping, [])
        nothing: dict[str, Any] = {"seqs": "{}", "errors": [], "pauses": [], "lasts": []}
        with connection.transaction(force_rollback=True), explained(self._holder.mapping):
            if statements.writes_refusals:
                connection.execute(statements(queries.REFUSED), nothing)

    def stop_at_now(self) -> None:
        """Claims nothing that is inserted from now on."""
        ((self.upto,),) = self._holder.execute(self._statements(queries.LAST), {})

    @property
    def may_claim(self) -> bool:
        """Whether few enough claims are on their way."""
        return bool(self._free) and sum(claim.piece.size for claim in self.in_flight) < _MOST_BYTES

    def claim(self, blocked: Collection[tuple[str, str]]) -> Claim | None:
        """The next rows, without those of the blocked aggregates; None where there are none now."""
        connection = self._free[0]
        left_out = set(blocked)
        self.was_locked_out = False
        if not self._is_more and not self._any(connection, left_out):
            return None
        events: list[Event] = []
        unreadable: dict[int, str] = {}
        size = 0
        for _ in range(_TRIES):
            self._holder.begin_claim(connection)
            try:
                events, size, self._is_more, unreadable = self._fetch(connection, left_out)
                if events and not self._is_rehearsed:
                    seqs = [event.seq for event in events]
                    rehearse(connection, self._statements, self._holder.mapping, seqs)
                    self._is_rehearsed = True
                break
            except psycopg.errors.LockNotAvailable:
                connection.execute("ROLLBACK")
                left_out |= self._locked(connection, left_out)
        if not events:
            connection.execute("ROLLBACK")
            return None
        self._free.popleft()
        self.claimed += 1
        piece = Piece(events, size, _NOWHERE, _NOWHERE, ends_tick=False, unreadable=unreadable)
        claim = Claim(self.claimed, piece, connection, time.monotonic())
        self.in_flight.append(claim)
        return claim

    def settle(self, claim: Claim, published: list[Event]) -> None:
        """Marks what Kafka has of a claim; the rest of it is pending for everybody again.

        Raises:
            MarkError: the table does not let all of it be marked; the others are.
        """
        try:
            if published:
                self._mark_claim(claim, [event.seq for event in published])
            elif claim.is_locked:
                claim.connection.execute("ROLLBACK")
        finally:
            self.in_flight.remove(claim)
            self._free.append(claim.connection)

    def _mark_claim(self, claim: Claim, seqs: list[int]) -> None:
        connection = claim.connection
        if not claim.is_locked:
            self._holder.begin_claim(connection)
        try:
            with explained(self._holder.mapping):
                marked = connection.execute(self._statements(queries.MARK), {"seqs": array(seqs)}).rowcount
                if marked != len(seqs):
                    self._explain(connection, seqs, marked)
                connection.execute("COMMIT")
        except MarkError:
            connection.execute("ROLLBACK")
            self._holder.begin_claim(connection)
            mark_what_can_be(connection, self._statements, seqs)
            connection.execute("COMMIT")
            raise

    def mark(self, published: list[Event]) -> None:
        """Marks events that were published by themselves, outside of any claim."""
        seqs = [event.seq for event in published]
        with explained(self._holder.mapping), self._holder.transaction():
            marked = self._holder.count(self._statements(queries.MARK), {"seqs": array(seqs)})
            if marked != len(seqs):
                ((left,),) = self._holder.execute(self._statements(queries.UNMARKED), {"seqs": array(seqs)})
                self._judge(len(seqs), marked, left)

    def let_go(self) -> None:
        """Ends the transactions that have been open for too long: they hold vacuum back."""
        for claim in self.in_flight:
            if claim.is_locked and time.monotonic() - claim.at > self._settings.breaker_seconds:
                claim.connection.execute("ROLLBACK")
                claim.is_locked = False

    def beat(self) -> None:
        """A sign of life on each connection that is not busy. From any thread."""
        for connection in self._connections:
            if connection.info.transaction_status != psycopg.pq.TransactionStatus.ACTIVE:
                # A claim that has just met a foreign lock is about to be rolled back.
                with suppress(psycopg.errors.InFailedSqlTransaction):
                    connection.execute("SELECT 1")

    def close(self) -> None:
        """Gives back what is claimed, and closes the connections."""
        for connection in self._connections:
            connection.close()

    def _any(self, connection: Connection, left_out: Collection[tuple[str, str]]) -> bool:
        """Whether there is something to claim: costs no transaction where there is not."""
        conditions, parameters = self._conditions(left_out)
        row = connection.execute(self._statements(queries.ANY, *conditions), parameters).fetchone()
        return row == (True,)

    def _fetch(
        self, connection: Connection, left_out: Collection[tuple[str, str]]
    ) -> tuple[list[Event], int, bool, dict[int, str]]:
        """Rows and their size, whether there may be more, and which could not be read."""
        if not self._careful:
            try:
                fetched = self._fetch_small(connection, left_out)
            except psycopg.Error as error:
                if not bodies.is_about_a_row(error):
                    raise
                fetched = None
            if fetched is not None:
                return *fetched, {}
            connection.execute("ROLLBACK")
            self._holder.begin_claim(connection)
            self._careful = _CAREFUL_CLAIMS
        self._careful -= 1
        return self._fetch_any(connection, left_out)

    def _fetch_small(
        self, connection: Connection, left_out: Collection[tuple[str, str]]
    ) -> tuple[list[Event], int, bool] | None:
        """Many at once; None if there are large ones among them."""
        conditions, parameters = self._conditions(left_out)
        statement = self._statements(queries.CLAIM, *conditions)
        connection.execute(statement, parameters | {"most": bodies.FEW})
        most, most_size = self._settings.piece_events, self._settings.piece_bytes
        events: list[Event] = []
        size, few = 0, min(_FEW, most)
        while True:
            rows = _some(connection, few)
            if any(row.payload is None for row in rows):
                return None
            events += rows
            size += weigh(rows)
            if len(rows) < few:
                return events, size, False
            if len(events) >= most or size > most_size:
                return events, size, True
            few = min(_FEW, most - len(events))

    def _fetch_any(
        self, connection: Connection, left_out: Collection[tuple[str, str]]
    ) -> tuple[list[Event], int, bool, dict[int, str]]:
        """A few at a time, claimed without their content, which is then read row by row."""
        conditions, parameters = self._conditions(left_out)
        statement = self._statements(queries.CLAIM, *conditions)
        connection.execute(statement, parameters | {"most": bodies.NOTHING})
        events: list[Event] = []
        unreadable: dict[int, str] = {}
        size = 0
        while size <= self._settings.piece_bytes and len(events) < min(_FEW, self._settings.piece_events):
            rows = {row.seq: row for row in _some(connection, _LARGE)}
            statement = self._statements(queries.EVENTS)
            for seq, content in bodies.read(connection, statement, {}, list(rows)):
                if isinstance(content, str):
                    unreadable[seq] = content
                    event = rows[seq]._replace(payload="", metadata=None)
                else:
                    event = Event._make(content[: len(Event._fields)])
                events.append(event)
                size += weigh([event])
            if len(rows) < _LARGE:
                return events, size, False, unreadable
        return events, size, True, unreadable

    def _locked(self, connection: Connection, left_out: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """The aggregates of which somebody else has locked a row."""
        conditions, parameters = self._conditions(left_out)
        self._holder.begin_claim(connection)
        rows = connection.execute(self._statements(queries.LOCKED, *conditions), parameters).fetchall()
        connection.execute("ROLLBACK")
        if rows and time.monotonic() - self._complained_at > _COMPLAIN_SECONDS:
            self._complained_at = time.monotonic()
            _LOG.warning(
                "another session has locked pending rows of %d aggregates of %s, which wait for it: is the "
                "old publisher still running?",
                *(len(rows), self._holder.mapping),
            )
        self.was_locked_out = True
        return {(kind, name) for kind, name in rows}

    def _conditions(
        self, left_out: Collection[tuple[str, str]]
    ) -> tuple[list[LiteralString], dict[str, Any]]:
        conditions: list[LiteralString] = []
        parameters: dict[str, Any] = {"limit": self._settings.piece_events}
        busy = [event.seq for claim in self.in_flight for event in claim.piece.events]
        if busy or self.passed_over:
            conditions.append(queries.NOT_BUSY)
            parameters["busy"] = array([*busy, *self.passed_over])
        if left_out:
            conditions.append(queries.NOT_AMONG)
            parameters |= names(left_out)
        if self.upto is not None:
            conditions.append(queries.UP_TO)
            parameters["upto"] = self.upto
        return conditions, parameters

    def _explain(self, connection: Connection, seqs: list[int], marked: int) -> None:
        row = connection.execute(self._statements(queries.UNMARKED), {"seqs": array(seqs)}).fetchone()
        assert row is not None
        self._judge(len(seqs), marked, row[0])

    def _judge(self, published: int, marked: int, left: int) -> None:
        """Published and marked differ; `left` of the rows are there and still pending."""
        table = self._holder.mapping
        if marked > published:
            raise SetupError(
                f"{self._holder.mapping.columns['seq']!r} is not unique in {table}: {published} events have "
                f"{marked} rows; give each row its own number"
            )
        if left:
            raise MarkError(
                f"{table} does not let {left} published rows be marked: look for a trigger, a rule or "
                "a policy that stops UPDATE"
            )
        _LOG.warning(
            "%d published events are not in %s any more, or were marked by somebody else: rows deleted, a "
            "partition detached, or another publisher?",
            *(published - marked, table),
        )


def _some(connection: Connection, count: int) -> list[Event]:
    """The next rows of the claim."""
    with connection.cursor(binary=True) as cursor:
        return list(map(Event._make, cursor.execute(sql.SQL(queries.FETCH).format(count=count)).fetchall()))


def names(aggregates: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Aggregates as the parameters of a condition."""
    types, ids = zip(*aggregates, strict=True)
    return {"types": list(types), "ids": list(ids)}
