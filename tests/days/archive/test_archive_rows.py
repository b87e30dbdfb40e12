"""The statements of the archive, about rows: no file is written."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, LiteralString
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from psycopg import sql

from outbox_pipelines.days.archive import archive_sql, proof, rows
from outbox_pipelines.days.archive.manifest import BUCKET, OWN, schema_with
from outbox_pipelines.days.archive.store import Store
from tests.conftest import Outbox

_DAY: Final = date(2026, 3, 1)
_OTHER: Final = date(2026, 3, 2)
_ARCHIVE: Final = UUID(int=7)
_LATER: Final = UUID(int=8)
_DAYS: Final = """
INSERT INTO outbox_days (day, state, sealed_at, closed_at, manifest_sha256, archive, archived_at, proven_at)
SELECT day, state, '2026-03-04', '2026-03-04', digest, archive, archived_at, archived_at + interval '1 day'
FROM (VALUES (%(day)s, 'archived', 'a digest', %(archive)s, '2026-03-05'::timestamptz),
             (%(other)s, 'archived', 'another', %(archive)s, '2026-03-05'),
             ('2026-03-03', 'closed', NULL, NULL, NULL)) AS d (day, state, digest, archive, archived_at)"""
_GIVEN: Final = {"day": _DAY, "other": _OTHER, "archive": _ARCHIVE}
_SHOWN: Final = """
SELECT day, state, events, manifest_sha256, archive, extract(day FROM archived_at)::int,
       extract(day FROM proven_at)::int, dropped_at, proven_at > now() - interval '1 hour'
