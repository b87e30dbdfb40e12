"""`outbox migrate` brings the schema into any schema of any database, and changes nothing a second time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.core import scripts
from outbox_pipelines.database import schema, schema_sql
from outbox_pipelines.errors import UnavailableError
from tests.conftest import wait_until
from tests.schema.events import insert
from tests.schema.servers import Database

# To be quoted, or found inside of our own names and texts.
SCHEMAS = ['My %s"ü', "outbox", "app"]

# With the version of each row: an UPDATE to the same values counts.
RECORDS = "SELECT xmin::text, * FROM outbox_migrations ORDER BY name"


def test_second_time_changes_nothing(empty: Database) -> None:
    """Guards against a migrate that rewrites objects, and so locks a busy table at every deployment."""
    assert empty.outbox("migrate").output.startswith("applied 0001_outbox, ")
    before = empty.catalog(), empty.rows(RECORDS)
    again = empty.outbox("migrate")
    assert (again.exit_code, again.output) == (0, "nothing to do\n")
    assert (empty.catalog(), empty.rows(RECORDS)) == before


def test_check_is_clean_and_changes_nothing(database: Database) -> None:
    """Guards against a check that leaves its scratch schema behind, or sees differences that do not exist."""
    before = database.catalog()
    checked = database.outbox("migrate", "--check")
    assert (checked.exit_code, checked.output) == (0, "the schema is up to date\n")
    assert database.catalog() == before
    assert not database.rows("SELECT FROM pg_namespace WHERE nspname LIKE 'outbox_check%'")


def test_the_comparison_makes_no_days(database: Database) -> None:
    """Guards against a copy with two weeks of partitions, which take more time than all else."""
    database.rows(
        "CREATE FUNCTION refuse_days() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF EXISTS (SELECT FROM pg_event_trigger_ddl_commands() WHERE object_identity ~ '_[0-9]{8}$') "
        "THEN RAISE EXCEPTION 'a day'; END IF; END $$"
    )
    database.rows("CREATE EVENT TRIGGER refuse_days ON ddl_command_end EXECUTE FUNCTION refuse_days()")
    assert schema.drift(database.settings) == []


def test_check_of_an_empty_database_names_what_is_missing(empty: Database) -> None:
    """Guards against a check that applies what it finds missing, or calls an empty database clean."""
    checked = empty.outbox("migrate", "--check")
    assert checked.exit_code == 1
    assert checked.output.startswith("not applied: 0001_outbox\n")
    assert empty.catalog() == []


@pytest.mark.extended
def test_any_name_of_a_schema(empty: Database) -> None:
    """Guards against names that are quoted wrongly, or removed from our own names when catalogs are
    compared."""
    for name in SCHEMAS:
        there = replace(empty, schema=name)
        assert there.outbox("migrate").output.startswith("applied"), name
        assert there.outbox("migrate").output == "nothing to do\n", name
        with there.connect() as connection:
            insert(connection, idempotency_key="k")
    assert empty.catalog() == []


def test_an_owner_without_further_rights_can_migrate(empty: Database) -> None:
    """Guards against a migration that only a superuser can run."""
    owner = empty.role()
    empty.rows(f"ALTER DATABASE {empty.value('SELECT current_database()')} OWNER TO {owner}")
    theirs = replace(empty, dsn=f"{empty.dsn} user={owner}", schema="app")
    for output in ("applied", "nothing to do"):
        done = theirs.outbox("migrate")
        assert done.exit_code == 0, done.output
        assert done.output.startswith(output)


def test_a_role_that_may_not_create_gets_one_line(empty: Database) -> None:
    """Guards against a stack trace instead of the one line that says which right is missing."""
    refused = replace(empty, dsn=f"{empty.dsn} user={empty.role()}").outbox("migrate")
    assert refused.exit_code == 2
    assert refused.output.startswith("outbox: permission denied")
    assert "CREATE" in refused.output
    assert refused.output.count("\n") == 1


def test_an_existing_outbox_table_is_left_alone(empty: Database) -> None:
    """Guards against a stack trace, or half a schema, if an application already has a table named outbox."""
    empty.rows("CREATE TABLE outbox (id int)")
    before = empty.catalog()
    refused = empty.outbox("migrate")
    assert refused.exit_code == 2
    assert 'relation "outbox" already exists' in refused.output
    assert "OUTBOX_SCHEMA" in refused.output
    assert refused.output.count("\n") == 1
    assert empty.catalog() == before


@pytest.mark.parametrize("command", ["status", "relay"])
def test_commands_without_a_schema_say_what_to_run(empty: Database, command: str) -> None:
    """Guards against UndefinedTable with a stack trace as an operator's first impression."""
    refused = empty.outbox(command)
    assert refused.exit_code == 2
    assert "'public'" in refused.output
    assert "OUTBOX_SCHEMA" in refused.output
    assert "run `outbox migrate`" in refused.output
    assert refused.output.count("\n") == 1


def test_the_last_migration_can_be_chosen(empty: Database) -> None:
    """Guards against an upgrade in steps that goes further than was said, or that seems to go back."""
    assert empty.outbox("migrate", "--to", "0002_beside").output == "applied 0001_outbox, 0002_beside\n"
    for to, says in (("0001_outbox", "0002_beside was applied"), ("0003", "name one of 0001_outbox, ")):
        refused = empty.outbox("migrate", "--to", to)
        assert (refused.exit_code, refused.output.count("\n")) == (2, 1)
        assert says in refused.output
    printed = empty.outbox("migrate", "--print", "--to", "0004_emit").output
    assert (printed.count("DO $outbox$"), "name = '0004_emit'" in printed) == (2, True)
    assert "-- 0003_guards (locks: outbox SHARE ROW EXCLUSIVE, outbox_delayed SHARE" in printed
    checked = empty.outbox("migrate", "--check").output.splitlines()
    assert checked[0].endswith("outbox_delayed SHARE ROW EXCLUSIVE; writers wait while it runs)")
    assert checked[1] == "not applied: 0004_emit (locks: none; no writer waits)"
    assert empty.outbox("migrate").output.startswith("applied 0003_guards, ")
    assert empty.outbox("migrate", "--check").output == "the schema is up to date\n"


