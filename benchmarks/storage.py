"""What an event leaves on the disk: bytes of WAL and of storage, by table and index.

Invariants:
- Events are written into a filled table after a checkpoint, each in a transaction of its own: so an index
  without an order in time shows in the images of its pages.
- The rows of the marked table, that of textbooks, are also marked as published, once.
- Bytes are counted: another process on the machine changes no figure.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final, LiteralString, NamedTuple

import psycopg

from benchmarks import textbook
from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Figure, Ratio, Row
from outbox_pipelines.local.postgres import find_programs
from outbox_pipelines.settings import Settings

_FILLED: Final = sized(200_000, 50_000)
_EVENTS: Final = sized(2_000, 500)
# How many texts of 32 digits a payload has.
_SIZES: Final = {"200 bytes": 5, "2 kB": 60}
_EVENT: Final[LiteralString] = """
SELECT 'order', (i % 20000)::text, 'order.placed', jsonb_build_object('number', i, 'state', 'placed', 'note',
       (SELECT string_agg(md5((i * m)::text), '') FROM generate_series(1, {words}) m)){more}
FROM generate_series({first}, {last}) i"""
_COLUMNS: Final[LiteralString] = "aggregate_type, aggregate_id, event_type, payload"
_WAYS: Final[dict[str, LiteralString]] = {
    "a marked table": f"INSERT INTO textbook_outbox ({_COLUMNS}) {_EVENT}",
    "a message without a table": "SELECT pg_logical_emit_message(true, 'outbox', e::text) FROM ("
    f"{_EVENT}) AS e",
    "the outbox": f"INSERT INTO outbox ({_COLUMNS}) {_EVENT}",
    "the outbox, with keys": f"INSERT INTO outbox ({_COLUMNS}, idempotency_key) {_EVENT}",
}
_MARK: Final = "UPDATE textbook_outbox SET published_at = now() WHERE id > %s AND id <= %s"
# An index of a day has the name of the one that it is a part of.
_RELATIONS: Final = """
SELECT pg_relation_filenode(c.oid)::text, pg_relation_size(c.oid),
       CASE c.relnamespace WHEN 'pg_toast'::regnamespace THEN 'toast'
                           ELSE coalesce(parent.relname, c.relname) END
FROM pg_class c
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
LEFT JOIN pg_class parent ON parent.oid = i.inhparent
WHERE c.relnamespace IN ('public'::regnamespace, 'pg_toast'::regnamespace)
    AND pg_relation_filenode(c.oid) IS NOT NULL"""
_LENGTHS: Final = re.compile(r"len \(rec/tot\): +(\d+)/ +(\d+),")
_RELATION: Final = re.compile(r"blkref #0: rel \d+/\d+/(\d+)")
_OTHER: Final = "transaction"


class _Bytes(NamedTuple):
    """Of an event, by relation."""

    records: dict[str, float]
    images: dict[str, float]
    disk: dict[str, float]

    @property
    def wal(self) -> float:
        return sum(self.records.values()) + sum(self.images.values())


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    rows = []
    for size, words in _SIZES.items():
        found = {way: _written(servers, way, words) for way in _WAYS}
        marked = found["a marked table"]
        for way, of in found.items():
            rows.append(
                _row(f"{size}: {way}", of.wal, sum(of.images.values()), sum(of.disk.values()), marked)
            )
        ours = found["the outbox, with keys"]
        rows += [
            _row(
                f"{size}: the outbox, with keys: {name}",
                ours.records.get(name, 0) + ours.images.get(name, 0),
                ours.images.get(name, 0),
                ours.disk.get(name, 0),
            )
            for name in sorted({*ours.records, *ours.images, *ours.disk})
        ]
    return rows


def _row(name: str, wal: float, images: float, disk: float, marked: _Bytes | None = None) -> Row:
    figures = (
        Figure(wal, "B", "WAL"),
        Figure(images, "B", "images of pages"),
        Figure(disk, "B", "disk"),
    )
    if marked is None:
        return Row(name, figures)
    return Row(
        name,
        figures,
        (
            Ratio(wal / marked.wal, "a marked table", "WAL"),
            Ratio(disk / sum(marked.disk.values()), "a marked table", "disk"),
        ),
    )


def _written(servers: Settings, way: str, words: int) -> _Bytes:
    with fresh_outbox(servers) as settings, psycopg.connect(settings.dsn, autocommit=True) as session:
        session.execute(textbook.TABLE.encode())
        session.execute("SET synchronous_commit = off")
        before = _sizes(session)
        session.execute(_statement(way, words, 1, _FILLED))
        session.execute("VACUUM outbox, textbook_outbox")
        disk = {name: (size - before[name]) / _FILLED for name, size in _sizes(session).items()}
        session.execute("CHECKPOINT")
        start = _position(session)
        for n in range(_FILLED + 1, _FILLED + _EVENTS + 1):
            session.execute(_statement(way, words, n, n))
        if way == "a marked table":
            for n in range(_FILLED, _FILLED + _EVENTS, 100):
                session.execute(_MARK, [n, n + 100])
        records, images = _wal(session, start)
    return _Bytes(records, images, {name: size for name, size in disk.items() if size})


def _statement(way: str, words: int, first: int, last: int) -> bytes:
    more = ", 'key ' || i" if way.endswith("keys") else ""
    return _WAYS[way].format(words=words, first=first, last=last, more=more).encode()


def _sizes(session: psycopg.Connection[Any]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for _, size, name in session.execute(_RELATIONS):
        sizes[name] += size
    return sizes


def _position(session: psycopg.Connection[Any]) -> str:
    return str(session.execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0])  # type: ignore[index]


def _wal(session: psycopg.Connection[Any], start: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return bytes of an event since a position, by relation: of records without images, and of images."""
    names = {node: name for node, _, name in session.execute(_RELATIONS)}
    stop = _position(session)
    session.execute("SELECT pg_switch_wal()")  # pg_waldump reads what is on the disk
    # PostgreSQL works in its directory, of which another path may not be reachable from here.
    directory = Path(f"/proc/{session.info.backend_pid}/cwd/pg_wal")
    program = find_programs(None) / "pg_waldump"
    shown = subprocess.run(
        [program, "--path", directory, "--start", start, "--end", stop],
        check=True,
        capture_output=True,
        text=True,
    )
    records: dict[str, float] = defaultdict(float)
    images: dict[str, float] = defaultdict(float)
    for line in shown.stdout.splitlines():
        relation = _RELATION.search(line)
        name = names.get(relation[1], _OTHER) if relation else _OTHER
        record, total = map(int, _LENGTHS.search(line).groups())  # type: ignore[union-attr]
        records[name] += record / _EVENTS
        images[name] += (total - record) / _EVENTS
    return records, images
