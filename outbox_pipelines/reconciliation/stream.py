"""Stream rows of PostgreSQL as batches: any number of rows with a few MB of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import adbc_driver_manager
import adbc_driver_postgresql
import adbc_driver_postgresql.dbapi
import pyarrow as pa
from psycopg import sql

from outbox_pipelines.core import session
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import reading_dsn
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.reconciliation import queries

_BATCH_BYTES: Final = 8_000_000
Read = Callable[[sql.Composable], Iterator[pa.RecordBatch]]
"""Returns the rows of a query in non-empty batches; one query at a time."""


@contextmanager
def reading(dsn: str, schema: str) -> Iterator[Read]:
    """Open a connection to read from.

    Raises:
        UnavailableError: the database is unavailable or reports an error.
    """
    hint = {adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
    try:
        with (
            adbc_driver_postgresql.dbapi.connect(reading_dsn(dsn), autocommit=True) as connection,
            connection.cursor(adbc_stmt_kwargs=hint) as cursor,
        ):

            def read(query: sql.Composable) -> Iterator[pa.RecordBatch]:
                cursor.execute(query.as_string())
                return (batch for batch in cursor.fetch_record_batch() if batch.num_rows)

            for statement in [*session.pin_own(schema), *queries.TUNE.split(";")]:
                cursor.execute(statement)
            yield read
    # A server that ends the connection between two batches is an OSError.
    except (adbc_driver_manager.Error, OSError) as error:
        raise UnavailableError(f"the database ended the query of ids: {first_line(error)}") from None
