"""All SQL of the consumer: that of its work, and that of an operator.

Tables are found by the search_path, like those of the handlers. Parameters of the work have casts, so that
each driver may send them as it likes.
"""

from __future__ import annotations

from typing import Final

# Whether a message of this key has to be handled first. The index has the key's hash.
_KEY_IS_TAKEN: Final = """
EXISTS (SELECT FROM inbox AS earlier
    WHERE earlier.state IN ('waiting', 'failed') AND (earlier.state = 'waiting' OR CAST({block} AS bool))
        AND earlier.source = {source} AND earlier.topic = {topic}
        AND earlier.key_hash = hashtextextended({key}, 0) AND earlier.key = {key}{before})"""


def _taken(source: str, topic: str, key: str, before: str = "") -> str:
    named = {"source": source, "topic": topic, "key": key, "block": "%(block)s"}
    return _KEY_IS_TAKEN.format(**named, before=before)


# From here on the handler runs: see handled_guard() in sql/consumer.
_HANDLING: Final = "(SELECT set_config('outbox.handling', 'on', true)) AS handling"
# The time at which the transaction began, which the row keeps. A transaction's number is not suitable: after
# a crash of the database, another transaction gets the number of an uncommitted one.
_BEGAN: Final = "CAST(extract(epoch FROM processed_at) AS text)"

# Returns when the transaction began, if the event is new and its key is free. While another transaction has
# the same event, the statement waits until that transaction ends. The bucket is given: for one row, the
# function takes longer to begin than to run.
RECORD: Final = f"""
INSERT INTO processed_events (event_id, source, bucket, content)
SELECT CAST(%(id)s AS uuid), %(source)s, CAST(%(bucket)s AS smallint), CAST(%(content)s AS uuid)
FROM {_HANDLING}
WHERE NOT {_taken("%(source)s", "%(topic)s", "%(key)s")}
ON CONFLICT DO NOTHING RETURNING {_BEGAN}"""

# The same for many: how many ids are new with free keys, and which, unless all are. In the order of ids, so
# that two that have the same ones cannot wait for each other. Arrays come as text: drivers need much time for
# lists.
_MANY: Final = """
unnest(CAST(CAST(%(ids)s AS text) AS uuid[]), CAST(CAST(%(topics)s AS text) AS text[]),
    CAST(CAST(%(keys)s AS text) AS text[]), CAST(CAST(%(contents)s AS text) AS text[]))
    WITH ORDINALITY AS it (id, topic, key, content, nth)"""
RECORD_MANY: Final = f"""
WITH new AS (
    INSERT INTO processed_events (event_id, source, bucket, content)
    SELECT id, %(source)s, processed_bucket(id), CAST(nullif(content, '') AS uuid)
    FROM {_MANY} CROSS JOIN {_HANDLING}
    WHERE NOT {_taken("%(source)s", "it.topic", "it.key")}
    ORDER BY id, nth
    ON CONFLICT DO NOTHING RETURNING event_id, processed_at)
SELECT CAST(count(*) AS int), CAST(extract(epoch FROM min(processed_at)) AS text),
    CASE WHEN count(*) < cardinality(CAST(CAST(%(ids)s AS text) AS uuid[]))
         THEN array_agg(CAST(event_id AS text)) END
FROM new"""

# Whether one of these keys has to wait. A statement that waits for another transaction goes on with what it
# saw at first: RECORD_MANY does not see what that one has put into the inbox.
TAKEN: Final = f"""
SELECT EXISTS (SELECT FROM unnest(CAST(CAST(%(topics)s AS text) AS text[]),
        CAST(CAST(%(keys)s AS text) AS text[])) AS it (topic, key)
    WHERE {_taken("%(source)s", "it.topic", "it.key")})"""

# Kafka's offset moves after the commit of this transaction: no crash or failover of the database may undo
# it, whatever the server, the role, the connection or the handler has set.
_DURABLE: Final = """set_config('synchronous_commit',
    CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)"""

