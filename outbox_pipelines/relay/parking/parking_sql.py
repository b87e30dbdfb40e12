"""SQL of parked and delayed events, and of dead letters. Names are unqualified: search_path finds them."""

from typing import Final, LiteralString

from outbox_pipelines.relay.relay_sql import EVENTS_WITH_TIME, MINE, NAMES

# A function, because a relay's role may not write the content of events. A slot may deliver a transaction
# before other sessions see its rows. If two rows have a seq, one of them may be published: it must not be
# parked, too.
PARK: Final = """
SELECT present, twice
FROM outbox_park(%(seqs)s::bigint[], %(states)s::text[], %(errors)s::text[],
                 %(start)s, %(stop)s, %(from)s, %(to)s)"""

# Whether a parked event blocks those behind it: a dead letter does if its types say so, each of them
# by a rule of its own, or all.
_BLOCKS: Final[LiteralString] = """(
    {0}.state IN ('waiting', 'retrying') OR {0}.state IN ('failed', 'replaying') AND coalesce(
        (%(event_blocks)s::jsonb ->> {0}.event_type)::boolean,
        (%(aggregate_blocks)s::jsonb ->> {0}.aggregate_type)::boolean,
        %(blocks)s))"""

BLOCKED: Final[LiteralString] = f"""
SELECT DISTINCT aggregate_type, aggregate_id FROM outbox_parked p
WHERE {_BLOCKS.format("p")} AND {MINE}"""

# In exactly_once an event is parked ahead of the position. It is not changed before the position covers it:
# otherwise a relay would read it again after a crash, although it was published.
_COVERED: Final[LiteralString] = """(
    SELECT outbox_covers(s.done, s.target, s.last_seq, p.tx, p.seq)
    FROM outbox_shards s WHERE s.shard = %(shard)s)"""

# The content of parked events, by seq. The queries below return no content, because an event is marked as
# being tried before its content is read.
BODIES: Final = EVENTS_WITH_TIME.parked

# No pause is as long as ten minutes: such a time was set before the database's clock was set back.
IS_DUE: Final[LiteralString] = """(
    next_attempt_at IS NULL
    OR next_attempt_at NOT BETWEEN clock_timestamp() AND clock_timestamp() + interval '10 minutes')"""

_PAUSED: Final[LiteralString] = f"state IN ('retrying', 'replaying') AND crashes > 0 AND NOT {IS_DUE}"

# The index has a hash of the id.
_OF_AGGREGATE: Final[LiteralString] = """
hashtextextended({0}.aggregate_id, 0) = hashtextextended(a.name, 0)
    AND {0}.aggregate_type = a.type AND {0}.aggregate_id = a.name"""

# The first event of each aggregate that blocks it.
HEADS: Final[LiteralString] = f"""
SELECT {NAMES}, state, attempts,
       CASE WHEN {IS_DUE} THEN 0 ELSE extract(epoch FROM next_attempt_at - clock_timestamp()) END::float8,
       crashes, covered
FROM unnest(%(types)s::text[], %(ids)s::text[]) AS a (type, name)
CROSS JOIN LATERAL (
    SELECT *, {_COVERED} AS covered FROM outbox_parked p
    WHERE {_OF_AGGREGATE.format("p")} AND {_BLOCKS.format("p")}
    ORDER BY p.seq LIMIT 1) AS head"""

# Events with no blocking event before them: up to the next one that must be tried alone.
FREE: Final[LiteralString] = f"""
SELECT {NAMES}
FROM unnest(%(types)s::text[], %(ids)s::text[]) AS a (type, name)
CROSS JOIN LATERAL (
    SELECT * FROM outbox_parked p
    WHERE {_OF_AGGREGATE.format("p")} AND p.state = 'waiting'
      AND {_COVERED}
      AND p.seq < coalesce((
          SELECT min(b.seq) FROM outbox_parked b
          WHERE {_OF_AGGREGATE.format("b")}
            AND {_BLOCKS.format("b")} AND b.state <> 'waiting'), 9223372036854775807)
    ORDER BY p.seq LIMIT %(limit)s) AS waiting"""

# Dead letters to be tried again: the first of each aggregate.
REPLAYS: Final[LiteralString] = f"""
SELECT DISTINCT ON (aggregate_type, aggregate_id) {NAMES}, state, attempts, 0::float8, crashes
FROM outbox_parked
WHERE state = 'replaying' AND {IS_DUE} AND {MINE}
ORDER BY aggregate_type, aggregate_id, seq LIMIT %(limit)s"""

