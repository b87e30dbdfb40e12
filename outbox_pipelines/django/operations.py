"""The operation of the app's migrations.

Invariants:
- It runs in the migration's transaction, and `sqlmigrate` prints what it would run.
- Databases other than PostgreSQL, and those that the project's routers leave out, are left alone.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import router
from django.db.migrations.operations.base import Operation

from outbox_pipelines import scripts


class CreateOutbox(Operation):  # type: ignore[misc]
    """Applies what is missing of the outbox's SQL, into the first schema of the search_path.

    Args:
        up_to: the newest file there is: with another file the app gets another migration.

    Backwards it drops all of it. That fails while there are events that are neither published nor discarded,
    unless the settings say ``OUTBOX_DROP_UNPUBLISHED = True``.
    """

    reversible = True

    def __init__(self, up_to: str) -> None:
        self.up_to = up_to

    def state_forwards(self, app_label: str, state: Any) -> None:
        """No model is made."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if _is_wanted(app_label, schema_editor):
            for statement in scripts.creating():
                schema_editor.execute(statement, params=None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if _is_wanted(app_label, schema_editor):
            lossy = getattr(settings, "OUTBOX_DROP_UNPUBLISHED", False)
            schema_editor.execute(scripts.dropping(even_if_unpublished=lossy), params=None)

    def describe(self) -> str:
        return f"Create the outbox, up to {self.up_to}"


def _is_wanted(app_label: str, schema_editor: Any) -> bool:
    connection = schema_editor.connection
    return connection.vendor == "postgresql" and bool(router.allow_migrate(connection.alias, app_label))