# Behind the handler: nothing comes back where it has ended the transaction that it was given. Now it can be
# committed.
_IS_HANDLING: Final = "current_setting('outbox.handling', true) = 'on'"
_CLEAR_HANDLING: Final = f"concat({_DURABLE}, set_config('outbox.handling', '', true))"
# A commit that waits for the disk and for synchronous standbys, which get all that was committed before. It
# must write something: a large object, gone at once, needs no privilege, and no replication slot delivers it.
REACH_STANDBYS: Final = f"SELECT {_CLEAR_HANDLING}, lo_unlink(lo_create(0))"
END_HANDLING: Final = f"""
SELECT CASE WHEN {_IS_HANDLING} THEN {_CLEAR_HANDLING} <> '' END"""

# The same with its commit, as one message: in a transaction that is not the consumer's, the first expression
# fails, with one of these codes, and the COMMIT is not executed. It is short: each event has it parsed.
NOT_OURS: Final = ("22P02", "42704")
END_HANDLING_AND_COMMIT: Final = f"""
SELECT CAST(current_setting('outbox.handling') AS bool), {_DURABLE}, set_config('outbox.handling', '', true);
COMMIT"""

# Whether a transaction is committed whose handling the consumer has not ended, because its tables lack the
# guard. Only the transaction itself can have left this row.
_BEGAN_THEN: Final = "extract(epoch FROM processed_at) = CAST(CAST(%(began)s AS text) AS numeric)"
IS_RECORDED: Final = f"""
SELECT EXISTS (SELECT FROM processed_events
    WHERE event_id = CAST(%(id)s AS uuid) AND source = %(source)s
        AND bucket = processed_bucket(CAST(%(id)s AS uuid)) AND {_BEGAN_THEN})"""
IS_SETTLED: Final = f"""
SELECT EXISTS (SELECT FROM inbox
    WHERE seq = CAST(%(seq)s AS bigint) AND state = 'processed' AND {_BEGAN_THEN})"""

# Which of these are there: of those that were not recorded just now, or that a cache knows. The buckets are
# given, so that no more partitions are looked into than have to be.
KNOWN: Final = """
SELECT CAST(event_id AS text) FROM processed_events
WHERE event_id = ANY (CAST(%(ids)s AS uuid[])) AND source = %(source)s
    AND bucket = ANY (CAST(%(buckets)s AS smallint[]))"""

# What the events of these ids said when they were recorded.
CONTENTS: Final = """
SELECT CAST(event_id AS text), CAST(content AS text) FROM processed_events
WHERE event_id = ANY (CAST(%(ids)s AS uuid[])) AND source = %(source)s
    AND bucket = ANY (CAST(%(buckets)s AS smallint[])) AND content IS NOT NULL"""

# Messages that are new go into the inbox in their order; seq and id of those come back. The row has another
# id than the one recorded here if its handler committed a part of its work: its own id is recorded already.
RECEIVE: Final = f"""
WITH it AS MATERIALIZED (
    SELECT * FROM unnest(CAST(%(ids)s AS uuid[]), CAST(%(topics)s AS text[]), CAST(%(partitions)s AS int[]),
        CAST(%(offsets)s AS bigint[]), CAST(%(keys)s AS text[]), CAST(%(types)s AS text[]),
        CAST(%(message_keys)s AS bytea[]), CAST(%(payloads)s AS bytea[]), CAST(%(headers)s AS text[]),
        CAST(%(sent_at)s AS timestamptz[]), CAST(%(contents)s AS text[]), CAST(%(kept_ids)s AS uuid[]))
    WITH ORDINALITY AS it (id, topic, partition, place, key, type, message_key, payload, headers, sent_at,
        content, kept_id, nth)
), new AS (
    INSERT INTO processed_events (event_id, source, bucket, content)
    SELECT id, %(source)s, processed_bucket(id), CAST(nullif(content, '') AS uuid)
    FROM it CROSS JOIN (SELECT {_DURABLE}) AS durable ORDER BY id, nth
    ON CONFLICT DO NOTHING RETURNING event_id
), once AS (SELECT DISTINCT ON (id) it.* FROM it JOIN new ON event_id = id ORDER BY id, nth)
INSERT INTO inbox (message_id, source, topic, partition, "offset", key, event_type, message_key, payload,
    headers, sent_at, state, attempts, next_attempt_at, last_error, paused_since)
SELECT kept_id, %(source)s, topic, partition, place, key, type, message_key, payload,
    CAST(headers AS json), sent_at, %(state)s, CAST(%(attempts)s AS int),
    now() + make_interval(secs => CAST(%(seconds)s AS float8)),
    CAST(%(error)s AS text), CASE WHEN CAST(%(paused)s AS bool) THEN now() END
FROM once ORDER BY nth
RETURNING seq, CAST(message_id AS text)"""

