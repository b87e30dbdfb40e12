"""SQL of slots. Table names are unqualified: the search_path finds them."""

from typing import Final, LiteralString

from outbox_pipelines.database.locks import AdvisoryLock
from outbox_pipelines.relay.relay_sql import OPEN

# Which of these transactions have rows here: in one statement, so in one snapshot.
WITH_ROWS: Final[LiteralString] = f"""
SELECT pg_current_snapshot()::text,
       ARRAY(SELECT tx::text::bigint FROM outbox
             WHERE {OPEN} AND tx >= %(first)s::xid8 AND tx < %(end)s::xid8
             UNION
             SELECT tx::text::bigint FROM outbox WHERE {OPEN} AND tx = ANY (%(others)s::xid8[]))"""

# Everything that is committed now ends before this position. A message, because its commit flushes the log:
# what is not flushed is not delivered. `local` flushes it whatever the session's setting is, without waiting
# for a standby.
END_OF_LOG: Final = """
SELECT (pg_logical_emit_message(true, 'outbox', '') - '0/0')::bigint
FROM set_config('synchronous_commit', 'local', true)"""

# What the slot must deliver next, as far as it is committed; a few are enough to notice that it does not.
NOT_DELIVERED: Final[LiteralString] = f"""
SELECT DISTINCT tx::text::bigint FROM (
    SELECT tx FROM outbox WHERE {OPEN} AND tx >= %(first)s::xid8 ORDER BY tx LIMIT 1000) t"""

# Not flushed for it, unlike END_OF_LOG: a database without events writes nothing.
INSERTED_TO: Final = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"

SLOT_ERROR: Final = """
UPDATE outbox_shards SET slot_error = %(error)s
WHERE shard = %(shard)s AND epoch = %(epoch)s AND slot IS NOT NULL"""

# A frozen relay that has lost the shard keeps its connection until the server notices. Until the row says
# that the slot is made, its reader is the session that makes it.
END_READER: Final = """
SELECT pg_terminate_backend(r.active_pid)
FROM pg_replication_slots r JOIN outbox_shards s ON s.slot = r.slot_name
WHERE r.slot_name = %(slot)s AND r.database = current_database() AND r.active_pid IS NOT NULL
  AND s.slot_snapshot IS NOT NULL AND NOT s.slot_ends"""

# --- setup ----------------------------------------------------------------------------------------------

FACTS: Final = """
SELECT current_setting('wal_level'), quote_ident(current_user),
       EXISTS (SELECT FROM outbox_shards WHERE shards > 1 OR wanted IS NOT NULL)"""
# What CREATE PUBLICATION needs.
MAY_PUBLISH: Final = """
SELECT relowner::regrole::text, pg_has_role(relowner, 'USAGE'), quote_ident(current_database()),
       has_database_privilege(current_database(), 'CREATE')
FROM pg_class WHERE oid = 'outbox'::regclass"""
SETUP: Final = AdvisoryLock("hashtext(%(lock)s)", "0")
NAMED: Final = """
SELECT slot, slot_snapshot::text, slot_ends, slot_error FROM outbox_shards LIMIT 1"""
BEGIN_SLOT: Final = """
UPDATE outbox_shards SET slot = %(slot)s, slot_snapshot = NULL, slot_ends = false, slot_error = NULL
WHERE shards = 1 AND wanted IS NULL"""
SLOT_IS_MADE: Final = (
    "UPDATE outbox_shards SET slot_snapshot = %(begins)s WHERE slot = %(slot)s AND shards = 1"
)
END_SLOT: Final = """
UPDATE outbox_shards SET slot_ends = true WHERE slot IS NOT NULL"""
NO_SLOT: Final = """
UPDATE outbox_shards SET slot = NULL, slot_snapshot = NULL, slot_ends = false, slot_error = NULL
WHERE slot IS NOT NULL"""

