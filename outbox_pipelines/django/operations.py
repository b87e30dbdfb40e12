"""The migration operation of the app.

Invariants:
- It runs in the migration's transaction, and `sqlmigrate` prints its SQL.
- Databases other than PostgreSQL, and those that the project's routers exclude, are not changed.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import router
from django.db.migrations.operations.base import Operation

from outbox_pipelines.core import scripts


class CreateOutbox(Operation):  # type: ignore[misc]
    """Apply the missing files of the outbox's SQL, in the first schema of the search_path.

    Args:
        up_to: the newest SQL file; each further file comes with another migration of the app.

    The reverse operation drops the outbox. It fails while events are neither published nor discarded, unless
    the settings have ``OUTBOX_DROP_UNPUBLISHED = True``.
    """

    reversible = True

    def __init__(self, up_to: str) -> None:
        self.up_to = up_to

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Do nothing: the app has no models."""

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
