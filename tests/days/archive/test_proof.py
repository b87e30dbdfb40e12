"""The proof: every change to a day's file, its manifest or its rows is found, and named.

What is done to the rows is tried on both servers; what is done to the files on one: the proof asks either
server the same, and `day` has shown on both that the answers to every shape of event are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive import manifest, proof
from outbox_pipelines.days.archive.manifest import SCHEMA
from outbox_pipelines.days.archive.store import key
from outbox_pipelines.settings import Settings
from tests.days.archive.days import (
    SEPARATED,
    days_ago,
    directory,
    edit_manifest,
    file,
    make_days,
    manifest_path,
    past_day,
    publish,
    rows,
    write,
    write_shapes,
)
from tests.days.archive.days import manifest as read_manifest
from tests.schema.servers import Database

Rows = list[dict[str, Any]]


@pytest.fixture
def day(database: Database, settings: Settings) -> date:
    """A day that is archived and proven."""
    day = past_day(database)
    days.archive(settings, day)
    assert days.verify(settings, day).equal
    return day


@pytest.fixture
def verify(database: Database, settings: Settings, day: date) -> Callable[[], tuple[str, ...]]:
    """Proves the day in both ways, and that the database takes note of it; the differences."""

    def found() -> tuple[str, ...]:
        proof = days.verify(settings, day)
        assert not proof.equal
        query = "SELECT proven_at FROM outbox_days WHERE day = %s"
        assert database.value(query, day) is None
        done = database.outbox("archive", "verify", str(day), OUTBOX_ARCHIVE=settings.archive)
        assert done.exit_code == 1
        assert done.stdout == ""
        assert done.stderr.splitlines() == [f"outbox: {day}: {line}" for line in proof.differences]
        return proof.differences

    return found


def write_file(settings: Settings, day: date, changed: Rows, **said: Any) -> None:
    """Another file in the place of the day's, with a manifest that fits it in every respect."""
    path = directory(settings, day) / "other.parquet"
    added = read_manifest(settings, day).columns
    pq.write_table(pa.Table.from_pylist(changed, manifest.schema_with(added)), path)
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    name = f"events-{sha256[:16]}.parquet"
    buckets = proof.sums_of_file(path, added)
    path.rename(path.with_name(name))
    consistent = {
        "file": name,
        "size": len(content),
        "sha256": sha256,
        "rows": len(changed),
        "buckets": buckets,
    }
    edit_manifest(settings, day, **consistent | said)


def name(row: dict[str, Any]) -> str:
    return f"bucket {row['seq'] // 100_000}: event {row['id']} (seq {row['seq']})"


EDITED = "the manifest of {} is not the one that was written: its digest differs"


def test_a_flipped_byte(settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]) -> None:
    """Guards against rot that Parquet's readers do not notice."""
    path = file(settings, day)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    assert verify()[0].startswith(f"{path.name} has changed since it was written: its sha256 is ")


def test_every_byte_counts(settings: Settings, day: date, is_short: bool) -> None:
    """Guards against a part of the file that nothing covers, and against a stack trace of its reader."""
    path = file(settings, day)
    original = path.read_bytes()
    for place in range(0, len(original), len(original) // (5 if is_short else 20)):
        content = bytearray(original)
        content[place] ^= 0x10
        path.write_bytes(content)
        assert "has changed since it was written" in days.verify(settings, day).differences[0]


@pytest.mark.parametrize("left", [0, 3, 0.5, -1])
def test_a_truncated_file(
    settings: Settings, day: date, verify: Callable[[], tuple[str, ...]], left: float
) -> None:
    """Guards against a copy that broke off, and against a stack trace of its reader."""
    path = file(settings, day)
    content = path.read_bytes()
    size = int(len(content) * left) if isinstance(left, float) else left % len(content)
    path.write_bytes(content[:size])
    found = verify()
    assert found[0] == f"{path.name} has {size:,} bytes, not {len(content):,}"
    assert found[1].startswith(f"{path.name} cannot be read: ")


def test_a_missing_file(settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]) -> None:
    """Guards against a day whose manifest stands for a file that is gone."""
    path = file(settings, day)
    path.unlink()
    assert verify() == (f"{path.name} is missing in {settings.archive}",)


