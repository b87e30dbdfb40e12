"""SQL of the outbox's days. Table names are unqualified: the search_path finds them."""

from typing import Any, Final, LiteralString

from psycopg import sql

from outbox_pipelines.database.locks import AdvisoryLock

# Whether its rows are visible through the outbox. `relispartition` stays true while a detach is pending.
ATTACHED: Final[LiteralString] = """EXISTS (
    SELECT FROM pg_inherits i
    WHERE i.inhrelid = c.oid AND i.inhparent = 'outbox'::regclass AND NOT i.inhdetachpending)"""

# Until the archive has counted the rows, use the server's statistics, which a crash resets.
DAYS: Final[LiteralString] = f"""
SELECT d.day, d.state,
       CASE WHEN c.oid IS NULL THEN 'gone' WHEN {ATTACHED} THEN 'attached'
            WHEN c.relispartition THEN 'detaching' ELSE 'detached' END,
       coalesce(d.events, greatest(c.reltuples::bigint, pg_stat_get_live_tuples(c.oid), 0)),
       coalesce(pg_total_relation_size(c.oid), 0), d.archived_at, d.proven_at
FROM outbox_days d
LEFT JOIN pg_class c ON c.oid = to_regclass('outbox_' || to_char(d.day, 'YYYYMMDD'))
ORDER BY d.day"""

FIRST: Final[LiteralString] = "SELECT min(day) FROM outbox_days"

# By the database's clock: the days after today up to the first one without a partition, which accepts no
# inserts; 0 if today has none. As long as there is no gap, the n-th day is n - 1 days after today.
AHEAD: Final[LiteralString] = f"""
SELECT greatest(count(*) - 1, 0) FROM (
    SELECT today, d.day - (row_number() OVER (ORDER BY d.day))::int + 1 AS first
    FROM (SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date AS today) clock
    JOIN outbox_days d ON d.state = 'open' AND d.day >= today
    JOIN pg_class c ON c.oid = to_regclass('outbox_' || to_char(d.day, 'YYYYMMDD')) AND {ATTACHED}) day
WHERE first = today"""

# Days that ended more than a day ago: automatic maintenance has had enough time for them. Of an archived day
# without the time of a proof the last one has failed, or has not run.
LATE: Final = """
SELECT count(*) FILTER (WHERE is_late AND state = 'open') AS to_close,
       count(*) FILTER (WHERE %(archives)s AND (is_late AND state = 'closed'
                              OR state = 'archived' AND proven_at IS NULL
                                 AND archived_at < clock_timestamp() - interval '1 day')) AS to_archive,
       count(*) FILTER (WHERE is_late
                        AND (state = 'archived' OR state = 'closed' AND %(drops_unarchived)s)) AS to_drop
FROM (SELECT *, (day + 1 + CASE WHEN state = 'archived' OR state = 'closed' AND %(drops_unarchived)s
                                THEN %(retention)s ELSE 0 END)::timestamp AT TIME ZONE 'UTC'
                < clock_timestamp() - interval '1 day' AS is_late FROM outbox_days) late"""

# Days whose rows are not visible through the outbox, except those that a session works on now: see DAY_LOCK.
DETACHED: Final[LiteralString] = f"""
SELECT count(*) FROM outbox_days d
JOIN pg_class c ON c.oid = to_regclass('outbox_' || to_char(d.day, 'YYYYMMDD')) AND NOT {ATTACHED}
CROSS JOIN LATERAL (
    SELECT hashtextextended('outbox day ' || d.day, 'outbox'::regclass::oid::bigint) AS key) lock
WHERE d.state <> 'dropped' AND NOT EXISTS (
    SELECT FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid = (lock.key >> 32) & 4294967295 AND l.objid = lock.key & 4294967295)"""

ENSURE: Final = "SELECT outbox_ensure_partitions(%(days)s, %(since)s)"
# How many days ago a day is, the first day that is not closed, and whether the day is before that one.
BACKFILL: Final = """
SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date - %(since)s::date, outbox_open_from()::text,
       %(since)s::date < outbox_open_from()"""
# For a role that may not own the table.
ENSURE_IF_OWNER: Final = """
SELECT CASE WHEN pg_has_role(relowner, 'USAGE') THEN outbox_ensure_partitions(%(days)s) END
FROM pg_class WHERE oid = 'outbox'::regclass"""

