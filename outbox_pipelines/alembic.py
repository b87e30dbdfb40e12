"""The outbox in Alembic: create its tables in your migrations, and exclude them from autogenerate.

    from outbox_pipelines.alembic import create_outbox, drop_outbox

    def upgrade() -> None:
        create_outbox()

    def downgrade() -> None:
        drop_outbox()

In `env.py`: `context.configure(…, include_name=include_name)`. A release with new files in `sql/` needs
another migration with `create_outbox()`, which applies the missing files.

Invariants:
- Everything runs in Alembic's transaction, or is part of its script (`--sql`).
- The tables are those of `outbox migrate`; both can be used on the same database.
"""

from __future__ import annotations

from collections.abc import Mapping

from alembic import op

from outbox_pipelines.core import scripts


def create_outbox(schema: str | None = None) -> None:
    """Apply the missing files of the outbox's SQL. If none is missing, nothing changes.

    Args:
        schema: the target schema, created if it does not exist; default: the first existing one of the
            search_path.
    """
    for statement in scripts.creating(schema):
        _run(statement)


def drop_outbox(schema: str | None = None, *, even_if_unpublished: bool = False) -> None:
    """Drop everything that `create_outbox` has created, with all events in it.

    Raises:
        sqlalchemy.exc.DBAPIError: some events are neither published nor discarded, and
            `even_if_unpublished` is false; nothing was dropped.
    """
    _run(scripts.dropping(schema, even_if_unpublished=even_if_unpublished))


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """Return whether autogenerate includes a name; for `context.configure`. It skips the outbox's tables.

    With a filter of your own: `include_name=lambda *about: mine(*about) and include_name(*about)`.
    """
    return type_ != "table" or name is None or not scripts.is_ours(name)


def _run(statement: str) -> None:
    context = op.get_context()
    if context.as_sql:
        context.impl.static_output(f"{statement};")
    else:
        # Without parameters, so that no driver interprets a percent sign as a placeholder.
        op.get_bind().exec_driver_sql(statement, execution_options={"no_parameters": True})
