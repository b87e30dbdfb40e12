"""`outbox migrate --grants FILE` gives roles exactly the rights that a file names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from outbox_pipelines.database import grants
from outbox_pipelines.errors import SetupError
from tests.schema.events import insert
from tests.schema.servers import Database

KINDS = ("writer", "relay", "operator", "analyst")


def _grants(database: Database, file: Path, content: str, *options: str) -> Result:
    file.write_text(content)
    return database.outbox("migrate", "--grants", str(file), *options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "grants.toml"


def test_each_kind_has_what_it_needs_in_a_hardened_database(database: Database, file: Path) -> None:
    """Guards against a file that gives less than the functions, or nothing after a REVOKE."""
    roles = {kind: database.role() for kind in KINDS}
    content = "\n".join(f'{role} = "{kind}"' for kind, role in roles.items())
    database.rows("REVOKE ALL ON SCHEMA public FROM PUBLIC")
    database.rows("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC")
    done = _grants(database, file, content)
    assert done.exit_code == 0, done.output
    checked = _grants(database, file, content, "--check")
    assert (checked.exit_code, checked.output) == (0, "the schema is up to date\n")
    with database.connect(user=roles["writer"]) as connection:
        insert(connection, idempotency_key="k")
        connection.execute("SELECT outbox_emit('order', '1', 'e', '{}')")
    by_role = {
        "relay": "SELECT count(*) FROM outbox",
        "operator": "SELECT count(*) FROM outbox_audit",
        "analyst": "SELECT count(*) FROM outbox_events",
    }
    for kind, query in by_role.items():
        with database.connect(user=roles[kind]) as connection:
            connection.execute(query.encode())
    # A relay's command, not only its rights.
    theirs = replace(database, dsn=f"{database.dsn} user={roles['relay']}")
    assert "shard 0" in theirs.outbox("status").output


@pytest.mark.parametrize("kind", KINDS)
def test_check_names_what_is_missing_and_what_is_too_many(database: Database, file: Path, kind: str) -> None:
    """Guards against a check that changes rights, or calls any set of rights equal."""
    role = database.role()
    content = f'{role} = "{kind}"'
    missing = _grants(database, file, content, "--check")
    assert missing.exit_code == 1
    assert f"role {role} lacks USAGE on schema public\n" in missing.output
    assert not database.value("SELECT has_schema_privilege(%s, 'public', 'CREATE')", role)
    assert not database.value(
        "SELECT EXISTS (SELECT FROM pg_class, aclexplode(relacl) WHERE grantee = %s::regrole)", role
    )
    assert _grants(database, file, content).exit_code == 0
    database.rows(f"REVOKE USAGE ON SCHEMA public FROM {role}")
    database.rows(f"GRANT UPDATE (payload) ON outbox TO {role}")
    database.rows(f"GRANT DELETE ON outbox_days TO {role} WITH GRANT OPTION")
    database.rows(f"GRANT EXECUTE ON FUNCTION outbox_protect_functions TO {role}")
    wrong = _grants(database, file, content, "--check")
    assert wrong.exit_code == 1
    lines = wrong.output.splitlines()
    assert f"role {role} lacks USAGE on schema public" in lines
    more = f"role {role} has more than its kind: "
    assert f"{more}UPDATE on outbox (payload)" in lines
    assert f"{more}DELETE with grant option on outbox_days" in lines
    assert f"{more}EXECUTE on function outbox_protect_functions" in lines
    assert database.value("SELECT has_table_privilege(%s, 'outbox_days', 'DELETE')", role)
    assert _grants(database, file, content).exit_code == 0
    assert not database.value("SELECT has_table_privilege(%s, 'outbox_days', 'DELETE')", role)
    assert not database.value("SELECT has_column_privilege(%s, 'outbox', 'payload', 'UPDATE')", role)
    assert _grants(database, file, content, "--check").output == "the schema is up to date\n"


def test_what_was_changed_is_printed(database: Database, file: Path) -> None:
    """Guards against rights that are reported as missing when they have just been given."""
    role, other = database.role(), database.role()
    done = _grants(database, file, f"{role} = 'writer'")
    [granted] = re.findall(rf"^role {role}: rights granted: (\d+), revoked: 0\n$", done.output)
    assert int(granted) > 3
    assert _grants(database, file, f"{role} = 'writer'").output == "nothing to do\n"
    added = _grants(database, file, f"{role} = ['writer', 'analyst']").output
    assert re.fullmatch(rf"role {role}: rights granted: [1-9]\d*, revoked: 0\n", added)
    removed = _grants(database, file, f"{role} = 'writer'").output
    assert re.fullmatch(rf"role {role}: rights granted: 0, revoked: [1-9]\d*\n", removed)
    unnamed = _grants(database, file, f"{other} = []").output
    assert re.fullmatch(rf"role {role} has rights on the outbox and is not in the file: .*\n", unnamed)
    refused = _grants(database, file, f"{role} = 'reader'")
    assert (refused.exit_code, refused.output.count("\n")) == (2, 1)


def test_options_several_kinds_and_none(database: Database, file: Path) -> None:
    """Guards against options that are lost, kept from an earlier grant, or not compared."""
    role, other = database.role(), database.role()
    options = "aggregate_types = ['a', 'b c'], key_namespace = 'x\"', own_ids = true"
    restricted = f"{role} = [{{kind = 'writer', {options}}}, 'analyst']\n{other} = 'writer'"
    assert _grants(database, file, restricted).exit_code == 0
    assert database.rows("SELECT * FROM outbox_writers") == [(role, ["a", "b c"], 'x"')]
    assert database.value("SELECT has_column_privilege(%s, 'outbox', 'id', 'INSERT')", role)
    assert database.value("SELECT has_table_privilege(%s, 'outbox_events', 'SELECT')", role)
    assert _grants(database, file, restricted, "--check").output == "the schema is up to date\n"
    database.rows("UPDATE outbox_writers SET aggregate_types = '{z}'")
    found = _grants(database, file, restricted, "--check").output
    assert f'role {role} has more than its kind: writes {{z}} with keys of x"\n' in found
    # Without a kind it has no right, and the check of a file without it names it.
    assert (
        f"role {role} has rights on the outbox and is not in the file"
        in _grants(database, file, f"{other} = 'writer'", "--check").output
    )
    assert _grants(database, file, f"{role} = []\n{other} = 'writer'").exit_code == 0
    assert database.rows("SELECT * FROM outbox_writers") == []
    assert _grants(database, file, f"{other} = 'writer'", "--check").output == "the schema is up to date\n"
    database.rows("GRANT SELECT ON outbox_parked TO PUBLIC")
    assert "role PUBLIC has rights" in _grants(database, file, f"{other} = 'writer'", "--check").output


def test_a_role_that_needs_quoting(database: Database, file: Path) -> None:
    """Guards against statements that are built from unquoted names."""
    name = f'A "b" {database.role()}%s'
    quoted = '"' + name.replace('"', '""') + '"'
    database.rows(f"CREATE ROLE {quoted}")
    content = f"'{name}' = 'relay'"
    assert _grants(database, file, content).exit_code == 0
    assert _grants(database, file, content, "--check").output == "the schema is up to date\n"
    assert _grants(database, file, f"'{name}' = []").exit_code == 0
    database.rows(f"REVOKE USAGE ON SCHEMA public FROM {quoted}")
    database.rows(f"DROP ROLE {quoted}")


def test_what_cannot_be_granted_is_one_line_and_changes_nothing(database: Database, file: Path) -> None:
    """Guards against tracebacks, and rights that are lost because of a mistake in another line."""
    role, owner = database.role(), database.role()
    good = f'{role} = "writer"'
    assert _grants(database, file, good).exit_code == 0
    before = database.value("SELECT relacl::text FROM pg_class WHERE oid = 'outbox'::regclass")
    wrong = {
        f'{role} = "reader"': "unknown kind 'reader': use analyst, operator, relay, writer",
        f'{good}\nno_such_role = "relay"': "role no_such_role does not exist",
        f"{role} = 3": f"role {role} has no kind: write app = ",
        f"[{role}]\nkey_namespace = 'x'": f"role {role} has no kind: write app = ",
        f"{role} = {{kind = 'writer', keys = 1}}": "no option 'keys', only aggregate_types, key_name",
        f"{role} = {{kind = 'relay', keys = 1}}": "relay has no option 'keys', only none",
        f"{role} = {{kind = 'writer', own_ids = 'yes'}}": "own_ids must be true or false",
        f"{role} = {{kind = 'writer', aggregate_types = 'a'}}": "aggregate_types must be a list of texts",
        f"{role} = {{kind = 'writer', aggregate_types = [1]}}": "aggregate_types must be a list of texts",
        f"{role} = ": "is not TOML",
        f"{good}\n{good}": "is not TOML",
        'postgres = "writer"': "role postgres owns the outbox",
    }
    for content, line in wrong.items():
        for options in ((), ("--check",)):
            done = _grants(database, file, content, *options)
            assert done.exit_code == 2, (content, done.output)
            assert line in done.output
            assert done.output.splitlines()[-1].startswith("outbox: ")
    missing = database.outbox("migrate", "--grants", str(file.with_name("none.toml")))
    assert missing.exit_code == 2
    assert "cannot be read" in missing.output
    assert database.value("SELECT relacl::text FROM pg_class WHERE oid = 'outbox'::regclass") == before
    # A right of another grantor, which the owner cannot revoke.
    database.rows(f"GRANT SELECT ON outbox TO {owner} WITH GRANT OPTION")
    database.rows(f"SET ROLE {owner}; GRANT SELECT ON outbox TO {role}; RESET ROLE")
    done = _grants(database, file, good)
    assert done.exit_code == 2
    assert f"role {role} has rights on TABLE outbox that another role than its owner granted" in done.output


def test_an_owner_who_does_not_own_the_schema(empty: Database, file: Path) -> None:
    """Guards against a grant that gives nothing, and a message that asks for CREATE."""
    owner, app = empty.role(), empty.role()
    name = empty.value("SELECT current_database()")
    empty.rows(
        f"CREATE SCHEMA app; GRANT CREATE, USAGE ON SCHEMA app TO {owner}; "
        f"GRANT CREATE ON DATABASE {name} TO {owner}"
    )
    theirs = replace(empty, dsn=f"{empty.dsn} user={owner}", schema="app")
    done = _grants(theirs, file, f"{app} = 'writer'")
    assert done.exit_code == 2
    assert f"could not grant to {app}: USAGE ON SCHEMA app" in done.output
    assert "nothing was changed" in done.output
    empty.rows(f"GRANT USAGE ON SCHEMA app TO {owner} WITH GRANT OPTION")
    assert _grants(theirs, file, f"{app} = 'writer'").exit_code == 0
    assert _grants(theirs, file, f"{app} = 'writer'", "--check").output == "the schema is up to date\n"
    there = replace(theirs, dsn=f"{empty.dsn} user={app}")
    with pytest.raises(SetupError, match=f"role {app} does not own the outbox .* run it as {owner}"):
        grants.apply(there.settings, {app: [("writer", {})]})


def test_check_before_the_first_migration(empty: Database, file: Path) -> None:
    """Guards against an error in place of the list of what is missing."""
    checked = _grants(empty, file, "app = 'writer'", "--check")
    assert checked.exit_code == 1
    assert checked.output.startswith("not applied: 0001_outbox\n")
