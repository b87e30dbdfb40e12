"""The handlers in Java and Node of examples/handlers, with the usual drivers. Go is in `make test`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from outbox_pipelines.consumer import migrate
from outbox_pipelines.local import jars
from outbox_pipelines.settings import load_settings
from tests.conftest import password_of
from tests.consumer.place import uuid7
from tests.schema.servers import Database, empty, server

__all__ = ["empty", "server"]

_HANDLERS: Final = Path(__file__).parents[2] / "examples" / "handlers"
_JDBC: Final = ("org.postgresql:postgresql:42.7.4",)
_JAVA: Final = """
import java.sql.Statement;
import org.postgresql.ds.PGSimpleDataSource;

public class Main {
    public static void main(String[] args) throws Exception {
        PGSimpleDataSource source = new PGSimpleDataSource();
        source.setURL("jdbc:postgresql://" + args[2] + ":" + args[3] + "/" + args[4]);
        source.setUser(args[5]);
        source.setPassword(System.getenv("SECRET"));
        try {
            Handle.handle(source, args[0], connection -> {
                try (Statement statement = connection.createStatement()) {
                    statement.executeUpdate("INSERT INTO effects VALUES ('" + args[0] + "')");
                }
                if (args[1].equals("fail")) throw new Exception("refused");
            });
            System.out.print("done");
        } catch (Exception error) {
            System.out.print(error.getMessage());
        }
    }
}
"""
_NODE: Final = """
const { Pool } = require("pg");
const { handle } = require("./handle.js");
const [event, how, host, port, database, user] = process.argv.slice(2);
const pool = new Pool({ host, port, database, user, password: process.env.SECRET });
handle(pool, event, async (client) => {
  await client.query("INSERT INTO effects VALUES ($1)", [event]);
  if (how === "fail") throw new Error("refused");
}).then(() => process.stdout.write("done"), (error) => process.stdout.write(error.message))
  .finally(() => pool.end());
"""


def _require(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.fail(f"{program} is missing: install it and add it to PATH", pytrace=False)


def _in_java(directory: Path) -> list[str]:
    _require("java", "javac")
    classes = f"{directory}:{jars.jars(_JDBC, load_settings().local_jars)}/*"
    (directory / "Main.java").write_text(_JAVA)
    shutil.copy(_HANDLERS / "Handle.java", directory)
    subprocess.run(["javac", "-cp", classes, "Main.java", "Handle.java"], cwd=directory, check=True)
    return ["java", "-cp", classes, "Main"]


def _in_node(directory: Path) -> list[str]:
    _require("node", "npm")
    subprocess.run(
        ["npm", "install", "--silent", "--no-save", "--no-audit", "pg@8"], cwd=directory, check=True
    )
    (directory / "main.js").write_text(_NODE)
    shutil.copy(_HANDLERS / "handle.js", directory)
    return ["node", str(directory / "main.js")]


@pytest.mark.parametrize("write", [_in_java, _in_node], ids=["java", "node"])
def test_a_handler(write: Any, empty: Database, tmp_path: Path) -> None:
    """Guards against an event that is handled twice, and one that is marked though its handler failed."""
    with empty.connect() as connection:
        migrate(connection)
    empty.rows("CREATE TABLE effects (event_id uuid)")
    command = write(tmp_path)
    at = {name: str(value) for name, value in psycopg.conninfo.conninfo_to_dict(empty.dsn).items()}
    event = str(uuid7())

    def handle(how: str) -> str:
        where = [at["host"], at["port"], at["dbname"], at["user"]]
        done = subprocess.run(
            [*command, event, how, *where],
            env=os.environ | {"SECRET": password_of(empty.dsn)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert handle("fail") == "refused"
    assert empty.rows("SELECT FROM effects") == empty.rows("SELECT FROM processed_events") == []
    assert [handle("work"), handle("work")] == ["done", "done"]
    assert empty.value("SELECT count(*) FROM effects") == 1
    assert empty.rows("SELECT event_id::text, source FROM processed_events") == [(event, "billing")]
