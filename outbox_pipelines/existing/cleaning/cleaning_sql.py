"""All SQL of the clean-up. `{published}` and `{old}` are conditions of a row, made from the mapping."""

from __future__ import annotations

from typing import Final

from outbox_pipelines.database.locks import AdvisoryLock

# One clean-up of a table at a time. Not the locks of relays: they continue.
LOCK: Final = AdvisoryLock("%(key)s::bigint")
# No lock waits for the disk: after a crash of the server, the next run deletes the same rows. A file gets its
# name only when the deletion of its rows is on disk.
TUNE: Final = "SET synchronous_commit = off"
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
AT_LENGTH: Final = "SET statement_timeout = 0; SET lock_timeout = 0"
NOTHING: Final = "SELECT"

# Those of the versions that are there all the same.
STILL: Final = """
SELECT count(*)
FROM unnest(%(places)s::tid[], %(transactions)s::xid[], %(ids)s::text[]) AS k (place, transaction, id),
LATERAL (SELECT FROM ONLY {leaf} AS t
         WHERE t.ctid = k.place AND t.xmin = k.transaction AND t.{id}::text IS NOT DISTINCT FROM k.id
           AND {published} OFFSET 0) AS found"""
# Not a message of pg_logical_emit_message: consumers of logical decoding would get it.
WRITTEN: Final = "SELECT pg_current_wal_insert_lsn()::text"
IS_ON_DISK: Final = "SELECT pg_current_wal_flush_lsn() >= %(written)s::pg_lsn"

# --- months -----------------------------------------------------------------------------------------------

# Partitions by one column; a default partition is none. A day after its end at the earliest: a transaction
# that began before the end still writes into it, and would fail. Times without a zone are UTC, as in the
# session.
MONTHS: Final = r"""
SELECT oid, schema, name, coalesce(until <= least(%(cutoff)s, now() - interval '1 day'), false) AS has_ended,
       row_number() OVER (ORDER BY until DESC NULLS FIRST) = 1 AS is_newest, is_ours
FROM (SELECT c.oid::bigint AS oid, n.nspname::text AS schema, c.relname::text AS name,
             (regexp_match(pg_get_expr(c.relpartbound, c.oid),
                           'TO \(''([^'']+)''\)'))[1]::timestamptz AS until,
             obj_description(c.oid, 'pg_class') IS NOT DISTINCT FROM %(remark)s AS is_ours
      FROM pg_partitioned_table p
      JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
      JOIN pg_inherits i ON i.inhparent = p.partrelid
      JOIN pg_class c ON c.oid = i.inhrelid AND c.relkind = 'r' JOIN pg_namespace n ON n.oid = c.relnamespace
      WHERE p.partrelid = %(oid)s::oid AND p.partstrat = 'r' AND p.partnatts = 1 AND a.attname = %(column)s
        AND c.oid <> p.partdefid) AS month
ORDER BY until"""
# Only an owner detaches.
OWNS: Final = """
SELECT pg_has_role(relowner, 'USAGE'), quote_ident(current_user), quote_ident(pg_get_userbyid(relowner))
FROM pg_class WHERE oid = %(oid)s::oid"""
# Views and functions that name the partition would prevent the DROP when it is detached already.
DEPENDENT: Final = """
SELECT pg_describe_object(classid, objid, 0) FROM pg_depend
WHERE refclassid = 'pg_class'::regclass AND refobjid = %(leaf)s::oid AND deptype = 'n'
  AND classid IN ('pg_rewrite'::regclass, 'pg_proc'::regclass) LIMIT 1"""
# What keeps a month: rows that are not published, and rows that are younger.
LEFT: Final = """
SELECT count(*) FILTER (WHERE ({published}) IS NOT TRUE), count(*) FILTER (WHERE ({old}) IS NOT TRUE)
FROM ONLY {leaf} AS t"""
# One statement, which the server ends in time whatever becomes of this process. Without ONLY, LOCK would wait
# for all partitions.
DETACH: Final = """
BEGIN
    LOCK TABLE ONLY {table} IN ACCESS EXCLUSIVE MODE;
    LOCK TABLE ONLY {leaf} IN ACCESS EXCLUSIVE MODE;
    IF EXISTS (SELECT FROM ONLY {leaf} AS t WHERE {unpublished}) THEN
        RAISE SQLSTATE '{unpublished_state}';
    END IF;
    ALTER TABLE {table} DETACH PARTITION {leaf};
    COMMENT ON TABLE {leaf} IS {remark};
END"""
UNPUBLISHED: Final = "OB001"
DO: Final = "DO {}"
# Found again after a kill.
DETACHED: Final = """
SELECT n.nspname::text, c.relname::text
FROM pg_description d JOIN pg_class c ON c.oid = d.objoid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE d.classoid = 'pg_class'::regclass AND d.objsubid = 0 AND d.description = %(remark)s
  AND c.relkind = 'r' AND NOT c.relispartition ORDER BY 1, 2"""
# Attached again by an operator: what becomes of it later is not ours.
FORGET: Final = "COMMENT ON TABLE {leaf} IS NULL"
# Sessions that write into it by its own name; readers continue.
KEEP: Final = "LOCK TABLE {leaf} IN SHARE MODE"
DROP: Final = "DROP TABLE {leaf}"

# --- pg_partman -------------------------------------------------------------------------------------------

RETENTION: Final = """
SELECT retention::text, infinite_time_partitions FROM {config} WHERE parent_table = %(table)s"""
# Partitions of the old kind, which no statement here reaches.
CHILDREN: Final = """
SELECT count(*) FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent
WHERE i.inhparent = %(oid)s::oid AND p.relkind = 'r'"""
