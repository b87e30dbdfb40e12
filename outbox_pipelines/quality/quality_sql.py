"""SQL of the measurements: one statement, one snapshot, one round trip. Table names are unqualified.

Invariants:
- The cost does not grow with the published events: rows are counted up to a cap, whole tables by the
  server's statistics.
"""

from typing import Final, LiteralString

from outbox_pipelines.core import sequence
from outbox_pipelines.days.partitions.partitions_sql import AHEAD, DETACHED, LATE, WRITTEN_AT

# Of this shard, and in days that are open. Closed days have nothing that is not published.
_HERE: Final[LiteralString] = """
    o.created_at >= outbox_open_from()::timestamp AT TIME ZONE 'UTC'
    AND (s.shards = 1 OR outbox_shard_of(o.aggregate_type, o.aggregate_id, s.shards) = s.shard)
    AND NOT outbox_covers(s.done, s.target, s.last_seq, o.tx, o.seq)"""

# In tx order, up to a cap: exact counting of 5.6 million takes 0.7 s. The oldest event is among the lowest
# transaction ids, so the cap does not touch the age. Every tx has two bounds, also where one would do: of a
# range with unknown bounds the planner expects few rows, and uses the index on tx; if not, it may read all.
_BACKLOG: Final[LiteralString] = f"""
SELECT least(count(*), %(cap)s) AS backlog,
       greatest(extract(epoch FROM clock_timestamp() - min({WRITTEN_AT})), 0) AS oldest_seconds
FROM (
    (SELECT o.id, o.created_at FROM pg_snapshot_xip(s.done) AS late(tx)
     CROSS JOIN LATERAL (
         SELECT o.id, o.created_at FROM outbox o WHERE o.tx >= late.tx AND o.tx <= late.tx AND {_HERE}
         ORDER BY o.tx LIMIT %(cap)s) o
     LIMIT %(cap)s)
    UNION ALL
    (SELECT o.id, o.created_at FROM outbox o
     WHERE o.tx >= pg_snapshot_xmax(s.done) AND o.tx <= pg_snapshot_xmax(pg_current_snapshot()) AND {_HERE}
     ORDER BY o.tx LIMIT %(cap)s)
) waiting"""

# A row in the future is from before the clock of the database went back.
_RATE: Final = """
SELECT coalesce(sum(events), 0) / 60 AS events_per_second,
       (SELECT latency FROM outbox_progress WHERE shard = s.shard AND at <= clock_timestamp()
        ORDER BY at DESC LIMIT 1) AS latency_seconds
FROM outbox_progress
WHERE shard = s.shard AND at > clock_timestamp() - interval '1 minute' AND at <= clock_timestamp()"""