FROM outbox_days ORDER BY day"""
_BEFORE: Final[dict[date, tuple[Any, ...]]] = {
    _DAY: ("archived", None, "a digest", _ARCHIVE, 5, 6, None, False),
    _OTHER: ("archived", None, "another", _ARCHIVE, 5, 6, None, False),
    date(2026, 3, 3): ("closed", None, None, None, None, None, None, None),
}


@pytest.fixture
def days(outbox: Outbox) -> Any:
    """A session, and two archived days and a closed one."""
    with outbox.connect() as connection:
        connection.execute("DELETE FROM outbox_days")
        connection.execute(_DAYS, _GIVEN)
        yield connection


def _shown(days: psycopg.Connection[Any]) -> dict[date, tuple[Any, ...]]:
    return {day: tuple(row) for day, *row in days.execute(_SHOWN)}


def test_which_archive_is_known(days: psycopg.Connection[Any]) -> None:
    """Guards against days that are looked for in an archive from before."""
    days.execute("UPDATE outbox_days SET archived_at = '2026-03-02' WHERE day = %s", [_OTHER])
    days.execute(
        "INSERT INTO outbox_days (day, state, sealed_at, closed_at, archive, archived_at) "
        "SELECT '2026-04-01'::date + n, 'archived', now(), now(), %s, '2026-03-03'::date + n "
        "FROM generate_series(0, 1) n",
        [_LATER],
    )
    assert days.execute(archive_sql.KNOWN_ARCHIVE).fetchall() == [(_ARCHIVE, 4)]
    days.execute("UPDATE outbox_days SET archived_at = '2026-03-09' WHERE archive = %s", [_LATER])
    assert days.execute(archive_sql.KNOWN_ARCHIVE).fetchall() == [(_LATER, 4)]
    assert days.execute(archive_sql.ARCHIVED_DAYS).fetchall() == [(_DAY, "a digest"), (_OTHER, "another")]
    days.execute(archive_sql.ADOPT, {"archive": _LATER})
    found = days.execute("SELECT day FROM outbox_days WHERE archive = %s", [_LATER]).fetchall()
    assert {day for (day,) in found} == {_DAY, _OTHER, date(2026, 4, 1), date(2026, 4, 2)}


@pytest.mark.parametrize("digest", ["a digest", "a new one"])
def test_a_day_that_is_archived_again(days: psycopg.Connection[Any], digest: str) -> None:
    """Guards against a proof of the file before, and against another day that counts as archived."""
    given = {"day": _DAY, "events": 9, "digest": digest, "archive": _LATER}
    assert days.execute(archive_sql.ARCHIVED, given).fetchall() == [(_DAY,)]
    found = _shown(days)
    is_same = digest == "a digest"
    own = found.pop(_DAY)
    assert own[:4] == ("archived", 9, digest, _LATER)
    assert own[4] == (5 if is_same else datetime.now(UTC).day)
    assert own[5] == (6 if is_same else None)
    assert found == {day: row for day, row in _BEFORE.items() if day != _DAY}


@pytest.mark.parametrize("state", ["open", "closed", "dropped"])
def test_a_day_whose_state_has_changed(days: psycopg.Connection[Any], state: str) -> None:
    """Guards against a day that was reopened while it was archived: it has events that no file has."""
    days.execute("UPDATE outbox_days SET state = %s, manifest_sha256 = NULL WHERE day = %s", [state, _DAY])
    given = {"day": _DAY, "events": 9, "digest": "a digest", "archive": _ARCHIVE}
    expected = [(_DAY,)] if state == "closed" else []
    assert days.execute(archive_sql.ARCHIVED, given).fetchall() == expected
    assert _shown(days)[_DAY][0] == ("archived" if expected else state)


def test_what_is_proven(days: psycopg.Connection[Any]) -> None:
    """Guards against a drop by the proof of another day or of another file, or in spite of a difference."""
    days.execute(archive_sql.PROVEN, {"day": _DAY, "digest": "another", "equal": True})
    assert _shown(days) == _BEFORE
    days.execute(archive_sql.PROVEN, {"day": _DAY, "digest": "a digest", "equal": True})
    found = _shown(days)
    assert found[_DAY][-1] is True
    assert {day: row for day, row in found.items() if day != _DAY} == {
        day: row for day, row in _BEFORE.items() if day != _DAY
    }
    days.execute("UPDATE outbox_days SET manifest_sha256 = 'a digest' WHERE day = %s", [_OTHER])
    days.execute(archive_sql.PROVEN, {"day": _DAY, "digest": "a digest", "equal": False})
    found = _shown(days)
    assert (found[_DAY][5], found[_OTHER][5]) == (None, 6)


def test_a_day_that_is_restored(days: psycopg.Connection[Any]) -> None:
    """Guards against a day that stays dropped, and against another one."""
    days.execute("UPDATE outbox_days SET state = 'dropped', dropped_at = now()")
    days.execute(archive_sql.RESTORED, {"day": _DAY})
    found = days.execute(
        "SELECT day, state, dropped_at IS NULL, proven_at > now() - interval '1 hour' "
        "FROM outbox_days ORDER BY 1"
    ).fetchall()
    assert found == [
        (_DAY, "archived", True, True),
        (_OTHER, "dropped", False, False),
        (date(2026, 3, 3), "dropped", False, None),
    ]
    assert days.execute(archive_sql.KNOWN, {"day": _OTHER}).fetchall() == [("dropped", "another")]


def test_where_days_are(days: psycopg.Connection[Any]) -> None:
    """Guards against a day that is read from the wrong place, or from none."""
    for number in (1, 2, 3):
        days.execute(
            f"CREATE TABLE outbox_2026030{number} PARTITION OF outbox "
            f"FOR VALUES FROM ('2026-03-0{number} 00:00Z') TO ('2026-03-0{number + 1} 00:00Z')".encode()
        )
    days.execute("ALTER TABLE outbox DETACH PARTITION outbox_20260302")
    days.execute("DROP TABLE outbox_20260303")
    found = [row for row in days.execute(archive_sql.WHERE_DAYS_ARE) if row[0] <= date(2026, 3, 3)]
    assert found == [
        (_DAY, True, "a digest", True),
        (_OTHER, False, "another", True),
        (date(2026, 3, 3), False, None, False),
    ]


def test_the_progress_of_a_day(outbox: Outbox) -> None:
    """Guards against times of publishing from before the day, or of another number of shards."""
    noon = datetime(2026, 3, 1, tzinfo=UTC)
    with outbox.connect() as connection:
        for n, (shard, shards, at) in enumerate(
            [
                (1, 2, noon + timedelta(2)),
                (0, 2, noon + timedelta(1)),
                (0, 2, noon),
                (0, 2, noon - timedelta(microseconds=1)),
                (0, 1, noon + timedelta(hours=3)),
            ]
        ):
            connection.execute(
                "INSERT INTO outbox_progress (shard, shards, at, done, last_seq, target, events) "
                "VALUES (%s, %s, %s, '7:7:', %s, '8:8:', 1)",
                [shard, shards, at, n],
            )
        found = connection.execute(archive_sql.PROGRESS, {"shards": 2, "day": _DAY}).fetchall()
        assert [row[-1] for row in found] == [2, 1, 0]
        assert sorted(connection.execute(archive_sql.DIVISIONS)) == [(1,), (2,)]


_WRITE: Final = """
INSERT INTO outbox (id, seq, aggregate_type, aggregate_id, event_type, payload)
VALUES (%s, %s, %s, 'a', 'x', '{}')"""


def _leaf(connection: psycopg.Connection[Any]) -> str:
    connection.execute("SET session_replication_role = replica")
    ((leaf,),) = connection.execute("SELECT 'outbox_' || to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')")
    return str(leaf)


def test_the_rows_of_a_bucket(outbox: Outbox) -> None:
    """Guards against a report that names a row of the next bucket, or leaves one out."""
    with outbox.connect() as connection:
        leaf = _leaf(connection)
        for seq in (BUCKET - 1, BUCKET, 2 * BUCKET - 1, 2 * BUCKET):
            connection.execute(_WRITE, [uuid4(), seq, "order"])
        parts: dict[str, Any] = {"bucket": sql.Literal(1), "extra": sql.SQL("")}
        found = connection.execute(archive_sql.of_leaf(archive_sql.DIGESTS, leaf, **parts))
        assert [seq for _, seq, _ in found] == [BUCKET, 2 * BUCKET - 1]
        sums = connection.execute(archive_sql.of_leaf(archive_sql.SUMS, leaf, extra=sql.SQL("")))
        assert [(bucket, count) for bucket, count, _ in sums] == [(0, 1), (1, 2), (2, 1)]
        # Amounts of money are printed as in the file, whatever the database says of them.
        connection.execute("SET lc_monetary = 'POSIX'")
        proof.sums_of_table(connection, leaf)
        assert connection.execute("SHOW lc_monetary").fetchall() == [("C",)]


def test_the_rows_of_a_bucket_of_a_file(tmp_path: Path) -> None:
    """Guards against the same in a file."""
    seqs = [2 * BUCKET, 2 * BUCKET - 1, BUCKET, BUCKET - 1]
    schema = schema_with(())
    known: dict[str, list[Any]] = {
        "id": [str(uuid4()) for _ in seqs],
        "seq": seqs,
        "created_at": [datetime.now(UTC)] * len(seqs),
    }
    missing = {name: [None] * len(seqs) for name in schema.names}
    file = tmp_path / "rows.parquet"
    pq.write_table(
        pa.table(missing | known, schema=pa.schema([field.with_nullable(True) for field in schema])), file
    )
    assert [seq for _, seq, _ in proof.rows_of_file(file, 1)] == [BUCKET, 2 * BUCKET - 1]
    sums = proof.sums_of_file(file)
    assert [(bucket, found.rows) for bucket, found in sums.items()] == [(0, 1), (1, 2), (2, 1)]


def test_a_table_without_rows(outbox: Outbox, tmp_path: Path) -> None:
    """Guards against an empty partition that cannot be archived, so that it is never dropped."""
    columns = {"n": "integer"}
    none = sql.SQL("(SELECT 1 AS n WHERE false) AS none")
    with outbox.connect() as connection:
        assert rows.write(connection, columns, none, tmp_path / "none.parquet") == 0
        assert rows.sum_of_rows(connection, columns, none) == (0, 0)
    assert rows.sum_of_file(Store(str(tmp_path)), "none.parquet", columns) == (0, 0)


def test_the_aggregate_types_of_a_day(outbox: Outbox) -> None:
    """Guards against types in another order than that of the file, and against one too few."""
    with outbox.connect() as connection:
        leaf = _leaf(connection)
        for seq, name in enumerate(["b", "a", "b", "B", "c"]):
            connection.execute(_WRITE, [uuid4(), seq, name])

        def found(most: int) -> Any:
            return connection.execute(
                archive_sql.of_leaf(archive_sql.TYPES, leaf, most=sql.Literal(most))
            ).fetchall()

        assert found(9) == [(["B", "a", "b", "c"], 4)]
        assert found(2)[0][1] == 3


def test_what_is_known_of_the_rows_of_a_day(outbox: Outbox) -> None:
    """Guards against the status of another event that has the same number."""
    ids = [uuid4() for _ in range(5)]
    with outbox.connect() as connection:
        leaf = _leaf(connection)
        for seq, each in enumerate(ids):
            connection.execute(_WRITE, [each, seq, "order"])
        connection.execute("UPDATE outbox SET aggregate_id = 'b' WHERE seq = 0")
        parked: LiteralString = (
            "INSERT INTO outbox_parked (id, seq, tx, aggregate_type, aggregate_id, event_type, payload, "
            "created_at, state, attempts, last_error) "
            "VALUES (%s, %s, '3', 'order', 'a', 'x', '{}', now(), %s, %s, 'big')"
        )
        connection.execute(parked, [ids[1], 1, "failed", 4])
        connection.execute(parked, [ids[2], 2, "discarded", 5])
        connection.execute(parked, [uuid4(), 3, "failed", 6])
        # Of other events with the same id.
        connection.execute(parked, [ids[3], 33, "failed", 6])
        released: LiteralString = "INSERT INTO outbox_released (seq, id, attempts) VALUES (%s, %s, %s)"
        connection.execute(released, [4, ids[4], 7])
        connection.execute(released, [0, uuid4(), 8])
        connection.execute(released, [44, ids[0], 8])
        parts: dict[str, Any] = {
            "shards": sql.SQL(""),
            "extra": sql.SQL(""),
            "aggregate": sql.SQL(archive_sql.BY_MANY_TYPES),
        }
        found = connection.execute(archive_sql.of_leaf(archive_sql.ROWS, leaf, **parts)).fetchall()
        assert [(row[1], row[13], row[14] is not None, row[15], row[16]) for row in found] == [
            (1, "FAILED", False, 4, "big"),
            (2, "DISCARDED", False, 5, "big"),
            (3, "PROCESSED", False, 0, None),
            (4, "PROCESSED", True, 7, None),
            (0, "PROCESSED", False, 0, None),
        ]
        assert connection.execute(archive_sql.of_leaf(archive_sql.IS_RESTORED, leaf)).fetchall() == [(False,)]
        connection.execute("UPDATE outbox SET tx = '3' WHERE seq = 1")
        assert connection.execute(archive_sql.of_leaf(archive_sql.IS_RESTORED, leaf)).fetchall() == [(True,)]


def test_columns_that_users_have_added(outbox: Outbox) -> None:
    """Guards against a column that the file lacks, and the system's own."""
    with outbox.connect() as connection:
        connection.execute("ALTER TABLE outbox ADD gone int, ADD tenant text, ADD number int")
        connection.execute("ALTER TABLE outbox DROP gone")
        connection.execute("ALTER TABLE outbox ADD twice int GENERATED ALWAYS AS (number * 2) STORED")
        found = connection.execute(archive_sql.ADDED, {"leaf": "outbox", "own": list(OWN)}).fetchall()
        assert found == [("tenant", "text", False), ("number", "integer", False), ("twice", "integer", True)]
        for name, is_known in (("text", True), ("nothing", False)):
            assert connection.execute(archive_sql.TYPE_EXISTS, {"type": name}).fetchall() == [(is_known,)]


def test_the_history_of_an_aggregate(outbox: Outbox) -> None:
    """Guards against events of another aggregate."""
    with outbox.connect() as connection:
        _leaf(connection)
        for seq, (kind, name) in enumerate([("order", "a"), ("offer", "a"), ("order", "b")]):
            connection.execute(
                "INSERT INTO outbox (seq, aggregate_type, aggregate_id, event_type, payload) "
                "VALUES (%s, %s, %s, 'x', '{}')",
                [seq, kind, name],
            )
        given = {"aggregate_type": "order", "aggregate_id": "a"}
        assert [seq for seq, *_ in connection.execute(archive_sql.HISTORY, given)] == [0]