# The first message of each key, where it is due and its handler is not left alone. What has been due longest
# comes first: by seq, the one try of a paused handler would always be of the oldest that fail. The keys
# behind them are read from the index alone; what is behind a message that waits is not looked at.
HEADS: Final = """
SELECT seq, attempts, event_type FROM inbox
WHERE seq IN (
        SELECT min(seq) FROM inbox
        WHERE state IN ('waiting', 'failed') AND (state = 'waiting' OR CAST(%(block)s AS bool))
            AND source = %(source)s
        GROUP BY topic, key_hash)
    AND state = 'waiting' AND next_attempt_at <= now()
    AND event_type <> ALL (CAST(%(held)s AS text[]))
    AND (event_type = ANY (CAST(%(named)s AS text[])) OR NOT CAST(%(other_held)s AS bool))
ORDER BY next_attempt_at, seq LIMIT CAST(%(limit)s AS int)"""

# The one behind it, so that a key's messages need no look at all keys each.
NEXT: Final = """
SELECT seq, attempts, event_type FROM (
    SELECT later.seq, later.attempts, later.event_type, later.next_attempt_at FROM inbox AS it
    JOIN inbox AS later ON later.source = it.source AND later.topic = it.topic
        AND later.key_hash = it.key_hash
        AND later.state IN ('waiting', 'failed') AND later.state = 'waiting'
    WHERE it.seq = CAST(%(seq)s AS bigint)
    ORDER BY later.seq LIMIT 1) AS first
WHERE next_attempt_at <= now()"""

# Stands until the attempt has ended otherwise.
CUT_OFF: Final = "the process ended while it handled the message"

# Committed before the handler begins: an attempt that crashes the process is counted. No other process takes
# the message until its next attempt is due.
CLAIM: Final = f"""
UPDATE inbox SET attempts = attempts + 1, last_error = '{CUT_OFF}',
    next_attempt_at = now() + make_interval(secs => CAST(%(seconds)s AS float8))
WHERE seq = (
    SELECT seq FROM inbox AS it
    WHERE seq = CAST(%(seq)s AS bigint) AND state = 'waiting' AND next_attempt_at <= now()
        AND attempts = CAST(%(attempts)s AS int)
        AND NOT {_taken("it.source", "it.topic", "it.key", " AND earlier.seq < it.seq")}
    FOR UPDATE SKIP LOCKED)
RETURNING topic, partition, "offset", message_key, payload, CAST(headers AS text), sent_at,
    CAST(message_id AS text)"""

# For the copy of a dead letter whose last attempt is over: no process has the message, and it is due again.
READ: Final = f"""
SELECT coalesce(last_error, '{CUT_OFF}'), topic, partition, "offset", message_key, payload,
    CAST(headers AS text), sent_at
FROM inbox
WHERE seq = CAST(%(seq)s AS bigint) AND state = 'waiting' AND next_attempt_at <= now()
    AND attempts = CAST(%(attempts)s AS int)
FOR UPDATE SKIP LOCKED"""

