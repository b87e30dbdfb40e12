"""The arithmetic of snapshots."""

from outbox_pipelines.relay.position import Snapshot


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
