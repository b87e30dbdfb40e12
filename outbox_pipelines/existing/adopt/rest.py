"""Events that the reader of a slot has not published: in a table of their own, which a relay publishes.

Invariants:
- The table has all of these events or does not exist; it is dropped when all of them are published.
"""

from __future__ import annotations

import time
from typing import Any, Final

from psycopg import sql

from outbox_pipelines.config.table_mapping import METADATA, Mapping
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.adopt import queries
from outbox_pipelines.existing.adopt.facts import Facts
from outbox_pipelines.existing.adopt.renaming import Say
from outbox_pipelines.existing.adopt.unsent import Row
from outbox_pipelines.relay import service
from outbox_pipelines.settings import Settings

_POLL: Final = 0.2
_ENTRIES: Final = (
    *("id", "aggregate_type", "aggregate_id", "event_type", "payload", "created_at", "headers", "trace_id"),
    *METADATA,
)


def exists(connection: Connection) -> bool:
    return connection.execute(queries.REST_EXISTS).fetchone() == (True,)


def drop(connection: Connection) -> None:
    connection.execute(queries.DROP_REST)


def keep(settings: Settings, connection: Connection, found: Facts, rows: list[Row]) -> None:
    """Store the events, in place of those that an earlier command has stored."""
    columns = [column for column in found.columns.values() if column.name in rows[0]]
    names = {
        "rest": sql.Identifier(settings.db_schema, queries.REST),
        "names": sql.SQL(", ").join(sql.Identifier(column.name) for column in columns),
        "columns": sql.SQL(", ").join(
            sql.SQL("{} {} {}").format(
                sql.Identifier(column.name),
                sql.SQL(column.type),
                sql.SQL("NOT NULL" if column.not_null else ""),
            )
            for column in columns
        ),
    }
    with connection.transaction(), connection.cursor() as cursor:
        drop(connection)
        cursor.execute(sql.SQL(queries.CREATE_REST).format(**names))
        cursor.execute(sql.SQL(queries.INDEX_REST).format(**names))
        with cursor.copy(sql.SQL(queries.COPY_REST).format(**names)) as copy:
            for row in rows:
                copy.write_row([row.get(column.name) for column in columns])


def publish(settings: Settings, connection: Connection, mapping: Mapping, *, until: float, say: Say) -> int:
    """Publish the events of the table, and drop it; return how many there were.

    Raises:
        NotReadyError: some could not be published in time.
    """
    given = settings.model_copy(
        update={
            "table": _description(settings, mapping),
            "delivery": "at_least_once",
            "on_dead_letter": "block",
        }
    )
    published = 0
    while (left := connection.execute(queries.REST_LEFT).fetchone()) is not None and left[0]:
        try:
            events = service.relay(given, until_empty=True, standby=service.Standby.REFUSE).events
        except service.ShardOwnedError as error:
            say(f"waiting: {error}")
            events = 0
        published += events
        if not events:
            time.sleep(_POLL)
        left = connection.execute(queries.REST_LEFT).fetchone()
        if time.monotonic() > until and left is not None and left[0]:
            why = f" ({left[1]:,} were rejected: {left[2]})" if left[1] else ""
            raise NotReadyError(
                f"{left[0]:,} events of before the switch are not published yet{why}; new events wait "
                f"for them. They are in {settings.db_schema}.{queries.REST}: correct or delete what is "
                "rejected there, and run the command again"
            )
    drop(connection)
    return published


def _description(settings: Settings, mapping: Mapping) -> dict[str, Any]:
    columns: dict[str, str] = {name: mapping.columns[name] for name in _ENTRIES if name in mapping.columns}
    columns |= {"seq": "seq_of_rest", "published_at": "published_at_of_rest"}
    columns |= {"retry_count": "retries_of_rest", "last_error": "error_of_rest"}
    given: dict[str, Any] = {"name": f"{settings.db_schema}.{queries.REST}", "columns": columns}
    if mapping.aggregate_type:
        given["aggregate_type"] = "".join(
            literal + ("" if spec is None else "{event_type:first}" if spec else "{event_type}")
            for literal, spec in mapping.aggregate_type
        )
    return given