# Of a command that has ended: the lock of set-up is free. Its slot is dropped with the session.
END_MAKER: Final = """
SELECT pg_terminate_backend(r.active_pid)
FROM pg_replication_slots r JOIN outbox_shards s ON s.slot = r.slot_name
WHERE r.database = current_database() AND r.active_pid IS NOT NULL AND s.slot_snapshot IS NULL"""

# What a slot is made in, to see its first snapshot.
BEGIN_SNAPSHOT: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
# In the transaction that has made the slot: the slot delivers exactly what this snapshot does not see.
FIRST_SNAPSHOT: Final = "SELECT pg_current_snapshot()::text"

# Whatever it was invalidated for, its status is lost as soon as no session reads it.
EXISTING_SLOT: Final = """
SELECT database, plugin, wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = %(slot)s"""

# NULL: there is none. All columns and rows are published if the publication names none; only PostgreSQL 15
# and later can name some.
PUBLICATION: Final = """
SELECT p.pubinsert, p.pubviaroot,
       t.tablename IS NOT NULL AND to_jsonb(r) ->> 'prattrs' IS NULL AND to_jsonb(r) ->> 'prqual' IS NULL
FROM pg_publication p
LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = 'outbox'::regclass
LEFT JOIN pg_publication_tables t ON t.pubname = p.pubname
    AND (t.schemaname, t.tablename) = (SELECT n.nspname, c.relname
                                       FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                                       WHERE c.oid = 'outbox'::regclass)
WHERE p.pubname = %(slot)s"""

PUBLICATION_OWNER: Final = """
SELECT pubowner::regrole::text, pg_has_role(pubowner, 'USAGE') FROM pg_publication WHERE pubname = %(slot)s"""

# Those that are like ours, of the outbox alone. Their names end as `slot_name` lets them: in the schema
# or a digest.
SIMILAR_PUBLICATIONS: Final = """
SELECT p.pubname::text FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
WHERE p.pubinsert AND p.pubviaroot AND NOT (p.pubupdate OR p.pubdelete OR p.pubtruncate)
  AND p.pubname ~ %(pattern)s AND p.pubname <> ALL (%(names)s)
GROUP BY p.pubname HAVING array_agg(r.prrelid) = ARRAY['outbox'::regclass::oid] ORDER BY 1"""

IDS: Final[LiteralString] = f"""
SELECT tx::text::bigint, id::text, aggregate_type, event_type, extract(epoch FROM created_at)::float8
FROM outbox WHERE {OPEN} AND tx = ANY (%(transactions)s::xid8[])"""

# Of the table or of its partitions. The oldest, because a slot is decoded as the database was then.
OLDEST_PUBLICATION: Final = """
SELECT p.pubname::text
FROM pg_publication p JOIN pg_publication_tables t ON t.pubname = p.pubname
JOIN pg_namespace n ON n.nspname = t.schemaname
JOIN pg_class c ON (c.relname, c.relnamespace) = (t.tablename, n.oid)
WHERE c.oid = 'outbox'::regclass
   OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'outbox'::regclass)
ORDER BY p.oid LIMIT 1"""

# What a new slot waits for: every transaction that runs when it begins.
LONGEST_TRANSACTIONS: Final = """
SELECT pid, coalesce(usename, '?'), coalesce(nullif(application_name, ''), 'no application name'),
       round(extract(epoch FROM clock_timestamp() - xact_start))::int
FROM pg_stat_activity
WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() AND pid <> %(pid)s
ORDER BY xact_start LIMIT 1"""

# --- cut-over -------------------------------------------------------------------------------------------

# Whether a relay reads the slot, and whether one runs at all.
IS_READ: Final = """
SELECT EXISTS (SELECT FROM pg_replication_slots r WHERE r.slot_name = s.slot AND r.active),
       s.owner IS NOT NULL AND s.heartbeat > clock_timestamp() - interval '30 seconds'
FROM outbox_shards s WHERE s.slot IS NOT NULL"""