# Before the handler, in its transaction: one that ends it takes this back too. Nothing comes back where
# another process has the message or was quicker. If we are late, another process may have taken our attempt
# for cut off and made a dead letter: it is none.
FINISH: Final = f"""
UPDATE inbox SET state = 'processed', processed_at = now(), last_error = NULL
FROM {_HANDLING}
WHERE seq = (
    SELECT seq FROM inbox WHERE seq = CAST(%(seq)s AS bigint)
        AND (state = 'waiting' OR (state = 'failed' AND attempts = CAST(%(attempts)s AS int)))
    FOR UPDATE SKIP LOCKED)
RETURNING {_BEGAN}"""

# The id that a message of the inbox has now, if it differs from the one that was recorded when the message
# was received: it was refused as no event or as one with a reused id, or the settings have changed. In the
# transaction of its handler: after a failed attempt, it must not be a duplicate of itself. While another
# transaction has the same event, the statement waits until that transaction ends.
RECORD_ID: Final = """
INSERT INTO processed_events (event_id, source, bucket, content)
VALUES (CAST(%(id)s AS uuid), %(source)s, CAST(%(bucket)s AS smallint), CAST(%(content)s AS uuid))
ON CONFLICT DO NOTHING RETURNING true"""

# If it was recorded before: whether as the same event. With another content, the producer has reused the id.
IS_SAME: Final = """
SELECT content IS NOT DISTINCT FROM CAST(%(content)s AS uuid) FROM processed_events
WHERE event_id = CAST(%(id)s AS uuid) AND source = %(source)s AND bucket = CAST(%(bucket)s AS smallint)"""

# An outage: take back the attempts that were counted since the handler's last success, and their long waits.
TAKE_BACK: Final = """
UPDATE inbox SET attempts = greatest(attempts - 1, 0),
    next_attempt_at = least(next_attempt_at, now() + make_interval(secs => CAST(%(seconds)s AS float8)))
WHERE seq = ANY (CAST(%(seqs)s AS bigint[])) AND state = 'waiting'"""

# Their handler succeeded again.
HURRY: Final = """
UPDATE inbox SET next_attempt_at = now(), paused_since = NULL
WHERE seq = ANY (CAST(%(seqs)s AS bigint[])) AND state = 'waiting'"""

# Settled by its handler's own commit, and failed afterwards. That commit recorded the id that it has now: a
# replay must not find this record and take the message for a duplicate.
SPOILT: Final = """
UPDATE inbox SET state = 'failed', processed_at = NULL, last_error = %(error)s,
    message_id = CAST(%(id)s AS uuid)
WHERE seq = CAST(%(seq)s AS bigint) AND state = 'processed'"""

# The end of our attempt. An attempt that began after it, and an operator's replay or discard, are left alone;
# our result replaces another process's assumption of a crash. If its answer is lost, it can run again.
MISSED: Final = """
UPDATE inbox SET state = %(state)s, last_error = %(error)s, attempts = attempts - CAST(%(back)s AS int),
    next_attempt_at = now() + make_interval(secs => CAST(%(seconds)s AS float8)),
    paused_since = CASE CAST(%(back)s AS int) WHEN 1 THEN coalesce(paused_since, now()) END
WHERE seq = (
    SELECT seq FROM inbox WHERE seq = CAST(%(seq)s AS bigint) AND state IN ('waiting', 'failed')
        AND attempts = CAST(%(attempts)s AS int)
    FOR UPDATE SKIP LOCKED)"""

_PLACES: Final = """
unnest(CAST(%(topics)s AS text[]), CAST(%(partitions)s AS int[])) AS it (topic, partition)"""
_NEW_OWNER: Final = f"""
INSERT INTO partition_owners (source, consumer_group, topic, partition, owner)
SELECT CAST(%(source)s AS text), CAST(%(group)s AS text), topic, partition, CAST(%(owner)s AS uuid)
FROM {_PLACES} ORDER BY topic, partition
ON CONFLICT (source, consumer_group, topic, partition)"""

