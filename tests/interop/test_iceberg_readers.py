"""The archive as an Iceberg table: four engines answer questions as `outbox archive query` does.

Each is in an environment of its own. pyiceberg and polars, which have no such SQL, read all rows, and DuckDB
asks those. Equal are counts, texts, times and whole numbers; a share is compared as the counts it is made of.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import psycopg
import pytest

from examples.airline.archive import ASK_SPARK, Show, ask
from outbox_pipelines.core.secret import Secret
from outbox_pipelines.database import schema
from outbox_pipelines.days import iceberg
from outbox_pipelines.days.archive import open_archive
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import postgres
from outbox_pipelines.settings import Settings, load_settings
from tests.days.archive import flights
from tests.interop import build
from tests.interop.iceberg_readers import questions

pytestmark = pytest.mark.slow

PROGRAMS: Final = Path(questions.__file__).parent


@dataclass(frozen=True, slots=True)
class Lake:
    """The archive of the flights, its catalog, and what its own reader answers."""

    settings: Settings
    dsn: str
    metadata: str
    answers: list[Any]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    place = tmp_path_factory.mktemp("flights")
    with postgres.Postgres(place / "postgres") as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("CREATE DATABASE lake")
        dsn = psycopg.conninfo.make_conninfo(server.dsn, dbname="lake")
        settings = load_settings(dsn=server.dsn, archive=str(place / "archive"), iceberg=Secret(dsn))
        schema.migrate(settings)
        flights.build(settings)
        assert len(iceberg.register(settings).added) == len(flights.DAYS)
        with psycopg.connect(dsn) as connection:
            row = connection.execute("SELECT metadata_location FROM iceberg_tables").fetchone()
        assert row is not None
        archive = open_archive(settings.archive)
        answers = _plain([archive.query(sql).fetchall() for sql in questions.in_duckdb()])
        yield Lake(settings, dsn, row[0], answers)


def _plain(answers: list[Any]) -> list[Any]:
    """Answers as JSON has them; a whole number is one, whatever its type."""
    found: list[Any] = json.loads(json.dumps(answers, default=str))
    return [
        [
            [int(value) if isinstance(value, float) and value.is_integer() else value for value in row]
            for row in rows
        ]
        for rows in found
    ]


def run(engine: str, *arguments: str, asked: list[str] | None = None, **environment: str) -> str:
    try:
        python = build.environment(load_settings(), PROGRAMS / f"{engine}.txt") / "bin" / "python"
    except SetupError as error:
        pytest.fail(str(error), pytrace=False)
    program = ASK_SPARK if engine == "spark" else next(PROGRAMS.glob(f"*_{engine}.py"))
    done = subprocess.run(
        [python, program, *arguments],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("engine", ["pyiceberg", "polars"])
def test_libraries_read_all_rows(lake: Lake, tmp_path: Path, engine: str) -> None:
    """Guards against a table that another library reads otherwise than we do."""
    file = tmp_path / "rows.parquet"
    run(engine, lake.metadata, str(file), POLARS_ICEBERG_PLANNER="pyiceberg")
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(
            f"CREATE VIEW events AS SELECT *, created_at::DATE AS event_date FROM read_parquet('{file}')"
        )
        answers = [connection.execute(sql).fetchall() for sql in questions.in_duckdb()]
    assert _plain(answers) == lake.answers


def test_duckdb_answers(lake: Lake) -> None:
    """Guards against a table that DuckDB reads otherwise by its extension than by the names of files."""
    answers = json.loads(run("duckdb", lake.metadata, asked=questions.in_duckdb()))
    assert _plain(answers) == lake.answers


_MAINTENANCE: Final = (
    "CALL outbox.system.expire_snapshots('outbox.outbox.events', TIMESTAMP '2999-01-01')",
    "CALL outbox.system.remove_orphan_files('outbox.outbox.events')",
    "CALL outbox.system.rewrite_data_files(table => 'outbox.outbox.events', "
    "options => map('rewrite-all', 'true'))",
)


def test_spark_answers(lake: Lake) -> None:
    """Guards against a catalog that engines written in Java cannot use, days that they misread, files that
    they delete, and a compaction that stays unseen."""
    try:
        jars = build.spark_jars(load_settings())
    except SetupError as error:
        pytest.fail(str(error), pytrace=False)
    given = psycopg.conninfo.conninfo_to_dict(lake.dsn)
    url = f"jdbc:postgresql://{given['host']}:{given['port']}/{given['dbname']}"
    answers = run(
        *("spark", ",".join(map(str, jars)), url, str(given["user"])),
        asked=[*questions.in_spark(), *_MAINTENANCE],
        PGPASSFILE=str(given["passfile"]),
    )
    *found, expired, removed, _ = json.loads(answers)
    assert _plain(found) == lake.answers
    assert ["GC is disabled" in refusal for refusal in (expired, removed)] == [True, True]
    done = iceberg.register(lake.settings)
    assert [each.partition(": another engine has written ")[0] for each in done.differences] == [
        str(day) for day in flights.DAYS
    ]
    assert (done.added, done.unchanged) == ((), 0)
    assert len(iceberg.register(lake.settings, again=True).added) == len(flights.DAYS)


def test_the_demo_asks_spark(lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a demo that does not find the Spark that was installed, or has it answer otherwise."""
    given = load_settings()
    try:
        build.spark_jars(given)
        build.environment(given, PROGRAMS / "spark.txt")
    except SetupError as error:
        pytest.fail(str(error), pytrace=False)
    ask(Show(lake.settings, "", {"OUTBOX_ARCHIVE": lake.settings.archive}), lake.dsn, given)
    assert "proven: Spark answers" in capsys.readouterr().out
