"""The handler in Go of examples/handlers; those in Java and Node are in tests/interop."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from outbox_pipelines.consumer import migrate
from tests.consumer.place import uuid7
from tests.examples.services import EXAMPLES, environment
from tests.schema.servers import Database, empty, server

__all__ = ["empty", "server"]

MAIN: Final = """
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"

	_ "github.com/lib/pq"
)

func main() {
	db, err := sql.Open("postgres", os.Getenv("OUTBOX_DSN"))
	if err != nil {
		panic(err)
	}
	err = handle(context.Background(), db, os.Args[1], func(tx *sql.Tx) error {
		if _, err := tx.Exec("INSERT INTO effects VALUES ($1)", os.Args[1]); err != nil {
			return err
		}
		if os.Args[2] == "fail" {
			return errors.New("refused")
		}
		return nil
	})
	fmt.Print(err)
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("go") is None:
        message = "this machine has no Go: apt-get install golang-go"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    directory = tmp_path_factory.mktemp("go")
    for name in ("go.mod", "go.sum"):
        shutil.copy(EXAMPLES / "go_shop" / name, directory)
    shutil.copy(EXAMPLES / "handlers" / "handle.go", directory)
    (directory / "main.go").write_text(MAIN)
    subprocess.run(
        ["go", "build", "-o", "handle", "."],
        cwd=directory,
        env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod"},
        check=True,
    )
    return directory / "handle"


@pytest.fixture
def database(empty: Database) -> Database:
    with empty.connect() as connection:
        migrate(connection)
    empty.rows("CREATE TABLE effects (event_id uuid)")
    return empty


def _handle(program: Path, database: Database, event: str, how: str = "work") -> str:
    done = subprocess.run(
        [program, event, how],
        env=environment(database) | {"PGSSLMODE": "disable"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_handler_in_go(program: Path, database: Database) -> None:
    """Guards against an event that is handled twice, and one that is marked though its handler failed."""
    event = str(uuid7())
    assert _handle(program, database, event, "fail") == "refused"
    assert database.rows("SELECT FROM effects") == database.rows("SELECT FROM processed_events") == []
    assert _handle(program, database, event) == "<nil>"
    assert _handle(program, database, event) == "<nil>"
    assert database.value("SELECT count(*) FROM effects") == 1
    assert database.rows("SELECT event_id::text, source FROM processed_events") == [(event, "billing")]
