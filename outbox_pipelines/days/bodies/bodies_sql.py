"""SQL of references to bodies, for PostgreSQL (names unqualified: the search_path finds them) and DuckDB."""

from typing import Final

# Whose events protect bodies. A restored or copied database is another outbox.
OWNER: Final = """
SELECT system_identifier, current_database(), current_schema() FROM pg_control_system()"""

# Where rows can be: the partitions of days, attached or not, and others that an owner has attached.
PLACES: Final = """
SELECT d.day, d.state, d.manifest_sha256, d.closed_at, n.nspname, c.relname
FROM outbox_days d
LEFT JOIN pg_class c ON c.oid = to_regclass('outbox_' || to_char(d.day, 'YYYYMMDD'))
LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
UNION ALL
SELECT NULL, 'open', NULL, NULL, n.nspname, c.relname
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE i.inhparent = 'outbox'::regclass
  AND i.inhrelid NOT IN (SELECT to_regclass('outbox_' || to_char(day, 'YYYYMMDD')) FROM outbox_days
                         WHERE to_regclass('outbox_' || to_char(day, 'YYYYMMDD')) IS NOT NULL)
ORDER BY 1"""

# Whatever may mean a body, wherever the word stands: a mistake in a reference must not cost its body.
MENTIONS: Final = """
SELECT id::text, payload::text FROM {table} WHERE payload::text LIKE '%outbox-body%'"""
FILE_MENTIONS: Final = "SELECT id, payload FROM read_parquet($file) WHERE contains(payload, 'outbox-body')"

TODAY: Final = "SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date"

# Those whose outcome is open, and that wrote into the outbox: a row of a backfill is in another day than its
# transaction, so the lock that closes a day does not find it. No process has them, see `HOLDERS`.
PREPARED: Final = """
SELECT p.gid
FROM pg_prepared_xacts p
JOIN pg_locks own ON own.locktype = 'transactionid' AND own.transactionid = p.transaction
JOIN pg_locks l ON l.virtualtransaction = own.virtualtransaction AND l.pid IS NULL
WHERE p.database = current_database() AND l.relation IN (
    SELECT relid FROM pg_partition_tree('outbox') UNION ALL SELECT 'outbox_delayed'::regclass)
ORDER BY p.prepared LIMIT 1"""

ADOPTION_EXISTS: Final = "SELECT to_regclass('outbox_adopted') IS NOT NULL"
# Until its switch, and after the way back, writers wrote into that table.
ADOPTED: Final = """
SELECT schema || '.' || name, state, (switched_at AT TIME ZONE 'UTC')::date FROM outbox_adopted"""