# The owner is who has the lock now: the row alone would still name one that was killed. Any other session
# with the lock keeps every relay from it. A shard that was never relayed is alone since the tables were made.
_SHARDS: Final[LiteralString] = f"""
WITH locks AS (
    SELECT classid, objid, pid FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 2 AND granted
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
SELECT coalesce(jsonb_agg(to_jsonb(found) ORDER BY found.shard), '[]') FROM (
    SELECT s.shard, s.shards, h.owner,
           CASE WHEN h.owned_since IS NOT NULL THEN greatest(
               0, extract(epoch FROM clock_timestamp() - h.owned_since)) END AS owned_seconds,
           CASE WHEN s.heartbeat IS NOT NULL THEN greatest(
               0, extract(epoch FROM clock_timestamp() - s.heartbeat)) END AS heartbeat_seconds,
           CASE WHEN h.shard IS NOT NULL THEN 0 ELSE greatest(
               0, extract(epoch FROM clock_timestamp() - coalesce(
                   s.heartbeat, (SELECT min(applied_at) FROM outbox_migrations)))) END AS unowned_seconds,
           EXISTS (SELECT FROM locks WHERE objid = s.shard
                   AND classid = hashtext(%(waiting)s)::bigint & 4294967295)
               OR EXISTS (SELECT FROM locks WHERE objid = 0
                          AND classid = hashtext(%(fleet)s)::bigint & 4294967295) AS successor_waits,
           coalesce(h.breaker, 'closed') AS breaker, h.breaker_reason, s.top_up_error,
           (SELECT format('session %%s of role %%s (%%s)', l.pid, coalesce(a.usename, '?'),
                          coalesce(nullif(a.application_name, ''), 'no application name')
                          || coalesce(to_char(a.backend_start AT TIME ZONE 'UTC',
                                              '", since "YYYY-MM-DD HH24:MI:SS" UTC"'), ''))
                   || format('; SELECT pg_terminate_backend(%%s) ends it', l.pid)
            FROM locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
            WHERE h.shard IS NULL AND l.objid = s.shard
              AND l.classid = hashtext(%(lock)s)::bigint & 4294967295 LIMIT 1) AS intruder,
           EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = h.pid AND a.wait_event = 'SyncRep'
                   AND a.query_start < clock_timestamp() - interval '5 seconds') AS awaits_standby,
           s.wanted, backlog.*, rate.*
    FROM outbox_shards s
    LEFT JOIN outbox_shards h ON h.shard = s.shard AND EXISTS (
        SELECT FROM locks
        WHERE objid = s.shard AND classid = hashtext(%(lock)s)::bigint & 4294967295 AND pid = s.pid)
        AND s.owner IS NOT NULL
    CROSS JOIN LATERAL ({_BACKLOG}) backlog
    CROSS JOIN LATERAL ({_RATE}) rate
) found"""

# A poisoned aggregate may have a hundred thousand events behind it.
_PARKED: Final = """
SELECT jsonb_build_object(
    'parked', count(*), 'blocked_aggregates', count(DISTINCT (aggregate_type, aggregate_id)))
FROM (SELECT aggregate_type, aggregate_id FROM outbox_parked
      WHERE state IN ('waiting', 'retrying') LIMIT %(cap)s) parked"""
_PARKED_REASONS: Final = """
SELECT coalesce(jsonb_agg(jsonb_build_array(last_error, events) ORDER BY events DESC), '[]') FROM (
    SELECT last_error, count(*) AS events FROM outbox_parked WHERE state = 'retrying'
    GROUP BY last_error ORDER BY count(*) DESC LIMIT 3) reasons"""

_DEAD_LETTERS: Final = """
SELECT jsonb_build_object(
    'dead_letters', count(*),
    'new_dead_letters', count(*) FILTER (WHERE failed_at > clock_timestamp() - interval '1 hour'))
FROM (SELECT failed_at FROM outbox_parked WHERE state = 'failed' LIMIT %(cap)s) failed"""
_DEAD_LETTER_REASONS: Final = """
SELECT coalesce(jsonb_agg(jsonb_build_array(last_error, events) ORDER BY events DESC), '[]') FROM (
    SELECT last_error, count(*) AS events
    FROM (SELECT last_error FROM outbox_parked WHERE state = 'failed' LIMIT %(cap)s) failed
    GROUP BY last_error ORDER BY count(*) DESC LIMIT 10) reasons"""

# Those that are due wait for a move; those with a reason could not be moved, and are no lag of the others.
_DELAYED: Final = """
SELECT jsonb_build_object(
    'delayed', (SELECT count(*) FROM (SELECT FROM outbox_delayed LIMIT %(cap)s) AS counted),
    'delayed_next_due_seconds', (
        SELECT extract(epoch FROM min(due) - statement_timestamp()) FROM outbox_delayed
        WHERE due > statement_timestamp()),
    'delayed_overdue', (SELECT count(*) FROM (SELECT FROM outbox_delayed
                                              WHERE due <= statement_timestamp() LIMIT %(cap)s) AS counted),
    'delayed_overdue_seconds', coalesce((
        SELECT extract(epoch FROM statement_timestamp() - min(due)) FROM outbox_delayed
        WHERE due <= statement_timestamp()), 0),
    'delayed_unmoved_seconds', coalesce((
        SELECT extract(epoch FROM statement_timestamp() - due) FROM outbox_delayed
        WHERE due <= statement_timestamp() AND last_error IS NULL ORDER BY due LIMIT 1), 0))"""