def test_a_missing_manifest(settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]) -> None:
    """Guards against a day that is archived by the database's word alone."""
    manifest_path(settings, day).unlink()
    assert verify() == (f"{day} has no manifest in {settings.archive}",)


def test_a_manifest_of_another_day(
    settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]
) -> None:
    """Guards against two directories that were swapped."""
    other = day + timedelta(1)
    edit_manifest(settings, day, day=str(other))
    (found,) = verify()
    assert found.startswith(f"the manifest of {day} is the one of {other}: it is in the wrong location")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"day": "2026-01-01"}', b"\xff"])
def test_a_manifest_that_is_none(
    settings: Settings, day: date, verify: Callable[[], tuple[str, ...]], content: bytes
) -> None:
    """Guards against a stack trace of a parser."""
    manifest_path(settings, day).write_bytes(content)
    (found,) = verify()
    assert found.startswith(f"the manifest of {day} cannot be read: ")
    assert f"`outbox archive day {day} --again`" in found
    assert ": :" not in found


@pytest.mark.parametrize(
    ("what", "value"), [("statuses", {"PROCESSED": 1}), ("tool", "an editor"), ("last_seq", 1)]
)
def test_an_edited_manifest(
    settings: Settings, day: date, verify: Callable[[], tuple[str, ...]], what: str, value: object
) -> None:
    """Guards against figures that were edited: the database keeps the digest."""
    edit_manifest(settings, day, **{what: value})
    assert verify() == (EDITED.format(day),)


def test_edited_sums(settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]) -> None:
    """Guards against a manifest that vouches for itself."""
    said = read_manifest(settings, day)
    ((bucket, (rows_, total)),) = said.buckets.items()
    edit_manifest(settings, day, buckets={bucket: (rows_ + 1, total + 1)}, rows=said.rows + 1)
    assert verify() == (
        EDITED.format(day),
        f"{said.file}: {said.rows:,}, in the manifest {said.rows + 1:,}",
        f"{said.file}: sums differ from the manifest's in the buckets {bucket}",
        f"the rows: {said.rows:,}, in the manifest {said.rows + 1:,}",
        f"the rows: sums differ from the manifest's in the buckets {bucket}",
    )


def change(table: Rows, number: int, column: str, value: object) -> list[int]:
    table[number][column] = value
    return [number]


def swap_times(table: Rows) -> list[int]:
    table[3]["created_at"], table[7]["created_at"] = table[7]["created_at"], table[3]["created_at"]
    return [3, 7]


def swap_payloads(table: Rows) -> list[int]:
    a, b = (n for n, row in enumerate(table) if len(row["payload"]) > 5_000 or row["payload"] == "null")
    table[a]["payload"], table[b]["payload"] = table[b]["payload"], table[a]["payload"]
    return [a, b]


def first(table: Rows, column: str, value: object) -> int:
    return next(n for n, row in enumerate(table) if row[column] == value)


def move_separator(table: Rows) -> list[int]:
    """The text between two columns, with the separators of the sums, stays what it was."""
    n = first(table, "aggregate_id", SEPARATED)
    before, after = SEPARATED.split(f"{chr(31)}=")
    table[n] |= {"aggregate_type": f"{table[n]['aggregate_type']}{chr(31)}={before}", "aggregate_id": after}
    return [n]