# Partitions without an owner become ours, and those whose owners have crashed at most so often. Those that
# another process left come back, and whether they are ours now. Again: the same answer.
OWN_FREE: Final = f"""
WITH ours AS ({_NEW_OWNER} DO UPDATE
    SET owner = excluded.owner, owned_since = now(), crashes = partition_owners.crashes + 1
    WHERE partition_owners.owner <> excluded.owner AND partition_owners.crashes < CAST(%(crashes)s AS int))
SELECT topic, partition, owner = CAST(%(owner)s AS uuid) OR crashes < CAST(%(crashes)s AS int)
FROM partition_owners JOIN {_PLACES} USING (topic, partition)
WHERE source = %(source)s AND consumer_group = %(group)s
    AND (owner <> CAST(%(owner)s AS uuid) OR crashes > 0)"""

# Taken over from the previous owner: none of the events that it was processing crashes the process.
OWN: Final = f"{_NEW_OWNER} DO UPDATE SET owner = excluded.owner, owned_since = now(), crashes = 0"

DISOWN: Final = f"""
DELETE FROM partition_owners USING {_PLACES}
WHERE source = %(source)s AND consumer_group = %(group)s AND owner = CAST(%(owner)s AS uuid)
    AND partition_owners.topic = it.topic AND partition_owners.partition = it.partition"""

# Whether all tables exist, checked before the first event. Tables of these names that an application made
# itself have no such triggers.
TABLES: Final = """
SELECT to_regclass('consumer_migrations') IS NOT NULL AND 2 = (
    SELECT count(*) FROM pg_trigger WHERE tgname = 'handled_guard' AND tgrelid IN (
        to_regclass('processed_events'), to_regclass('inbox')))"""

# What has made them, and the versions that it needs.
VERSIONS: Final = "SELECT name, needs FROM consumer_migrations"

# If not: whether the search_path leads to such tables of an application.
FOREIGN: Final = """
SELECT EXISTS (
    SELECT FROM unnest(ARRAY[to_regclass('processed_events'), to_regclass('inbox')]) AS it (relation)
    WHERE relation IS NOT NULL AND NOT EXISTS (
        SELECT FROM pg_trigger WHERE tgrelid = relation AND tgname = 'handled_guard'))"""

# The service's own table of processed events; without a schema, the one that the search_path leads to. Not by
# to_regclass, which fails where the role may not use the schema.
DEDUPE_TABLE: Final = """
SELECT CAST(relation.oid AS bigint), quote_ident(nspname) || '.' || quote_ident(relname),
    relkind IN ('r', 'p'),
    relation.oid IN (to_regclass('processed_events'), to_regclass('inbox')) AND EXISTS (
        SELECT FROM pg_trigger WHERE tgrelid = relation.oid AND tgname = 'handled_guard'),
    CAST(current_user AS text)
FROM pg_class AS relation JOIN pg_namespace AS space ON space.oid = relnamespace
WHERE relname = %(table)s AND relkind IN ('r', 'p', 'v', 'm', 'f')
    AND has_schema_privilege(space.oid, 'USAGE')
    AND CASE WHEN CAST(%(schema)s AS text) IS NULL THEN pg_table_is_visible(relation.oid)
             ELSE nspname = CAST(%(schema)s AS text) END"""

# Its columns, what an INSERT has to give, and what the role may do. The typmod counts four bytes more than
# characters.
DEDUPE_COLUMNS: Final = """
SELECT CAST(attname AS text), format_type(atttypid, NULL),
    CASE WHEN atttypmod > 4 AND atttypid IN (CAST('varchar' AS regtype), CAST('bpchar' AS regtype))
         THEN atttypmod - 4 END,
    attnotnull AND NOT atthasdef AND attidentity = '',
    has_column_privilege(attrelid, attnum, 'INSERT'), has_column_privilege(attrelid, attnum, 'SELECT'),
    has_column_privilege(attrelid, attnum, 'UPDATE')
FROM pg_attribute
WHERE attrelid = CAST(CAST(%(oid)s AS bigint) AS oid) AND attnum > 0 AND NOT attisdropped ORDER BY attnum"""

