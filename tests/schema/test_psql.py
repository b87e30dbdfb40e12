"""The files of `sql/` with psql and nothing else."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

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