_DELAYED_REASONS: Final = """
SELECT coalesce(jsonb_agg(jsonb_build_array(last_error, events) ORDER BY events DESC), '[]') FROM (
    SELECT last_error, count(*) AS events FROM outbox_delayed
    WHERE due <= statement_timestamp() AND last_error IS NOT NULL
    GROUP BY last_error ORDER BY count(*) DESC LIMIT 3) reasons"""

# A replay in progress reports once a second. Its process may be gone.
_REPLAYS: Final = """
SELECT coalesce(jsonb_agg(to_jsonb(found)), '[]') FROM (
    SELECT id, started_at, coalesce(on_behalf_of, actor) AS by, reason, target, events, sent, state, error,
           CASE WHEN state = 'running' THEN greatest(
               0, extract(epoch FROM clock_timestamp() - progress_at)) ELSE 0 END AS silent_seconds
    FROM outbox_replays WHERE state IN ('running', 'stopped')
    ORDER BY state, started_at DESC LIMIT 20) found"""

_TABLE_BYTES: Final = """
SELECT coalesce(sum(pg_total_relation_size(inhrelid)), 0)
FROM pg_inherits WHERE inhparent = 'outbox'::regclass"""

# Counting a hundred million keys takes minutes; the server's own count is near enough to plot.
_KEYS: Final = """
SELECT jsonb_build_object(
    'idempotency_keys', greatest(reltuples::bigint, pg_stat_get_live_tuples(oid), 0),
    'idempotency_keys_bytes', pg_total_relation_size(oid))
FROM pg_class WHERE oid = 'outbox_keys'::regclass"""

# What keeps a day from being closed, and dead rows from being removed. The age of other roles' transactions
# shows to members of pg_read_all_stats; prepared ones show to everybody.
_OLD_TRANSACTION: Final = """
SELECT jsonb_build_array(extract(epoch FROM clock_timestamp() - since), what) FROM (
    SELECT xact_start AS since, format('session %%s of %%s (%%s)', pid, usename, application_name) AS what
    FROM pg_stat_activity
    WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
      AND backend_type = 'client backend'
    UNION ALL
    SELECT prepared, format('prepared transaction %%s of %%s', gid, owner)
    FROM pg_prepared_xacts WHERE database = current_database()
) open ORDER BY since LIMIT 1"""

# The old table whose rows come first: its events are not published, and no relay has a shard.
_DRAINING: Final = "SELECT to_jsonb(schema || '.' || name) FROM outbox_adopted WHERE state = 'draining'"

_SEQUENCE: Final[LiteralString] = f"SELECT jsonb_build_array({sequence.DRAWN}, outbox_last_seq())"

