"""Delayed events of a test, and the time that passes until they are due."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg

from outbox_pipelines.writer import NewEvent, emit_many
from tests.conftest import Outbox


def delay(outbox: Outbox, *aggregates: object, is_due: bool = True, **options: Any) -> None:
    with outbox.connect(autocommit=False) as connection:
        emit_many(
            connection,
            [
                NewEvent("order", aggregate, "e", {"n": n}, deliver_after=timedelta(hours=1), **options)
                for n, aggregate in enumerate(aggregates)
            ],
        )
        if is_due:
            pass_time(connection)


def pass_time(connection: psycopg.Connection[Any]) -> None:
    """As if their time had come."""
    connection.execute(
        "UPDATE outbox_delayed SET due = due - interval '1 hour' WHERE due > clock_timestamp()"
    )
