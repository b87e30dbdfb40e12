"""The files of `sql/` with psql and nothing else."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.schema.events import insert
from tests.schema.servers import Database

FILES = sorted((Path(__file__).parents[2] / "sql").glob("*.sql"))


@pytest.mark.parametrize("search_path", ['"$user", public', '"My Outbox", public'])
def test_files_in_order_are_all_there_is(empty: Database, search_path: str) -> None:
    """Guards against files that work only through `outbox migrate`, or whose outcome it takes for drift."""
    psql = empty.bin_dir / "psql"
    if not psql.exists():
        pytest.skip(f"no psql in {empty.bin_dir}: the tests run with the machine's PostgreSQL")
    there = replace(empty, schema="My Outbox" if "My" in search_path else "public")
    empty.rows('CREATE SCHEMA "My Outbox"')
    for file in FILES:
        subprocess.run(
            [psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", file, there.dsn],
            env=os.environ | {"PGOPTIONS": f"-c search_path={search_path.replace(' ', chr(92) + ' ')}"},
            check=True,
            capture_output=True,
        )
    assert there.outbox("migrate").output == "nothing to do\n"


def test_what_migrate_prints(empty: Database, tmp_path: Path) -> None:
    """Guards against printed SQL that is not what `outbox migrate` runs, and a print that runs it."""
    psql = empty.bin_dir / "psql"
    if not psql.exists():
        pytest.skip(f"no psql in {empty.bin_dir}: the tests run with the machine's PostgreSQL")
    there = replace(empty, schema="My Outbox")
    (tmp_path / "FILE").write_text(there.outbox("migrate", "--print").stdout)
    assert empty.rows("SELECT FROM pg_namespace WHERE nspname = 'My Outbox'") == []
    command = (tmp_path / "FILE").read_text().partition(": psql ")[2].partition(",")[0]
    subprocess.run(
        [psql, "-X", "-q", "-d", there.dsn, *command.split()], cwd=tmp_path, check=True, capture_output=True
    )
    assert there.outbox("migrate", "--check").output == "the schema is up to date\n"
    assert there.outbox("migrate", "--print").output == "-- nothing to do\n"


def test_what_drops_it(empty: Database, tmp_path: Path) -> None:
    """Guards against an outbox that leaves objects behind, or is dropped with events that wait."""
    psql = empty.bin_dir / "psql"
    if not psql.exists():
        pytest.skip(f"no psql in {empty.bin_dir}: the tests run with the machine's PostgreSQL")
    there = replace(empty, schema="My Outbox")
    there.outbox("migrate")
    (tmp_path / "drop.sql").write_text(there.outbox("migrate", "--print-drop").stdout)
    command = [str(psql), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", str(tmp_path / "drop.sql"), there.dsn]
    with there.connect() as connection:
        insert(connection)
    refused = subprocess.run(command, capture_output=True, text=True)
    assert "there are events that are not published, nothing was dropped" in refused.stderr
    # As if a relay had published it.
    there.rows("UPDATE outbox_shards SET done = pg_current_snapshot()")
    there.rows("SELECT outbox_emit('order', '1', 'e', '{}', deliver_after => now() + interval '1 day')")
    refused = subprocess.run(command, capture_output=True, text=True)
    assert "cancel delayed events" in refused.stderr
    there.rows("SELECT outbox_cancel(id) FROM outbox_delayed")
    subprocess.run(command, check=True, capture_output=True)
    left = "SELECT FROM {} WHERE {} = '\"My Outbox\"'::regnamespace"
    for catalog, column in (
        ("pg_class", "relnamespace"),
        ("pg_proc", "pronamespace"),
        ("pg_type", "typnamespace"),
    ):
        assert empty.rows(left.format(catalog, column)) == []
