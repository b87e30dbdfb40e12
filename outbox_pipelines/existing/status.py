"""The status of a marked table: its backlog and the age of it, its dead letters, its owner.

Invariants:
- One read. It is cheap if the table has an index over its pending rows: counts are capped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psycopg

from outbox_pipelines.core.table_locks import reading_only
from outbox_pipelines.core.text import plain
from outbox_pipelines.database import connect
from outbox_pipelines.debezium import connector_reading
from outbox_pipelines.debezium.connector_state import Connector
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import examine, queries
from outbox_pipelines.existing.check import open_mapping
from outbox_pipelines.existing.ownership import awaiting, holding, shown
from outbox_pipelines.existing.statements import Statements
from outbox_pipelines.quality.measured import CAP, age
from outbox_pipelines.quality.rules import CheckResult
from outbox_pipelines.quality.status import rendered
from outbox_pipelines.relay import adoption
from outbox_pipelines.relay.relay_sql import PLAN_EACH
from outbox_pipelines.settings import Settings


@dataclass(frozen=True, slots=True)
class TableStatus:
    """The status of one marked table."""

    table: str
    owner: str | None
    """The relay that owns the table, or those that share it, with a note if Kafka is unavailable to one; None
    without a relay."""
    owned_seconds: float | None
    """Seconds since the relay took the table; None if the role may not see it."""
    backlog: int
    """Pending rows, counted up to `CAP`."""
    oldest_seconds: float | None
    """Age of the oldest of them; None without a backlog, or without a created_at."""
    retried: int
    """How many of them were rejected and are tried again, counted among the first `CAP`."""
    retried_reasons: dict[str, int]
    """Their reasons: the three most frequent, with their counts."""
    failed: int
    """Rows whose event is a dead letter, counted up to `CAP`."""
    reasons: dict[str, int]
    """Their reasons: the three most frequent, with their counts; empty without a last_error."""
    successor_waits: bool
    """Whether a standby waits for the table."""
    warnings: list[str]
    has_ages: bool
    """Whether there is a created_at."""
    connector: Connector | None = None
    """Debezium's connector; None without OUTBOX_CONNECT."""


@reading_only()
def read(settings: Settings) -> TableStatus:
    """Return the status of the table that OUTBOX_TABLE names.

    Raises:
        SetupError: the database is unavailable, the table is locked, or it does not match OUTBOX_TABLE.
    """
    try:
        return _read(settings)
    except psycopg.errors.LockNotAvailable:
        raise SetupError(
            f"another session has locked {open_mapping(settings)}, or waits for its lock, for more than 5 s: "
            "nothing is published until it ends; `SELECT pid, query, pg_blocking_pids(pid) FROM "
            "pg_stat_activity` shows it"
        ) from None


def _read(settings: Settings) -> TableStatus:
    mapping = open_mapping(settings)
    # Before the connection, which would wait for it.
    reported = connector_reading.ask(settings) if settings.connect else None
    with connect(settings, name="outbox: status") as connection:
        connection.execute(PLAN_EACH)
        connection.execute(queries.FOR_A_WHILE)
        mapping = adoption.followed(connection, mapping)
        found = examine.check(connection, mapping)
        statements = Statements(mapping, found.types, max_attempts=settings.max_attempts, with_time=False)
        cap = {"cap": CAP}
        backlog = connection.execute(statements(queries.BACKLOG), cap).fetchone()
        retried = connection.execute(statements(queries.RETRIED), cap).fetchall()
        failed = connection.execute(statements(queries.FAILURES), cap).fetchone()
        owners = connection.execute(queries.OWNER, {"key": holding(found.oid)}).fetchall()
        waiting = connection.execute(queries.OWNER, {"key": awaiting(found.oid)}).fetchall()
        reasons: list[tuple[str, int]] = []
        if failed and failed[0] and statements.writes_errors:
            reasons = connection.execute(statements(queries.REASONS), cap).fetchall()
        assert backlog is not None
        assert failed is not None
        return TableStatus(
            table=str(mapping),
            owner="; ".join(sorted(shown(name, pid) for pid, name, *_ in owners)) or None,
            owned_seconds=max((seconds for *_, seconds, _ in owners if seconds is not None), default=None),
            backlog=backlog[0],
            oldest_seconds=backlog[1],
            retried=int(retried[0][2]) if retried else 0,
            retried_reasons={reason: number for reason, number, _ in retried},
            failed=failed[0],
            reasons=dict(reasons),
            successor_waits=bool(waiting),
            warnings=found.warnings,
            has_ages="created_at" in mapping.columns,
            connector=None if reported is None else connector_reading.combine(settings, connection, reported),
        )


def render(status: TableStatus, results: Iterable[CheckResult]) -> str:
    """Return the status as text for a terminal, then the failed checks."""
    since = "" if status.owned_seconds is None else f" for {age(status.owned_seconds)}"
    oldest = "" if status.oldest_seconds is None else f", oldest {age(status.oldest_seconds)}"
    hint = "  (correct the cause, then run `outbox dead-letters replay`)" if status.failed else ""
    lines = [
        f"table {status.table}",
        f"  owner       {status.owner + since if status.owner else 'no active relay; start `outbox relay`'}",
        f"  backlog     {_count(status.backlog)} events{oldest}",
        *([f"  retried     {_count(status.retried)} of them, which were rejected"] if status.retried else []),
        *(f"  {count:,} × {reason}" for reason, count in status.retried_reasons.items()),
        f"  failed      {_count(status.failed)}{hint}",
        *(f"  {count:,} × {reason}" for reason, count in status.reasons.items()),
        *(f"  warning     {warning}" for warning in status.warnings),
        *rendered(results),
    ]
    return "\n".join(map(plain, lines))


def _count(number: int) -> str:
    return f"{number:,}" if number < CAP else f"at least {CAP:,}"