# The columns of each unique constraint that ON CONFLICT can name.
DEDUPE_UNIQUES: Final = """
SELECT CAST(json_agg(attname ORDER BY attnum) AS text)
FROM pg_index CROSS JOIN unnest(CAST(indkey AS int2[])) WITH ORDINALITY AS key (number, nth)
    JOIN pg_attribute ON attrelid = indrelid AND attnum = key.number AND nth <= indnkeyatts
WHERE indrelid = CAST(CAST(%(oid)s AS bigint) AS oid) AND indisunique AND indisvalid AND indimmediate
    AND indpred IS NULL AND indexprs IS NULL
GROUP BY indexrelid"""

# The values that are new there. While another transaction has the same one, the statement waits until that
# transaction ends. In the order of values, so that two that have the same ones cannot wait for each other.
# The constraint is named: another one that is violated is an error, and not a processed event.
DEDUPE: Final = """
INSERT INTO {table} AS theirs ({columns})
SELECT {contents}
FROM unnest(CAST(%(values)s AS text[]), CAST(%(payloads)s AS text[])) AS it (value, payload)
ORDER BY it.value
ON CONFLICT ({unique}) {conflict} RETURNING CAST(theirs.{column} AS text)"""

# In an inbox a row without that time is received, and not processed.
DEDUPE_INBOX: Final = "DO UPDATE SET {mark} = now() WHERE theirs.{mark} IS NULL"


# As the index `inbox_age` has it: the statements above do not take that one.
_OPEN: Final = "processed_at IS NULL"
_COUNT: Final = f"""
    (SELECT count(*) FROM (SELECT FROM inbox AS it
        WHERE it.source = sources.source AND state = '{{state}}' AND {_OPEN} LIMIT 100000) AS capped)"""

# How far the inbox of a source is behind, or that of each source with open messages. Reads no more than two
# indexes have of them: counts end at a cap, since the age says more from there on; each source is a look.
# A paused handler is tried with one message at a time: the latest of their times is that of its next try.
STATUS: Final = f"""
WITH RECURSIVE sources (source) AS (
    SELECT coalesce(CAST(%(source)s AS text), (SELECT min(source) FROM inbox WHERE {_OPEN}))
    UNION ALL
    SELECT (SELECT min(it.source) FROM inbox AS it WHERE it.source > sources.source AND {_OPEN})
    FROM sources WHERE CAST(%(source)s AS text) IS NULL AND sources.source IS NOT NULL)
SELECT source, {_COUNT.format(state="waiting")} AS waiting, {_COUNT.format(state="failed")} AS dead_letters,
    (SELECT extract(epoch FROM now() - min(received_at)) FROM inbox AS it
        WHERE it.source = sources.source AND state = 'waiting' AND {_OPEN}) AS oldest_seconds,
    (SELECT CAST(coalesce(json_agg(json_build_array(event_type, extract(epoch FROM now() - since),
            greatest(extract(epoch FROM next_try - now()), 0), error) ORDER BY since), '[]') AS text)
        FROM (SELECT event_type, min(paused_since) AS since,
                max(next_attempt_at) FILTER (WHERE is_over) AS next_try,
                (array_agg(last_error ORDER BY next_attempt_at DESC) FILTER (WHERE is_over))[1] AS error
            FROM inbox AS it CROSS JOIN LATERAL (SELECT last_error <> '{CUT_OFF}' AS is_over) AS try
            WHERE it.source = sources.source AND state = 'waiting' AND paused_since IS NOT NULL
            GROUP BY event_type) AS handlers) AS paused
FROM sources WHERE source IS NOT NULL ORDER BY source"""

# The selected dead letters; a condition that is not given is NULL.
_MEANT: Final = """
state = %(state)s
    AND (CAST(%(ids)s AS uuid[]) IS NULL OR message_id = ANY (CAST(%(ids)s AS uuid[])))
    AND (CAST(%(source)s AS text) IS NULL OR source = %(source)s)
    AND (CAST(%(event_type)s AS text) IS NULL OR event_type = %(event_type)s)
    AND (CAST(%(key)s AS text) IS NULL OR key = %(key)s)
    AND (CAST(%(error)s AS text) IS NULL OR strpos(last_error, %(error)s) > 0)
    AND (CAST(%(since)s AS timestamptz) IS NULL OR received_at >= %(since)s)
    AND (CAST(%(until)s AS timestamptz) IS NULL OR received_at < %(until)s)"""

