"""Which dead letters a filter means: each condition alone, and their order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import pytest

from outbox_pipelines.relay.parking import parking_sql
from tests.conftest import Outbox

_NOON: Final = datetime(2026, 3, 1, 12, tzinfo=UTC)
_US: Final = timedelta(microseconds=1)
_ID: Final = UUID(int=1)
# The first one; each of the others differs from it in one value.
_ROWS: Final = """
INSERT INTO outbox_parked (seq, id, tx, aggregate_type, aggregate_id, event_type, payload, state,
                           last_error, failed_at, created_at)
SELECT seq, ('00000000-0000-0000-0000-' || lpad(seq::text, 12, '0'))::uuid, '3', type, name, event, '{}',
       state, error, failed_at, now()
FROM (VALUES
    (1, 'order', 'a', 'placed', 'failed', 'too large', %(noon)s::timestamptz),
    (2, 'offer', 'a', 'placed', 'failed', 'too large', %(noon)s),
    (3, 'order', 'b', 'placed', 'failed', 'too large', %(noon)s),
    (4, 'order', 'a', 'paid', 'failed', 'too large', %(noon)s),
    (5, 'order', 'a', 'placed', 'failed', NULL, %(noon)s),
    (6, 'order', 'a', 'placed', 'failed', 'too large', %(noon)s + interval '1 hour'),
    (7, 'order', 'a', 'placed', 'waiting', 'too large', %(noon)s)
) AS r (seq, type, name, event, state, error, failed_at)"""
_ANY: Final[dict[str, Any]] = dict.fromkeys(
    ("ids", "event_type", "aggregate_type", "aggregate_id", "error", "since", "until")
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [6, 5, 4, 3, 2, 1]),
        ({"ids": [_ID, UUID(int=7)]}, [1]),
        ({"event_type": "paid"}, [4]),
        ({"aggregate_type": "offer"}, [2]),
        ({"aggregate_id": "b"}, [3]),
        ({"error": "large"}, [6, 4, 3, 2, 1]),
        ({"error": "small"}, []),
        ({"since": _NOON}, [6, 5, 4, 3, 2, 1]),
        ({"since": _NOON + _US}, [6]),
        ({"until": _NOON}, [5, 4, 3, 2, 1]),
        ({"until": _NOON - _US}, []),
        ({"aggregate_type": "order", "aggregate_id": "a", "event_type": "placed", "until": _NOON}, [5, 1]),
    ],
)
def test_a_filter_means_these(outbox: Outbox, given: dict[str, Any], expected: list[int]) -> None:
    """Guards against a replay, or a discard, of what the operator has not named."""
    with outbox.connect() as connection:
        connection.execute(_ROWS, {"noon": _NOON})
        values = _ANY | given
        assert sorted(seq for (seq,) in connection.execute(parking_sql.MEANT, values)) == sorted(expected)
        shown = values | {"state": "failed", "limit": 99}
        listed = connection.execute(parking_sql.LIST_DEAD_LETTERS, shown).fetchall()
        assert [row[1] for row in listed] == expected
        assert all((row[9] == "") == (row[1] == 5) for row in listed)
        assert (
            connection.execute(parking_sql.LIST_DEAD_LETTERS, shown | {"limit": 1}).fetchall() == listed[:1]
        )
        counted = connection.execute(parking_sql.COUNT_DEAD_LETTERS, shown).fetchall()
        without = sum(seq == 5 for seq in expected)
        rest = len(expected) - without
        assert sorted(counted) == [row for row in (("", without), ("too large", rest)) if row[1]]
        assert [count for _, count in counted] == sorted((count for _, count in counted), reverse=True)
