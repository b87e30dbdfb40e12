"""Which messages of the inbox a filter means: each condition alone, and their order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest

from outbox_pipelines.consumer import consumer_sql as queries
from tests.consumer.place import Place

_NOON: Final = datetime(2026, 3, 1, 12, tzinfo=UTC)
_US: Final = timedelta(microseconds=1)
# The first one; each of the others differs from it in one value.
_ROWS: Final = """
INSERT INTO inbox (message_id, source, topic, partition, "offset", key, event_type, headers, sent_at,
                   received_at, state, last_error)
SELECT ('00000000-0000-0000-0000-' || lpad(nth::text, 12, '0'))::uuid, source, 'a topic', 0, nth, key, type,
       '[]', received, received, state, error
FROM (VALUES
    (1, 'one', 'a', 'placed', 'failed', 'too large', %(noon)s::timestamptz),
    (2, 'two', 'a', 'placed', 'failed', 'too large', %(noon)s),
    (3, 'one', 'b', 'placed', 'failed', 'too large', %(noon)s),
    (4, 'one', 'a', 'paid', 'failed', 'too large', %(noon)s),
    (5, 'one', 'a', 'placed', 'failed', NULL, %(noon)s),
    (6, 'one', 'a', 'placed', 'failed', 'too large', %(noon)s + interval '1 hour'),
    (7, 'one', 'a', 'placed', 'waiting', 'too large', %(noon)s)
) AS r (nth, source, key, type, state, error, received)
ORDER BY nth"""
_ANY: Final[dict[str, Any]] = dict.fromkeys(("ids", "source", "event_type", "key", "error", "since", "until"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [6, 5, 4, 3, 2, 1]),
        ({"state": "waiting"}, [7]),
        ({"ids": [UUID(int=1), UUID(int=7)]}, [1]),
        ({"source": "two"}, [2]),
        ({"event_type": "paid"}, [4]),
        ({"key": "b"}, [3]),
        ({"error": "large"}, [6, 4, 3, 2, 1]),
        ({"error": "small"}, []),
        ({"since": _NOON}, [6, 5, 4, 3, 2, 1]),
        ({"since": _NOON + _US}, [6]),
        ({"until": _NOON}, []),
        ({"until": _NOON + _US}, [5, 4, 3, 2, 1]),
        ({"source": "one", "key": "a", "event_type": "placed", "until": _NOON + _US}, [5, 1]),
    ],
)
def test_a_filter_means_these(place: Place, given: dict[str, Any], expected: list[int]) -> None:
    """Guards against a replay, or a discard, of what the operator has not named."""
    with psycopg.connect(place.dsn, autocommit=True) as connection:
        connection.execute(_ROWS, {"noon": _NOON})
        values = {"state": "failed", "limit": 99} | _ANY | given
        listed = connection.execute(queries.LIST_DEAD_LETTERS.encode(), values).fetchall()
        assert [row[7] for row in listed] == expected
        few = connection.execute(queries.LIST_DEAD_LETTERS.encode(), values | {"limit": 1}).fetchall()
        assert few == listed[:1]
        sources = connection.execute(queries.SOURCES_OF_DEAD_LETTERS.encode(), values).fetchall()
        assert sources == sorted({(row[2],) for row in listed})
        counted = connection.execute(queries.COUNT_DEAD_LETTERS.encode(), values).fetchall()
        without = sum(nth == 5 for nth in expected)
        rest = len(expected) - without
        assert counted == [row for row in (("too large", rest), (None, without)) if row[1]]
        # As each of the two changes them.
        for statement, state in ((queries.REPLAY, "waiting"), (queries.DISCARD, "discarded")):
            with connection.transaction(force_rollback=True):
                connection.execute(statement.encode(), values | {"actor": "someone", "reason": "a reason"})
                audited = connection.execute("SELECT seq, actor, reason FROM inbox_audit ORDER BY seq DESC")
                assert audited.fetchall() == [(row[0], "someone", "a reason") for row in listed]
                changed = connection.execute(
                    'SELECT "offset", attempts, processed_at IS NULL FROM inbox WHERE state = %s AND '
                    '"offset" = ANY (%s) ORDER BY 1 DESC',
                    [state, expected],
                ).fetchall()
                assert [row[0] for row in changed] == expected
                assert all(row[2] is (state == "waiting") for row in changed)
