"""What relays look at while `outbox adopt` replaces a marked table by the append-only outbox.

Invariants:
- After the switch, the relay of the outbox takes no shard until the table's remaining rows are published.
- After the way back, no relay takes the table until the outbox's remaining events are published.
- A relay finds the table under the name that it has now, whatever [table] in outbox.toml says, and whatever
  OUTBOX_SCHEMA: the view that has the table's name leads to the outbox that adopted it.
- Once the rows are published, a relay that names the table by [table] is refused: it would publish nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Final, LiteralString

from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError

ORDER_TRIGGER: Final = "adopted_order"
"""The trigger on a table that must wait; it also refuses the marks of other publishers."""
# The schema of the outbox behind a view that a switch has made, and whether this role may look into it.
BEHIND_VIEW: Final = """
SELECT n.nspname::text, has_schema_privilege(n.oid, 'USAGE')
FROM pg_class c JOIN pg_namespace v ON v.oid = c.relnamespace
JOIN pg_trigger g ON g.tgrelid = c.oid AND g.tgname = 'adopted_insert'
JOIN pg_proc p ON p.oid = g.tgfoid JOIN pg_namespace n ON n.oid = p.pronamespace
WHERE v.nspname = coalesce(%(schema)s::text, current_schema()) AND c.relname = %(name)s"""
_KEPT: Final[LiteralString] = """
SELECT kept_as::text, state FROM {schema}.outbox_adopted WHERE state IN ('draining', 'adopted', 'finished')"""
_DRAINING: Final = "SELECT schema || '.' || name FROM outbox_adopted WHERE state = 'draining'"
MUST_WAIT: Final = f"""
SELECT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = %(oid)s::oid AND tgname = '{ORDER_TRIGGER}')"""


def followed(connection: Connection, mapping: Mapping, *, has_ended: bool = False) -> Mapping:
    """Return the mapping with the name that the table has now.

    Args:
        has_ended: follow a table whose rows are all published, too.

    Raises:
        SetupError: the relay of the outbox publishes in place of the relay of this table.
    """
    given = {"schema": mapping.schema, "name": mapping.table}
    behind = connection.execute(BEHIND_VIEW, given).fetchone()
    if behind is None:
        return mapping
    schema, may_look = behind
    kept, state = None, "adopted"
    if may_look:
        query = sql.SQL(_KEPT).format(schema=sql.Identifier(schema))
        if (row := connection.execute(query).fetchone()) is None:
            # A way back has begun since.
            return mapping
        kept, state = row
    if kept is not None and (state == "draining" or (state == "adopted" and has_ended)):
        return dataclasses.replace(mapping, table=kept)
    raise SetupError(
        f"{mapping} was adopted by the append-only outbox in schema {schema}, whose relay publishes its "
        "events: remove [table] (OUTBOX_TABLE), which only `outbox adopt` needs, and set "
        f"OUTBOX_SCHEMA={schema}"
    )


def draining(connection: Connection) -> str | None:
    """Return why no relay may take a shard of the outbox now; None if one may."""
    row = connection.execute(_DRAINING).fetchone()
    if row is None:
        return None
    return (
        f"events wait for the remaining rows of {row[0]}, which were written before the switch: "
        "run `outbox adopt drain`"
    )


def regclass(mapping: Mapping) -> sql.Composable:
    """Return the name of a mapping's table as a literal for `to_regclass`."""
    parts = (mapping.schema, mapping.table) if mapping.schema else (mapping.table,)
    return sql.Literal(sql.Identifier(*parts).as_string())