# Only one session at a time closes, archives, proves or drops a day, on any machine.
DAY_LOCK: Final = AdvisoryLock(
    "hashtextextended('outbox day ' || %(day)s::date, 'outbox'::regclass::oid::bigint)"
)

# When an event was written. A backfilled event has a `created_at` in the past; its id, if of version 7,
# contains the time when it was generated. Recent rows need no look at their ids.
WRITTEN_AT: Final[LiteralString] = """
CASE WHEN created_at < clock_timestamp() - interval '1 hour' THEN coalesce((
    SELECT drawn FROM (
        SELECT CASE WHEN substr(id::text, 15, 1) = '7' THEN
                   to_timestamp(('x' || left(replace(id::text, '-', ''), 12))::bit(48)::bigint / 1000.0) END
    ) AS id_of (drawn)
    WHERE drawn BETWEEN created_at + interval '1 hour' AND clock_timestamp()
), created_at) ELSE created_at END"""

# --- closing --------------------------------------------------------------------------------------------

CLOCK: Final = "SELECT clock_timestamp()"

DAY: Final = """
SELECT state, sealed_at, archived_at, proven_at, manifest_sha256, events
FROM outbox_days WHERE day = %(day)s"""

OVER: Final = """
SELECT day FROM outbox_days
WHERE state = 'open'
  AND (day + 1)::timestamp AT TIME ZONE 'UTC' + make_interval(secs => %(minutes)s * 60) <= clock_timestamp()
ORDER BY day"""

# The transactions that began before the day's end, and those of other roles, whose start is hidden. Every
# role can see the lock that each transaction has on itself.
RUNNING: Final = """
SELECT l.virtualtransaction, a.xact_start, l.pid, a.usename
FROM pg_locks l
JOIN pg_stat_activity a ON a.pid = l.pid AND a.datname = current_database()
WHERE l.locktype = 'virtualxid' AND l.mode = 'ExclusiveLock' AND l.granted AND l.pid <> pg_backend_pid()
  AND (a.xact_start IS NULL OR a.xact_start < (%(day)s::date + 1)::timestamp AT TIME ZONE 'UTC')
  AND a.backend_type IS DISTINCT FROM 'autovacuum worker'
ORDER BY a.xact_start"""

# G7: writers queue behind a requested lock.
SHORT_LOCK: Final = "SET LOCAL lock_timeout = '50ms'"

# Conflicts with the lock of every transaction that has written here and not yet committed; readers are not
# affected. ALWAYS makes the trigger fire for rows from logical replication, too.
SEAL: Final = """
LOCK TABLE {leaf} IN SHARE ROW EXCLUSIVE MODE;
CREATE OR REPLACE TRIGGER outbox_closed BEFORE INSERT ON {leaf} FOR EACH ROW
EXECUTE FUNCTION outbox_refuse_late_insert();
ALTER TABLE {leaf} ENABLE ALWAYS TRIGGER outbox_closed"""
SEALED: Final = "UPDATE outbox_days SET sealed_at = clock_timestamp() WHERE day = %(day)s"

# A prepared transaction has no process; its name is found through the lock that it has on itself.
HOLDERS: Final = """
SELECT DISTINCT l.pid, p.gid
FROM pg_locks l
LEFT JOIN pg_locks own ON own.locktype = 'transactionid' AND own.virtualtransaction = l.virtualtransaction
LEFT JOIN pg_prepared_xacts p ON p.transaction = own.transactionid
WHERE l.relation = to_regclass(%(leaf)s) AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.mode NOT IN ('AccessShareLock', 'RowShareLock')"""

# Rows that their shard's position does not cover. The index skips those below every snapshot (covered).
BEHIND: Final = """
SELECT shard, count(*) FROM (
    SELECT s.shard FROM {leaf} o
    JOIN outbox_shards s ON s.shard = outbox_shard_of(o.aggregate_type, o.aggregate_id, s.shards)
    WHERE o.tx >= (SELECT min(pg_snapshot_xmin(done)) FROM outbox_shards)
      AND NOT outbox_covers(s.done, s.target, s.last_seq, o.tx, o.seq)
    LIMIT 1000) behind
GROUP BY shard ORDER BY shard"""