CHANGES: dict[str, Callable[[Rows], list[int]]] = {
    "payload": lambda table: change(table, 5, "payload", '{"total": 6}'),
    "payload, by a blank": lambda table: change(
        table, first(table, "payload", '{"total": 5}'), "payload", '{"total":5}'
    ),
    "a microsecond": lambda table: change(
        table, 4, "created_at", table[4]["created_at"] + timedelta(microseconds=1)
    ),
    "swapped times": swap_times,
    "swapped payloads": swap_payloads,
    "a separator, moved": move_separator,
    "NULL, now empty": lambda table: change(
        table, first(table, "correlation_id", None), "correlation_id", ""
    ),
    "empty, now NULL": lambda table: change(table, first(table, "causation_id", ""), "causation_id", None),
    "no headers, now {}": lambda table: change(table, first(table, "headers", None), "headers", "{}"),
    "version 0, now NULL": lambda table: change(table, first(table, "version", 0), "version", None),
    "an aggregate": lambda table: change(table, 2, "aggregate_id", table[2]["aggregate_id"] + " "),
    "unicode of another form": lambda table: change(
        table, first(table, "event_type", "e\N{COMBINING ACUTE ACCENT}"), "event_type", "é"
    ),
    "key": lambda table: change(table, first(table, "idempotency_key", "key"), "idempotency_key", "kez"),
    "trace": lambda table: change(table, 1, "traceparent", "00-1"),
}


def test_a_changed_value(settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]) -> None:
    """Guards against a changed file with a manifest that was made to match."""
    archived = (file(settings, day), manifest_path(settings, day))
    original = {path: path.read_bytes() for path in archived}
    for what, make in CHANGES.items():
        table = rows(settings, day)
        changed = make(table)
        write_file(settings, day, table)
        bucket = table[0]["seq"] // 100_000
        found = verify()
        assert found[:3] == (
            EDITED.format(day),
            f"the rows: sums differ from the manifest's in the buckets {bucket}",
            f"table and file differ in the buckets {bucket}",
        ), what
        assert sorted(found[3:]) == sorted(f"{name(table[n])} differs" for n in changed), what
        file(settings, day).unlink()
        for path, content in original.items():
            path.write_bytes(content)
    assert days.verify(settings, day).equal


def test_a_changed_seq(settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]) -> None:
    """Guards against an event that has moved into another bucket."""
    table = rows(settings, day)
    before = name(table[0])
    table[0]["seq"] += 500_000
    write_file(settings, day, table)
    found = verify()
    assert f"{before} is missing in the file" in found
    assert f"{name(table[0])} is in the file once too often" in found


def test_a_missing_row(settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]) -> None:
    """Guards against a file that lacks an event, and a manifest that says nothing of it."""
    table = rows(settings, day)
    missing = table.pop(6)
    write_file(settings, day, table)
    found = verify()
    assert f"the rows: {len(table) + 1}, in the manifest {len(table)}" in found
    assert found[-1] == f"{name(missing)} is missing in the file"


def test_a_doubled_row(settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]) -> None:
    """Guards against an event that is counted twice; a sum by XOR would not notice two of the same."""
    table = rows(settings, day)
    write_file(settings, day, [*table, table[6]])
    assert verify()[-1] == f"{name(table[6])} is in the file once too often"
    write_file(settings, day, [*table, table[6], table[6]])
    assert verify()[-1] == f"{name(table[6])} is in the file too often"


def test_a_row_in_place_of_another(
    settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]
) -> None:
    """Guards against counts that are right and rows that are not."""
    table = rows(settings, day)
    missing, table[3] = table[3], table[5]
    write_file(settings, day, table)
    assert set(verify()[-2:]) == {
        f"{name(missing)} is missing in the file",
        f"{name(table[5])} is in the file once too often",
    }


def test_another_fate(settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]) -> None:
    """Guards against what became of an event, which the sums do not cover, changed in the file."""
    table = rows(settings, day)
    table[0]["status"] = "FAILED"
    write_file(settings, day, table)
    assert verify() == (EDITED.format(day),)


OWNERS_CHANGES = {
    "UPDATE outbox SET payload = '6' WHERE seq = {seq}": "differs",
    "UPDATE outbox SET correlation_id = NULL WHERE correlation_id = ''": "differs",
    "DELETE FROM outbox WHERE seq = {seq}": "is in the file once too often",
}


