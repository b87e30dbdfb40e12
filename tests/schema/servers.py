"""Real servers, the wheel's PostgreSQL and the machine's own, and databases on them.

Invariants:
- A folder whose SQL is what its tests try imports `both_servers`: its tests run on both. The others import
  `server`; `make matrix` runs those that send SQL of their own on each PostgreSQL.
- Where the machine has no PostgreSQL, tests on its own are skipped; under CI=true they fail.
- A server lasts for the session: a test leaves roles behind, but no connection, no prepared transaction.
- A migrated database is a copy of one that was migrated once for each server.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import sql

from outbox_pipelines.cli.main import cli
from outbox_pipelines.database import schema
from outbox_pipelines.local import postgres
from outbox_pipelines.settings import Settings, load_settings
from tests.conftest import (
    ADOPT,
    Lasting,
    create_database,
    drop_database,
    end_sessions,
    may_log_in,
    quicken_logins,
    session,
)

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True)
class Database:
    """One test's database."""

    dsn: str
    bin_dir: Path
    schema: str = "public"

    @property
    def settings(self) -> Settings:
        return load_settings(dsn=self.dsn, db_schema=self.schema)

    def connect(self, *, user: str = "postgres", autocommit: bool = True) -> Connection:
        """A connection as an application makes it; its search_path leads to the outbox."""
        connection = psycopg.connect(self.dsn, user=user, autocommit=True)
        connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(self.schema)))
        connection.autocommit = autocommit
        return connection

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """What a query answers, in a session that asks all of them."""
        connection = session(_as_owner(self.dsn))
        connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(self.schema)))
        cursor = connection.execute(query.encode(), values or None)
        if "ALTER DATABASE" in query or "ALTER ROLE" in query:
            # Only a new session has what this changes.
            end_sessions(_as_owner(self.dsn))
            return []
        return cursor.fetchall() if cursor.description else []

    def value(self, query: str, *values: object) -> Any:
        """The one value that a query answers."""
        [(value,)] = self.rows(query, *values)
        return value

    def role(self) -> str:
        """A new role that may only log in; it exists as long as the server."""
        name = f"role_{uuid.uuid4().hex[:12]}"
        self.rows(f"CREATE ROLE {name} {may_log_in(self.dsn)}")
        return name

    def outbox(self, *arguments: str, **environment: str) -> Result:
        """Runs the command `outbox`, in this process."""
        ours = {"OUTBOX_DSN": self.dsn, "OUTBOX_SCHEMA": self.schema}
        if arguments[:1] == ("consumer",):
            ours = {"OUTBOX_CONSUMER_DSN": self.dsn, "OUTBOX_CONSUMER_SCHEMA": self.schema}
        none: dict[str, str | None] = {name: None for name in os.environ if name.startswith("OUTBOX_")}
        return CliRunner().invoke(cli, arguments, env={**none, **ours, **environment})

    def catalog(self) -> list[tuple[Any, ...]]:
        """Everything the catalog holds about the schema, with the identity of each entry."""
        return self.rows(_CATALOG, self.schema)


def _as_owner(dsn: str) -> str:
    return psycopg.conninfo.make_conninfo(dsn, user="postgres")


# An oid or a row's version changes with every write, so that equal catalogs mean: nothing was written.
_CATALOG = """
WITH space AS (SELECT oid FROM pg_namespace WHERE nspname = %s),
relation AS (SELECT c.oid, c.xmin, c.relname FROM pg_class c, space WHERE c.relnamespace = space.oid)
SELECT 'relation', relname::text, oid, xmin FROM relation
UNION ALL SELECT 'column', attname, attrelid, a.xmin FROM pg_attribute a JOIN relation r ON r.oid = attrelid
UNION ALL SELECT 'default', NULL, d.oid, d.xmin FROM pg_attrdef d JOIN relation r ON r.oid = adrelid
UNION ALL SELECT 'constraint', conname, o.oid, o.xmin FROM pg_constraint o JOIN relation r ON r.oid = conrelid
UNION ALL SELECT 'trigger', tgname, t.oid, t.xmin FROM pg_trigger t JOIN relation r ON r.oid = tgrelid
UNION ALL SELECT 'function', proname, p.oid, p.xmin FROM pg_proc p, space WHERE pronamespace = space.oid
ORDER BY 1, 3, 2"""