STILL_PARKED: Final = """
SELECT count(*) FROM outbox_parked
WHERE state IN ('waiting', 'retrying', 'replaying')
  AND created_at >= %(day)s::date::timestamp AT TIME ZONE 'UTC'
  AND created_at < (%(day)s::date + 1)::timestamp AT TIME ZONE 'UTC'"""

# The lock of outbox_ensure_partitions: no day may be created before closed ones, where no relay reads.
LOCK_CALENDAR: Final = """
SELECT pg_advisory_xact_lock(hashtextextended('outbox_ensure_partitions', 'outbox'::regclass::oid::bigint))"""
# Taken before the events are checked: everything that is visible in it is then known to be published.
COMMITTED: Final = "SELECT pg_current_snapshot()::text"
CLOSED: Final = """
UPDATE outbox_days
SET state = 'closed', closed_at = clock_timestamp(), published = %(committed)s,
    last_seq = (SELECT max(seq) FROM outbox
                WHERE created_at >= %(day)s::date::timestamp AT TIME ZONE 'UTC'
                  AND created_at < (%(day)s::date + 1)::timestamp AT TIME ZONE 'UTC')
WHERE day = %(day)s AND state = 'open'"""

# Rows of a closed day that bypassed the guards; found by the index.
PAST_GUARDS: Final = """
SELECT count(*), min(o.id::text) FROM {leaf} o, outbox_days d
WHERE d.day = %(day)s AND o.tx >= pg_snapshot_xmin(d.published)
  AND NOT pg_visible_in_snapshot(o.tx, d.published)"""
# The positions have moved past these rows. With the id of this transaction, relays read them again.
DECLARE_REBASE: Final = "SET LOCAL outbox.rebase = on"
TO_BE_PUBLISHED: Final = """
UPDATE {leaf} o SET tx = pg_current_xact_id() FROM outbox_days d
WHERE d.day = %(day)s AND o.tx >= pg_snapshot_xmin(d.published)
  AND NOT pg_visible_in_snapshot(o.tx, d.published)"""

UNSEAL: Final = "DROP TRIGGER IF EXISTS outbox_closed ON {leaf}"
# The new epoch makes every relay restart. In the order of shards: see `relay_sql.UNWANT_FORGOTTEN`.
REOPEN: Final = """
WITH opened AS (
    UPDATE outbox_days SET state = 'open', sealed_at = NULL, closed_at = NULL, published = NULL
    WHERE day = %(day)s
)
UPDATE outbox_shards s SET epoch = epoch + 1, owner = NULL, owned_since = NULL
FROM (SELECT shard FROM outbox_shards ORDER BY shard FOR UPDATE) AS locked
WHERE s.shard = locked.shard"""

# --- dropping -------------------------------------------------------------------------------------------

# What prevents DROP TABLE, such as a view on the partition itself; NULL if nothing does.
DEPENDENTS: Final = """
SELECT min(r.ev_class::regclass::text)
FROM pg_depend d JOIN pg_rewrite r ON r.oid = d.objid
WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass
  AND d.refobjid = to_regclass(%(leaf)s) AND r.ev_class <> d.refobjid"""

# With one, PostgreSQL detaches no partition concurrently.
DEFAULT_PARTITION: Final = """
SELECT partdefid::regclass::text FROM pg_partitioned_table
WHERE partrelid = 'outbox'::regclass AND partdefid <> 0"""

# The transactions that use the outbox now: DETACH waits for them, and until then the day is not visible.
USERS: Final = """
SELECT DISTINCT virtualtransaction FROM pg_locks
WHERE relation = 'outbox'::regclass AND granted AND pid IS DISTINCT FROM pg_backend_pid()
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""

# attached, detaching, detached, or no row if the partition does not exist.
ATTACHMENT: Final = """
SELECT CASE WHEN i.inhrelid IS NULL THEN 'detached' WHEN i.inhdetachpending THEN 'detaching'
            ELSE 'attached' END
FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = 'outbox'::regclass
WHERE c.oid = to_regclass(%(leaf)s)"""

# An interrupted detach; until it is finished, no other day can be detached.
DETACHING: Final = """
SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'outbox'::regclass AND i.inhdetachpending"""

# CONCURRENTLY does not lock the parent against writers. It waits for transactions that use the outbox now;
# later transactions do not wait behind it.
DETACH_LOCK: Final = "SET lock_timeout = '2s'"
DETACH: Final = "ALTER TABLE outbox DETACH PARTITION {leaf} CONCURRENTLY"
FINISH_DETACH: Final = "ALTER TABLE outbox DETACH PARTITION {leaf} FINALIZE"
# DETACH has left a constraint with these bounds, so ATTACH does not scan the rows.
ATTACH: Final = "ALTER TABLE outbox ATTACH PARTITION {leaf} FOR VALUES FROM ({start}) TO ({stop})"

# Nothing changes between proof and drop.
LOCK_DETACHED: Final = "LOCK TABLE {leaf} IN ACCESS EXCLUSIVE MODE"
DROP: Final = "DROP TABLE {leaf}"
DROPPED: Final = """
UPDATE outbox_days
SET state = 'dropped', dropped_at = clock_timestamp(),
    proven_at = CASE WHEN %(proven)s THEN clock_timestamp() ELSE proven_at END
WHERE day = %(day)s"""

UNPROVEN: Final = "UPDATE outbox_days SET proven_at = NULL WHERE day = %(day)s"

# Days past the retention by the database's clock: archived, or closed if there is no archive.
DUE: Final = """
SELECT day FROM outbox_days
WHERE state = ANY (%(states)s)
  AND (day + 1 + %(retention)s)::timestamp AT TIME ZONE 'UTC' <= clock_timestamp()
ORDER BY day"""

# --- purging --------------------------------------------------------------------------------------------

# The rows that show when a day's events were published are needed until the day is archived, and as long as
# the day can be queried in the table.
PURGE_BEFORE: Final = """
SELECT least(
    (SELECT min(day) FROM outbox_days WHERE state = 'open' OR state = 'closed' AND %(archives)s)::timestamp
        AT TIME ZONE 'UTC',
    clock_timestamp() - make_interval(days => greatest(%(retention)s, 7)))"""

BATCH: Final = 5000
"""Rows that one statement deletes, in about 50 ms; a writer that needs one of the keys waits that long."""

PURGE_PROGRESS: Final[LiteralString] = f"""
DELETE FROM outbox_progress p USING (
    SELECT s.shard, o.at FROM (SELECT DISTINCT shard FROM outbox_progress) s
    CROSS JOIN LATERAL (SELECT at FROM outbox_progress WHERE shard = s.shard AND at < %(before)s
                        ORDER BY at LIMIT {BATCH}) o) old
WHERE p.shard = old.shard AND p.at = old.at"""
PURGE_RELEASED: Final[LiteralString] = f"""
DELETE FROM outbox_released WHERE (seq, id) IN (
    SELECT seq, id FROM outbox_released WHERE published_at < %(before)s LIMIT {BATCH})"""
# Their content is in the archive. Dead letters stay, because they can be replayed.
PURGE_DISCARDED: Final[LiteralString] = f"""
DELETE FROM outbox_parked WHERE seq IN (
    SELECT seq FROM outbox_parked
    WHERE state = 'discarded' AND failed_at < %(before)s AND created_at < %(before)s
    LIMIT {BATCH})"""

# By pages: an index on the age would cost every writer with a key, and no page is read twice.
KEY_PAGES: Final = "SELECT pg_relation_size('outbox_keys') / current_setting('block_size')::int"
PAGES: Final = 32
# The key of a delayed event stays used until the event is in the table.
PURGE_KEYS: Final = """
DELETE FROM outbox_keys k
WHERE ctid >= format('(%%s,0)', %(from)s::bigint)::tid AND ctid < format('(%%s,0)', %(to)s::bigint)::tid
  AND created_at < clock_timestamp() - make_interval(days => %(days)s)
  AND NOT EXISTS (SELECT FROM outbox_delayed d WHERE d.id = k.event_id)"""


def named(query: LiteralString, leaf: str, **names: Any) -> sql.Composed:
    """Return a query with the name of a partition filled in."""
    return sql.SQL(query).format(leaf=sql.Identifier(leaf), **names)
