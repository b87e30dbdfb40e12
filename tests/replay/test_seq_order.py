"""Rows in the order of `seq`, whatever their number and size."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from outbox_pipelines.replay import seq_order
from outbox_pipelines.replay.seq_order import in_order


@pytest.mark.parametrize(("rows", "spread"), [(0, 1), (1, 1), (50, 1), (4_000, 1), (2_000, 10**9)])
def test_rows_are_in_order_and_in_small_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, spread: int
) -> None:
    """Guards against a row that is lost, doubled or out of order, tables that grow, and files that stay."""
    monkeypatch.setattr(seq_order, "_BYTES", 2_000)
    seqs = [n * spread + 7 for n in range(rows)]
    mixed = random.Random(rows).sample(seqs, rows)
    table = pa.table(
        {"seq": pa.array(mixed, pa.int64()), "text": [f"{seq} {'x' * (seq % 40)}" for seq in mixed]}
    )
    last = max(seqs, default=7)
    found = list(in_order(table.to_batches(30), 7, last, tmp_path))
    assert [seq for each in found for seq in each.column("seq").to_pylist()] == seqs
    assert [text for each in found for text in each.column("text").to_pylist()] == [
        f"{seq} {'x' * (seq % 40)}" for seq in seqs
    ]
    assert all(each.nbytes < 12_000 for each in found)
    assert not list(tmp_path.iterdir())


def test_equal_numbers_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a distribution that never ends, since a number was used twice."""
    monkeypatch.setattr(seq_order, "_BYTES", 100)
    table = pa.table({"seq": [3, 5] * 40, "text": ["x" * 20] * 80})
    found = [seq for each in in_order(table.to_batches(5), 1, 9, tmp_path) for seq in each["seq"].to_pylist()]
    assert found == [3] * 40 + [5] * 40