# Takes the strongest lock on the outbox.
UPGRADE = """\
-- Locks: outbox ACCESS EXCLUSIVE
ALTER TABLE outbox ADD CONSTRAINT outbox_more CHECK (version >= 0) NOT VALID;
INSERT INTO outbox_migrations (name) VALUES ('0010_more')"""


@pytest.fixture
def upgrade(database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package has a further file; that of the database's template does not."""
    (tmp_path / "0010_more.sql").write_text(UPGRADE)
    every = [*scripts.files(), tmp_path / "0010_more.sql"]
    monkeypatch.setattr(schema, "files", lambda: every)


@contextmanager
def _idle_writer(database: Database) -> Iterator[None]:
    with database.connect(autocommit=False) as writer:
        insert(writer)
        yield
        writer.rollback()


@pytest.mark.usefixtures("upgrade")
def test_writers_do_not_wait_for_an_upgrade(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a migration that waits for a writer, and all other writers for the migration (G7)."""
    monkeypatch.setattr(schema, "_PAUSE", 0.2)
    done: list[list[str]] = []
    tries: list[object] = []
    apply = schema._apply

    def counted(*given: object) -> None:
        tries.append(given)
        apply(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(schema, "_apply", counted)
    migration = threading.Thread(target=lambda: done.append(schema.migrate(database.settings)))
    with database.connect() as others, _idle_writer(database):
        # Far more than 50 ms, and less than a migration tries: machines may be busy.
        others.execute("SET lock_timeout = '10s'")
        migration.start()
        wait_until(lambda: insert(others) is not None and len(tries) >= 5, seconds=60, what="five tries")
        assert not done
    migration.join(60)
    assert done == [["0010_more"]]


@pytest.mark.usefixtures("upgrade")
def test_writers_do_not_wait_for_the_comparison(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a lock that is kept while the schema is compared, which takes seconds."""
    compare, compared = schema._differences, []

    def gated(*given: object) -> list[str]:
        with database.connect() as writer:
            writer.execute("SET lock_timeout = '2s'")
            compared.append(insert(writer))
        return compare(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(schema, "_differences", gated)
    assert schema.migrate(database.settings) == ["0010_more"]
    assert len(compared) == 2


@pytest.mark.usefixtures("upgrade")
def test_an_upgrade_gives_up_and_changes_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a deployment that hangs behind a forgotten transaction."""
    monkeypatch.setattr(schema_sql, "PATIENCE", 0.0)
    before = database.rows(RECORDS)
    with (
        _idle_writer(database),
        pytest.raises(UnavailableError, match=r"kept a lock on the outbox.*nothing was changed"),
    ):
        schema.migrate(database.settings)
    assert database.rows(RECORDS) == before


def test_a_newer_schema_is_named(database: Database) -> None:
    """Guards against an older version whose message has an operator undo what the newer one made."""
    database.rows("INSERT INTO outbox_migrations (name) VALUES ('0010_future')")
    refused, checked = database.outbox("migrate"), database.outbox("migrate", "--check")
    assert (refused.exit_code, checked.exit_code) == (2, 1)
    for output in (refused.output, checked.output):
        assert "made by a newer version of outbox-pipelines (0010_future)" in output
        assert "undo" not in output
        assert output.count("\n") == 1


def test_a_grant_that_gives_nothing_is_refused(empty: Database) -> None:
    """Guards against a WARNING instead of a right: the owner of the outbox may not own its schema."""
    owner, app = empty.role(), empty.role()
    name = empty.value("SELECT current_database()")
    empty.rows(
        f"CREATE SCHEMA app; GRANT CREATE, USAGE ON SCHEMA app TO {owner}; "
        f"GRANT CREATE ON DATABASE {name} TO {owner}"
    )
    theirs = replace(empty, dsn=f"{empty.dsn} user={owner}", schema="app")
    assert theirs.outbox("migrate").exit_code == 0
    here = replace(empty, schema="app")
    for kind in ("writer", "relay", "operator", "analyst"):
        with (
            here.connect(user=owner) as session,
            pytest.raises(
                psycopg.errors.InsufficientPrivilege, match=f"could not grant to {app}: USAGE ON SCHEMA app"
            ),
        ):
            session.execute(f"SELECT outbox_grant_{kind}('{app}')".encode())
    empty.rows(f"GRANT USAGE ON SCHEMA app TO {app}")
    for kind in ("writer", "relay", "operator", "analyst"):
        with here.connect(user=owner) as session:
            session.execute(f"SELECT outbox_grant_{kind}('{app}')".encode())
    assert theirs.outbox("migrate", "--check").output == "the schema is up to date\n"
    empty.rows(f"REVOKE USAGE ON SCHEMA app FROM {app}")
    checked = theirs.outbox("migrate", "--check")
    assert checked.exit_code == 1
    assert f"role {app} has rights on the outbox and none on its schema" in checked.output
    assert f"GRANT USAGE ON SCHEMA app TO {app}" in checked.output
