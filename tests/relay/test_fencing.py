"""Every statement of a relay about its shard: it changes this shard's row alone, and only in its epoch."""

from __future__ import annotations

from typing import Any, Final, LiteralString

import pytest

from outbox_pipelines.relay import queries
from tests.conftest import Outbox
from tests.relay.test_resharding import MORE_SHARDS

_GIVEN: Final[dict[str, Any]] = {
    "shard": 0,
    "shards": 2,
    "epoch": 5,
    "seq": 7,
    "error": "an error",
    "state": "open",
    "reason": "a reason",
    "tick": None,
    "target": None,
    "last_seq": None,
    "events": 1,
    "newest": 1,
    "open_from": "-infinity",
}
_STATEMENTS: Final = {
    name: getattr(queries, name)
    for name in (
        *("HEARTBEAT", "CRASH_GUARD", "CALM", "FORGET_TICK", "TOP_UP_ERROR", "BREAKER", "SETTLE"),
        *("SETTLE_WITH_PROGRESS", "RELEASE", "PAUSED", "REACHED"),
    )
}


@pytest.mark.parametrize("statement", _STATEMENTS.values(), ids=_STATEMENTS)
def test_another_shard_or_an_old_epoch_is_left_alone(outbox: Outbox, statement: LiteralString) -> None:
    """Guards against a relay that lost its shard, or has another one, and changes what belongs to others."""
    with outbox.connect() as connection:
        connection.execute(MORE_SHARDS, [[1]])
        connection.execute(
            "UPDATE outbox_shards SET shards = 2, epoch = 5, owner = 'relay', crash_guard_seq = 1, "
            "tick_id = gen_random_uuid()"
        )
        # A change to three shards has begun; for `REACHED` with a barrier.
        barrier = "done" if statement == queries.REACHED else "NULL"
        connection.execute(
            f"UPDATE outbox_shards SET wanted = 3, wanted_at = now(), barrier = {barrier}".encode()
        )

        def rows() -> dict[int, tuple[Any, ...]]:
            found = connection.execute("SELECT shard, xmin::text, ctid::text, done::text FROM outbox_shards")
            return {shard: row for shard, *row in found}

        before = rows()
        given = _GIVEN | {"done": before[0][2], "ctid": before[0][1]}
        for stranger in ({"epoch": 4}, {"epoch": 6}, {"shard": 2}, {"ctid": before[1][1], "shard": 2}):
            connection.execute(statement, given | stranger)
            assert rows() == before
        connection.execute(statement, given)
        after = rows()
        assert after[1] == before[1]
        assert after[0] != before[0]
