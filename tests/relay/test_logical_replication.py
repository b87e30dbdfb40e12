"""An outbox that logical replication fills from another database."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.database import schema
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.relay import relay_sql, service
from outbox_pipelines.settings import Settings, load_settings
from tests.conftest import Outbox, password_of, wait_until


def _at(outbox: Outbox, dsn: str) -> Settings:
    return load_settings(dsn=dsn, kafka=outbox.settings.kafka, topic=outbox.settings.topic)


def test_a_replicated_outbox_is_not_relayed(tmp_path: Path, outbox: Outbox) -> None:
    """Guards G1: rows with transaction ids of another database would be passed over in silence."""
    postgres = Postgres(tmp_path / "postgres", {"wal_level": "logical"})
    try:
        postgres.start()
        with psycopg.connect(postgres.dsn, autocommit=True) as admin:
            admin.execute("CREATE DATABASE copy")
        publisher = Outbox(_at(outbox, postgres.dsn))
        copy = psycopg.conninfo.make_conninfo(postgres.dsn, dbname="copy")
        subscriber = Outbox(_at(outbox, copy))
        for settings in (publisher.settings, subscriber.settings):
            schema.migrate(settings)
        with publisher.connect() as connection:
            connection.execute("CREATE PUBLICATION events FOR TABLE outbox")
            connection.execute("SELECT pg_create_logical_replication_slot('events', 'pgoutput')")
        # The server connects on its own, and may run as a user who cannot read the password file.
        source = psycopg.conninfo.make_conninfo(
            postgres.dsn, password=password_of(postgres.dsn), passfile=None
        )
        with subscriber.connect() as connection:
            connection.execute(
                f"CREATE SUBSCRIPTION events CONNECTION '{source}' PUBLICATION events "
                "WITH (create_slot = false)".encode()
            )
            publisher.write(1, 2, 3)
            wait_until(
                lambda: connection.execute("SELECT count(*) FROM outbox").fetchone() == (3,), seconds=60
            )
            with pytest.raises(SetupError, match="subscription events fills this outbox"):
                service.relay(subscriber.settings, until_empty=True)
        assert service.relay(publisher.settings, until_empty=True).events == 3
        assert len(outbox.messages()) == 3
    finally:
        postgres.stop()


def test_which_subscription_fills_an_outbox(outbox: Outbox) -> None:
    """Guards against one of another table, which would stop the relay, and the name of another one."""
    made = "CREATE SUBSCRIPTION {} CONNECTION '' PUBLICATION p WITH (connect = false, slot_name = NONE)"
    with outbox.connect(autocommit=False) as connection:
        connection.execute("CREATE TABLE other (id int) PARTITION BY RANGE (id)")
        connection.execute("CREATE TABLE part PARTITION OF other DEFAULT")
        connection.execute("SET LOCAL allow_system_table_mods = on")
        row = connection.execute(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox'::regclass"
        ).fetchone()
        assert row is not None
        leaf = str(row[0])
        for name, table, found in (("a", "part", []), ("b", "outbox", [("b",)]), ("c", leaf, [("c",)])):
            connection.execute(made.format(name).encode())
            connection.execute(
                "INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate) "
                "SELECT oid, %s::regclass, 'r' FROM pg_subscription WHERE subname = %s",
                [table, name],
            )
            assert connection.execute(relay_sql.SUBSCRIPTION).fetchall() == found
            if found:
                connection.execute("DELETE FROM pg_subscription_rel WHERE srrelid = %s::regclass", [table])
        connection.rollback()
