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
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from outbox_pipelines.config import table_mapping
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import examine, queries
from outbox_pipelines.existing.check import open_mapping
from outbox_pipelines.existing.statements import Statements
from outbox_pipelines.relay import adoption
from outbox_pipelines.settings import Settings

# Larger than any payload that Kafka usually accepts.
_MOST_SHOWN: Final = 2_000_000
# What a filter needs in the table.
_NEEDS: Final = {"error": "last_error", "since": "failed_at", "until": "failed_at"}


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A dead letter, without its content."""

    id: str
    aggregate_type: str
    aggregate_id: str
    event_type: str
    attempts: int
    failed_at: datetime | None
    """None without such a column."""
    created_at: datetime | None
    error: str


@dataclass(frozen=True, slots=True)
class Found:
    """Dead letters, newest first, and their number by reason."""

    total: int
    by_error: dict[str, int]
    rows: list[DeadLetterRow]


def find(settings: Settings, given: Mapping[str, Any], *, limit: int = 50) -> Found:
    """Return the dead letters that meet all given conditions.

    Args:
        given: ids, event_type, aggregate_type, aggregate_id, error, since, until; or some of these.
        limit: maximum number of rows; the counts cover all.

    Raises:
        SetupError: the table does not record what a condition is about.
    """
    with _opened(settings, given) as (connection, statements, conditions):
        counts = connection.execute(statements(queries.COUNT_DEAD_LETTERS), conditions).fetchall()
        rows = connection.execute(
            statements(queries.LIST_DEAD_LETTERS), conditions | {"limit": limit}
        ).fetchall()
    by_error: dict[str, int] = dict(counts)
    return Found(sum(by_error.values()), by_error, [DeadLetterRow(*row) for row in rows])


def show(settings: Settings, event_id: str) -> list[dict[str, Any]]:
    """Return the rows with this id that are not published, with all of their columns."""
    with _opened(settings, {}) as (connection, statements, _):
        given = {"id": event_id, "most": _MOST_SHOWN}
        rows = connection.execute(statements(queries.SHOW_UNPUBLISHED), given).fetchall()
    note = f"(not shown: more than {_MOST_SHOWN:,} bytes)"
    return [{"id": event_id, "row": note} if row is None else _read(row) for (row,) in rows]


def replay(settings: Settings, given: Mapping[str, Any]) -> int:
    """Make dead letters pending, as if they had never been tried; return how many.

    Args:
        given: as for `find`.

    Raises:
        SetupError: as `find`.
    """
    with _opened(settings, given) as (connection, statements, conditions):
        return connection.execute(statements(queries.REPLAY), conditions).rowcount


@contextmanager
def _opened(
    settings: Settings, given: Mapping[str, Any]
) -> Iterator[tuple[Connection, Statements, dict[str, Any]]]:
    mapping = open_mapping(settings)
    with connect(settings, name="outbox dead-letters") as connection:
        mapping = adoption.followed(connection, mapping)
        types = examine.check(connection, mapping).types
        _require(mapping, given)
        conditions: dict[str, Any] = dict.fromkeys(queries.CONDITIONS)
        conditions |= {name: value or None for name, value in given.items()}
        conditions["ids"] = list(map(str, given["ids"])) if given.get("ids") else None
        yield (
            connection,
            Statements(mapping, types, max_attempts=settings.max_attempts, with_time=False),
            conditions,
        )


def _require(mapping: table_mapping.Mapping, given: Mapping[str, Any]) -> None:
    if not mapping.remembers_failures:
        raise SetupError(
            f"{mapping} has no failed_at and no last_error, so its dead letters are not recorded: the relay "
            "tries them again after each restart"
        )
    for condition, column in _NEEDS.items():
        if given.get(condition) and column not in mapping.columns:
            raise SetupError(f"{mapping} has no {column}, so --{condition} cannot select: leave it out")


def _read(row: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(row)
    return shown
