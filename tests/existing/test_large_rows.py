"""What large and unreadable rows cost the claims around them, in statements, rows and memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.existing import guides, textbook
from tests.existing.conftest import Make
from tests.existing.textbook import Table, holding

_ROWS = 6_000
_BATCH = 1_000


class _Cost:
    """Statements of this process, and the rows that they returned."""

    def __init__(self) -> None:
        self.statements = 0
        self.rows = 0

    def __str__(self) -> str:
        return f"{self.statements} statements, {self.rows} rows"


@contextmanager
def _counted() -> Iterator[_Cost]:
    cost = _Cost()
    execute, stream = psycopg.Cursor.execute, psycopg.Cursor.stream

    def executed(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        cost.statements += 1
        found = execute(self, query, *arguments, **options)
        if "FETCH" in str(query):
            cost.rows += self.rowcount
        return found

    def streamed(self: Any, query: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        cost.statements += 1
        for row in stream(self, query, *arguments, **options):
            cost.rows += 1
            yield row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", executed)
        patch.setattr(psycopg.Cursor, "stream", streamed)
        yield cost


def _fill(table: Table, rows: int, *, one_in: int, bytes_: int) -> None:
    """Small rows, and each so many one of this size."""
    with table.connect() as connection:
        connection.execute(
            "INSERT INTO events (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'order', i::text, 'e', "
            "       to_jsonb(repeat(md5(i::text), CASE WHEN (i - 1) %% %s = 0 THEN %s ELSE 1 END)) "
            "FROM generate_series(1, %s) i",
            [one_in, bytes_ // 32, rows],
        )


def _drain(table: Table, **settings: object) -> tuple[_Cost, list[int], list[int]]:
    """Claim and mark everything; the cost, the rows of each claim, and the bytes of each."""
    counts, sizes = [], []
    seqs: list[int] = []
    # No thread sends heartbeats.
    with holding(table, lease_seconds=600.0, **settings) as (_, source), _counted() as cost:
        while claim := source.claim([]):
            events = claim.batch.events
            assert claim.batch.size > sum(len(event.payload) for event in events)
            counts.append(len(events))
            sizes.append(claim.batch.size)
            seqs += [event.seq for event in events]
            source.settle(claim, events)
            del claim, events
    assert seqs == [seq for seq, _ in table.rows()]
    assert table.pending() == []
    return cost, counts, sizes


@pytest.mark.parametrize("one_in", [_ROWS, 500, 50])
def test_large_rows_among_small_ones(table: Table, one_in: int) -> None:
    """Guards against small rows that are claimed one by one, or again, because a row before them is large."""
    _fill(table, _ROWS, one_in=one_in, bytes_=20_000)
    cost, counts, _ = _drain(table, batch_events=_BATCH)
    large = _ROWS // one_in
    assert counts == [_BATCH] * (_ROWS // _BATCH)
    assert cost.rows == _ROWS + large
    # Of each claim: a look, two savepoints around its first mark, what begins and ends it; of large rows a
    # few together.
    assert cost.statements < 20 * len(counts) + 3 * large, cost


@pytest.mark.parametrize(("one_in", "bytes_"), [(1, 1_000_000), (3, 400_000), (200, 3_000_000)])
def test_many_large_rows(table: Table, one_in: int, bytes_: int) -> None:
    """Guards against claims that are read whole before their size is known, and rows that are read again and
    again because they did not fit."""
    large = 24
    rows = large * one_in
    _fill(table, rows, one_in=one_in, bytes_=bytes_)
    tracemalloc.start()
    try:
        cost, counts, sizes = _drain(table, batch_bytes=4_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(sizes) < 4_000_000 + 1.1 * bytes_
    assert len(counts) < 2 * large * bytes_ / 4_000_000
    assert peak < 4_000_000 + 3 * bytes_, peak
    # The first claim meets what no claim before it has seen.
    assert cost.rows < 500 + 3 * rows, cost


def test_an_unreadable_row_among_others(make_table: Make) -> None:
    """Guards against rows that are claimed one by one, or again and again, around one that cannot be read."""
    ddl = textbook.PUBLISHED_AT.replace("headers jsonb", "headers json")
    table = make_table(ddl, textbook.PUBLISHED_AT_MAPPING)
    _fill(table, _ROWS, one_in=_ROWS, bytes_=32)
    with table.connect() as connection:
        connection.execute("""UPDATE events SET headers = '{"a": "\\u0000"}' WHERE seq = 1700""")
        connection.execute("ANALYZE events")
    cost, counts, _ = _drain(table, batch_events=_BATCH)
    assert sum(counts) == _ROWS
    assert cost.rows < _ROWS + _BATCH + 2 * 500, cost
    assert cost.statements < 20 * len(counts) + 50, cost


def test_rows_behind_those_that_fit_are_free(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a relay that takes its own claim for the lock of another session, and passes over it."""
    _fill(table, 30, one_in=1, bytes_=400_000)
    seqs: list[int] = []
    with holding(table, batch_bytes=1_000_000) as (_, source):
        while source.may_claim:
            claim = source.claim([])
            assert claim is not None
            seqs += [event.seq for event in claim.batch.events]
    assert seqs == list(range(1, len(seqs) + 1))
    assert len(seqs) > 5
    assert "old publisher" not in caplog.text


def test_rows_that_are_not_claimed_have_no_number(make_table: Make) -> None:
    """Guards against memory that each row costs which was fetched and did not fit, or was behind a lock."""
    table = make_table(guides.D.ddl, guides.D.mapping)
    with table.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at) "
            "SELECT gen_random_uuid(), 'Order', i::text, 'e', "
            "       to_jsonb(repeat(md5(i::text), CASE WHEN i < 10 THEN 10000 ELSE 1 END)), "
            "       now() + i * interval '1 us' "
            "FROM generate_series(1, 700) i"
        )
    with (
        holding(table, batch_bytes=1_000_000) as (ownership, source),
        table.connect(autocommit=False) as other,
    ):
        keys: Any = ownership.statements.keys
        for locked in ("", "600"):
            other.execute("SELECT FROM outbox WHERE aggregate_id = %s FOR UPDATE", [locked])
            while source.may_claim and (claim := source.claim([])):
                assert claim.batch.events
            numbers = {event.seq for claim in source.in_flight for event in claim.batch.events}
            assert keys._ids.keys() == numbers
            for claim in list(source.in_flight):
                source.settle(claim, claim.batch.events)
            assert not keys._ids
