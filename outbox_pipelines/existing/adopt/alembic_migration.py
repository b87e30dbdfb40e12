"""`outbox adopt` as a migration of Alembic.

Nothing else is in the migration:

    from outbox_pipelines.existing.adopt.alembic_migration import adopt_table, give_table_back

    def upgrade() -> None:
        adopt_table("table.toml", "outbox", accept=["column:trace_id"])

    def downgrade() -> None:
        give_table_back("table.toml", "outbox")

Invariants:
- The migrations before it are committed first: the switch runs in a session of its own, and must see their
  work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from alembic import op

from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing.adopt import migrating


def adopt_table(
    config: Path | str,
    schema: str,
    *,
    accept: Sequence[str] = (),
    seconds: float = 60.0,
    dsn: str | None = None,
) -> None:
    """Prepare and switch, as `outbox adopt` does; drain the table afterwards with `outbox adopt drain`.

    Args:
        config: an `outbox.toml` whose section `[table]` describes the table.
        schema: of the append-only outbox.
        accept: the consequences that `outbox adopt plan` names.
        seconds: how long to wait for transactions that use the table.
        dsn: the database, if the engine's URL does not lead to it.
    """
    with _committed(dsn) as to:
        migrating.forwards(to, config, schema, accept, seconds)


def give_table_back(
    config: Path | str, schema: str, *, seconds: float = 60.0, dsn: str | None = None
) -> None:
    """Undo the switch, as `outbox adopt back` does: events that wait are published (OUTBOX_KAFKA)."""
    with _committed(dsn) as to:
        migrating.backwards(to, config, schema, seconds)


@contextmanager
def _committed(dsn: str | None) -> Iterator[str]:
    context = op.get_context()
    if context.as_sql:
        raise SetupError(
            "a script (--sql) cannot contain the switch, which is made of what the catalog has: "
            "run `outbox adopt`"
        )
    with context.autocommit_block():
        url = op.get_bind().engine.url
        given = {"host": url.host, "port": url.port, "dbname": url.database}
        given |= {"user": url.username, "password": url.password}
        yield dsn or migrating.dsn_of(given, dict(url.query))
