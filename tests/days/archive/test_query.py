"""`outbox archive query`: what is printed, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import boto3
import duckdb
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from outbox_pipelines.cli.main import cli
from outbox_pipelines.days.archive import open_archive
from tests.days.archive.reading import ONE, TWO, bucket, event, objects, put_day, three_days

pytestmark = pytest.mark.slow

COUNTS = "SELECT event_date, count(*) AS events FROM events GROUP BY ALL ORDER BY ALL"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An archive of three days, with ten events each."""
    three_days(tmp_path / "archive")
    return tmp_path / "archive"


def ask(root: Path | str, *arguments: str, input: str = "", **settings: str) -> Result:
    """Runs the command with the archive as its only setting, but for those that are given."""
    none: dict[str, str | None] = {name: None for name in os.environ if name.startswith("OUTBOX_")}
    given = {f"OUTBOX_{name.upper()}": value for name, value in settings.items()}
    environment = {**none, **given, "OUTBOX_ARCHIVE": str(root)}
    return CliRunner().invoke(cli, ["archive", "query", *arguments], env=environment, input=input)


def test_a_table_for_users(root: Path) -> None:
    """Guards against an answer that cannot be read, and a command that wants a database."""
    done = ask(root, COUNTS)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "event_date      events",
        "------------  --------",
        "2013-01-01          10",
        "2013-01-02          10",
        "2013-01-03          10",
    ]


def test_rows_that_were_cut_are_reported(root: Path) -> None:
    """Guards against a part that is taken for the whole, and a terminal flooded with a million rows."""
    done = ask(root, "SELECT seq FROM events ORDER BY seq", "--limit", "4")
    assert done.stdout.split() == ["seq", "-----", "10", "11", "12", "13"]
    assert done.stderr == "outbox: showing the first 4 rows: use --limit for more, --csv for all\n"
    exactly = ask(root, "SELECT seq FROM events ORDER BY seq", "--limit", "30")
    assert (len(exactly.stdout.splitlines()), exactly.stderr) == (32, "")
    many = ask(root, "SELECT * FROM range(1000)")
    assert len(many.stdout.splitlines()) == 102
    assert "the first 100 rows" in many.stderr


def test_long_and_missing_cells(root: Path) -> None:
    """Guards against a payload that pushes all else off the screen, and numbers made of texts."""
    done = ask(root, "SELECT repeat('x', 200) AS long, NULL AS none, '1e5' AS text, E'a\\nb' AS lines")
    *_, row = done.stdout.splitlines()
    assert row.split() == ["x" * 79 + "…", "1e5", "a", "b"]
    assert done.exit_code == 0
    assert ask(root, "SELECT seq FROM events WHERE false").stdout.splitlines()[0].strip() == "seq"


def test_csv_json_and_parquet(root: Path, tmp_path: Path) -> None:
    """Guards against forms that other tools cannot read, or that stop at the first hundred rows."""
    sql = "SELECT seq, created_at, headers, payload, event_date, seq / 4 AS quarter FROM events ORDER BY seq"
    rows = list(csv.reader(io.StringIO(ask(root, sql, "--csv").stdout)))
    assert rows[0] == ["seq", "created_at", "headers", "payload", "event_date", "quarter"]
    assert rows[1] == ["10", "2013-01-01 00:00:10+00:00", "", '{"n": 10}', "2013-01-01", "2.5"]
    assert len(rows) == 31
    found = json.loads(ask(root, sql, "--json").stdout)
    assert len(found) == 30
    assert found[0] == {
        "seq": 10,
        "created_at": "2013-01-01 00:00:10+00:00",
        "headers": None,
        "payload": '{"n": 10}',
        "event_date": "2013-01-01",
        "quarter": 2.5,
    }
    assert json.loads(ask(root, "SELECT 1 WHERE false", "--json").stdout) == []
    assert len(json.loads(ask(root, "SELECT * FROM range(1000)", "--json").stdout)) == 1000
    assert len(ask(root, "SELECT * FROM range(1000)", "--csv", "--limit", "7").stdout.splitlines()) == 8
    file = tmp_path / "out.parquet"
    assert ask(root, sql, "--parquet", str(file)).exit_code == 0
    assert pq.read_table(file).column("seq").to_pylist() == list(range(10, 40))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out.parquet"]


