"""All SQL of what an operator asks a consumer's tables: dead letters, and rows that are removed."""

from __future__ import annotations

from typing import Final

# How far a source's inbox is behind; the count ends at a cap, since the age says more from there on.
STATUS: Final = """
SELECT source,
    (SELECT count(*) FROM (SELECT FROM inbox AS it WHERE it.source = sources.source AND state = 'waiting'
        AND state IN ('waiting', 'failed') LIMIT 100000) AS capped) AS waiting,
    (SELECT count(*) FROM inbox AS it WHERE it.source = sources.source AND state = 'failed') AS dead_letters,
    (SELECT extract(epoch FROM now() - min(received_at)) FROM inbox AS it
        WHERE it.source = sources.source AND state = 'waiting') AS oldest_seconds
FROM (SELECT DISTINCT source FROM inbox WHERE state IN ('waiting', 'failed')) AS sources ORDER BY source"""

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
    last_error
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