TRYING: Final = "UPDATE outbox_parked SET trying = true WHERE seq = ANY (%(seqs)s::bigint[])"

# Kafka has answered, or its client has waited for a while: a crash from now on does not count against them.
INNOCENT: Final = "UPDATE outbox_parked SET trying = false WHERE seq = ANY (%(seqs)s::bigint[]) AND trying"

RELEASED: Final = "SELECT outbox_release(%(seqs)s::bigint[])"

# Kafka would accept it: it is published with the next transaction.
ACCEPTED: Final = """
UPDATE outbox_parked SET state = 'waiting', trying = false, next_attempt_at = NULL
WHERE seq = ANY (%(seqs)s::bigint[]) AND state IN ('retrying', 'replaying')"""

# A replayed dead letter has used its attempts: after one more refusal it is a dead letter again. A refusal
# ends a series of crashes, because the event was sent and the relay still runs.
REFUSED: Final = """
UPDATE outbox_parked p
SET attempts = attempts + 1, last_error = r.error, trying = false, crashes = 0,
    next_attempt_at = clock_timestamp() + make_interval(secs => r.pause),
    state = CASE WHEN state = 'replaying' OR r.last THEN 'failed' ELSE 'retrying' END,
    failed_at = CASE WHEN state = 'replaying' OR r.last THEN clock_timestamp() END,
    command_due = (state = 'replaying' OR r.last) AND %(command)s
FROM unnest(%(seqs)s::bigint[], %(errors)s::text[], %(pauses)s::float8[], %(last)s::boolean[])
     AS r (seq, error, pause, last)
WHERE p.seq = r.seq AND p.state IN ('retrying', 'replaying')
RETURNING p.seq, p.state, p.attempts"""

# No attempt is counted, because there was no answer about the event itself.
POSTPONED: Final = """
UPDATE outbox_parked p
SET last_error = coalesce(r.error, last_error), trying = false,
    next_attempt_at = clock_timestamp() + make_interval(secs => r.pause)
FROM unnest(%(seqs)s::bigint[], %(errors)s::text[], %(pauses)s::float8[]) AS r (seq, error, pause)
WHERE p.seq = r.seq"""

# Their content cannot be read, so they cannot be tried.
UNREADABLE: Final = """
UPDATE outbox_parked p
SET state = 'failed', last_error = u.error, trying = false, failed_at = clock_timestamp()
FROM unnest(%(seqs)s::bigint[], %(errors)s::text[]) AS u (seq, error)
WHERE p.seq = u.seq AND p.state IN ('waiting', 'retrying', 'replaying')
RETURNING p.seq, p.attempts"""

# Released events of a refused batch: each is tried alone from now on.
SUSPECTED: Final = """
UPDATE outbox_parked p
SET state = 'retrying', trying = false, next_attempt_at = clock_timestamp(), last_error = s.error
FROM unnest(%(seqs)s::bigint[], %(errors)s::text[]) AS s (seq, error)
WHERE p.seq = s.seq AND p.state = 'waiting'"""

# The events that a relay was trying when it ended. If it crashed: an event that was in flight with others is
# tried alone immediately, and counts one crash at most, because another event may be the cause. An event that
# was alone waits before its next attempt, longer each time, because the process may have been killed from
# outside. After `most` crashes it is a dead letter. An event in the state `waiting` was released with others,
# unless it has crashes.
WAS_TRYING: Final[LiteralString] = f"""
UPDATE outbox_parked p
SET trying = false, crashes = total,
    next_attempt_at = clock_timestamp() + CASE WHEN alone THEN make_interval(
        secs => least(%(longest)s::float8, %(pause)s::float8 * 4 ^ (total - 1))) ELSE interval '0' END,
    state = CASE WHEN alone AND total >= %(most)s THEN 'failed'
                 WHEN %(crashed)s AND state = 'waiting' THEN 'retrying' ELSE state END,
    failed_at = CASE WHEN alone AND total >= %(most)s THEN clock_timestamp() END,
    command_due = alone AND total >= %(most)s AND %(command)s,
    last_error = CASE WHEN NOT %(crashed)s THEN last_error WHEN total = 1 THEN %(error)s
                      ELSE replace(%(error)s, 'crashed', 'crashed ' || total || ' times') END
FROM (
    SELECT tried, was, alone,
           CASE WHEN alone THEN before + 1 WHEN %(crashed)s THEN greatest(before, 1) ELSE before END AS total
    FROM (
        SELECT tried, was, before,
               %(crashed)s AND (was <> 'waiting' OR before > 0) AND count(*) OVER () = 1 AS alone
        FROM (SELECT seq AS tried, state AS was, crashes AS before
              FROM outbox_parked WHERE trying AND {MINE} FOR UPDATE) AS locked) AS marked) AS judged
WHERE seq = tried
RETURNING {NAMES}, was, state, attempts, last_error, alone, crashes,
          extract(epoch FROM next_attempt_at - clock_timestamp())::float8"""