@pytest.mark.parametrize("statement", OWNERS_CHANGES)
def test_a_changed_table(
    database: Database, settings: Settings, day: date, verify: Callable[[], tuple[str, ...]], statement: str
) -> None:
    """Guards against an owner who has switched the guards off, and rows that are dropped so."""
    row = next(row for row in rows(settings, day) if row["correlation_id"] == "")
    database.rows("ALTER TABLE outbox DISABLE TRIGGER outbox_append_only")
    database.rows(statement.format(seq=row["seq"]))
    database.rows("ALTER TABLE outbox ENABLE TRIGGER outbox_append_only")
    found = verify()
    assert found[-1] == f"{name(row)} {OWNERS_CHANGES[statement]}"
    assert EDITED.format(day) not in found


def test_a_row_that_came_later(
    database: Database, settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]
) -> None:
    """Guards against an insert into a closed day, by an owner who has taken its seal off."""
    database.rows(f"DROP TRIGGER outbox_closed ON outbox_{day:%Y%m%d}")
    (late,) = write(database, day)
    assert verify()[-1].endswith(f"event {late.id} (seq {late.seq}) is missing in the file")


def test_a_day_is_proven_again_once_it_is_restored(
    database: Database, settings: Settings, day: date, verify: Callable[[], tuple[str, ...]]
) -> None:
    """Guards against a failure that stays, and a file that cannot be restored while its rows are there."""
    file(settings, day).unlink()
    verify()
    days.archive(settings, day, again=True)
    assert days.verify(settings, day).equal
    assert database.value("SELECT proven_at IS NOT NULL FROM outbox_days WHERE day = %s", day)


def test_a_dropped_day_is_compared_with_its_manifest(
    database: Database, settings: Settings, day: date
) -> None:
    """Guards against an only copy that rots unnoticed."""
    database.rows(f"DROP TABLE outbox_{day:%Y%m%d}")
    database.rows("UPDATE outbox_days SET state = 'dropped' WHERE day = %s", day)
    proof = days.verify(settings, day)
    assert (proof.differences, proof.rows) == ((), read_manifest(settings, day).rows)
    path = file(settings, day)
    path.write_bytes(path.read_bytes()[:-1])
    assert "bytes, not" in days.verify(settings, day).differences[0]


def test_many_differences_are_not_all_listed(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a log of a million lines."""
    day = days_ago(3)
    make_days(database, day)
    write(database, day, [{}] * 40)
    # Into another bucket, as after a busy hour.
    database.rows("SELECT setval('outbox_seq', 3000000)")
    write_shapes(database, day)
    publish(database)
    days.archive(settings, day)
    write_file(settings, day, [row | {"version": 99} for row in rows(settings, day)])
    found = days.verify(settings, day).differences
    assert "table and file differ in the buckets 0, 30" in found
    assert "bucket 0: and 30 more" in found
    assert len([line for line in found if line.startswith("bucket 30: event")]) == 10


def test_an_archive_whose_name_looks_like_a_pattern(database: Database, tmp_path: Path) -> None:
    """Guards against a proof of other files than the day's: readers take [a] and * for patterns."""
    day = past_day(database)
    odd = tmp_path / "arch[iv]e * of {a,b}?"
    settings = database.settings.model_copy(update={"archive": str(odd)})
    days.archive(settings, day)
    assert days.verify(settings, day).equal
    path = odd / key(day, "") / read_manifest(settings, day).file
    path.write_bytes(path.read_bytes()[:-1])
    assert not days.verify(settings, day).equal


def test_the_text_of_a_row_covers_every_column() -> None:
    """Guards against a new column that is archived and never proven."""
    fate = {"status", "published_at", "attempts", "last_error"}
    text = manifest.row_text("created_at")
    assert [name for name in SCHEMA.names if name not in fate and name not in text] == []
    assert manifest.Manifest.model_fields["format"].default == 1
