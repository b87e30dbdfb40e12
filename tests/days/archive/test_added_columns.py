"""Columns that a user has added to the outbox: archived, proven, restored and read as the others are."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

import pyarrow as pa
import pytest

from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive import drop, open_archive, restore
from outbox_pipelines.days.partitions import calendar
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings
from tests.days.archive.days import (
    directory,
    edit_manifest,
    file,
    manifest,
    past_day,
    publish,
    rows,
    write,
)
from tests.days.archive.test_proof import write_file
from tests.schema.servers import Database

# A name, a type, and values as SQL, of which each has its row; the last row has none.
COLUMNS: dict[str, tuple[str, list[str]]] = {
    "tenant": ("text", ["''", "'a'", "chr(31) || '1='", r"'\\N'", "'日本語, \"x\"'"]),
    "flag": ("boolean", ["true", "false"]),
    "small": ("smallint", ["-32768", "0"]),
    "number": ("integer", ["2147483647"]),
    "Long Number": ("bigint", ["-9223372036854775808"]),
    "money": ("numeric(30, 4)", ["0.1000", "'NaN'", "12345678901234567890.1234"]),
    "ratio": ("double precision", ["0.1", "1e300", "'-Infinity'", "'NaN'", "-0.0"]),
    "single": ("real", ["0.1"]),
    "at": ("timestamptz", ["'2026-01-01 00:00:00.000001+02'", "'infinity'", "'4000-01-01 BC'"]),
    "local_at": ("timestamp(3)", ["'2026-01-01'"]),
    "on": ("date", ["'2026-02-28'", "'-infinity'"]),
    "lasts": ("interval", ["'1 year 2 days -3 hours'"]),
    "raw": ("bytea", [r"'\x00ff'", "''"]),
    "tags": ("text[]", ["ARRAY['a', NULL, '']", "'{}'"]),
    "place": ("point", ["'(1,2)'"]),
    "span": ("tstzrange", ["'[2026-01-01,2026-01-02)'"]),
    "color": ("color", ["'red'"]),
    "padded": ("char(5)", ["'a'"]),
    "owner": ("uuid", ["'0000abcd-0000-7000-8000-000000000001'"]),
    "extra": ("json", ["""'{"b": 1,  "a": 1e2}'"""]),
    # Names that the file has already, or that mean something elsewhere.
    "status": ("text", ["'mine'"]),
    "Status": ("text", ["'mine too'"]),
    "published_at": ("date", ["'2026-01-01'"]),
    "event_date": ("date", ["'2026-01-01'"]),
    'a "b" {name} %s $1 ;--': ("text", ["'odd'"]),
}
_AFTER = "UPDATE {leaf} SET {changes} WHERE seq = (SELECT min(seq) + {n} FROM {leaf})"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def add(database: Database, **columns: str) -> None:
    """Columns that a user adds, with their types."""
    for name, type in columns.items():
        database.rows(f"ALTER TABLE outbox ADD COLUMN {quoted(name)} {type}")


def as_text(database: Database, table: str) -> list[tuple[Any, ...]]:
    """All columns of all rows, as PostgreSQL prints them by default."""
    listed = ", ".join(f"{quoted(name)}::text" for name in ("id", "payload", *COLUMNS))
    with database.connect() as connection:
        return connection.execute(f"SELECT {listed} FROM {table} ORDER BY seq".encode()).fetchall()


@pytest.fixture
def day(database: Database) -> date:
    """A published day whose events have columns of a user with all kinds of values."""
    database.rows("CREATE TYPE color AS ENUM ('red', 'green')")
    add(database, **{name: type for name, (type, _) in COLUMNS.items()})
    day = past_day(database)
    database.rows("ALTER TABLE outbox DISABLE TRIGGER outbox_append_only")
    leaf = calendar.leaf_of(day)
    with database.connect() as connection:
        for n in range(5):
            changes = ", ".join(
                f"{quoted(name)} = {values[n]}" for name, (_, values) in COLUMNS.items() if n < len(values)
            )
            connection.execute(_AFTER.format(leaf=leaf, n=n, changes=changes).encode())
    database.rows("ALTER TABLE outbox ENABLE TRIGGER outbox_append_only")
    return day


@pytest.mark.parametrize("attach", [False, True])
def test_they_survive_the_drop(database: Database, settings: Settings, day: date, attach: bool) -> None:
    """Guards against a column that is lost permanently once its day is archived, proven and dropped."""
    # What a role or a database may say of how values are printed.
    database.rows(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET bytea_output = escape', current_database()); "
        "EXECUTE format('ALTER DATABASE %I SET extra_float_digits = -5', current_database()); "
        "EXECUTE format('ALTER DATABASE %I SET IntervalStyle = sql_standard', current_database()); END $$"
    )
    before = as_text(database, calendar.leaf_of(day))
    days.archive(settings, day)
    assert days.verify(settings, day).equal
    assert drop.drop(settings, day).rows == len(before)
    restored = restore.restore(settings, day, attach)
    assert as_text(database, restored.table) == before
    if attach:
        assert days.verify(settings, day).equal
        assert drop.drop(settings, day).rows == len(before)


def test_each_is_summed(settings: Settings, day: date) -> None:
    """Guards against a column that is archived and not proven."""
    days.archive(settings, day)
    table = rows(settings, day)
    columns = manifest(settings, day).columns
    assert [column.name for column in columns] == list(COLUMNS)
    # A text, a boolean, an integer, and some of the other kinds.
    for column in (*columns[:3], *columns[7::6], columns[-1]):
        row = next(row for row in table if row[column.stored] is not None)
        changed = [each | {column.stored: None} if each is row else each for each in table]
        write_file(settings, day, changed)
        (difference,) = [line for line in days.verify(settings, day).differences if "event" in line]
        assert difference.endswith(f"event {row['id']} (seq {row['seq']}) differs"), column


def test_a_column_that_came_later(database: Database, settings: Settings) -> None:
    """Guards against days that cannot be dropped because their column was added after they were archived, and
    against one that is dropped with values that its file does not have."""
    day = past_day(database)
    days.archive(settings, day)
    add(database, tenant="text")
    assert days.verify(settings, day).equal
    add(database, region="text NOT NULL DEFAULT 'eu'")
    (difference,) = days.verify(settings, day).differences
    assert difference == f"the rows have a column region, which {file(settings, day).name} does not have"
    with pytest.raises(drop.NotProvenError, match="--again"):
        drop.drop(settings, day)
    days.archive(settings, day, again=True)
    assert drop.drop(settings, day).now
    restored = restore.restore(settings, day)
    assert {value for (value,) in database.rows(f"SELECT region FROM {restored.table}")} == {"eu"}


def test_a_column_that_is_gone(database: Database, settings: Settings) -> None:
    """Guards against days that cannot be dropped, or restored, after a column was removed."""
    database.rows("CREATE TYPE color AS ENUM ('red', 'green')")
    add(database, tenant="text DEFAULT 'a'", color="color DEFAULT 'red'")
    day = past_day(database)
    days.archive(settings, day)
    database.rows("ALTER TABLE outbox DROP COLUMN tenant, DROP COLUMN color")
    assert days.verify(settings, day).equal
    assert drop.drop(settings, day).now
    with pytest.raises(SetupError, match=r"has the column tenant \(text\), which the outbox no longer has"):
        restore.restore(settings, day, attach=True)
    database.rows("DROP TYPE color")
    restored = restore.restore(settings, day)
    found = database.rows(f"SELECT DISTINCT tenant, color, pg_typeof(color)::text FROM {restored.table}")
    assert found == [("a", "red", "text")]


def test_a_column_that_does_not_take_old_rows(database: Database, settings: Settings) -> None:
    """Guards against a traceback where the outbox has changed since."""
    day = past_day(database)
    days.archive(settings, day)
    drop.drop(settings, day)
    add(database, tenant="text NOT NULL")
    with pytest.raises(SetupError, match="its rows violate the outbox's constraints"):
        restore.restore(settings, day)


def test_computed_columns(database: Database, settings: Settings) -> None:
    """Guards against a day that cannot be restored because PostgreSQL computes one of its columns."""
    add(database, total="int GENERATED ALWAYS AS ((payload ->> 'total')::int) STORED")
    day = past_day(database)
    days.archive(settings, day)
    before = database.rows(f"SELECT id, total FROM {calendar.leaf_of(day)} ORDER BY id")
    assert {total for _, total in before} >= {5}
    drop.drop(settings, day)
    restored = restore.restore(settings, day)
    assert database.rows(f"SELECT id, total FROM {restored.table} ORDER BY id") == before


@pytest.fixture
def three_days(database: Database, settings: Settings) -> list[date]:
    """Archived days: without a column, with one, with the same of another type."""
    first = past_day(database, 5)
    made = [first, first + timedelta(1), first + timedelta(2)]
    days.archive(settings, first)
    add(database, tenant="int DEFAULT 7", flag="boolean DEFAULT true")
    write(database, made[1])
    publish(database)
    days.archive(settings, made[1])
    database.rows("ALTER TABLE outbox ALTER COLUMN tenant TYPE text USING 'tenant ' || tenant")
    database.rows("ALTER TABLE outbox ALTER COLUMN tenant SET DEFAULT 'tenant 8'")
    write(database, made[2])
    publish(database)
    days.archive(settings, made[2])
    return made


READERS: dict[str, Callable[[Settings], pa.Table]] = {
    "relation": lambda settings: open_archive(settings.archive).relation().to_arrow_table(),
    "query": lambda settings: open_archive(settings.archive).query("SELECT * FROM events").to_arrow_table(),
    "dataset": lambda settings: open_archive(settings.archive).dataset().to_table(),
}


@pytest.mark.parametrize("reader", READERS)
def test_they_are_read(settings: Settings, three_days: list[date], reader: str) -> None:
    """Guards against a column that analysts do not see, and days that cannot be read together."""
    table = READERS[reader](settings)
    seen = sorted(
        {(row["event_date"], row["tenant"], row["flag"]) for row in table.to_pylist()}, key=lambda row: row[0]
    )
    assert seen == [
        (three_days[0], None, None),
        (three_days[1], "7", True),
        (three_days[2], "tenant 8", True),
    ]


@pytest.mark.extended
@pytest.mark.parametrize("reader", READERS)
def test_a_wider_integer_stays_one(database: Database, settings: Settings, reader: str) -> None:
    """Guards against a number that is text in queries because its column was widened."""
    first = past_day(database, 5)
    add(database, total="int DEFAULT 7")
    write(database, first + timedelta(1))
    publish(database)
    days.archive(settings, first + timedelta(1))
    database.rows("ALTER TABLE outbox ALTER COLUMN total TYPE bigint")
    database.rows(f"ALTER TABLE outbox ALTER COLUMN total SET DEFAULT {2**40}")
    write(database, first + timedelta(2))
    publish(database)
    days.archive(settings, first + timedelta(2))
    assert sorted(row["total"] for row in READERS[reader](settings).to_pylist()) == [7, 2**40]


@pytest.mark.extended
@pytest.mark.parametrize("reader", READERS)
def test_a_name_in_another_case(database: Database, settings: Settings, reader: str) -> None:
    """Guards against NULL in place of the values of a column that was renamed in case only."""
    first = past_day(database, 5)
    add(database, tenant="int DEFAULT 7")
    write(database, first + timedelta(1))
    publish(database)
    days.archive(settings, first + timedelta(1))
    database.rows('ALTER TABLE outbox RENAME COLUMN tenant TO "Tenant"')
    write(database, first + timedelta(2))
    publish(database)
    days.archive(settings, first + timedelta(2))
    rows = READERS[reader](settings).to_pylist()
    values = [(row["event_date"], row["tenant"], row.get("Tenant")) for row in rows]
    by_case = [(first + timedelta(1), 7, None), (first + timedelta(2), None, 7)]
    together = [(first + timedelta(1), 7, None), (first + timedelta(2), 7, None)]
    assert sorted(values, key=str) == (by_case if reader == "dataset" else together)


def test_a_frame_has_them(settings: Settings, three_days: list[date]) -> None:
    """Guards against a helper that knows the outbox's own columns alone."""
    archive = open_archive(settings.archive)
    frame = archive.dataframe(since=three_days[2], columns=["tenant", "event_date"])
    assert list(frame.tenant) == ["tenant 8"]


def test_a_manifest_that_hides_a_column(database: Database, settings: Settings, day: date) -> None:
    """Guards against a manifest that was edited so that a column is neither summed nor restored."""
    days.archive(settings, day)
    edit_manifest(settings, day, columns=[])
    assert not days.verify(settings, day).equal
    assert list(directory(settings, day).iterdir())
