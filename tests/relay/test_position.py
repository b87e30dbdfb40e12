"""The arithmetic of snapshots."""

import pytest

from outbox_pipelines.core.position import Position, Snapshot


def test_text_form_survives_a_round_trip() -> None:
    """Guards against a snapshot that PostgreSQL would read differently."""
    for text in ("5:5:", "5:9:5,7", "4294967290:4294967299:4294967290"):
        assert str(Snapshot.parse(text)) == text


def test_a_snapshot_sees_what_was_over() -> None:
    """Guards against reading rows of a transaction that still ran."""
    snapshot = Snapshot.parse("5:9:5,7")
    assert [tx for tx in range(1, 12) if snapshot.sees(tx)] == [1, 2, 3, 4, 6, 8]


def test_late_transactions_ran_then_and_are_over_now() -> None:
    """Guards against losing the event of a transaction that outlived a tick."""
    done, target = Snapshot.parse("5:9:5,7"), Snapshot.parse("7:20:7,12")
    assert done.late(target) == [5]


def test_a_tick_opens_where_the_last_one_ended() -> None:
    """Guards against a position that passes over events, or returns to a tick that is over."""
    one, two, three = Snapshot(1, 1, ()), Snapshot(2, 2, ()), Snapshot(3, 3, ())
    assert Position(one).opened_as(Position(one, two, 0)) == Position(one, two, 0)
    assert Position(one, two, 7).opened_as(Position(one, two, 7)) == Position(one, two, 7)
    for at, opened in (
        (Position(one), Position(two, three, 0)),
        (Position(one), Position(one, two, 7)),
        (Position(one), Position(one)),
        (Position(one, two, 7), Position(one, two, 6)),
        (Position(one, two, 7), Position(one, three, 7)),
    ):
        with pytest.raises(ValueError, match="a tick was opened"):
            at.opened_as(opened)
