"""Values of a query as text: what PostgreSQL prints for the same value, for every type."""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from outbox_pipelines.days.archive import rendering
from outbox_pipelines.local.postgres import Postgres
from tests.days.archive.reading import three_days
from tests.days.archive.test_query import ask
from tests.schema.servers import server

__all__ = ["server"]

# In PostgreSQL's SQL; the same in DuckDB's unless it is given.
SAME = (
    *("true", "false", "NULL::boolean"),
    *("'-32768'::smallint", "2147483647::int", "'-9223372036854775808'::bigint"),
    *("12345678901234567890.123456789::numeric(38,9)", "0.10::numeric(4,2)", "-0.001::numeric(5,3)"),
    *("0.1::real", "1.5e-30::real", "16777216::real", "'NaN'::real", "'-Infinity'::real", "3.4e38::real"),
    *("0.1::float8", "1e300::float8", "'NaN'::float8", "'Infinity'::float8", "1e-300::float8"),
    *("''::text", "'a\"b, c'::text", "'日本語'::varchar"),
    *("'infinity'::date", "'-infinity'::date", "'2024-02-29'::date", "'9999-12-31'::date"),
    *("'12024-01-01'::date", "'0001-01-01'::date"),
    *("'24:00:00'::time", "'01:02:03.000001'::time", "'00:00:00.5'::time"),
    *("'10:00:00+02'::timetz", "'10:00:00.25-05:30'::timetz"),
    *("'infinity'::timestamp", "'-infinity'::timestamp", "'2024-02-29 01:02:03.100000'::timestamp"),
    *("'infinity'::timestamptz", "'-infinity'::timestamptz", "'2024-02-29 01:02:03+02'::timestamptz"),
    *("'9999-12-31 23:59:59.999999+00'::timestamptz", "'294246-01-10 00:00:00+00'::timestamptz"),
    *("'2013-01-01 10:15:00+00'::timestamptz", "'2013-01-01 10:15:00.123456+00'::timestamptz"),
    *(
        f"interval '{text}'"
        for text in (
            *("1 year 2 months 1 day", "14 months", "-14 months", "30 days", "1 month", "-1 day", "0 days"),
            *("3600.5 seconds", "-0.5 seconds", "-40 hours", "1 day 90 seconds", "0.000001 seconds"),
            *("1 year -1 day 00:00:01", "10 years", "100:59:59.999999", "-1 month 1 day -00:00:30"),
        )
    ),
    "'0e7fdb1e-5a3c-7cc1-9a55-5e0f1d4f2b8e'::uuid",
)
OTHERS = {
    r"'\x00ff'::bytea": r"'\x00\xFF'::blob",
    "'0044-03-15 BC'::date": "'0044-03-15 (BC)'::date",
    "'0044-03-15 01:02:03+00 BC'::timestamptz": "'0044-03-15 (BC) 01:02:03+00'::timestamptz",
    "170141183460469231731687303715884105727::numeric": "170141183460469231731687303715884105727::hugeint",
}


def _printed(sql: str) -> object:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        found = rendering.rendered(connection.sql(f"SELECT {sql} AS x"))
        ((value,),) = connection.execute(found.sql_query()).fetchall()
        return value


def test_every_type(server: Postgres) -> None:
    """Guards against months that become days, `infinity` that becomes a year, and digits of a REAL."""
    import psycopg

    wrong = {}
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("SET TimeZone = 'UTC'; SET IntervalStyle = 'iso_8601'; SET DateStyle = 'ISO'")
        for of_postgres, of_duckdb in {**{each: each for each in SAME}, **OTHERS}.items():
            row = connection.execute(f"SELECT ({of_postgres})::text".encode()).fetchone()
            assert row is not None
            (wanted,), value = row, _printed(of_duckdb)
            found = None if value is None else rendering.text_of(value)
            if wanted is not None and found is not None and "timestamptz" in of_postgres:
                wanted = wanted.replace("+00", "+00:00")
            elif wanted is not None and of_postgres.endswith("+02'::timetz"):
                wanted += ":00"
            elif wanted is not None and found is not None and of_postgres.endswith(("real", "float8")):
                wanted, found = str(float(wanted)), str(float(found))
            if found != wanted:
                wrong[of_postgres] = (found, wanted)
    assert wrong == {}


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("[interval '1 month', NULL]", ["P1M", None]),
        ("[[interval '1 month'], []]", [["P1M"], []]),
        ("[DATE 'infinity']::DATE[1]", ["infinity"]),
        (
            "{'a': interval '1 month', 'x y': [{'z': DATE 'infinity'}]}",
            {"a": "P1M", "x y": [{"z": "infinity"}]},
        ),
        ("MAP {'a': TIMESTAMPTZ 'infinity'}", {"a": "infinity"}),
        ("MAP {DATE '2013-01-02': 0.1::FLOAT}", {"2013-01-02": 0.1}),
        ("row(interval '1 month', 2)", ["P1M", 2]),
        ("NULL::STRUCT(a INTERVAL)", None),
        ("NULL::INTERVAL[]", None),
        ("NULL::MAP(VARCHAR, DATE)", None),
    ],
)
def test_inside_of_others(sql: str, wanted: object) -> None:
    """Guards against a renderer that knows columns only."""
    assert json.loads(rendering.json_of(_printed(sql))) == wanted


