"""SQL of the rebase. Table names are unqualified: the search_path finds them."""

from typing import Final, LiteralString

# Writers wait, so that the set of rows is final; not for long.
LOCK_OUTBOX: Final = "SET LOCAL lock_timeout = '5s'; LOCK TABLE outbox IN SHARE ROW EXCLUSIVE MODE"
DECLARE_REBASE: Final = "SET LOCAL outbox.rebase = on"
# The transaction gets its id here, after the snapshot was taken: so the snapshot does not see it.
NOW: Final = "SELECT pg_current_xact_id()::text::bigint, pg_current_snapshot()::text"

# The old position still says which rows were published, because both use the old database's ids. The
# exception are rows that a writer added here since the restore: their ids are between the restore, which is
# the id that wrote the position row, and now. Those count as not published. An old id may lie there too, but
# what wrote a restored row here has a lower id, and a writer (or its savepoint) the same or a higher one.
# `xmin` is the lower half of an id that is never higher than the one of this transaction.
# A published row then keeps an id below every snapshot (3 is the lowest an ordinary transaction ever had).
_ROWS: Final[LiteralString] = """
WITH restored AS (
    SELECT shard, shards, done, target, last_seq, slot,
           (%(own)s::bigint - (%(own)s::bigint - xmin::text::bigint & 4294967295))::text::xid8 AS at
    FROM outbox_shards
), rows AS (
    SELECT o.id, o.created_at, o.tx, o.seq, w.at AS written, r.slot, d.state,
           outbox_covers(r.done, r.target, r.last_seq, o.tx, o.seq)
           AND NOT (o.tx >= r.at AND o.tx <= w.at::text::xid8)
           AND coalesce(pg_visible_in_snapshot(o.tx, d.published), true) AS published
    FROM outbox o JOIN restored r ON r.shard = outbox_shard_of(o.aggregate_type, o.aggregate_id, r.shards)
    LEFT JOIN outbox_days d ON d.day = (o.created_at AT TIME ZONE 'UTC')::date
    CROSS JOIN LATERAL (SELECT
        %(own)s::bigint - (%(own)s::bigint - o.xmin::text::bigint & 4294967295) AS at) w
)"""
REBASE_ROWS: Final[LiteralString] = f"""{_ROWS}, moved AS (
    UPDATE outbox o SET tx = CASE WHEN rows.published THEN '3' ELSE %(own)s::text END::xid8
    FROM rows
    WHERE rows.id = o.id AND rows.created_at = o.created_at
      AND (NOT rows.published OR rows.tx >= pg_snapshot_xmin(%(now)s::pg_snapshot))
)
SELECT count(*) FILTER (WHERE published), count(*) FILTER (WHERE NOT published) FROM rows"""

# A slot is one of the other server.
REBASE_SHARDS: Final = """
UPDATE outbox_shards
SET done = %(done)s, target = NULL, last_seq = NULL, tick_id = NULL, epoch = epoch + 1, owner = NULL,
    slot = NULL, slot_snapshot = NULL, slot_ends = false, slot_error = NULL,
    wanted = NULL, wanted_at = NULL, barrier_paused = false, barrier_reached = false, barrier = NULL,
    system_identifier = (SELECT system_identifier FROM pg_control_system()),
    database = (SELECT oid FROM pg_database WHERE datname = current_database())"""

# Unpublished events that were written since the sequence was set back get new numbers above all others, and
# so does the later one of two with the same number. Written since then is what was written after the last row
# with a number that the sequence has not reached. A row that is parked ahead of the position is left out,
# because its copy has its number; so is everything if a slot is read, because the server's log has the old
# numbers (a rebase from another database drops the slot).
RENUMBER: Final[LiteralString] = f"""{_ROWS}, judged AS (
    SELECT rows.*,
           row_number() OVER (PARTITION BY seq ORDER BY published DESC, written, created_at, id) AS nth,
           (SELECT coalesce(max(written), 0) FROM rows WHERE seq > %(drawn)s) AS before
    FROM rows
), numbers AS (
    SELECT j.id, j.created_at,
           %(last)s + row_number() OVER (ORDER BY j.seq, j.written, j.created_at, j.id) AS seq
    FROM judged j LEFT JOIN outbox_parked p ON p.seq = j.seq
    WHERE NOT j.published AND coalesce(j.state, 'open') = 'open' AND (j.slot IS NULL OR %(is_copy)s)
      AND (p.id, p.created_at) IS DISTINCT FROM (j.id, j.created_at)
      AND (j.nth > 1 OR p.seq IS NOT NULL
           OR %(drawn)s < %(last)s AND j.written > j.before)
), moved AS (
    UPDATE outbox o SET seq = numbers.seq FROM numbers
    WHERE numbers.id = o.id AND numbers.created_at = o.created_at
)
SELECT count(*), coalesce(max(seq), %(last)s) FROM numbers"""
RAISE_SEQUENCE: Final = "SELECT setval('outbox_seq', %(to)s)"

# Whether an unpublished event has the number of another one.
TWICE: Final = """
SELECT EXISTS (
    SELECT FROM outbox o
    JOIN outbox_shards s ON s.shard = outbox_shard_of(o.aggregate_type, o.aggregate_id, s.shards)
    WHERE o.created_at >= outbox_open_from()::timestamp AT TIME ZONE 'UTC'
      AND o.tx >= (SELECT min(pg_snapshot_xmin(done)) FROM outbox_shards)
      AND NOT outbox_covers(s.done, s.target, s.last_seq, o.tx, o.seq)
      AND (EXISTS (SELECT FROM outbox b WHERE b.seq = o.seq AND (b.id, b.created_at) <> (o.id, o.created_at))
           OR EXISTS (SELECT FROM outbox_parked p
                      WHERE p.seq = o.seq AND (p.id, p.created_at) <> (o.id, o.created_at))))"""

# A relay that runs starts over, and reads the new numbers. In the order of shards: see `_CANCEL`.
FENCE: Final = """
UPDATE outbox_shards s SET epoch = epoch + 1, owner = NULL, owned_since = NULL
FROM (SELECT shard FROM outbox_shards ORDER BY shard FOR UPDATE) AS locked
WHERE s.shard = locked.shard"""

# Like the rows of the outbox they were copied from; of those whose day was dropped, published ones.
REBASE_PARKED: Final = """
UPDATE outbox_parked p SET tx = coalesce((
    SELECT o.tx FROM outbox o
    WHERE o.seq = p.seq AND o.id = p.id AND o.created_at = p.created_at), '3')"""

# What was published of closed days has ids that this snapshot shows.
REBASE_DAYS: Final = "UPDATE outbox_days SET published = %(now)s WHERE published IS NOT NULL"

# Its positions speak of the old database.
FORGET_PROGRESS: Final = "DELETE FROM outbox_progress"
