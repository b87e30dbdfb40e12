"""All SQL of the clean-up. `{published}` and `{old}` are conditions of a row, made from the mapping."""

from __future__ import annotations

from typing import Final

# One clean-up of a table at a time. Not the locks of relays: they continue.
TRY_LOCK: Final = "SELECT pg_try_advisory_lock(%(key)s::bigint)"
# No lock waits for the disk: after a crash of the server, the next run deletes the same rows. A file gets its
# name only when the deletion of its rows is on disk.
TUNE: Final = "SET synchronous_commit = off; SET statement_timeout = 0; SET lock_timeout = 0"
CUTOFF: Final = """
SELECT now() - make_interval(secs => %(seconds)s), s.system_identifier || '-' || d.oid
FROM pg_control_system() AS s, pg_database AS d WHERE d.datname = current_database()"""
# Rights to the parent are enough for a relay, but rows are deleted from each partition.
LACKING: Final = """
SELECT format('%%I.%%I', n.nspname, c.relname), quote_ident(current_user)
FROM (SELECT %(oid)s::oid UNION SELECT relid FROM pg_partition_tree(%(oid)s::oid::regclass)) AS p (oid)
JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p')
  AND NOT (has_table_privilege(c.oid, 'SELECT') AND has_any_column_privilege(c.oid, 'UPDATE')
           AND has_table_privilege(c.oid, 'DELETE'))
ORDER BY c.oid <> %(oid)s::oid, 1"""

# --- rows -------------------------------------------------------------------------------------------------

# The tables that contain rows, with their size in blocks.
LEAVES: Final = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text,
       (pg_relation_size(c.oid) / current_setting('block_size')::int)::bigint
FROM (SELECT %(oid)s::oid UNION SELECT relid FROM pg_partition_tree(%(oid)s::oid::regclass)) AS p (oid)
JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' ORDER BY 2, 3"""
# By place in the table: no index over the time of publishing is needed, and nothing is read twice. A row
# version is named by its place and its transaction.
ROWS: Final = """
SELECT t.ctid::text, t.xmin::text, t.{id}::text FROM ONLY {leaf} AS t
WHERE t.ctid >= %(start)s::tid AND t.ctid < %(end)s::tid AND {published} AND {old}"""
COUNT: Final = """
SELECT count(*) FROM ONLY {leaf} AS t
WHERE t.ctid >= %(start)s::tid AND t.ctid < %(end)s::tid AND {published} AND {old}"""
# What follows FROM, for the rows that are archived.
ARCHIVED: Final = """ONLY {leaf} AS t
WHERE t.ctid >= {start}::tid AND t.ctid < {end}::tid AND {published} AND {old}"""
# Exactly these versions, if they are still published. A locked row is left to the next run. LATERAL: a join
# could read the whole table for each batch.
DELETE: Final = """
DELETE FROM ONLY {leaf} AS d WHERE d.ctid = ANY (ARRAY(
    SELECT found.place
    FROM unnest(%(places)s::tid[], %(transactions)s::xid[], %(ids)s::text[]) AS k (place, transaction, id),
    LATERAL (SELECT t.ctid FROM ONLY {leaf} AS t
             WHERE t.ctid = k.place AND t.xmin = k.transaction AND t.{id}::text IS NOT DISTINCT FROM k.id
               AND {published} FOR UPDATE SKIP LOCKED) AS found (place)))"""
# A statement of its own is a transaction of its own: no lock waits for an answer of this process.
BRIEFLY: Final = "SET statement_timeout = {most}; SET lock_timeout = {wait}"
AT_LENGTH: Final = "SET statement_timeout = 0; SET lock_timeout = 0"
NOTHING: Final = "SELECT"

# Those of the versions that are there all the same.
STILL: Final = """
SELECT count(*)
FROM unnest(%(places)s::tid[], %(transactions)s::xid[], %(ids)s::text[]) AS k (place, transaction, id),
LATERAL (SELECT FROM ONLY {leaf} AS t
         WHERE t.ctid = k.place AND t.xmin = k.transaction AND t.{id}::text IS NOT DISTINCT FROM k.id
           AND {published} OFFSET 0) AS found"""
WRITTEN: Final = "SELECT pg_current_wal_insert_lsn()::text"
IS_ON_DISK: Final = "SELECT pg_current_wal_flush_lsn() >= %(written)s::pg_lsn"

# A commit that waits until it, and all that was committed before it, is on disk; one that writes nothing does
# not wait.
TO_DISK: Final = "SET LOCAL synchronous_commit = on; SELECT pg_logical_emit_message(true, 'outbox', '')"

# --- months -----------------------------------------------------------------------------------------------

# Partitions by one column, with the end of each. A default partition has none.
MONTHS: Final = r"""
SELECT c.oid::bigint, n.nspname::text, c.relname::text,
       (regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \(''([^'']+)''\)'))[1]
FROM pg_partitioned_table p
JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
JOIN pg_inherits i ON i.inhparent = p.partrelid
JOIN pg_class c ON c.oid = i.inhrelid AND c.relkind = 'r' JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.partrelid = %(oid)s::oid AND p.partstrat = 'r' AND p.partnatts = 1 AND a.attname = %(column)s
ORDER BY 4"""
ENDED: Final = "SELECT {end}::timestamptz <= %(cutoff)s"
# What keeps a month: rows that are not published, and rows that are younger.
LEFT: Final = """
SELECT count(*) FILTER (WHERE ({published}) IS NOT TRUE), count(*) FILTER (WHERE ({old}) IS NOT TRUE)
FROM ONLY {leaf} AS t"""
UNPUBLISHED: Final = "SELECT EXISTS (SELECT FROM ONLY {leaf} AS t WHERE {unpublished})"
LOCK: Final = "LOCK TABLE {table}, {leaf} IN ACCESS EXCLUSIVE MODE"
DETACH: Final = "ALTER TABLE {table} DETACH PARTITION {leaf}"
# Found again after a kill.
REMARK: Final = "COMMENT ON TABLE {leaf} IS {remark}"
DETACHED: Final = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text
FROM pg_description d JOIN pg_class c ON c.oid = d.objoid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE d.classoid = 'pg_class'::regclass AND d.objsubid = 0 AND d.description = %(remark)s
  AND c.relkind = 'r' AND NOT c.relispartition ORDER BY 2, 3"""
DROP: Final = "DROP TABLE {leaf}"

# --- pg_partman -------------------------------------------------------------------------------------------

# Its settings, if it is installed and this role may read them.
PARTMAN: Final = """
SELECT format('%I.part_config', n.nspname)
FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'part_config'
WHERE e.extname = 'pg_partman' AND has_schema_privilege(n.oid, 'USAGE')
  AND has_table_privilege(c.oid, 'SELECT')"""
RETENTION: Final = """
SELECT retention::text, infinite_time_partitions FROM {config} WHERE parent_table = %(table)s"""
