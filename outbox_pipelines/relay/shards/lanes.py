"""Which rows of the outbox belong to a shard: those in a range of lanes, hashes that two indexes end with.

Invariants:
- The ranges of N shards cover every lane once, for each N.
- `outbox_shard_of` gives the same shard: parked events, days and the archive ask it.
"""

from __future__ import annotations

from typing import Final, LiteralString

# Written as in the indexes of `0001_outbox.sql`: on tx, and on seq. An index fits only what is written alike.
_LANE: Final[LiteralString] = "hashtextextended(aggregate_id, hashtext(aggregate_type))"
_WITHIN: Final[LiteralString] = "BETWEEN %(first_lane)s::bigint AND %(last_lane)s::bigint"
MINE_BY_TX: Final[LiteralString] = f"AND {_LANE} {_WITHIN}"
MINE_BY_SEQ: Final[LiteralString] = f"AND {_LANE} + 0 {_WITHIN}"


def of(shard: int, shards: int) -> dict[str, int]:
    """Return the first and the last lane of a shard, as parameters."""
    return {"first_lane": _first(shard, shards), "last_lane": _first(shard + 1, shards) - 1}


def _first(shard: int, shards: int) -> int:
    # The least lane whose upper half, times the number of shards, reaches this shard.
    return (-(-(shard << 32) // shards) - (1 << 31)) << 32
