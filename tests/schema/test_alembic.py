"""The outbox as a migration of Alembic, in an environment as `alembic init` makes it."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import alembic.command
import alembic.config
import pytest
import sqlalchemy
from psycopg.types.json import Jsonb

from tests.conftest import wait_until
from tests.schema.events import insert
from tests.schema.servers import Database
from tests.writer import targets

# The SQL that it runs is tried on both by other tests.
pytestmark = pytest.mark.parametrize("server", ["wheel"], indirect=True)

ENV = """
import asyncio
import sqlalchemy as sa
from alembic import context
from sqlalchemy.ext.asyncio import create_async_engine
from outbox_pipelines.alembic import include_name

metadata = sa.MetaData()
sa.Table("orders", metadata, sa.Column("id", sa.Integer, primary_key=True))
url = context.config.get_main_option("sqlalchemy.url")

def run(connection):
    context.configure(connection=connection, target_metadata=metadata, include_name=include_name)
    with context.begin_transaction():
        context.run_migrations()

async def run_asynchronously():
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        await connection.run_sync(run)
        await connection.commit()
    await engine.dispose()

if context.is_offline_mode():
    context.configure(url=url, target_metadata=metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
elif "asyncpg" in url:
    asyncio.run(run_asynchronously())
else:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        run(connection)
"""
MIGRATION = """
import sqlalchemy as sa
from alembic import op
from outbox_pipelines.alembic import create_outbox, drop_outbox

revision = "1"
down_revision = None

def upgrade():
    create_outbox({arguments})
    op.create_table("orders", sa.Column("id", sa.Integer, primary_key=True))

def downgrade():
    op.drop_table("orders")
    drop_outbox({arguments})
"""


@pytest.fixture
def config(tmp_path: Path, empty: Database) -> alembic.config.Config:
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "script.py.mako").write_text("${upgrades if upgrades else 'pass'}")
    return _config(tmp_path, empty, "psycopg")


def _config(directory: Path, database: Database, driver: str) -> alembic.config.Config:
    config = alembic.config.Config(output_buffer=io.StringIO(), stdout=io.StringIO())
    config.set_main_option("script_location", str(directory))
    config.set_main_option("path_separator", "os")
    url = targets.url(driver, database).render_as_string(hide_password=False)
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def migration(directory: Path, **arguments: object) -> None:
    """One revision that makes the outbox and a table of the application."""
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    (directory / "versions" / "1.py").write_text(MIGRATION.replace("{arguments}", written))


def is_as_migrate_makes_it(database: Database) -> bool:
    checked = database.outbox("migrate", "--check")
    return checked.output == "the schema is up to date\n"


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_upgrade_is_migrate(
    config: alembic.config.Config, tmp_path: Path, empty: Database, driver: str
) -> None:
    """Guards against a second description of the schema that drifts from the first, and half of it with some
    drivers."""
    migration(tmp_path)
    alembic.command.upgrade(_config(tmp_path, empty, driver), "head")
    assert is_as_migrate_makes_it(empty)
    assert empty.outbox("migrate").output == "nothing to do\n"
    with empty.connect() as connection:
        insert(connection, idempotency_key="k")
    assert empty.value("SELECT to_regclass('public.orders') IS NOT NULL")


def test_another_schema(config: alembic.config.Config, tmp_path: Path, empty: Database) -> None:
    """Guards against a search_path that stays, and sends the application's tables into the outbox's
    schema."""
    schema = "My 'Out\"box' %s :x"
    migration(tmp_path, schema=schema)
    alembic.command.upgrade(config, "head")
    assert is_as_migrate_makes_it(replace(empty, schema=schema))
    assert empty.value("SELECT to_regclass('public.orders') IS NOT NULL")
    assert empty.value("SELECT to_regclass('public.outbox') IS NULL")


def test_where_the_outbox_is_already(config: alembic.config.Config, tmp_path: Path, empty: Database) -> None:
    """Guards against an application that began with `outbox migrate` and cannot use its own migrations."""
    assert empty.outbox("migrate").exit_code == 0
    before = empty.rows("SELECT oid, xmin FROM pg_class WHERE relname LIKE 'outbox%' ORDER BY oid")
    migration(tmp_path)
    alembic.command.upgrade(config, "head")
    assert empty.rows("SELECT oid, xmin FROM pg_class WHERE relname LIKE 'outbox%' ORDER BY oid") == before


def test_a_failure_leaves_nothing(config: alembic.config.Config, tmp_path: Path, empty: Database) -> None:
    """Guards against half an outbox, committed apart from the migration that failed."""
    migration(tmp_path)
    empty.rows("CREATE TABLE orders (id int)")
    with pytest.raises(sqlalchemy.exc.ProgrammingError, match="orders"):
        alembic.command.upgrade(config, "head")
    assert empty.value("SELECT to_regclass('outbox') IS NULL")


@pytest.mark.parametrize("times", [1, 2])
def test_a_script(config: alembic.config.Config, tmp_path: Path, empty: Database, times: int) -> None:
    """Guards against a script with doubled percent signs, or one that fails where a part is already there."""
    migration(tmp_path)
    alembic.command.upgrade(config, "head", sql=True)
    script = config.output_buffer.getvalue()  # type: ignore[union-attr]
    if times > 1:
        assert empty.outbox("migrate").exit_code == 0
    empty.rows(script)
    assert is_as_migrate_makes_it(empty)


def test_downgrade(config: alembic.config.Config, tmp_path: Path, empty: Database) -> None:
    """Guards against objects that are left behind, and stop the next upgrade."""
    migration(tmp_path)
    before = empty.rows(OBJECTS)
    alembic.command.upgrade(config, "head")
    empty.rows("CREATE TABLE outbox_mine (id int)")
    alembic.command.downgrade(config, "base")
    assert empty.rows(OBJECTS) == sorted([*before, ("alembic_version",), ("outbox_mine",)])
    empty.rows("DROP TABLE outbox_mine")
    alembic.command.upgrade(config, "head")
    assert is_as_migrate_makes_it(empty)


OBJECTS = """
SELECT relname::text FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind <> 'i'
UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace ORDER BY 1"""


def test_downgrade_refuses_to_lose_events(
    config: alembic.config.Config, tmp_path: Path, empty: Database
) -> None:
    """Guards against unpublished events, dropped with their table."""
    migration(tmp_path)
    alembic.command.upgrade(config, "head")
    with empty.connect() as connection:
        insert(connection)
    with pytest.raises(sqlalchemy.exc.DBAPIError, match="not published, nothing was dropped"):
        alembic.command.downgrade(config, "base")
    assert empty.value("SELECT count(*) FROM outbox") == 1
    assert empty.value("SELECT to_regclass('orders') IS NOT NULL")
    migration(tmp_path, even_if_unpublished=True)
    path = tmp_path / "versions" / "1.py"
    path.write_text(path.read_text().replace("create_outbox(even_if_unpublished=True)", "create_outbox()"))
    alembic.command.downgrade(config, "base")
    assert empty.value("SELECT to_regclass('outbox') IS NULL")


def test_downgrade_when_all_is_published(
    config: alembic.config.Config, tmp_path: Path, empty: Database
) -> None:
    """Guards against a guard that no outbox in use ever passes."""
    migration(tmp_path)
    alembic.command.upgrade(config, "head")
    with empty.connect() as connection:
        insert(connection)
        connection.execute("UPDATE outbox_shards SET done = pg_current_snapshot()")
    alembic.command.downgrade(config, "base")
    assert empty.value("SELECT to_regclass('outbox') IS NULL")


def test_downgrade_refuses_to_lose_dead_letters(
    config: alembic.config.Config, tmp_path: Path, empty: Database
) -> None:
    """Guards against the drop of a dead letter whose day is already gone, or of a delayed event."""
    migration(tmp_path)
    alembic.command.upgrade(config, "head")
    with empty.connect() as connection, connection.transaction(force_rollback=True):
        insert(connection)
        [event] = connection.execute("SELECT to_jsonb(outbox) FROM outbox").fetchone() or ()
    event |= {"state": "failed", "attempts": 5, "parked_at": "now", "trying": False, "crashes": 0}
    event |= {"command_due": False}
    empty.rows(
        "INSERT INTO outbox_parked SELECT * FROM jsonb_populate_record(NULL::outbox_parked, %s)", Jsonb(event)
    )
    with pytest.raises(sqlalchemy.exc.DBAPIError, match="not published"):
        alembic.command.downgrade(config, "base")
    empty.rows("UPDATE outbox_parked SET state = 'discarded'")
    empty.rows("SELECT outbox_emit('order', '1', 'e', '{}', deliver_after => now() + interval '1 day')")
    with pytest.raises(sqlalchemy.exc.DBAPIError, match="not published"):
        alembic.command.downgrade(config, "base")
    empty.rows("SELECT outbox_cancel(id) FROM outbox_delayed")
    alembic.command.downgrade(config, "base")


def test_downgrade_waits_for_writers(config: alembic.config.Config, tmp_path: Path, empty: Database) -> None:
    """Guards against an event that is committed between the look for unpublished ones and the drop."""
    migration(tmp_path)
    alembic.command.upgrade(config, "head")
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'relation'"
    )
    with ThreadPoolExecutor(1) as pool:
        with empty.connect(autocommit=False) as writer:
            insert(writer)
            downgrade = pool.submit(alembic.command.downgrade, config, "base")
            wait_until(lambda: empty.value(waiting), what="the downgrade waits")
        with pytest.raises(sqlalchemy.exc.DBAPIError, match="not published"):
            downgrade.result(600)
    assert empty.value("SELECT count(*) FROM outbox") == 1


def test_autogenerate_sees_none_of_it(config: alembic.config.Config, tmp_path: Path, empty: Database) -> None:
    """Guards against a migration that proposes to drop the outbox, or the partition of each day."""
    migration(tmp_path)
    alembic.command.upgrade(config, "head")
    alembic.command.check(config)
    empty.rows("CREATE TABLE outbox_mine (id int)")
    with pytest.raises(alembic.util.exc.AutogenerateDiffsDetected, match="outbox_mine"):
        alembic.command.check(config)
