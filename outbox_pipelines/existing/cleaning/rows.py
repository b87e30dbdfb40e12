"""Deletes published rows in batches so small that no lock is held for long.

Invariants:
- A statement that takes more than 40 ms is canceled and tried with fewer rows, so that no lock is held for
  more than 50 ms. Between two of them is a pause as long as the last one.
- A batch is one statement, and so one transaction: if this process or the network stops, no lock is held.
- Only versions of rows that were found published are deleted, and only if they still are.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import psycopg
from psycopg import sql

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.sqlstates import is_outage
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.cleaning import queries
from outbox_pipelines.existing.cleaning.target import Target

MOST_SECONDS: Final = 0.05
"""How long a batch may hold its locks."""
# Half of it: a statement that is canceled was for nothing.
_WANTED_SECONDS: Final = MOST_SECONDS / 2
# The rest is for what comes after the statement: its cancellation, or its commit.
CANCEL_MS: Final = 40
"""After how many milliseconds the server cancels a statement."""
BRIEFLY: Final = f"SET statement_timeout = {CANCEL_MS}; SET lock_timeout = {CANCEL_MS // 2}"
"""Limits of a statement: how long it may take, and how much of that it may wait for a lock."""
_WINDOW_BLOCKS: Final = 256
_FIRST_ROWS: Final = 200
_MOST_ROWS: Final = 5_000
_ATTEMPTS_OF_ONE: Final = 5
ATTEMPTS: Final = 100
"""How often a lock is tried."""
PAUSE: Final = (0.02, 0.2)
"""Seconds between two attempts: from, to."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of rows: places, transactions and ids, as texts."""

    places: list[str]
    transactions: list[str]
    ids: list[str]

    def __len__(self) -> int:
        return len(self.places)


@dataclass(slots=True)
class Deleter:
    """Deletes batches of one table, each in a transaction of its own."""

    connection: Connection
    target: Target
    stop: threading.Event
    deleted: int = 0
    longest: float = 0.0
    """Seconds of the longest batch, which held its locks for less."""
    _rows: int = field(default=_FIRST_ROWS)
    _round_trip: float | None = None
    """Seconds that each statement takes on the network, without locks."""

    def delete(self, leaf: sql.Identifier, versions: Versions) -> int:
        """Delete these versions; return how many were there and not locked.

        Raises:
            NotReadyError: a single row takes too long; another session locks the table; a foreign key or a
                trigger refuses.
        """
        if self._round_trip is None:
            self._round_trip = min(self._seconds_of_nothing() for _ in range(3))
        self.connection.execute(BRIEFLY)
        deleted = self._delete(self.target.statement(queries.DELETE, leaf), versions)
        self.connection.execute(queries.AT_LENGTH)
        self.deleted += deleted
        return deleted

    def _delete(self, statement: sql.Composed, versions: Versions) -> int:
        at = deleted = failures = 0
        while at < len(versions) and not self.stop.is_set():
            until = at + self._rows
            given = {
                "places": versions.places[at:until],
                "transactions": versions.transactions[at:until],
                "ids": versions.ids[at:until],
            }
            began = time.monotonic()
            try:
                count = self._execute(statement, given)
            except psycopg.errors.QueryCanceled:
                # One such statement can also be the fault of a machine that is busy for a moment.
                failures += self._rows == 1
                if failures == _ATTEMPTS_OF_ONE:
                    raise NotReadyError(
                        f"deleting one row of {self.target} takes more than {CANCEL_MS} ms: "
                        "look for a trigger, or a foreign key without an index"
                    ) from None
                self._rows = max(1, self._rows // 4)
                self.stop.wait(MOST_SECONDS)
                continue
            except psycopg.errors.LockNotAvailable:
                failures += 1
                if failures == ATTEMPTS:
                    raise NotReadyError(
                        f"another session locks {self.target}, or rows that its rows reference: the next run "
                        "continues"
                    ) from None
                self.stop.wait(random.uniform(*PAUSE))
                continue
            except psycopg.DatabaseError as error:
                if is_outage(error):
                    raise
                raise NotReadyError(
                    f"rows of {self.target} cannot be deleted: {first_line(error)}: remove the rows that "
                    "reference them, or change what refuses the DELETE; the next run continues"
                ) from None
            took = max(0.0, time.monotonic() - began - (self._round_trip or 0.0))
            deleted += count
            at, failures = until, 0
            self.longest = max(self.longest, took)
            self._adapt(took)
            self.stop.wait(took)
        return deleted

    def _execute(self, statement: sql.Composed, given: dict[str, list[str]]) -> int:
        return self.connection.execute(statement, given).rowcount

    def _seconds_of_nothing(self) -> float:
        began = time.monotonic()
        self.connection.execute(queries.NOTHING)
        return time.monotonic() - began

    def _adapt(self, took: float) -> None:
        if took > _WANTED_SECONDS:
            self._rows = max(1, self._rows // 2)
        elif took < _WANTED_SECONDS / 4:
            self._rows = min(_MOST_ROWS, self._rows * 2)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A table that contains rows."""

    oid: int
    name: sql.Identifier
    blocks: int


def leaves(connection: Connection, target: Target) -> list[Leaf]:
    """Return the tables that contain the rows: the partitions, or the table itself."""
    found = connection.execute(queries.LEAVES, {"oid": target.oid}).fetchall()
    return [Leaf(oid, sql.Identifier(schema, name), blocks) for oid, schema, name, blocks in found]


def windows(blocks: int) -> Iterator[tuple[int, int]]:
    """Divide a table into ranges of blocks."""
    for start in range(0, blocks, _WINDOW_BLOCKS):
        yield start, min(start + _WINDOW_BLOCKS, blocks)


def place(block: int) -> str:
    """Return the place of a block's beginning."""
    return f"({block},0)"


def delete_all(deleter: Deleter) -> None:
    """Delete all rows that may be removed."""
    connection, target = deleter.connection, deleter.target
    for leaf in leaves(connection, target):
        query = target.statement(queries.ROWS, leaf.name)
        for start, end in windows(leaf.blocks):
            found = connection.execute(query, {"start": place(start), "end": place(end)}).fetchall()
            if found:
                deleter.delete(leaf.name, Versions(*map(list, zip(*found, strict=True))))
            if deleter.stop.is_set():
                return
