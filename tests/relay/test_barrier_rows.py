"""The statements of a change of shards, about the rows of shards; and the days in which a span has rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final, LiteralString

import pytest

from outbox_pipelines.relay import relay_sql
from tests.conftest import Outbox
from tests.relay.test_resharding import MORE_SHARDS

_CHANGING: Final[LiteralString] = """
UPDATE outbox_shards SET epoch = 5, wanted = 2, wanted_at = clock_timestamp(), barrier_paused = false,
    barrier_reached = false, barrier = {barrier}, done = '7:7:', target = {target}, last_seq = NULL"""


@pytest.mark.parametrize(
    ("more", "is_paused"),
    [
        ("", True),
        ("wanted = NULL", False),
        ("barrier = '7:7:'", False),
        ("target = '9:9:', last_seq = 1", False),
        ("done = '8:8:'", False),
        ("epoch = 6", False),
    ],
)
def test_a_relay_pauses_between_ticks(outbox: Outbox, more: LiteralString, is_paused: bool) -> None:
    """Guards against a relay that counts as paused, and still publishes."""
    with outbox.connect() as connection:
        connection.execute(_CHANGING.format(barrier="NULL", target="NULL"))
        if more:
            connection.execute(f"UPDATE outbox_shards SET {more}")
        connection.execute(relay_sql.PAUSED, {"shard": 0, "epoch": 5, "done": "7:7:"})
        assert connection.execute("SELECT barrier_paused FROM outbox_shards").fetchone() == (is_paused,)


@pytest.mark.parametrize(
    ("more", "is_there"),
    [
        ("", True),
        ("barrier = NULL", False),
        ("target = '9:9:', last_seq = 1", False),
        ("done = '8:8:'", False),
    ],
)
def test_a_relay_has_reached_the_barrier(outbox: Outbox, more: LiteralString, is_there: bool) -> None:
    """Guards against shards that are divided again although one of them is behind."""
    with outbox.connect() as connection:
        connection.execute(_CHANGING.format(barrier="'7:7:'", target="NULL"))
        if more:
            connection.execute(f"UPDATE outbox_shards SET {more}")
        connection.execute(relay_sql.REACHED, {"shard": 0, "epoch": 5})
        assert connection.execute("SELECT barrier_reached FROM outbox_shards").fetchone() == (is_there,)


_BEGUN: Final = """
UPDATE outbox_shards SET wanted = 3, wanted_at = clock_timestamp() + make_interval(secs => %s),
    barrier_paused = true, barrier_reached = true, barrier = done"""
_STATE: Final = """
SELECT DISTINCT wanted, wanted_at IS NULL, barrier_paused, barrier_reached, barrier IS NULL
FROM outbox_shards"""
_NONE: Final = [(None, True, False, False, True)]
_BEGAN: Final = [(3, False, True, True, False)]


@pytest.mark.parametrize(
    ("seconds", "is_forgotten"), [(0, False), (-7, False), (7, False), (-15, True), (15, True)]
)
def test_a_change_that_no_process_waits_for_is_cancelled(
    outbox: Outbox, seconds: int, is_forgotten: bool
) -> None:
    """Guards against relays that pause without end, and a change that is cancelled under its process."""
    with outbox.connect() as connection:
        connection.execute(MORE_SHARDS, [[1]])
        connection.execute(_BEGUN, [seconds])
        connection.execute(relay_sql.UNWANT_FORGOTTEN)
        assert connection.execute(_STATE).fetchall() == (_NONE if is_forgotten else _BEGAN)


def test_a_relay_that_cannot_take_part_cancels_this_change(outbox: Outbox) -> None:
    """Guards against the next change, which is cancelled for the one before."""
    with outbox.connect() as connection:
        connection.execute(MORE_SHARDS, [[1]])
        connection.execute(_BEGUN, [0])
        connection.execute(relay_sql.UNWANT, {"wanted": 2})
        assert connection.execute(_STATE).fetchall() == _BEGAN
        connection.execute(relay_sql.UNWANT, {"wanted": 3})
        assert connection.execute(_STATE).fetchall() == _NONE


def test_the_days_of_a_span(outbox: Outbox) -> None:
    """Guards against a window that names a day too few, and passes over its rows; or every day."""
    today = datetime.now(UTC).date()
    days = [today - timedelta(2), today - timedelta(1), today]
    with outbox.connect() as connection:
        # A partitioned table of the application, whose bounds are no times.
        connection.execute(
            "CREATE TABLE theirs (name text) PARTITION BY RANGE (name); "
            "CREATE TABLE theirs_a PARTITION OF theirs FOR VALUES FROM ('a') TO ('b')"
        )
        connection.execute("SELECT outbox_ensure_partitions(14, %s)", [days[0]])
        with connection.transaction():
            connection.execute("SET LOCAL outbox.backfill = on")
            # As each day begins.
            seqs = [
                connection.execute(
                    "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at) "
                    "VALUES ('order', '1', 'placed', '{}', %s::date::timestamp AT TIME ZONE 'UTC') "
                    "RETURNING seq",
                    [day],
                ).fetchall()[0][0]
                for day in days
            ]

        def found(first: int, last: int, open_from: object = "-infinity") -> Any:
            given = {"from": seqs[first], "to": seqs[last], "open_from": open_from}
            ((start, stop),) = connection.execute(relay_sql.DAYS, given).fetchall()
            return start.astimezone(UTC).date(), stop.astimezone(UTC).date()

        for first, last in ((0, 0), (1, 1), (2, 2), (0, 1), (1, 2), (0, 2)):
            assert found(first, last) == (days[first], days[last] + timedelta(1))
        assert found(0, 2, days[1]) == (days[1], today + timedelta(1))


def test_the_next_row_behind_a_gap(outbox: Outbox) -> None:
    """Guards against a window that begins with the last row of the one before, again and again."""
    (first, second) = outbox.write("a", "b")
    given = {
        "start": datetime(2000, 1, 1, tzinfo=UTC),
        "stop": datetime(9000, 1, 1, tzinfo=UTC),
        "to": second,
    }
    with outbox.connect() as connection:
        for last_seq, following in ((first - 1, first), (first, second), (second, None)):
            found = connection.execute(relay_sql.NEXT_SEQ, given | {"last_seq": last_seq}).fetchall()
            assert found == [(following,)]
