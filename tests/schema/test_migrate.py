"""`outbox migrate` brings the schema into any schema of any database, and changes nothing a second time."""

from __future__ import annotations

from dataclasses import replace

import pytest

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


def test_check_of_an_empty_database_names_what_is_missing(empty: Database) -> None:
    """Guards against a check that applies what it finds missing, or calls an empty database clean."""
    checked = empty.outbox("migrate", "--check")
    assert checked.exit_code == 1
    assert checked.output.startswith("not applied: 0001_outbox\n")
    assert empty.catalog() == []


def test_any_name_of_a_schema(empty: Database) -> None:
    """Guards against names that are quoted wrongly, or removed from our own names when catalogs are
    compared."""
    for schema in SCHEMAS:
        there = replace(empty, schema=schema)
        assert there.outbox("migrate").output.startswith("applied"), schema
        assert there.outbox("migrate").output == "nothing to do\n", schema
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
