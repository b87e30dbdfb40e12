"""`open_archive`: what analysts get of an archive, and what is read for it."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, date, datetime
from pathlib import Path
from unittest.mock import patch

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from outbox_pipelines.days.archive import open_archive
from outbox_pipelines.days.archive.manifest import SCHEMA, VERSION
from outbox_pipelines.days.archive.store import key, manifest_key
from outbox_pipelines.errors import SetupError
from tests.days.archive.reading import ONE, THREE, TWO, bucket, event, objects, put_day, three_days
from tests.days.archive.test_query import ask

COLUMNS = [*SCHEMA.names, "event_date"]


def _seqs(relation: duckdb.DuckDBPyRelation) -> list[int]:
    return sorted(seq for (seq,) in relation.project("seq").fetchall())


def test_all_that_is_archived_comes_in_each_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a reader that misses days, columns or the day itself."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    three_days(tmp_path)
    archive = open_archive(str(tmp_path))
    assert archive.days == [ONE, TWO, THREE]
    relation = archive.relation()
    assert relation.columns == COLUMNS
    assert str(relation.types[-1]) == "DATE"
    assert _seqs(relation) == list(range(10, 40))
    frame = archive.dataframe()
    assert list(frame.columns) == COLUMNS
    assert sorted(frame.seq) == list(range(10, 40))
    dataset = archive.dataset()
    assert dataset.schema.names == COLUMNS
    assert dataset.count_rows() == 30
    assert dataset.to_table(columns=["event_date"]).column(0).unique().to_pylist() == archive.days
    counts = archive.query("SELECT event_date, count(*) FROM events GROUP BY 1 ORDER BY 1").fetchall()
    assert counts == [(ONE, 10), (TWO, 10), (THREE, 10)]
    # Not the zone of the machine.
    assert archive.query("SELECT current_setting('TimeZone')").fetchall() == [("UTC",)]


def test_the_types_of_a_frame(tmp_path: Path) -> None:
    """Guards against versions that become floats, times without a zone, and NaN where there is no text."""
    put_day(tmp_path, ONE, [event(ONE, 1, version=7, headers='{"a": "b"}'), event(ONE, 2)])
    frame = open_archive(str(tmp_path)).dataframe()
    assert str(frame.created_at.dtype) == "datetime64[us, UTC]"
    assert str(frame.published_at.dtype) == "datetime64[us, UTC]"
    assert frame.version.dtype == pd.Int32Dtype()
    assert list(frame.version.isna()) == [False, True]
    assert frame.seq.dtype == "int64"
    assert pd.api.types.is_string_dtype(frame.payload)
    assert frame.payload[0] == '{"n": 1}'
    assert pd.isna(frame.headers[1])
    assert frame.created_at[0] == datetime(2013, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert frame.event_date[0] == pd.Timestamp("2013-01-01")
    parsed = open_archive(str(tmp_path)).dataframe(parse=True)
    assert list(parsed.payload) == [{"n": 1}, {"n": 2}]
    assert list(parsed.headers) == [{"a": "b"}, None]


def test_filters(tmp_path: Path) -> None:
    """Guards against a filter that is dropped on the way, and text that breaks out of its quotes."""
    three_days(tmp_path)
    odd = 'it\'s "odd" $1'
    put_day(tmp_path, date(2013, 1, 4), [event(THREE, 40, aggregate_type=odd, event_type="other")])
    archive = open_archive(str(tmp_path))
    for wanted, seqs in (
        ({"since": TWO, "until": "2013-01-03"}, list(range(20, 40))),
        ({"until": ONE, "aggregate_id": "3"}, [13]),
        ({"aggregate_type": "order", "aggregate_id": "3"}, [13, 23, 33]),
        ({"aggregate_type": odd}, [40]),
        ({"event_type": "other"}, [40]),
        ({"since": "2014-01-01"}, []),
    ):
        assert _seqs(archive.relation(**wanted)) == seqs
        assert sorted(archive.dataframe(**wanted).seq) == seqs
        dataset = archive.dataset(**wanted)
        assert sorted(dataset.to_table(columns=["seq"]).column("seq").to_pylist()) == seqs
    assert archive.dataframe(columns=["seq", "event_date"]).columns.tolist() == ["seq", "event_date"]
    assert archive.relation(columns=["payload"]).columns == ["payload"]
    with pytest.raises(SetupError, match="no column nonsense: choose from id, seq"):
        archive.relation(columns=["nonsense"])
    with pytest.raises(SetupError, match="'yesterday' is not a day: write a date such as 2026-11-21"):
        archive.relation(since="yesterday")


def test_files_of_other_days_are_not_opened(tmp_path: Path) -> None:
    """Guards against a question about one day that reads a year."""
    files = three_days(tmp_path)
    files[TWO].write_bytes(b"no Parquet file")
    archive = open_archive(str(tmp_path))
    assert _seqs(archive.relation(since=THREE)) == list(range(30, 40))
    assert len(archive.dataframe(until=ONE)) == 10
    assert archive.dataset(since=THREE).count_rows() == 10
    count = "SELECT count(*) FROM events WHERE event_date"
    assert archive.query(f"{count} = '2013-01-03'").fetchall() == [(10,)]
    assert archive.query(f"{count} <> '2013-01-02'").fetchall() == [(20,)]
    with pytest.raises(duckdb.Error):
        archive.query(f"{count} = '2013-01-02'").fetchall()


def test_row_groups_of_other_aggregates_are_not_read(tmp_path: Path) -> None:
    """Guards against a filter that is applied after everything was read."""
    file = put_day(tmp_path, ONE, [event(ONE, seq) for seq in range(10, 20)], group=1)
    content = bytearray(file.read_bytes())
    # The pages of the row groups 2 to 9 become noise.
    groups = ds.dataset(file, format="parquet").get_fragments()
    metadata = next(groups).metadata
    for number in range(1, 10):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(number).column(column)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            content[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    file.write_bytes(content)
    archive = open_archive(str(tmp_path))
    assert _seqs(archive.relation(aggregate_type="order", aggregate_id="0")) == [10]
    assert archive.dataset(aggregate_id="0").to_table().column("seq").to_pylist() == [10]
    with pytest.raises(duckdb.Error):
        archive.relation(aggregate_id="1").fetchall()


def test_files_that_no_manifest_names_do_not_count(tmp_path: Path) -> None:
    """Guards against events that are counted twice, or half of a file that is being written."""
    files = three_days(tmp_path)
    superseded = files[TWO].with_name("events-0123456789abcdef.parquet")
    superseded.write_bytes(files[TWO].read_bytes())
    (tmp_path / key(date(2013, 1, 4), "")).mkdir()
    (tmp_path / key(date(2013, 1, 4), "events-0123456789abcdef.parquet")).write_bytes(b"half")
    archive = open_archive(str(tmp_path))
    assert archive.days == [ONE, TWO, THREE]
    assert len(archive.relation().fetchall()) == 30


def test_versions_are_read_together(tmp_path: Path) -> None:
    """Guards against a new column that old files hide, or old files that a new column makes unreadable."""
    older = pa.schema([field for field in SCHEMA if field.name not in ("traceparent", "version")])
    newer = SCHEMA.append(pa.field("tenant", pa.string()))
    put_day(tmp_path, ONE, [event(ONE, 1)], schema=older, version=VERSION - 1)
    put_day(tmp_path, TWO, [event(TWO, 2, version=5)])
    put_day(tmp_path, THREE, [event(THREE, 3, tenant="t")], schema=newer, version=VERSION + 1)
    archive = open_archive(str(tmp_path))
    expected = [(1, None, None, ONE), (2, 5, None, TWO), (3, None, "t", THREE)]
    query = "SELECT seq, version, tenant, event_date FROM events ORDER BY seq"
    assert archive.query(query).fetchall() == expected
    frame = archive.dataframe()
    assert frame.columns.tolist() == [*SCHEMA.names, "tenant", "event_date"]
    assert frame.version.dtype == pd.Int32Dtype()
    rows = archive.dataset().to_table(columns=["seq", "version", "tenant", "event_date"]).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == expected
    # None of these days' files has the column.
    assert archive.relation(until=ONE, columns=["version", "tenant"]).fetchall() == [(None, None)]


def test_a_column_that_no_file_has(tmp_path: Path) -> None:
    """Guards against an archive that can only be read with an older release."""
    older = pa.schema([field for field in SCHEMA if field.name != "published_at"])
    put_day(tmp_path, ONE, [event(ONE, 1)], schema=older, version=VERSION - 1)
    frame = open_archive(str(tmp_path)).dataframe(columns=["seq", "published_at"])
    assert str(frame.published_at.dtype) == "datetime64[us, UTC]"
    assert frame.published_at.isna().all()


def test_names_above_the_archive_are_no_columns(tmp_path: Path) -> None:
    """Guards against `env=prod/archive`, of which DuckDB makes a column."""
    root = tmp_path / "env=it's prod" / "archive"
    three_days(root)
    assert open_archive(str(root)).query("FROM events").columns == COLUMNS


def test_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against readers that work in a directory alone, and days that are fetched in vain."""
    made: dict[str, bytes] = {}
    for day, seq in ((ONE, 10), (TWO, 20), (THREE, 30)):
        made |= objects(day, [event(day, seq + n) for n in range(10)])
    name = next(name for name in made if str(TWO) in name and name.endswith(".parquet"))
    made[name] = b"no Parquet file"
    with bucket(monkeypatch, made) as url:
        archive = open_archive(url)
        assert archive.days == [ONE, TWO, THREE]
        assert _seqs(archive.relation(since=THREE, aggregate_id="3")) == [33]
        assert archive.query("SELECT count(*) FROM events WHERE event_date <> '2013-01-02'").fetchall() == [
            (20,)
        ]
        assert archive.dataframe(until=ONE).columns.tolist() == COLUMNS
        assert archive.dataset(until=ONE, aggregate_id="4").to_table().column("seq").to_pylist() == [14]


