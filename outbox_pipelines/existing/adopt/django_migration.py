"""`outbox adopt` as an operation of a Django migration.

Nothing else is in the migration:

    class Migration(migrations.Migration):
        atomic = False
        dependencies = [("shop", "0007_outbox")]
        operations = [AdoptTable("table.toml", "outbox", accept=["column:trace_id"])]

Invariants:
- Databases other than PostgreSQL, and those that the project's routers exclude, are not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.db import router
from django.db.migrations.operations.base import Operation

from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing.adopt import migrating


class AdoptTable(Operation):  # type: ignore[misc]
    """Prepare and switch, as `outbox adopt` does; drain the table afterwards with `outbox adopt drain`.

    The reverse operation is `outbox adopt back`, which publishes events that wait (OUTBOX_KAFKA).

    Args:
        config: an `outbox.toml` whose section `[table]` describes the table.
        schema: of the append-only outbox.
        accept: the consequences that `outbox adopt plan` names.
        seconds: how long to wait for transactions that use the table.
    """

    reversible = True

    def __init__(
        self, config: Path | str, schema: str, accept: Sequence[str] = (), seconds: float = 60.0
    ) -> None:
        self.config = config
        self.schema = schema
        self.accept = accept
        self.seconds = seconds

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Do nothing: the model stays, and the view has its table's name."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if dsn := _dsn(app_label, schema_editor):
            migrating.forwards(dsn, self.config, self.schema, self.accept, self.seconds)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if dsn := _dsn(app_label, schema_editor):
            migrating.backwards(dsn, self.config, self.schema, self.seconds)

    def describe(self) -> str:
        return f"Adopt the outbox table of {self.config}"


def _dsn(app_label: str, schema_editor: Any) -> str | None:
    """Return the database of the migration; None if it is not to be changed."""
    connection = schema_editor.connection
    if connection.vendor != "postgresql" or not router.allow_migrate(connection.alias, app_label):
        return None
    if schema_editor.collect_sql:
        schema_editor.collected_sql.append(
            "-- outbox adopt: the statements are printed by `outbox adopt plan`"
        )
        return None
    if connection.in_atomic_block:
        raise SetupError(
            "the switch runs in a session of its own, which does not see an open transaction: write atomic = "
            "False in the migration, with this operation alone"
        )
    at = connection.settings_dict
    given = {"host": at["HOST"], "port": at["PORT"], "dbname": at["NAME"]}
    given |= {"user": at["USER"], "password": at["PASSWORD"]}
    return migrating.dsn_of(given, dict(at.get("OPTIONS") or {}))
