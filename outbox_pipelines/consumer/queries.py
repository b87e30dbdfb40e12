"""The consumer's SQL. Tables are found by the search_path, like those of the handlers."""

from __future__ import annotations

from typing import Final

# A row comes back if the event is new. While another transaction has the same event, it waits for what
# becomes of that. No column is returned: that would need more rights than INSERT.
RECORD: Final = """
INSERT INTO processed_events (event_id, source, bucket)
VALUES (CAST(%(event_id)s AS uuid), %(source)s, processed_bucket(CAST(%(event_id)s AS uuid)))
ON CONFLICT DO NOTHING RETURNING true"""

# `outbox consumer prune` looks at every partition of the ring by itself.
PARTITIONS: Final = """
SELECT inhrelid::regclass::text FROM pg_inherits
WHERE inhparent = 'processed_events'::regclass AND inhrelid <> 'processed_events_other'::regclass
ORDER BY 1"""

# Whether a partition holds rows, and none that is to be kept. All of it is read only where that is so; an
# index for it would be paid for by every event.
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
