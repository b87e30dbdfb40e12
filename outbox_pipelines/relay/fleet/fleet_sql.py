"""SQL of a fleet. Table names are unqualified: the search_path finds them."""

from typing import Final, LiteralString

# What the shared thread asks while readers wait: it touches no table. `watch.py` relies on the order: the
# snapshot, the sequences, the counter of transaction ids (age compares with it).
WATCH_ONE: Final = b"""
SELECT pg_current_snapshot()::text, pg_sequence_last_value($1::oid)::text, age('3'::xid)::text"""
# The same for outboxes that are schemas of one database; an outbox whose sequence says nothing is not in it.
WATCH_MANY: Final = b"""
SELECT pg_current_snapshot()::text,
       (SELECT string_agg(coalesce(pg_sequence_last_value(one)::text, ''), ',' ORDER BY n)
        FROM unnest($1::oid[]) WITH ORDINALITY AS sequences(one, n)),
       age('3'::xid)::text"""

# A session that takes numbers in advance (CACHE) does not move the sequence when it uses them.
SEQUENCE: Final = """
SELECT seqrelid::bigint FROM pg_sequence
WHERE seqrelid = to_regclass('outbox_seq') AND seqcache = 1
  AND has_sequence_privilege(seqrelid, 'USAGE, SELECT')"""

# Released when the statement ends: a look is no attempt to take the shard, which an owner would notice.
IS_FREE: Final = "SELECT pg_try_advisory_xact_lock(hashtext(%(lock)s), %(shard)s)"
TABLE_IS_FREE: Final = "SELECT pg_try_advisory_xact_lock(%(key)s)"

# Shared by all processes of the fleet that would take over. Tried again: an owner's look may be in the way.
STAND_BY: Final = "SELECT pg_try_advisory_lock_shared(hashtext(%(fleet)s), 0)"
# Much cheaper than to count them.
NONE_STANDS_BY: Final = "SELECT pg_try_advisory_xact_lock(hashtext(%(fleet)s), 0)"
STANDBYS: Final[LiteralString] = """
SELECT count(*) FROM pg_locks
WHERE locktype = 'advisory' AND objsubid = 2 AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND classid = hashtext(%(fleet)s)::bigint & 4294967295 AND objid = 0"""