@pytest.mark.parametrize(
    "sql",
    [
        "COPY (SELECT 1) TO '{root}/manifest.json'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{root}/manifest.json'",
        "SELECT 1; COPY (SELECT 1) TO '{root}/manifest.json'",
        "CREATE TABLE t AS SELECT 1",
        "",
    ],
)
def test_a_query_only_reads(tmp_path: Path, sql: str) -> None:
    """Guards against a query that writes into the archive."""
    three_days(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SetupError, match="only a single SELECT is allowed: the archive is read-only"):
        open_archive(str(tmp_path)).query(sql.format(root=tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_names_in_a_query_are_tables(tmp_path: Path) -> None:
    """Guards against a query that finds the reader's own variables, and tables that cannot be joined."""
    three_days(tmp_path)
    archive = open_archive(str(tmp_path))
    with pytest.raises(duckdb.CatalogException):
        archive.query("SELECT * FROM statements")
    archive.connection.register("names", pd.DataFrame({"id": ["3"], "name": ["Ada"]}))
    query = "SELECT name, count(*) FROM events JOIN names ON names.id = aggregate_id GROUP BY 1"
    assert archive.query(query).fetchall() == [("Ada", 3)]


def test_nothing_to_read(tmp_path: Path) -> None:
    """Guards against a wrong path that is made, and answers that nothing ever happened."""
    with pytest.raises(
        SetupError, match=r"nowhere is not a directory: give the location from OUTBOX_ARCHIVE$"
    ):
        open_archive(str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(SetupError, match="has no days yet: write one with `outbox archive day`"):
        open_archive(str(tmp_path))


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    """Guards against a day that is left out in silence."""
    three_days(tmp_path)
    (tmp_path / manifest_key(TWO)).write_text('{"format": 2}')
    archive = open_archive(str(tmp_path))
    damaged = r"the manifest of 2013-01-02 cannot be read: [^\n]*`outbox archive day 2013-01-02 --again`$"
    assert archive.days == [ONE, TWO, THREE]
    for sql in ("SELECT count(*) FROM events", "SELECT * FROM events WHERE event_date = '2013-01-02'"):
        with pytest.raises(duckdb.Error, match=damaged):
            archive.query(sql).fetchall()
    with pytest.raises(SetupError, match=damaged):
        archive.dataframe()
    with pytest.raises(SetupError, match=damaged):
        archive.dataset()
    with pytest.raises(SetupError, match=damaged):
        archive.relation(until=TWO)


def test_other_days_are_read_beside_a_damaged_manifest(tmp_path: Path) -> None:
    """Guards against one damaged manifest that blocks all other days."""
    three_days(tmp_path)
    (tmp_path / manifest_key(TWO)).write_text('{"format": 2}')
    archive = open_archive(str(tmp_path))
    others = "SELECT count(*) FROM events WHERE event_date IN ('2013-01-01', '2013-01-03')"
    assert archive.query(others).fetchall() == [(20,)]
    assert archive.query("SELECT count(*) FROM events WHERE event_date > '2013-01-02'").fetchall() == [(10,)]
    assert len(archive.dataframe(since=THREE)) == 10
    assert archive.dataset(until=ONE).count_rows() == 10
    assert ask(tmp_path, others).exit_code == 0
    refused = ask(tmp_path, "SELECT count(*) FROM events")
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert "the manifest of 2013-01-02 cannot be read" in refused.stderr


def test_parsing_keeps_no_second_copy(tmp_path: Path) -> None:
    """Guards against a frame for which all texts are in memory beside what they are parsed to."""
    put_day(tmp_path, ONE, [event(ONE, n) for n in range(20_000)])
    archive = open_archive(str(tmp_path))
    at_once = set()

    def parsed(name: str, text: str, events: pa.RecordBatch, row: int) -> str:
        at_once.add(events.num_rows)
        return text

    with patch("outbox_pipelines.days.archive.data_set._parsed", parsed):
        frame = archive.dataframe(columns=["payload", "seq"], parse=True)
    assert (list(frame.columns), len(frame)) == (["payload", "seq"], 20_000)
    assert max(at_once) <= 10_000


def test_the_package_is_light() -> None:
    """Guards against DuckDB and pandas in every process that has to do with the archive."""
    heavy = "{'duckdb', 'pandas', 'pyarrow', 'fsspec'}"
    code = f"import sys, outbox_pipelines.days.archive; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_payload_that_python_cannot_parse_is_named(tmp_path: Path) -> None:
    """Guards against an analyst who does not learn which of a million events it is."""
    rows = [event(ONE, 1), event(ONE, 2, payload=f'{{"n": 1{"0" * 5000}}}')]
    put_day(tmp_path, ONE, rows)
    archive = open_archive(str(tmp_path))
    with pytest.raises(SetupError, match=r"payload of event 00000000-0000-7000-8000-000000000002 \(seq 2\)"):
        archive.dataframe(parse=True, columns=["payload"])
    assert len(archive.dataframe(columns=["payload"])) == 2