def test_sql_from_elsewhere(root: Path, tmp_path: Path) -> None:
    """Guards against queries that have to be squeezed through a shell's quotes."""
    file = tmp_path / "counts.sql"
    file.write_text(f"-- Events by day.\n{COUNTS};\n")
    expected = ask(root, COUNTS).stdout
    assert ask(root, str(file)).stdout == expected
    assert ask(root, "-", input=file.read_text()).stdout == expected
    missing = ask(root, str(tmp_path / "missing.sql"))
    assert missing.exit_code == 2
    assert "cannot read the query file" in missing.stderr


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELEC 1", 'the query failed: Parser Error: syntax error at or near "SELEC"'),
        ("SELECT payloud FROM events", "payloud"),
        ("SELECT * FROM event", "event does not exist"),
        ("SELECT payload::int FROM events", "the query failed: Conversion Error"),
        ("DROP VIEW events", "only a single SELECT is allowed: the archive is read-only"),
        ("", "only a single SELECT is allowed"),
    ],
)
def test_errors_are_one_line(root: Path, sql: str, said: str) -> None:
    """Guards against a stack trace for a slip of the pen."""
    for form in ([], ["--csv"], ["--json"]):
        done = ask(root, sql, *form)
        assert done.exit_code == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_the_archive_is_not_written(root: Path, tmp_path: Path) -> None:
    """Guards against a file of the archive that a query replaces, or half of one that it leaves elsewhere."""
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for file in (next(iter(before)), root / "new.parquet"):
        done = ask(root, COUNTS, "--parquet", str(file))
        assert done.exit_code == 2
        assert "is in the archive, which is read-only: choose a file elsewhere" in done.stderr
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    (tmp_path / "out.parquet").write_text("of yesterday")
    late = "SELECT CASE WHEN range = 900000 THEN error('boom') ELSE range END FROM range(1000000)"
    failed = ask(root, late, "--parquet", str(tmp_path / "out.parquet"))
    assert failed.exit_code == 2
    assert len(failed.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out.parquet"]
    assert (tmp_path / "out.parquet").read_text() == "of yesterday"
    os.mkfifo(tmp_path / "pipe")
    # Refused before the query, which would fail.
    for name in ("no/such/out.parquet", "pipe"):
        nowhere = ask(root, late, "--parquet", str(tmp_path / name))
        assert nowhere.exit_code == 2
        assert "cannot be written: " in nowhere.stderr
        assert len(nowhere.stderr.splitlines()) == 1
    assert (tmp_path / "pipe").is_fifo()


def test_a_missing_file_is_one_line(root: Path) -> None:
    """Guards against a stack trace after a day's file was removed."""
    next((root / "events" / "event_date=2013-01-02").glob("*.parquet")).unlink()
    done = ask(root, COUNTS)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert "2013-01-02" in done.stderr


def test_what_a_query_would_not_notice_is_a_warning(root: Path) -> None:
    """Guards against counts of a file that was replaced, and of days of which one is left out."""
    assert ask(root, COUNTS).stderr == ""
    (root / "_outbox" / "manifests" / "2013-01-01.json").unlink()
    file = next((root / "events" / "event_date=2013-01-02").glob("*.parquet"))
    table = pq.read_table(file).slice(1)
    file.chmod(0o600)
    pq.write_table(table, file)
    done = ask(root, "SELECT count(*) FROM events")
    assert (done.exit_code, "19" in done.stdout) == (0, True)
    replaced, left_out = done.stderr.splitlines()
    assert f"{file.name} of 2013-01-02 has " in replaced
    assert "2013-01-01 has a file and no manifest, so its events are left out" in left_out


@pytest.mark.parametrize("damage", ["whole", "part"])
def test_a_damaged_file_is_one_line(root: Path, damage: str) -> None:
    """Guards against an error of a library that leads nowhere."""
    file = next((root / "events" / "event_date=2013-01-02").glob("*.parquet"))
    content = file.read_bytes()
    file.chmod(0o600)
    file.write_bytes(b"x" * 2000 if damage == "whole" else content[:200] + bytes(300) + content[500:])
    done = ask(root, "SELECT * FROM events")
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert f"`outbox archive verify {'2013-01-02' if damage == 'whole' else 'DAY'}`" in done.stderr


def test_no_archive(tmp_path: Path) -> None:
    """Guards against answers of an archive that is not there."""
    for archive, said in (
        ("", "no archive configured: set OUTBOX_ARCHIVE"),
        ("none", "no archive configured: set OUTBOX_ARCHIVE"),
        (str(tmp_path / "nowhere"), "is not a directory"),
        (str(tmp_path), "has no days yet"),
    ):
        none: dict[str, str | None] = {name: None for name in os.environ if name.startswith("OUTBOX_")}
        done = CliRunner().invoke(
            cli, ["archive", "query", COUNTS], env={**none, "OUTBOX_ARCHIVE": archive or None}
        )
        assert done.exit_code == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_only_one_form(root: Path, tmp_path: Path) -> None:
    """Guards against a form that is chosen in silence."""
    done = ask(root, COUNTS, "--json", "--parquet", str(tmp_path / "x.parquet"))
    assert done.exit_code == 2
    assert "choose one of --csv, --json, --parquet" in done.stderr


def test_local_files_can_be_joined(root: Path, tmp_path: Path) -> None:
    """Guards against an archive that cannot be combined with an analyst's own data."""
    put_day(root, ONE, [event(ONE, 1)])
    (tmp_path / "names.csv").write_text("id,name\n1,Ada\n")
    sql = f"SELECT name FROM events JOIN '{tmp_path}/names.csv' n ON n.id::text = aggregate_id AND seq = 1"
    assert ask(root, sql, "--csv", "--read", f"{tmp_path}/names.csv").stdout == "name\nAda\n"


@pytest.mark.extended
def test_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a stack trace where the bucket refuses, and a process that says more than the answer."""
    made = objects(ONE, [event(ONE, 1)]) | objects(TWO, [event(TWO, 2)])
    with bucket(monkeypatch, made) as url:
        monkeypatch.setenv("OUTBOX_ARCHIVE", url)
        command = [
            sys.executable,
            "-m",
            "outbox_pipelines",
            "archive",
            "query",
            "SELECT max(seq) AS n FROM events",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["n", "---", "2"], "")
        name = next(name for name in made if str(TWO) in name and name.endswith(".parquet"))
        boto3.client("s3").delete_object(Bucket=url.split("/")[2], Key=f"some/archive/{name}")
        failed = ask(url, "SELECT max(payload) FROM events")
        assert failed.exit_code == 2
        # The bucket's server runs in this process, and logs.
        (said,) = [line for line in failed.stderr.splitlines() if " info: " not in line]
        assert said.startswith(f"outbox: the archive {url} (OUTBOX_ARCHIVE) reports an error: ")


QUERIES = (
    "SELECT * FROM read_text('{secret}')",
    "SELECT * FROM read_blob('{secret}')",
    "SELECT * FROM read_csv('{secret}')",
    "SELECT * FROM '{secret}'",
    "SELECT * FROM glob('{directory}/*')",
    "SELECT * FROM read_text('{root}/../secret.csv')",
    "SELECT * FROM read_parquet('{root}/events/event_date=2013-01-01/events-superseded.parquet')",
    "SELECT * FROM read_text('/proc/self/environ')",
    "SELECT * FROM read_csv('http://127.0.0.1:9/x')",
    "SELECT * FROM sniff_csv('{secret}')",
    "SELECT * FROM parquet_metadata('{secret}')",
    "EXPLAIN ANALYZE SELECT * FROM read_text('{secret}')",
    "PIVOT (SELECT * FROM read_csv('{secret}')) ON canary USING count(*)",
    "PIVOT events ON event_date USING any_value((SELECT content FROM read_text('{secret}')))",
)


@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_a_query_reads_the_archive_alone(root: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Guards against a local file that every user of the archive can read."""
    secret = root.parent / "secret.csv"
    secret.write_text("canary\nhunter2\n")
    (root / "events" / "event_date=2013-01-01" / "events-superseded.parquet").write_bytes(b"canary")
    with bucket(monkeypatch, objects(ONE, [event(ONE, 1)])) as url:
        where = root if place == "directory" else url
        assert ask(where, COUNTS).exit_code == 0
        for query in QUERIES:
            done = ask(where, query.format(secret=secret, directory=root.parent, root=root))
            assert done.exit_code == 2, query
            assert "hunter2" not in done.output, query
            assert "canary" not in done.stdout, query


COPY = "COPY (SELECT 'evil' AS a) TO '{file}' (USE_TMP_FILE false)"
WRITING = (
    COPY,
    f"EXPLAIN ANALYZE {COPY}",
    f"EXPLAIN (FORMAT json) {COPY}",
    f"/* */ EXPLAIN ANALYZE {COPY}",
    f"WITH x AS ({COPY}) SELECT * FROM x",
    f"EXPLAIN ANALYZE WITH x AS ({COPY}) SELECT * FROM x",
    f"EXPLAIN (ANALYZE, FORMAT json) WITH x AS ({COPY}) SELECT * FROM x",
    f"WITH x AS ({COPY}), y AS (SELECT 1 AS a) PIVOT y ON a USING count(*)",
    f"EXPLAIN WITH x AS ({COPY}), y AS (SELECT 1 AS a) PIVOT y ON a USING count(*)",
    f"SELECT * FROM (WITH x AS ({COPY}), y AS (SELECT 1 AS a) PIVOT y ON a USING count(*))",
    "COPY (PIVOT events ON event_type USING count(*)) TO '{file}' (USE_TMP_FILE false)",
    "CREATE TABLE t AS PIVOT events ON event_type USING count(*)",
    "SELECT * FROM query('WITH x AS (CO' || 'PY (SELECT 1) TO ''{file}'' (USE_TMP_FILE false)) SELECT 1')",
    "SELECT * FROM json_execute_serialized_sql('{serialized}')",
    "SELECT * FROM main.\"JSON_execute_serialized_sql\"('{serialized}')",
    "SELECT * FROM query('SELECT * FROM json_execute_serial' || 'ized_sql(''{twice}'')')",
    "SELECT 1; PIVOT events ON event_type USING count(*)",
)


@pytest.mark.extended
@pytest.mark.parametrize("form", [[], ["--json"], ["--parquet", "out.parquet"]])
def test_a_query_writes_no_file_of_the_archive(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    """Guards against a file of the archive that every user of `query` can replace: it may be opened."""
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    file = next(path for path in before if path.suffix == ".parquet")
    with duckdb.connect() as connection:
        hidden = f"WITH x AS ({COPY.format(file=file)}) SELECT * FROM x"
        ((text,),) = connection.execute("SELECT json_serialize_sql($1::VARCHAR)", [hidden]).fetchall()
    serialized = text.replace("'", "''")
    for query in WRITING:
        given = query.format(file=file, serialized=serialized, twice=serialized.replace("'", "''"))
        done = ask(root, given, *form)
        assert done.exit_code == 2, query
        assert len(done.stderr.splitlines()) == 1, query
        assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before, query


def test_words_that_could_write_are_only_words(root: Path) -> None:
    """Guards against a refusal of an honest question about copies and queries."""
    for sql in (
        "SELECT count(*) AS copy FROM events WHERE payload ->> 'query' IS NULL",
        "SELECT * FROM query('SELECT count(*) AS copy FROM events')",
        "PIVOT events ON event_date IN ('2013-01-01') USING count(*) AS copy",
    ):
        done = ask(root, sql)
        assert done.exit_code == 0, done.output
    refused = ask(root, "PIVOT (SELECT 1 AS copy) ON copy USING count(*)")
    assert "list its columns" in refused.stderr


def test_a_pivot(root: Path) -> None:
    """Guards against a question that DuckDB answers and the archive refuses."""
    pivot = "PIVOT events ON event_date USING count(*) GROUP BY aggregate_type"
    (row,) = json.loads(ask(root, pivot, "--json").stdout)
    assert list(row.values())[1:] == [10, 10, 10]
    assert list(row)[1:] == ["2013-01-01", "2013-01-02", "2013-01-03"]
    assert "2013-01-02" in ask(root, pivot + ";\n").stdout
    assert len(list(csv.reader(io.StringIO(ask(root, pivot, "--csv").stdout)))) == 2
    beneath = f'WITH p AS ({pivot}) SELECT "2013-01-03" AS third FROM p'
    assert json.loads(ask(root, beneath, "--json").stdout) == [{"third": 10}]


def test_a_plan(root: Path) -> None:
    """Guards against a slow query that cannot be analyzed."""
    for explain in ("EXPLAIN", "explain analyze", "EXPLAIN (FORMAT json)", "\n EXPLAIN ANALYZE"):
        for sql in (COUNTS, "(SELECT 1)", "PIVOT events ON event_date USING count(*)"):
            done = ask(root, f"{explain} {sql}")
            assert (done.exit_code, done.stderr) == (0, ""), done.stderr
    lines = ask(root, f"EXPLAIN ANALYZE {COUNTS}").stdout.splitlines()
    assert len(lines) > 5
    assert any("30 rows" in line for line in lines)
    assert json.loads(ask(root, f"EXPLAIN (FORMAT json) {COUNTS}").stdout)
    assert json.loads(ask(root, f"EXPLAIN {COUNTS}", "--json").stdout)[0]["explain_key"] == "physical_plan"


def test_a_query_cannot_lift_the_lock(root: Path) -> None:
    with open_archive(str(root)).connection as connection:
        for statement in ("SET enable_external_access = true", "RESET lock_configuration", "LOAD httpfs"):
            with pytest.raises(duckdb.Error, match=r"locked|disabled"):
                connection.execute(statement)
        mode = Path(connection.execute("SELECT current_setting('temp_directory')").fetchall()[0][0]).stat()
    assert mode.st_mode & 0o777 == 0o700


def test_every_type_has_a_form(root: Path) -> None:
    """Guards against decimals that lose digits, JSON that no parser takes, and Python's own notation."""
    sql = (
        "SELECT 12345678901234567890.123456789::DECIMAL(38, 9) AS money, 'NaN'::DOUBLE AS nan, "
        "'-Infinity'::FLOAT AS low, {'a': 0.10::DECIMAL(4, 2), 'b': [true, NULL]} AS made, "
        r"MAP {1: DATE '2013-01-02'} AS mapped, '\x00\xFF'::BLOB AS raw, TIME '01:02:03' AS at, "
        "INTERVAL '1 day 90 seconds' AS lasts, true AS flag, NULL AS nothing, "
        "170141183460469231731687303715884105727 AS big"
    )
    text = ask(root, sql, "--json").stdout

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (found,) = json.loads(text, parse_constant=refuse, parse_float=str)
    assert found == {
        "money": "12345678901234567890.123456789",
        "nan": "NaN",
        "low": "-Infinity",
        "made": {"a": "0.10", "b": [True, None]},
        "mapped": {"1": "2013-01-02"},
        "raw": r"\x00ff",
        "at": "01:02:03",
        "lasts": "P1DT1M30S",
        "flag": True,
        "nothing": None,
        "big": 2**127 - 1,
    }
    (row,) = csv.DictReader(io.StringIO(ask(root, sql, "--csv").stdout))
    assert (row["money"], row["made"]) == ("12345678901234567890.123456789", '{"a": 0.10, "b": [true, null]}')
    assert "datetime" not in ask(root, sql).stdout
