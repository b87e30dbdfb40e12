"""SQL of reading, owning and changing shards: who takes one, what is read and settled, the barrier.

Table names are unqualified: the search_path finds them.
"""

from __future__ import annotations

from typing import Final, LiteralString, NamedTuple

from outbox_pipelines.core import sequence
from outbox_pipelines.days.partitions.partitions_sql import WRITTEN_AT

# The rows of a shard are those in a range of lanes. The ranges of N shards cover every lane once; the
# function `outbox_shard_of` gives the same shard: parked events, days and the archive ask it.
# Written as in the indexes of `0001_outbox.sql`: on tx, and on seq. An index fits only what is written alike.
_LANE: Final[LiteralString] = "hashtextextended(aggregate_id, hashtext(aggregate_type))"
_WITHIN: Final[LiteralString] = "BETWEEN %(first_lane)s::bigint AND %(last_lane)s::bigint"
MINE_BY_TX: Final[LiteralString] = f"AND {_LANE} {_WITHIN}"
MINE_BY_SEQ: Final[LiteralString] = f"AND {_LANE} + 0 {_WITHIN}"


def lanes_of(shard: int, shards: int) -> dict[str, int]:
    """Return the first and the last lane of a shard, as parameters."""
    return {"first_lane": _first(shard, shards), "last_lane": _first(shard + 1, shards) - 1}