@contextmanager
def fresh(server: postgres.Postgres, template: str = "template1") -> Iterator[Database]:
    """A database of its own, copied from another one."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    assert server.bin_dir is not None
    create_database(session(server.dsn), name, template)
    dsn = psycopg.conninfo.make_conninfo(server.dsn, dbname=name)
    try:
        yield Database(dsn, server.bin_dir)
    finally:
        end_sessions(_as_owner(dsn))
        drop_database(session(server.dsn), name)


def _bin_dir(which: str) -> Path:
    if which == "wheel":
        # Those of a cell of `make matrix`, or the wheel's.
        return postgres.find_programs(load_settings().local_postgres)
    found = sorted(postgres.SYSTEM.glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    if not found:
        message = f"this machine has no PostgreSQL in {postgres.SYSTEM}: apt-get install postgresql"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found[-1].parent


@contextmanager
def _quick(directory: Path, programs: Path) -> Iterator[postgres.Postgres]:
    # Each copy of a database adds ten megabytes to the log, which may lie in memory.
    with postgres.Postgres(directory, {"max_wal_size": "128MB"}, bin_dir=programs) as server:
        quicken_logins(server.dsn)
        yield server


def running_server(which: str, lasting: Lasting, directories: pytest.TempPathFactory) -> postgres.Postgres:
    """The session's server with these programs; starting one takes two seconds."""
    programs = _bin_dir(which)
    server: postgres.Postgres = lasting.once(
        ("postgres", which), lambda: _quick(directories.mktemp("postgres"), programs)
    )
    return server


@pytest.fixture(
    scope="session", params=["wheel", pytest.param("machine", marks=pytest.mark.extended)], name="server"
)
def both_servers(
    request: pytest.FixtureRequest, lasting: Lasting, tmp_path_factory: pytest.TempPathFactory
) -> postgres.Postgres:
    return running_server(request.param, lasting, tmp_path_factory)


@pytest.fixture(scope="session")
def server(lasting: Lasting, tmp_path_factory: pytest.TempPathFactory) -> postgres.Postgres:
    return running_server("wheel", lasting, tmp_path_factory)


@contextmanager
def _migrated(server: postgres.Postgres) -> Iterator[str]:
    with fresh(server) as made:
        schema.migrate(made.settings)
        yield str(psycopg.conninfo.conninfo_to_dict(made.dsn)["dbname"])


def _template(server: postgres.Postgres, lasting: Lasting) -> str:
    """The name of a database that was migrated today, by UTC, to be copied."""
    name: str = lasting.once(("template", server.dsn, datetime.now(UTC).date()), lambda: _migrated(server))
    return name


@pytest.fixture(scope="session")
def template(server: postgres.Postgres, lasting: Lasting) -> str:
    """The name of a migrated database, to be copied."""
    return _template(server, lasting)


@pytest.fixture
def empty(server: postgres.Postgres) -> Iterator[Database]:
    """A database without an outbox."""
    with fresh(server) as made:
        yield made


@pytest.fixture
def database(server: postgres.Postgres, lasting: Lasting) -> Iterator[Database]:
    """A migrated database."""
    with fresh(server, _template(server, lasting)) as made:
        # As if it had been migrated itself: a copy is refused.
        made.rows(ADOPT)
        yield made


@pytest.fixture(scope="module")
def kept(server: postgres.Postgres, template: str) -> Iterator[Database]:
    """A migrated database for a module of tests that commit; each looks at its own rows only."""
    with fresh(server, template) as made:
        yield made


@pytest.fixture(scope="session")
def shared(server: postgres.Postgres, template: str) -> Iterator[Database]:
    """A migrated database in which nothing is ever committed."""
    with fresh(server, template) as made:
        yield made


@pytest.fixture
def connection(shared: Database) -> Iterator[Connection]:
    """A transaction that is rolled back."""
    with shared.connect(autocommit=False) as connection:
        # Without it the first `connection.transaction()` were no savepoint, and would commit.
        connection.execute("SELECT 1")
        yield connection
        connection.rollback()
