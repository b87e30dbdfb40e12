"""Write through Django: `django.db.connection`, and each of `django.db.connections`."""

from __future__ import annotations

from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import ConnectionProxy

from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.statements import Query
from outbox_pipelines.writer.targets import Way, no_transaction


def _on_connection(connection: Any, query: Query) -> list[tuple[Any, ...]]:
    # Django's caches use proxies of the same class.
    vendor = getattr(connection, "vendor", "no database")
    if vendor != "postgresql":
        raise OutboxError(f"this connection leads to {vendor}: the outbox needs PostgreSQL")
    if not connection.in_atomic_block and connection.get_autocommit():
        raise no_transaction("`with transaction.atomic():`")
    with connection.cursor() as cursor:
        cursor.execute(query.statement.percent, query.values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


_WAY: Final = Way(_on_connection)
WAYS: Final[dict[type, Way]] = {BaseDatabaseWrapper: _WAY, ConnectionProxy: _WAY}