def _first(shard: int, shards: int) -> int:
    # The least lane whose upper half, times the number of shards, reaches this shard.
    return (-(-(shard << 32) // shards) - (1 << 31)) << 32


# For a window, a generic plan would walk the wrong index (seconds beside 5 million rows).
PLAN_EACH: Final = "SET plan_cache_mode = force_custom_plan"
# For a tick of a few rows, planning takes five times as long as reading.
PLAN_ONCE: Final = "SET plan_cache_mode = force_generic_plan"
# Without sequential scans, a plan that was made while a day was empty is right when it is full, and a shard
# does not read the rows of the others. A bitmap is made of a whole backlog before its first row, and a limit
# spares nothing. Parallel workers take longer to start than to read.
BY_INDEX: Final = """
SET enable_seqscan = off; SET enable_bitmapscan = off; SET max_parallel_workers_per_gather = 0"""

# How long a session may be silent.
LIMIT: Final = "SELECT set_config(%(setting)s, %(lease)s, false)"

# A poll: touches no table.
SNAPSHOT: Final = "SELECT pg_current_snapshot()::text"

# The columns in the order of `Event`, in two steps. The first makes texts of a row that takes at most `most`
# bytes as it is stored: what is larger is not even loaded. The second lets out what is at most so long as
# text, since a few bytes of JSON can be a very long text. Of anything larger it leaves the content out
# (payload NULL), and cuts long names. The subquery between the two has OFFSET 0: each text is made once.
# One metadata column, built only where there is something in it, spares Python six values a row.
_PAYLOAD: Final[LiteralString] = """
    CASE WHEN pg_column_size(payload) <= %(most)s THEN payload::text END AS payload"""
_METADATA: Final[LiteralString] = """
    'idempotency-key', idempotency_key, 'correlation-id', correlation_id,
    'causation-id', causation_id, 'traceparent', traceparent, 'version', version"""
# Empty where it is too large.
_SMALL_METADATA: Final[LiteralString] = """
    WHEN coalesce(pg_column_size(headers), 0) + coalesce(octet_length(idempotency_key), 0)
         + coalesce(octet_length(correlation_id), 0) + coalesce(octet_length(causation_id), 0)
         + coalesce(octet_length(traceparent), 0) > %(most)s THEN ''"""
_TEXTS: Final[LiteralString] = f"""
    seq, id, aggregate_type, aggregate_id, event_type, {_PAYLOAD},
    CASE WHEN num_nonnulls(headers, idempotency_key, correlation_id, causation_id, traceparent, version) = 0
         THEN NULL {_SMALL_METADATA}
         ELSE (jsonb_strip_nulls(jsonb_build_object({_METADATA}))
               || jsonb_build_object('headers', coalesce(headers, '{{}}'::jsonb)))::text
    END AS metadata"""
# The same with the event's time in its metadata, for the shapes that show it.
_TEXTS_WITH_TIME: Final[LiteralString] = f"""
    seq, id, aggregate_type, aggregate_id, event_type, {_PAYLOAD},
    CASE {_SMALL_METADATA}
         ELSE (jsonb_strip_nulls(jsonb_build_object({_METADATA},
                   'created-at', to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')))
               || jsonb_build_object('headers', coalesce(headers, '{{}}'::jsonb)))::text
    END AS metadata"""
# Maximum size of metadata: parsing takes up to thirty times its size in memory. Repeated in `FITTING`.
MOST_METADATA: Final = 1_000_000
FITTING: Final[LiteralString] = """seq, id::text,
    CASE WHEN octet_length(aggregate_type) <= %(most)s THEN aggregate_type ELSE left(aggregate_type, 999) END,
    CASE WHEN octet_length(aggregate_id) <= %(most)s THEN aggregate_id ELSE left(aggregate_id, 999) END,
    CASE WHEN octet_length(event_type) <= %(most)s THEN event_type ELSE left(event_type, 999) END,
    CASE WHEN octet_length(payload) + octet_length(aggregate_type) + octet_length(aggregate_id)
              + octet_length(event_type) + coalesce(octet_length(metadata), 0) <= %(most)s
              AND metadata IS DISTINCT FROM '' AND coalesce(octet_length(metadata), 0) <= 1000000
         THEN payload END,
    CASE WHEN octet_length(metadata) <= least(%(most)s, 1000000) THEN metadata END"""
# Who an event is, without its content.
NAMES: Final[LiteralString] = """
    seq, id::text, aggregate_type, aggregate_id, left(event_type, 999), NULL::text, NULL::text"""

# Of this shard, in a table without lanes. With one shard the planner drops it.
MINE: Final[LiteralString] = """
    (%(shards)s = 1 OR outbox_shard_of(aggregate_type, aggregate_id, %(shards)s) = %(shard)s)"""

# Closed days have nothing that is not published: without them, planning stays cheap however many there are.
OPEN_FROM: Final = "SELECT outbox_open_from()::text"
OPEN_FROM_TIME: Final[LiteralString] = "(%(open_from)s::date::timestamp AT TIME ZONE 'UTC')"
OPEN: Final[LiteralString] = f"created_at >= {OPEN_FROM_TIME}"

# The sum hides seq from the planner: no index but that on tx fits, whatever is known of a day. By another
# one, a kept plan of late transactions would read all rows of a day (51 ms for 400,000 in place of 0.5).
_TICK: Final[LiteralString] = f"""
    {OPEN} AND tx >= %(first)s::xid8 AND tx < %(end)s::xid8
    AND pg_visible_in_snapshot(tx, %(target)s::pg_snapshot)"""
_RANGE: Final[LiteralString] = f"{_TICK} AND seq + 0 > %(last_seq)s"
_LATE: Final[LiteralString] = f"{OPEN} AND tx = ANY (%(late)s::xid8[]) AND seq + 0 > %(last_seq)s"
# Up to the snapshot of the statement itself. A subquery is run once, not for each row.
_ENDED: Final[LiteralString] = "pg_visible_in_snapshot(tx, (SELECT pg_current_snapshot()))"
_SINCE: Final[LiteralString] = f"{OPEN} AND tx >= %(first)s::xid8 AND {_ENDED}"
_AND_NOW: Final[LiteralString] = """
UNION ALL
SELECT -2, pg_current_snapshot()::text, '', '', '', '', NULL"""

# The days in which a span has rows. A window names them, so that it is planned over one partition or two:
# over all of them, planning would cost more than reading. Through the parent, so that a role which may read
# the outbox needs no grant on each day.
DAYS: Final[LiteralString] = rf"""
SELECT min(day.start), max(day.stop)
FROM pg_inherits i
JOIN pg_class leaf ON leaf.oid = i.inhrelid
CROSS JOIN LATERAL regexp_match(
    pg_get_expr(leaf.relpartbound, leaf.oid), $$FROM \('(.+)'\) TO \('(.+)'\)$$) AS bounds
CROSS JOIN LATERAL (SELECT bounds[1]::timestamptz AS start, bounds[2]::timestamptz AS stop) AS day
CROSS JOIN LATERAL (
    SELECT FROM outbox
    WHERE {OPEN} AND created_at >= day.start AND created_at < day.stop AND seq >= %(from)s AND seq <= %(to)s
    LIMIT 1) AS row
WHERE i.inhparent = 'outbox'::regclass AND day.stop > {OPEN_FROM_TIME}"""


class Reading(NamedTuple):
    """The queries that return events; each takes `most`."""

    small_tick: LiteralString
    """Whole: by the tx index, sorted afterwards. A tick of more rows than the limit answers with a single row
    with the seq -1."""
    small_tick_with_late: LiteralString
    """The same where transactions that ran at `done` have ended since: seldom, and planning costs twice."""
    news: LiteralString
    """The same up to the current snapshot, which is the id of a first row with the seq -2."""
    news_with_late: LiteralString
    """The same where transactions ran at `done`: `late` names all of them."""
    edges: LiteralString
    """The seq of the first and of the last row of a big tick, in the order of tx."""
    spans: LiteralString
    """Where a big tick begins and ends in `seq`: one row for the range and one for each late transaction."""
    window: LiteralString
    """Of a big tick, by the seq index: the conditions on tx are functions, so that no other index fits. Takes
    `width`, the number of rows."""
    bodies: LiteralString
    """Rows that were listed without content. Sorted as they are stored: a row's texts are made when it is
    fetched, and not at all where the reader stops before it."""
    parked: LiteralString
    """The same of parked events."""


def _reading(texts: LiteralString, by_tx: LiteralString = "", by_seq: LiteralString = "") -> Reading:
    within: LiteralString = f"{_TICK} {by_tx}"
    edges: LiteralString = f"""
SELECT (SELECT seq FROM outbox WHERE {within} ORDER BY tx, seq LIMIT 1),
       (SELECT seq FROM outbox WHERE {within} ORDER BY tx DESC, seq DESC LIMIT 1)"""
    spans: LiteralString = f"""
SELECT (SELECT min(seq + 0) FROM outbox WHERE {within} AND seq <= %(lowest)s::bigint),
       (SELECT max(seq + 0) FROM outbox WHERE {within} AND seq >= %(highest)s::bigint)
WHERE %(lowest)s::bigint IS NOT NULL
UNION ALL
SELECT min(seq), max(seq) FROM outbox WHERE {_LATE} {by_tx} GROUP BY tx"""
    ranged: LiteralString = f"SELECT * FROM outbox WHERE {_RANGE} {by_tx}"
    late: LiteralString = f"SELECT * FROM outbox WHERE {_LATE} {by_tx}"
    since: LiteralString = f"SELECT * FROM outbox WHERE {_SINCE} {by_tx}"

    def few(rows: LiteralString, more: LiteralString = "") -> LiteralString:
        return f"""
WITH tick AS MATERIALIZED (
    {rows} LIMIT %(limit)s + 1
)
SELECT {FITTING}
FROM (SELECT {texts} FROM tick WHERE (SELECT count(*) FROM tick) <= %(limit)s OFFSET 0) AS event
UNION ALL
SELECT -1, '', '', '', '', '', NULL WHERE (SELECT count(*) FROM tick) > %(limit)s{more}
ORDER BY 1"""

    # With one shard a window has no more rows than numbers, and without a limit it is read faster.
    # With ties: a position is a seq, and would pass over the second of two rows that have the same.
    limit: LiteralString = "FETCH FIRST (%(width)s) ROWS WITH TIES" if by_seq else "OFFSET 0"
    window: LiteralString = f"""
SELECT {FITTING} FROM (
    SELECT {texts} FROM outbox
    WHERE created_at >= %(start)s AND created_at < %(stop)s AND seq > %(last_seq)s AND seq <= %(to)s
      AND pg_visible_in_snapshot(tx, %(target)s::pg_snapshot)
      AND NOT pg_visible_in_snapshot(tx, %(done)s::pg_snapshot) {by_seq}
    ORDER BY seq {limit}) AS event
ORDER BY seq"""
    bodies: LiteralString = f"""
SELECT {FITTING} FROM (
    SELECT {texts} FROM (
        SELECT * FROM outbox
        WHERE created_at >= %(start)s AND created_at < %(stop)s AND seq = ANY (%(seqs)s::bigint[])
        ORDER BY seq OFFSET 0) AS stored
    OFFSET 0) AS event
ORDER BY seq"""
    parked: LiteralString = f"""
SELECT {FITTING} FROM (
    SELECT {texts} FROM (
        SELECT * FROM outbox_parked WHERE seq = ANY (%(seqs)s::bigint[]) ORDER BY seq OFFSET 0) AS stored
    OFFSET 0) AS event
ORDER BY seq"""
    return Reading(
        *(few(ranged), few(f"{ranged} UNION ALL {late}")),
        *(few(since, _AND_NOW), few(f"{since} UNION ALL {late} AND {_ENDED}", _AND_NOW)),
        *(edges, spans, window, bodies, parked),
    )


EVENTS: Final = _reading(_TEXTS)
EVENTS_WITH_TIME: Final = _reading(_TEXTS_WITH_TIME)
# The same of one of several shards.
SHARD_EVENTS: Final = _reading(_TEXTS, MINE_BY_TX, MINE_BY_SEQ)
SHARD_EVENTS_WITH_TIME: Final = _reading(_TEXTS_WITH_TIME, MINE_BY_TX, MINE_BY_SEQ)

# After an empty window: over the gap that a jump of the sequence left.
NEXT_SEQ: Final = """
SELECT min(seq) FROM outbox
WHERE created_at >= %(start)s AND created_at < %(stop)s AND seq > %(last_seq)s AND seq <= %(to)s"""

# One lock per schema and shard. Polled, because a statement that waits would delay vacuum.
TRY_LOCK: Final = "SELECT pg_try_advisory_lock(hashtext(%(lock)s), %(shard)s)"
UNLOCK: Final = "SELECT pg_advisory_unlock(hashtext(%(lock)s), %(shard)s)"
LOCK_IS_HELD: Final = """
SELECT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 2 AND granted
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid = hashtext(%(lock)s)::bigint & 4294967295 AND objid = %(shard)s
)"""

# Two statements: a balancer that knows the system's tables sends the second to the primary alone.
IS_STANDBY: Final = "SELECT pg_is_in_recovery() FROM outbox_shards LIMIT 1"
LOCK_IS_HELD_BY: Final[LiteralString] = f"{LOCK_IS_HELD.rstrip().removesuffix(')')} AND pid = %(pid)s)"
PID: Final = "SELECT pg_backend_pid()"
# A session whose statement has arrived is active until it has answered; one that was ended is gone. With
# track_activities = off this is unknown, and a long statement must not count as lost.
IS_WORKED_FOR: Final = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity
    WHERE pid = %(pid)s AND state IN ('active', 'disabled')
)"""

# Any role that may connect may also take this lock. No relay gets the shard then, and none has it.
INTRUDER: Final[LiteralString] = """
SELECT l.pid, format('session %%s of role %%s (%%s)', l.pid, coalesce(a.usename, '?'),
                     coalesce(nullif(a.application_name, ''), 'no application name')
                     || coalesce(to_char(a.backend_start AT TIME ZONE 'UTC',
                                         '", since "YYYY-MM-DD HH24:MI:SS" UTC"'), ''))
FROM pg_locks l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid = hashtext(%(lock)s)::bigint & 4294967295 AND l.objid = %(shard)s
  AND l.pid IS DISTINCT FROM (SELECT pid FROM outbox_shards WHERE shard = %(shard)s AND owner IS NOT NULL)"""

# The session of the relay that has this shard, while it does nothing. If two looks find the same, it has done
# nothing between them.
IDLE_OWNER: Final = """
SELECT a.pid, a.state_change::text
FROM outbox_shards s
JOIN pg_locks l ON l.pid = s.pid AND l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.classid = hashtext(%(lock)s)::bigint & 4294967295 AND l.objid = s.shard
JOIN pg_stat_activity a ON a.pid = s.pid AND a.state = 'idle'
WHERE s.shard = %(shard)s AND s.owner IS NOT NULL"""
# A session that has worked since, or another one with the same number, has a later moment.
END_IDLE: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE pid = %(pid)s AND state_change::text = %(since)s"""

# Transaction ids have a meaning in one database only.
IDENTITY: Final = """
SELECT system_identifier, (SELECT oid FROM pg_database WHERE datname = current_database())
FROM pg_control_system()"""

# A subscription that fills the outbox: its rows carry transaction ids of the publisher's database, and the
# relay would pass them over.
SUBSCRIPTION: Final = """
SELECT s.subname FROM pg_subscription_rel r JOIN pg_subscription s ON s.oid = r.srsubid
WHERE r.srrelid = 'outbox'::regclass
   OR r.srrelid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'outbox'::regclass)
LIMIT 1"""

SHARD_IDENTITY: Final = "SELECT system_identifier, database FROM outbox_shards LIMIT 1"

OWNER: Final = """
SELECT owner, to_char(owned_since AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
FROM outbox_shards WHERE shard = %(shard)s"""

# The epoch fences the previous owner. If the shard was not released, its relay has crashed: the row counts
# the crashes in a row, and those at the event that was published alone. A process that has lost its session
# and starts over has not crashed; the events at which earlier ones crashed are still ahead. An outage of
# Kafka outlasts an owner: the breaker stays as it is until Kafka answers the next one. After `outbox adopt
# switch`, the rows that were written before it are published first.
TAKE: Final = """
UPDATE outbox_shards s
SET owner = %(owner)s, pid = pg_backend_pid(), epoch = epoch + 1,
    owned_since = clock_timestamp(), heartbeat = clock_timestamp(),
    barrier_paused = false, barrier_reached = false,
    crashes = CASE WHEN was IS NULL THEN 0 ELSE crashes + (was <> %(owner)s)::int END,
    crash_guard_seq = CASE WHEN was IS NULL THEN NULL ELSE crash_guard_seq END,
    crash_guard_crashes = CASE WHEN was IS NULL OR crash_guard_seq IS NULL THEN 0
                          ELSE crash_guard_crashes + (was <> %(owner)s)::int END
FROM (SELECT owner AS was FROM outbox_shards WHERE shard = %(shard)s FOR UPDATE) before
WHERE shard = %(shard)s AND NOT EXISTS (SELECT FROM outbox_adopted WHERE state = 'draining')
RETURNING epoch, shards, coalesce(was <> %(owner)s, false), crashes, crash_guard_seq, crash_guard_crashes,
          s.ctid::text, done::text, target::text, last_seq, tick_id::text, outbox_open_from()::text,
          breaker, breaker_reason"""

# While nothing is settled yet, or any more.
HEARTBEAT: Final = """
UPDATE outbox_shards SET heartbeat = clock_timestamp() WHERE shard = %(shard)s AND epoch = %(epoch)s"""

# Before an event is read alone, because relays have crashed here. Another event begins its own count.
CRASH_GUARD: Final = """
UPDATE outbox_shards
SET crash_guard_seq = %(seq)s,
    crash_guard_crashes = CASE WHEN crash_guard_seq = %(seq)s THEN crash_guard_crashes ELSE 0 END
WHERE shard = %(shard)s AND epoch = %(epoch)s"""

# Clears the crash state: everything that may have been in flight at the crash is published.
CALM: Final = """
UPDATE outbox_shards SET crashes = 0, crash_guard_seq = NULL, crash_guard_crashes = 0
WHERE shard = %(shard)s AND epoch = %(epoch)s"""

# Without Kafka's part in it: at_least_once.
FORGET_TICK: Final = "UPDATE outbox_shards SET tick_id = NULL WHERE shard = %(shard)s AND epoch = %(epoch)s"

TOP_UP_ERROR: Final = """
UPDATE outbox_shards SET top_up_error = %(error)s
WHERE shard = %(shard)s AND epoch = %(epoch)s AND top_up_error IS DISTINCT FROM %(error)s"""

BREAKER: Final = """
UPDATE outbox_shards SET breaker = %(state)s, breaker_reason = %(reason)s
WHERE shard = %(shard)s AND epoch = %(epoch)s"""

# By ctid: with an old snapshot open somewhere, dead versions of the row pile up, and the way to it by
# primary key grows from 0.02 to 0.7 ms (measured at 44,000 versions).
_MOVE: Final[LiteralString] = """
UPDATE outbox_shards
SET done = %(done)s, target = %(target)s, last_seq = %(last_seq)s, heartbeat = clock_timestamp(),
    tick_id = coalesce(%(tick)s::uuid, tick_id)
WHERE ctid = %(ctid)s::tid AND shard = %(shard)s AND epoch = %(epoch)s
RETURNING ctid::text"""
SETTLE: Final[LiteralString] = _MOVE
# The progress row is written with the settle, without an additional commit.
SETTLE_WITH_PROGRESS: Final[LiteralString] = f"""
WITH moved AS ({_MOVE}), written AS (
    INSERT INTO outbox_progress (shard, shards, done, target, last_seq, events, latency)
    SELECT %(shard)s, %(shards)s, %(done)s, %(target)s, %(last_seq)s, %(events)s,
           (SELECT min(greatest(0, extract(epoch FROM clock_timestamp() - {WRITTEN_AT}))) FROM outbox
            WHERE {OPEN} AND seq = %(newest)s)
    FROM moved
    RETURNING latency
)
SELECT moved.ctid, (SELECT latency FROM written), outbox_open_from()::text FROM moved"""

# The row has moved: look it up again.
FIND_AGAIN: Final = "SELECT ctid::text FROM outbox_shards WHERE shard = %(shard)s AND epoch = %(epoch)s"

RELEASE: Final = """
UPDATE outbox_shards SET owner = NULL, owned_since = NULL
WHERE shard = %(shard)s AND epoch = %(epoch)s"""

SHARD_NUMBERS: Final = "SELECT shard FROM outbox_shards ORDER BY shard"

# --- shards ---------------------------------------------------------------------------------------------

# Functions: operators may not write into the table.
CHANGE_SHARDS: Final = """
SELECT step, missing FROM outbox_change_shards(%(wanted)s, %(started)s, %(on_behalf_of)s)"""
KEEP_SHARDS: Final = "SELECT outbox_keep_shards()"

# The shards whose lock no relay holds, if a change to another number would begin now: from that moment on all
# relays pause, and one that does not exist never answers. With a slot the change is refused for that reason.
UNOWNED: Final = """
SELECT string_agg(s.shard::text, ', ' ORDER BY s.shard) FROM outbox_shards s
WHERE s.wanted IS NULL AND s.shards <> %(wanted)s AND s.slot IS NULL
  AND NOT (s.owner IS NOT NULL AND EXISTS (
      SELECT FROM pg_locks l
      WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted AND l.pid = s.pid
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND l.classid = hashtext(%(lock)s)::bigint & 4294967295 AND l.objid = s.shard))"""

# The process that requested the change has stopped: the relays cancel it. A time in the future was set before
# the clock was set back. In the order of shards, like every statement that locks several, against deadlocks.
_CANCEL: Final[LiteralString] = """
UPDATE outbox_shards s
SET wanted = NULL, wanted_at = NULL, barrier_paused = false, barrier_reached = false, barrier = NULL
FROM (SELECT shard FROM outbox_shards WHERE {which} ORDER BY shard FOR UPDATE) AS locked
WHERE s.shard = locked.shard"""
UNWANT_FORGOTTEN: Final[LiteralString] = _CANCEL.format(
    which="""wanted_at NOT BETWEEN clock_timestamp() - interval '10 seconds'
                         AND clock_timestamp() + interval '10 seconds'"""
)

# A relay that cannot take part cancels the change before anything has paused.
UNWANT: Final[LiteralString] = _CANCEL.format(which="wanted = %(wanted)s")

# The sequence, which never goes back; no table is touched.
DRAWN: Final[LiteralString] = f"SELECT {sequence.DRAWN}"

# What may change under a relay; also the slot to read, if it is made and not about to be dropped.
CHANGE: Final[LiteralString] = """
SELECT epoch, wanted, barrier::text, barrier_paused, barrier_reached,
       CASE WHEN slot_snapshot IS NOT NULL AND NOT slot_ends AND shards = 1 THEN slot END,
       slot_snapshot::text, slot_error
FROM outbox_shards WHERE shard = %(shard)s"""
# The same where the row was settled last: see `_MOVE`. By its key it takes 9 ms beside 360,000 dead versions.
CHANGE_AT: Final[LiteralString] = f"{CHANGE} AND ctid = %(ctid)s::tid"
PAUSED: Final = """
UPDATE outbox_shards SET barrier_paused = true
WHERE shard = %(shard)s AND epoch = %(epoch)s AND wanted IS NOT NULL AND barrier IS NULL
  AND target IS NULL AND done::text = %(done)s"""
REACHED: Final = """
UPDATE outbox_shards SET barrier_reached = true
WHERE shard = %(shard)s AND epoch = %(epoch)s AND target IS NULL AND done::text = barrier::text"""

# --- start ----------------------------------------------------------------------------------------------

# The first relay to take a shard raises its epoch. Locked, so that no relay takes one in between.
LOCK_EPOCHS: Final = "SELECT epoch FROM outbox_shards ORDER BY shard FOR UPDATE"

# What the database has not drawn yet was never the end of a snapshot here.
IS_KNOWN: Final = """
SELECT pg_snapshot_xmax(%(at)s::pg_snapshot) <= pg_snapshot_xmax(pg_current_snapshot())"""

# Every event created since has this transaction id or a later one. What runs now is not over, however old.
SNAPSHOT_SINCE: Final = """
SELECT format('%%s:%%s:%%s', least(pg_snapshot_xmin(now), cut), cut,
              (SELECT string_agg(tx::text, ',' ORDER BY tx) FROM pg_snapshot_xip(now) tx WHERE tx < cut))
FROM pg_current_snapshot() AS now, LATERAL (
    SELECT coalesce(min(tx), pg_snapshot_xmax(now)) AS cut FROM outbox WHERE created_at >= %(since)s) since"""

START: Final = "UPDATE outbox_shards SET done = %(at)s"
SKIPPED: Final = "SELECT count(*) FROM outbox WHERE pg_visible_in_snapshot(tx, %(at)s::pg_snapshot)"
