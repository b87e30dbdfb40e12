"""What relays look at while `outbox adopt` replaces a marked table by the append-only outbox.

Invariants:
- After the switch, the relay of the outbox takes no shard until the table's remaining rows are published.
- After the way back, no relay takes the table until the outbox's remaining events are published.
- A relay finds the table under the name that it has now, whatever [table] in outbox.toml says.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.database import Connection

ORDER_TRIGGER: Final = "adopted_order"
"""The trigger on a table that must wait; it also refuses the marks of other publishers."""
_IS_THERE: Final = "SELECT to_regclass('outbox_adopted') IS NOT NULL"
_KEPT: Final = """
SELECT kept_as::text FROM outbox_adopted
WHERE schema = %(schema)s AND name = %(name)s AND state IN ('draining', 'adopted')"""
_DRAINING: Final = "SELECT schema || '.' || name FROM outbox_adopted WHERE state = 'draining'"
MUST_WAIT: Final = f"""
SELECT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = %(oid)s::oid AND tgname = '{ORDER_TRIGGER}')"""


def followed(connection: Connection, mapping: Mapping) -> Mapping:
    """Return the mapping with the name that the table has now."""
    if mapping.schema is None or connection.execute(_IS_THERE).fetchone() != (True,):
        return mapping
    row = connection.execute(_KEPT, {"schema": mapping.schema, "name": mapping.table}).fetchone()
    return mapping if row is None else dataclasses.replace(mapping, table=row[0])


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
