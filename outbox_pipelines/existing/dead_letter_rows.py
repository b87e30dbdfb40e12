"""Finds, shows and replays the dead letters of a marked table, in its own rows.

Invariants:
- Only rows that the table records as dead letters are shown in a list or changed.
- A replayed row is pending, as one that was never tried. The table has no place for an audit.
- Nothing is discarded: what becomes of a row that is not to be published is up to the application.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from outbox_pipelines.config import table_mapping
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import examine, existing_sql
from outbox_pipelines.existing.check import open_mapping
from outbox_pipelines.existing.table_statements import Statements
from outbox_pipelines.relay import adoption
from outbox_pipelines.relay.parking.dead_letter_store import (
    CONDITIONS,
    Action,
    DeadLetterRow,
    FoundDeadLetters,
    Replayed,
)
from outbox_pipelines.settings import RelaySettings

# Larger than any payload that Kafka usually accepts.
_MOST_SHOWN: Final = 2_000_000
# What a filter needs in the table.
_NEEDS: Final = {"error": "last_error", "since": "failed_at", "until": "failed_at"}


class DeadLetterRows:
    """The dead letters in the rows of the table of OUTBOX_TABLE: implements `kinds.DeadLetters`."""

    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings

    def find(self, given: Mapping[str, Any], *, limit: int, discarded: bool) -> FoundDeadLetters:
        if discarded:
            raise SetupError("an existing table has no discarded dead letters: leave out --discarded")
        with self._opened(given) as (connection, statements, conditions):
            counts = connection.execute(statements(existing_sql.COUNT_DEAD_LETTERS), conditions).fetchall()
            rows = connection.execute(
                statements(existing_sql.LIST_DEAD_LETTERS), conditions | {"limit": limit}
            ).fetchall()
        by_error: dict[str, int] = dict(counts)
        return FoundDeadLetters(sum(by_error.values()), by_error, [DeadLetterRow(*row) for row in rows])

    def show(self, given: str) -> list[dict[str, Any]]:
        """Return the rows with this id that are not published, with all of their columns."""
        with self._opened({}) as (connection, statements, _):
            which = {"id": given, "most": _MOST_SHOWN}
            rows = connection.execute(statements(existing_sql.SHOW_UNPUBLISHED), which).fetchall()
        note = f"(not shown: more than {_MOST_SHOWN:,} bytes)"
        return [{"id": given, "row": note} if row is None else json.loads(row) for (row,) in rows]

    def check_action(self, action: Action, given: Mapping[str, Any]) -> None:
        if action == "discard":
            raise SetupError(
                "an existing table has no place for discarded dead letters: delete the rows, or mark them as "
                "published, in your application"
            )

    def act(self, action: Action, given: Mapping[str, Any], *, actor: str, reason: str) -> int:
        """Make dead letters pending, as if they had never been tried; return how many."""
        self.check_action(action, given)
        with self._opened(given) as (connection, statements, conditions):
            return connection.execute(statements(existing_sql.REPLAY), conditions).rowcount

    def replay(self, given: Mapping[str, Any], *, actor: str, reason: str, seconds: float) -> Replayed:
        return Replayed(self.act("replay", given, actor=actor, reason=reason), [], None)

    @contextmanager
    def _opened(self, given: Mapping[str, Any]) -> Iterator[tuple[Connection, Statements, dict[str, Any]]]:
        """Yield a session, the statements and their parameters; refuse what the table does not record."""
        mapping = open_mapping(self._settings)
        with connect(self._settings, name="outbox dead-letters") as connection:
            mapping = adoption.followed(connection, mapping, has_ended=True)
            types = examine.check(connection, mapping).types
            _require(mapping, given)
            ids = list(given.get("ids") or ()) or None
            most = self._settings.max_attempts
            yield (
                connection,
                Statements(mapping, types, max_attempts=most, with_time=False),
                {**dict.fromkeys(CONDITIONS), **given, "ids": ids},
            )


def _require(mapping: table_mapping.Mapping, given: Mapping[str, Any]) -> None:
    if not mapping.remembers_failures:
        raise SetupError(
            f"{mapping} has no failed_at and no last_error, so its dead letters are not recorded: the relay "
            "tries them again after each restart"
        )
    for condition, column in _NEEDS.items():
        if given.get(condition) is not None and column not in mapping.columns:
            raise SetupError(f"{mapping} has no {column}, so --{condition} cannot select: leave it out")