COUNT_DEAD_LETTERS: Final = f"""
SELECT last_error, count(*) FROM inbox WHERE {_MEANT}
GROUP BY last_error ORDER BY count(*) DESC, last_error"""

# One event has the same id in every source: an operator who gives ids means one service.
SOURCES_OF_DEAD_LETTERS: Final = f"SELECT DISTINCT source FROM inbox WHERE {_MEANT} ORDER BY source"

LIST_DEAD_LETTERS: Final = f"""
SELECT seq, message_id::text, source, event_type, key, topic, partition, "offset", attempts, received_at,
    last_error, headers
FROM inbox WHERE {_MEANT} ORDER BY seq DESC LIMIT %(limit)s"""

# The payload as text where it is text, and its bytes in hexadecimal where it is not.
SHOW: Final = """
SELECT jsonb_build_object('source', it.source, 'message_id', it.message_id, 'state', it.state,
    'event_type', it.event_type, 'key', it.key, 'topic', it.topic, 'partition', it.partition,
    'offset', it."offset", 'attempts', it.attempts, 'last_error', it.last_error, 'sent_at', it.sent_at,
    'received_at', it.received_at, 'next_attempt_at', it.next_attempt_at, 'processed_at', it.processed_at,
    'actions', (SELECT coalesce(jsonb_agg(jsonb_build_object('at', at, 'actor', actor, 'action', action,
        'reason', reason) ORDER BY at), '[]') FROM inbox_audit WHERE inbox_audit.seq = it.seq)),
    payload, headers
FROM inbox AS it WHERE message_id = %(id)s ORDER BY it.seq"""

# All attempts are available again. An audit row for each message, in one statement with the change.
REPLAY: Final = f"""
WITH meant AS (
    UPDATE inbox SET state = 'waiting', attempts = 0, next_attempt_at = now()
    WHERE {_MEANT} RETURNING seq, message_id, source)
INSERT INTO inbox_audit (actor, action, reason, seq, message_id, source)
SELECT %(actor)s, 'replay', %(reason)s, seq, message_id, source FROM meant"""

DISCARD: Final = f"""
WITH meant AS (
    UPDATE inbox SET state = 'discarded', processed_at = now()
    WHERE {_MEANT} RETURNING seq, message_id, source)
INSERT INTO inbox_audit (actor, action, reason, seq, message_id, source)
SELECT %(actor)s, 'discard', %(reason)s, seq, message_id, source FROM meant"""

# `outbox consumer prune` checks each partition of the ring separately.
PARTITIONS: Final = """
SELECT inhrelid::regclass::text FROM pg_inherits
WHERE inhparent = 'processed_events'::regclass AND inhrelid <> 'processed_events_other'::regclass
ORDER BY 1"""

# Whether a partition has rows, and none to be kept. Only then is all of it read; every event would pay for an
# index.
IS_OVER: Final = """
SELECT EXISTS (SELECT FROM {partition})
   AND NOT EXISTS (SELECT FROM {partition} WHERE processed_at >= now() - %(keep)s)"""

# Only who handles an event of that old day waits: we for 50 ms, it while the rows are looked at once more.
LOCK_TIMEOUT: Final = "SET LOCAL lock_timeout = '50ms'"
LOCK: Final = "LOCK TABLE {partition} IN ACCESS EXCLUSIVE MODE"
EMPTY: Final = "TRUNCATE {partition}"

# Ids without a time share one partition: their rows go one by one, some at a time, so that no transaction is
# long.
DELETE_OTHERS: Final = """
DELETE FROM processed_events_other WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM processed_events_other WHERE processed_at < now() - %(keep)s LIMIT %(limit)s))"""

# What is dealt with goes from the inbox in the same way; what waits and dead letters stay.
DELETE_RECEIVED: Final = """
DELETE FROM inbox WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM inbox WHERE processed_at < now() - %(keep)s LIMIT %(limit)s))"""
