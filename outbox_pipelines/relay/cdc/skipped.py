"""Notices events that a slot skips: it was moved or replaced by hand, or its publication was changed.

Invariants:
- A transaction is skipped if it was not delivered, and was committed, with rows here, before a position in
  the log that the slot has reached.
- Few are remembered at a time. The position lacks all of them, so another source publishes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import psycopg

from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.cdc import queries
from outbox_pipelines.relay.cdc.delivered import Delivered
from outbox_pipelines.relay.cdc.stream import SlotLostError

_LOOK_SECONDS: Final = 10.0


class Skipped:
    """What a slot should deliver, compared with what it has delivered.

    Args:
        connection: in autocommit mode.
        ask: brings `delivered` up to date with the table.
    """

    def __init__(
        self, connection: psycopg.Connection[Any], delivered: Delivered, ask: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._delivered = delivered
        self._ask = ask
        self._awaited: set[int] = set()
        self._until: int | None = None
        """The position in the log before which the awaited transactions end; None: none are awaited."""
        self._look_at = 0.0
        self._looked_at_position = -1
        self.is_checked = False
        """Whether nothing was skipped before the reader caught up."""

    def look(self, position: int, open_from: Any) -> None:
        """Compare; all that was received before `position` must be in `delivered`.

        Raises:
            SlotLostError: the slot has skipped events.
        """
        if self._until is None:
            if time.monotonic() >= self._look_at and position != self._looked_at_position:
                self._begin(open_from)
                self._looked_at_position = position
        elif position >= self._until:
            skipped = sum(not self._delivered.sees(tx) for tx in self._awaited)
            self._until, self.is_checked = None, True
            if skipped:
                raise SlotLostError(
                    f"it has skipped the events of {skipped} transactions: the slot was moved, read or "
                    "replaced by another program, or its publication was changed"
                )

    def _begin(self, open_from: Any) -> None:
        self._look_at = time.monotonic() + _LOOK_SECONDS
        self._ask()
        given = {"first": str(self._delivered.end), "open_from": open_from}
        rows = self._connection.execute(queries.NOT_DELIVERED, given).fetchall()
        self._awaited = self._delivered.awaited | {tx for (tx,) in rows}
        # Afterwards: each of them ends before it. The first look must end also if nothing is written.
        query = queries.INSERTED_TO if self.is_checked else queries.END_OF_LOG
        row = self._connection.execute(query).fetchone()
        assert row is not None
        self._until = row[0]


def require_publication(connection: psycopg.Connection[Any], slot: str) -> None:
    """Raise SetupError if the slot's publication does not publish all of the outbox.

    Since PostgreSQL 18 a slot without a publication is read without an error, and without events.
    """
    if connection.execute(queries.PUBLICATION, {"slot": slot}).fetchone() != (True, True, True):
        raise SetupError(
            f"the publication {slot} is missing or does not publish the outbox as it must: "
            "run `outbox cdc setup`"
        )
