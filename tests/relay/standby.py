"""A primary with a streaming standby, and an outbox in both."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from outbox_pipelines.database import schema
from outbox_pipelines.local import Stack, postgres
from outbox_pipelines.local.postgres import Postgres, find_programs
from outbox_pipelines.local.server import STAY
from outbox_pipelines.settings import Settings, load_settings
from tests.conftest import Outbox, password_of, topic_prefix, wait_until


@dataclass(frozen=True)
class Pair:
    """Both servers, and an outbox whose DSN names both, the standby first."""

    primary: Postgres
    standby: Postgres
    outbox: Outbox

    def straight(self, server: Postgres) -> Settings:
        return self.outbox.settings.model_copy(update={"dsn": server.dsn})

    def promote(self) -> None:
        """Return when the standby is a primary."""
        with psycopg.connect(self.standby.dsn, autocommit=True) as connection:
            # Waiting inside of the statement, its snapshot can hold up the very WAL that it waits for.
            connection.execute("SELECT pg_promote(wait => false)")
            wait_until(
                lambda: connection.execute("SELECT pg_is_in_recovery()").fetchone() == (False,),
                what="the promotion",
            )


@contextmanager
def replicated(
    directory: Path,
    stack: Stack,
    *,
    primary_settings: Mapping[str, object] | None = None,
    standby_settings: Mapping[str, object] | None = None,
) -> Iterator[Pair]:
    """Both, for the length of the block.

    Args:
        primary_settings: of the server, once the standby exists.
        standby_settings: of the other server.
    """
    primary = Postgres(directory / "primary")
    standby = Postgres(directory / "standby", standby_settings)
    try:
        primary.start()
        if slot := (standby_settings or {}).get("primary_slot_name"):
            with psycopg.connect(primary.dsn, autocommit=True) as connection:
                connection.execute("SELECT pg_create_physical_replication_slot(%s)", [slot])
        copy = standby.directory / "cluster" / "data"
        copy.parent.mkdir(parents=True)
        # The standby asks as the user that it runs as, who cannot read the file of the password.
        source = psycopg.conninfo.make_conninfo(primary.dsn, password=password_of(primary.dsn))
        backup: list[str | Path] = [find_programs() / "pg_basebackup", "-d", source, "-D", copy]
        subprocess.run([*backup, "-R", "-c", "fast"], check=True)
        if postgres.identity() != STAY:
            for path in (copy, *copy.rglob("*")):
                shutil.chown(path, *postgres.identity())
        copy.chmod(0o700)
        shutil.copy(primary.password_file, standby.password_file)
        standby.start()
        topic = f"{topic_prefix()}-{{aggregate_type}}"
        hosts = psycopg.conninfo.make_conninfo(
            primary.dsn, host="127.0.0.1,127.0.0.1", port=f"{standby.port},{primary.port}"
        )
        with psycopg.connect(primary.dsn, autocommit=True) as connection:
            for name, value in (primary_settings or {}).items():
                connection.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
            connection.execute("SELECT pg_reload_conf()")
        settings = load_settings(dsn=hosts, kafka=stack.kafka, topic=topic)
        schema.migrate(settings.model_copy(update={"dsn": primary.dsn}))
        yield Pair(primary, standby, Outbox(settings))
    finally:
        standby.stop()
        primary.stop()
