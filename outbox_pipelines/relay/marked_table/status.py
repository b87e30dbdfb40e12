"""What an operator asks first about an existing table: backlog, its age, what was given up, who relays it.

Invariants:
- One read, cheap where the table has an index over its pending rows: counts are capped.
"""

from __future__ import annotations

from dataclasses import dataclass

from outbox_pipelines.database import connect
from outbox_pipelines.quality.measured import CAP, age
from outbox_pipelines.relay.marked_table import pg_catalog, queries
from outbox_pipelines.relay.marked_table.ownership import holding, open_mapping, shown
from outbox_pipelines.relay.marked_table.queries import Statements
from outbox_pipelines.relay.queries import TUNE
from outbox_pipelines.settings import Settings
from outbox_pipelines.text import plain


@dataclass(frozen=True, slots=True)
class TableStatus:
    """The state of one existing table."""

    table: str
    owner: str | None
    """Who relays it, and what that relay says of Kafka if it is away; None while nobody does."""
    owned_seconds: float | None
    """For how long; None where the role may not know."""
    backlog: int
    """Pending rows, counted up to `CAP`."""
    oldest_seconds: float | None
    """Age of the oldest of them; None without a backlog, or without a created_at."""
    failed: int
    """Rows that were given up, counted up to `CAP`."""
    warnings: list[str]


def read(settings: Settings) -> TableStatus:
    """Reads it.

    Raises:
        SetupError: the database is away, or the table is not as OUTBOX_TABLE_FILE says.
    """
    mapping = open_mapping(settings)
    with connect(settings, name="outbox: status") as connection:
        connection.execute(TUNE)
        found = pg_catalog.check(connection, mapping)
        statements = Statements(mapping, found.types, max_attempts=settings.max_attempts, with_time=False)
        cap = {"cap": CAP}
        backlog = connection.execute(statements(queries.BACKLOG), cap).fetchone()
        failed = connection.execute(statements(queries.FAILURES), cap).fetchone()
        owner = connection.execute(queries.OWNER, {"key": holding(found.oid)}).fetchone()
        assert backlog is not None
        assert failed is not None
        pid, name, owned_seconds, _ = owner or (0, None, None, None)
        return TableStatus(
            table=str(mapping),
            owner=shown(name, pid) if owner else None,
            owned_seconds=owned_seconds,
            backlog=backlog[0],
            oldest_seconds=backlog[1],
            failed=failed[0],
            warnings=found.warnings,
        )


def render(status: TableStatus) -> str:
    """For a terminal."""
    since = "" if status.owned_seconds is None else f" for {age(status.owned_seconds)}"
    oldest = "" if status.oldest_seconds is None else f", the oldest {age(status.oldest_seconds)} old"
    hint = "  (mend them, then make them pending again: docs/existing-tables.md)" if status.failed else ""
    lines = [
        f"table {status.table}",
        f"  owner      {status.owner + since if status.owner else 'nobody: start `outbox relay`'}",
        f"  backlog     {_count(status.backlog)} events{oldest}",
        f"  failed      {_count(status.failed)}{hint}",
        *(f"  warning     {warning}" for warning in status.warnings),
    ]
    return "\n".join(map(plain, lines))


def _count(number: int) -> str:
    return f"{number:,}" if number < CAP else f"at least {CAP:,}"
