"""A database of tests is copied and dropped although the server still has the last session in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import psycopg
import pytest

from outbox_pipelines.database import connect
from outbox_pipelines.relay.read.slot.stream import Stream
from tests.conftest import Outbox, create_database, drop_database, end_sessions


class _Admin:
    """A session of the server; the last one in a database ends when a statement of this one has failed."""

    def __init__(self, session: psycopg.Connection[Any], end: Callable[[], None]) -> None:
        self.info, self._session, self._end, self.failures = session.info, session, end, 0

    def execute(self, statement: bytes) -> object:
        try:
            return self._session.execute(statement)
        except psycopg.errors.ObjectInUse:
            self.failures += 1
            self._end()
            raise


@pytest.mark.extended
def test_a_database_whose_last_session_has_just_ended(outbox: Outbox) -> None:
    """Guards against a test that fails where the server notices the end of a session late."""
    name = str(psycopg.conninfo.conninfo_to_dict(outbox.settings.require_dsn())["dbname"])
    copy, slot = f"{name}_copy", f"{name}_copy"
    settings = outbox.settings.model_copy(
        update={"dsn": psycopg.conninfo.make_conninfo(outbox.settings.require_dsn(), dbname=copy)}
    )
    with psycopg.connect(outbox.settings.require_dsn(), dbname="postgres", autocommit=True) as session:
        end_sessions(outbox.settings.require_dsn())
        admin = _Admin(session, outbox.connect().close)
        create_database(cast("psycopg.Connection[Any]", admin), copy, name)
        assert admin.failures > 0
        with psycopg.connect(settings.require_dsn(), autocommit=True) as connection:
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        reader = connect(settings, name="reader", replication=True)
        Stream(reader, slot, "none")
        admin = _Admin(session, reader.close)
        drop_database(cast("psycopg.Connection[Any]", admin), copy)
        assert admin.failures > 0