# The row names one slot at most. Columns that older servers lack are read from the row as JSON.
_SLOTS: Final[LiteralString] = """
SELECT jsonb_build_object(
    'slot', s.slot, 'made', s.slot_snapshot IS NOT NULL, 'ends', s.slot_ends, 'error', s.slot_error,
    'changing', EXISTS (
        SELECT FROM pg_locks
        WHERE locktype = 'advisory' AND objsubid = 2 AND granted AND objid = 0
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND classid = hashtext(%(setup_lock)s)::bigint & 4294967295),
    'exists', r.slot_name IS NOT NULL, 'foreign', f.slot_name IS NOT NULL, 'reader', r.active_pid,
    'retained_bytes', pg_wal_lsn_diff(pg_current_wal_insert_lsn(), r.restart_lsn)::bigint,
    'unconfirmed_bytes', pg_wal_lsn_diff(pg_current_wal_insert_lsn(), r.confirmed_flush_lsn)::bigint,
    'safe_bytes', r.safe_wal_size, 'wal_status', r.wal_status,
    'inactive_since', to_jsonb(r) -> 'inactive_since',
    'invalidation_reason', to_jsonb(r) -> 'invalidation_reason',
    'published', s.slot IS NULL OR EXISTS (
        SELECT FROM pg_publication p JOIN pg_publication_tables t ON t.pubname = p.pubname
        LEFT JOIN pg_publication_rel l ON l.prpubid = p.oid AND l.prrelid = 'outbox'::regclass
        WHERE p.pubname = s.slot AND p.pubinsert AND p.pubviaroot
          AND to_jsonb(l) ->> 'prattrs' IS NULL AND to_jsonb(l) ->> 'prqual' IS NULL
          AND (t.schemaname, t.tablename) = (SELECT n.nspname, c.relname
                                             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                                             WHERE c.oid = 'outbox'::regclass)),
    'unlimited', current_setting('max_slot_wal_keep_size') = '-1',
    'copy', (s.system_identifier, s.database) <> (
        SELECT system_identifier, (SELECT oid FROM pg_database WHERE datname = current_database())
        FROM pg_control_system()),
    'standbys', (
        SELECT coalesce(jsonb_agg(wanted), '[]')
        FROM regexp_split_to_table(current_setting('synchronized_standby_slots', true), '[ ,"]+') AS wanted
        LEFT JOIN pg_replication_slots p ON p.slot_name = wanted
        WHERE wanted <> '' AND p.active IS NOT TRUE AND to_jsonb(r) -> 'failover' = 'true'),
    'waiting_commits', (
        SELECT count(*) FROM pg_stat_activity
        WHERE s.slot IS NOT NULL AND datname = current_database() AND wait_event = 'SyncRep'
          AND query_start < clock_timestamp() - interval '5 seconds'),
    'others', (
        SELECT coalesce(jsonb_agg(jsonb_build_object(
            'slot', o.slot_name, 'active', o.active, 'retained_bytes',
            coalesce(pg_wal_lsn_diff(pg_current_wal_insert_lsn(), o.restart_lsn), 0)::bigint)), '[]')
        FROM pg_replication_slots o
        WHERE o.database = current_database() AND o.slot_name IS DISTINCT FROM r.slot_name))
FROM (SELECT slot, slot_snapshot, slot_ends, slot_error, system_identifier, database
      FROM outbox_shards ORDER BY shard LIMIT 1) s
LEFT JOIN pg_replication_slots r
       ON r.slot_name = s.slot AND r.database = current_database() AND r.plugin = 'pgoutput'
LEFT JOIN pg_replication_slots f ON f.slot_name = s.slot AND r.slot_name IS NULL"""
SLOTS: Final = _SLOTS

_PARTS: Final[dict[LiteralString, LiteralString]] = {
    "shards": _SHARDS,
    "parked": _PARKED,
    "parked_reasons": _PARKED_REASONS,
    "dead_letters": _DEAD_LETTERS,
    "dead_letter_reasons": _DEAD_LETTER_REASONS,
    "delayed": _DELAYED,
    "delayed_reasons": _DELAYED_REASONS,
    "partitions_ahead": AHEAD,
    "days_late": f"SELECT to_jsonb(late) FROM ({LATE}) late",
    "days_detached": DETACHED,
    "replays": _REPLAYS,
    "table_bytes": _TABLE_BYTES,
    "keys": _KEYS,
    "oldest_transaction": _OLD_TRANSACTION,
    "draining": _DRAINING,
    "sequence": _SEQUENCE,
    "slots": _SLOTS,
}

# Without the backlog, which is in the table of the events.
_OWNERS: Final = """
SELECT coalesce(jsonb_agg(jsonb_build_object(
    'shard', s.shard, 'owner', s.owner, 'breaker', s.breaker, 'heartbeat_seconds',
    extract(epoch FROM clock_timestamp() - s.heartbeat)) ORDER BY s.shard), '[]') FROM outbox_shards s"""
# Each alone, for when another one cannot be read.
ALONE: Final[dict[LiteralString, LiteralString]] = {
    "shards": _OWNERS,
    **{name: _PARTS[name] for name in ("parked", "dead_letters", "partitions_ahead", "oldest_transaction")},
}

MEASURE: Final[LiteralString] = "SELECT " + ", ".join(
    [f"({part}) AS {name}" for name, part in _PARTS.items()]
)