# A relay crashed while it published this event alone: that is the first crash that counts for it.
CRASHED_ALONE: Final = """
UPDATE outbox_parked SET crashes = 1, next_attempt_at = clock_timestamp() + make_interval(secs => %(pause)s)
WHERE seq = %(seq)s AND state = 'retrying'"""

# Of events that were released together only the first is marked; another one may be the cause of the crash.
ALONE: Final[LiteralString] = f"""
UPDATE outbox_parked p SET state = 'retrying', next_attempt_at = clock_timestamp(), last_error = %(error)s
FROM unnest(%(types)s::text[], %(ids)s::text[]) AS a (type, name)
WHERE {_OF_AGGREGATE.format("p")} AND p.state = 'waiting'"""

ANY_REPLAYS: Final[LiteralString] = f"""
SELECT EXISTS (SELECT FROM outbox_parked WHERE state = 'replaying' AND {MINE})"""

# What a run until empty leaves unpublished: from the table, since an earlier process may have parked events.
# Also how many of them wait because a relay crashed while trying them, and the seconds until one is due.
UNPUBLISHED: Final[LiteralString] = f"""
SELECT count(*), count(*) FILTER (WHERE {_PAUSED}),
       coalesce(extract(epoch FROM min(next_attempt_at) FILTER (WHERE {_PAUSED}) - clock_timestamp()),
                0)::float8
FROM outbox_parked WHERE state <> 'discarded' AND {MINE}"""

# Dead letters for which the operator's command has not run. Without their content, which may be large.
COMMANDS: Final[LiteralString] = f"""
SELECT seq, id::text, aggregate_type, aggregate_id, event_type, attempts, coalesce(last_error, '')
FROM outbox_parked
WHERE command_due AND state = 'failed' AND seq <> ALL (%(under_way)s::bigint[]) AND {MINE}
ORDER BY failed_at LIMIT %(room)s"""
COMMANDS_DUE: Final = "UPDATE outbox_parked SET command_due = true WHERE seq = ANY (%(seqs)s::bigint[])"
# Locked in the order in which `ACT` locks them: an operator may replay them at this moment.
COMMANDS_RAN: Final = """
UPDATE outbox_parked SET command_due = false
WHERE seq IN (SELECT seq FROM outbox_parked WHERE seq = ANY (%(seqs)s::bigint[]) ORDER BY seq FOR UPDATE)"""

# Changes with each replay or discard. The highest number would miss an entry that commits late.
REVISION: Final = "SELECT count(*) FROM outbox_audit"

# --- dead letters ---------------------------------------------------------------------------------------

_MEANT: Final[LiteralString] = """
    (%(ids)s::uuid[] IS NULL OR id = ANY (%(ids)s::uuid[]))
    AND (%(event_type)s::text IS NULL OR event_type = %(event_type)s)
    AND (%(aggregate_type)s::text IS NULL OR aggregate_type = %(aggregate_type)s)
    AND (%(aggregate_id)s::text IS NULL OR aggregate_id = %(aggregate_id)s)
    AND (%(error)s::text IS NULL OR strpos(last_error, %(error)s) > 0)
    AND (%(since)s::timestamptz IS NULL OR failed_at >= %(since)s)
    AND (%(until)s::timestamptz IS NULL OR failed_at <= %(until)s)"""

