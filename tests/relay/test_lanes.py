"""Which aggregates belong to a shard, for Python and for the database."""

from __future__ import annotations

import re

from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.lease.resharding import MOST_SHARDS
from tests.conftest import Outbox

_LANE = re.compile(r"hashtextextended\(aggregate_id, \(hashtext\(aggregate_type\)\)::bigint\)")


def test_every_lane_has_one_shard_and_the_database_agrees(outbox: Outbox) -> None:
    """Guards against an event that no shard reads, or two, and against a status that asks the wrong one."""
    with outbox.connect() as connection:
        ((body,),) = connection.execute(
            "SELECT pg_get_function_sqlbody('outbox_shard_of(text, text, int)'::regprocedure)"
        ).fetchall()
        formula, replaced = _LANE.subn("lane", body.removeprefix("RETURN "))
        assert replaced == 1
        for shards in range(1, MOST_SHARDS + 1):
            ranges = [tuple(relay_sql.lanes_of(shard, shards).values()) for shard in range(shards)]
            assert (ranges[0][0], ranges[-1][1]) == (-(1 << 63), (1 << 63) - 1)
            assert [first - 1 for first, _ in ranges[1:]] == [last for _, last in ranges[:-1]]
            found = connection.execute(
                f"SELECT min({formula}), max({formula}) "
                "FROM unnest(%s::bigint[], %s::bigint[]) WITH ORDINALITY AS edge (first, last, n), "
                "LATERAL (SELECT first AS lane UNION ALL SELECT last) ends, "
                "LATERAL (SELECT %s::int AS shards) number GROUP BY n ORDER BY n".encode(),
                [[first for first, _ in ranges], [last for _, last in ranges], shards],
            ).fetchall()
            assert found == [(shard, shard) for shard in range(shards)]


def test_shards_are_of_about_the_same_size(outbox: Outbox) -> None:
    """Guards against a hash whose upper half does not spread what applications use as ids."""
    with outbox.connect() as connection:
        for aggregate_id in ("n::text", "lpad(n::text, 12, '0')", "md5(n::text)::uuid::text"):
            sizes = [
                size
                for (size,) in connection.execute(
                    "SELECT count(*) FROM generate_series(1, 60000) n "
                    f"GROUP BY outbox_shard_of('order', {aggregate_id}, 6)".encode()
                )
            ]
            assert len(sizes) == 6
            assert max(sizes) < min(sizes) * 1.08
