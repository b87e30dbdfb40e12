"""The outbox in Alembic: its tables in a migration of yours, and out of autogenerate's sight.

    from outbox_pipelines.alembic import create_outbox, drop_outbox

    def upgrade() -> None:
        create_outbox()

    def downgrade() -> None:
        drop_outbox()

In `env.py`: `context.configure(…, include_name=include_name)`. A release with new files in `sql/` wants
another migration with `create_outbox()`, which applies what is missing.

Invariants:
- Everything runs in Alembic's transaction, or stands in its script (`--sql`).
- The tables are those of `outbox migrate`; both can be used on one database.
"""

from __future__ import annotations

from collections.abc import Mapping

from alembic import op

from outbox_pipelines import scripts


def create_outbox(schema: str | None = None) -> None:
    """Applies what is missing of the outbox's SQL; where nothing is, it changes nothing.

    Args:
        schema: where to, made if it is not there; else the first of the search_path that exists.
    """
    for statement in scripts.creating(schema):
        _run(statement)


def drop_outbox(schema: str | None = None, *, even_if_unpublished: bool = False) -> None:
    """Drops everything that `create_outbox` has made, with all events in it.

    Raises:
        sqlalchemy.exc.DBAPIError: there are events that are neither published nor discarded, and
            `even_if_unpublished` does not say that they may be lost; nothing was dropped.
    """
    _run(scripts.dropping(schema, even_if_unpublished=even_if_unpublished))


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """For `context.configure`: autogenerate neither drops nor compares the outbox's tables.

    With a filter of your own: `include_name=lambda *about: mine(*about) and include_name(*about)`.
    """
    return type_ != "table" or name is None or not scripts.is_ours(name)


def _run(statement: str) -> None:
    context = op.get_context()
    if context.as_sql:
        context.impl.static_output(f"{statement};")
    else:
        # Without parameters, so that no driver takes a percent sign for a placeholder.
        op.get_bind().exec_driver_sql(statement, execution_options={"no_parameters": True})