COUNT_DEAD_LETTERS: Final[LiteralString] = f"""
SELECT coalesce(last_error, ''), count(*) FROM outbox_parked WHERE state = %(state)s AND {_MEANT}
GROUP BY 1 ORDER BY 2 DESC"""
LIST_DEAD_LETTERS: Final[LiteralString] = f"""
SELECT id::text, seq, left(aggregate_type, 999), left(aggregate_id, 999), left(event_type, 999), state,
       attempts, failed_at, created_at, coalesce(last_error, '')
FROM outbox_parked WHERE state = %(state)s AND {_MEANT}
ORDER BY failed_at DESC, seq DESC LIMIT %(limit)s"""

# Without content, and with the beginning of long texts: either may be too large to read.
SHOW_PARKED: Final = """
SELECT to_jsonb(p) || jsonb_build_object('actions', (
    SELECT coalesce(jsonb_agg(to_jsonb(a) - 'events' - 'filter' ORDER BY a.number), '[]'::jsonb)
    FROM outbox_audit a WHERE a.events @> ARRAY[p.seq]))
FROM (SELECT id, seq, tx, left(aggregate_type, 999) AS aggregate_type,
             left(aggregate_id, 999) AS aggregate_id, left(event_type, 999) AS event_type,
             left(idempotency_key, 999) AS idempotency_key,
             left(correlation_id, 999) AS correlation_id, left(causation_id, 999) AS causation_id,
             left(traceparent, 999) AS traceparent, version, created_at, state, attempts, next_attempt_at,
             last_error, parked_at, failed_at, trying, crashes, command_due
      FROM outbox_parked WHERE id = %(id)s) AS p
ORDER BY p.seq"""
# NULL if it is longer than `most`.
SHOW_CONTENT: Final = """
SELECT CASE WHEN octet_length(payload) <= %(most)s THEN payload END,
       CASE WHEN octet_length(headers) <= %(most)s THEN headers END, has_headers
FROM (SELECT CASE WHEN pg_column_size(payload) <= %(most)s THEN payload::text END AS payload,
             CASE WHEN pg_column_size(headers) <= %(most)s THEN headers::text END AS headers,
             headers IS NOT NULL AS has_headers
      FROM outbox_parked WHERE seq = %(seq)s OFFSET 0) AS content"""

# The state of replayed events; a published one is no longer in the table.
AFTER_REPLAY: Final[LiteralString] = """
SELECT id::text, seq, left(aggregate_type, 999), left(aggregate_id, 999), left(event_type, 999), state,
       attempts, failed_at, created_at, coalesce(last_error, '')
FROM outbox_parked WHERE seq = ANY (%(seqs)s::bigint[]) AND state <> 'discarded' ORDER BY seq"""

MEANT: Final[LiteralString] = f"SELECT seq FROM outbox_parked WHERE state = 'failed' AND {_MEANT}"
# Also writes the audit. A function, because operators may not write to the tables.
ACT: Final = """
SELECT outbox_act(%(action)s, %(seqs)s::bigint[], %(reason)s, %(filter)s::jsonb, %(on_behalf_of)s)"""

# Functions, because neither a relay's role nor an operator's may write the content of events.
MOVE_DUE: Final = "SELECT outbox_move_due(%(most)s)"
MOVE_DUE_AGAIN: Final = "SELECT outbox_move_due(%(most)s, %(again)s)"
COUNT_DELAYED: Final = "SELECT count(*) FROM outbox_delayed WHERE NOT %(overdue)s OR due <= clock_timestamp()"
DELAYED: Final = """
SELECT id, aggregate_type, aggregate_id, event_type, due, later_events_wait, last_error, created_at
FROM outbox_delayed WHERE NOT %(overdue)s OR due <= clock_timestamp() ORDER BY due, seq LIMIT %(limit)s"""
# Who has changed or locked these rows and has not ended. A prepared transaction has no process.
HOLDERS: Final = """
SELECT d.id, p.gid, l.pid, a.usename, a.application_name,
       to_char(a.xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
FROM outbox_delayed d
JOIN pg_locks l ON l.locktype = 'transactionid' AND l.granted AND l.transactionid = d.xmax
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_prepared_xacts p ON l.pid IS NULL
     AND p.transaction::text IN (l.transactionid::text, split_part(l.virtualtransaction, '/', 2))
WHERE d.id = ANY (%(ids)s) AND l.pid IS DISTINCT FROM pg_backend_pid()"""
CANCEL_DELAYED: Final = "SELECT outbox_cancel_delayed(%(ids)s, %(reason)s, %(actor)s)"