# What a Parquet file has no exact type for, and its text.
TEXTS = {
    "340282366920938463463374607431768211455::uhugeint": "340282366920938463463374607431768211455",
    "'23:59:59+05:30'::timetz": "23:59:59+05:30",
    "'101'::bit": "101",
    "interval '1 month 1 day'": "P1M1D",
    "union_value(n := 2)": "2",
    "union_value(n := interval '1 month')": "1 month",
    "12345678901234567890123456789012345678901234567890::bignum": (
        "12345678901234567890123456789012345678901234567890"
    ),
    "'POINT(1 2)'::geometry": "POINT (1 2)",
    "1::variant": "1",
    "[interval '1 month', NULL]": ["P1M", None],
    "[['1'::bit, '0'::bit]]": [["1", "0"]],
    "['1'::bit]::bit[1]": ["1"],
    "{'a': '10:00:00+02'::timetz, 'b': 1}": {"a": "10:00:00+02:00", "b": 1},
    "row(interval '1 month', 2)": {"element1": "P1M", "element2": 2},
    "MAP {'a': 1::uhugeint}": [("a", "1")],
    "NULL::INTERVAL": None,
}


def test_parquet_has_every_value_of_the_table(tmp_path: Path) -> None:
    """Guards against -1 for the greatest integer, a time without its offset, and pyarrow's refusals."""
    three_days(tmp_path / "archive")
    file = tmp_path / "made.parquet"
    columns = ", ".join(f"{sql} AS c{number}" for number, sql in enumerate(TEXTS))
    made = ask(tmp_path / "archive", f"SELECT {columns}", "--parquet", str(file))
    assert (made.exit_code, made.stderr) == (0, f"written to {file}\n")
    assert list(pq.read_table(file).to_pylist()[0].values()) == list(TEXTS.values())
    sql = "SELECT 'infinity'::timestamp_s AS s, 'infinity'::timestamp_ms AS ms, 1.5 AS d, 0.1::float AS f"
    assert ask(tmp_path / "archive", sql, "--parquet", str(file)).exit_code == 0
    with duckdb.connect() as connection:
        kept = connection.execute(f"SELECT s::VARCHAR, ms::VARCHAR, d, typeof(f) FROM '{file}'").fetchall()
    assert kept == [("infinity", "infinity", Decimal("1.5"), "FLOAT")]


def test_columns_of_one_name(tmp_path: Path) -> None:
    """Guards against a value that JSON loses, and a file that no reader opens."""
    three_days(tmp_path / "archive")
    root, file = tmp_path / "archive", tmp_path / "made.parquet"
    sql = 'SELECT 1 AS a, 2 AS a, 3 AS "A", seq FROM events ORDER BY seq DESC LIMIT 1'
    (found,) = json.loads(ask(root, sql, "--json").stdout)
    names = ["a", "a_1", "A_2", "seq"]
    assert list(found) == names
    assert list(found.values())[:3] == [1, 2, 3]
    assert ask(root, sql, "--csv").stdout.splitlines()[0] == ",".join(names)
    assert ask(root, sql).stdout.split()[:4] == names
    assert ask(root, sql, "--parquet", str(file)).exit_code == 0
    assert pq.read_table(file).column_names == names
    with duckdb.connect() as connection:
        assert connection.execute(f"SELECT * FROM '{file}'").fetchall()[0][:3] == (1, 2, 3)


def test_nothing_and_an_empty_text_differ_in_csv(tmp_path: Path) -> None:
    """Guards against NULL and '' that are the same, as COPY tells them apart."""
    three_days(tmp_path / "archive")
    text = ask(tmp_path / "archive", "SELECT NULL AS a, '' AS b, 'x,\"y\"' AS c, true AS d", "--csv").stdout
    assert text == 'a,b,c,d\n,"","x,""y""",true\n'
    (row,) = csv.DictReader(io.StringIO(text))
    assert row == {"a": "", "b": "", "c": 'x,"y"', "d": "true"}
