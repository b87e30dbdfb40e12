"""All SQL that makes the months of an existing table."""

from __future__ import annotations

from typing import Final

from outbox_pipelines.database.locks import AdvisoryLock

LOCK: Final = AdvisoryLock("%(key)s::bigint")
# How the table is partitioned, and by whom it can be changed.
TABLE: Final = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, p.partstrat = 'r' AND p.partnatts = 1,
       format_type(a.atttypid, NULL), pg_has_role(c.relowner, 'USAGE'), quote_ident(current_user),
       quote_ident(pg_get_userbyid(c.relowner)),
       date_trunc('month', clock_timestamp())
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_partitioned_table p ON p.partrelid = c.oid
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = p.partattrs[0] AND a.attnum > 0
WHERE c.oid = %(oid)s::oid"""
# Its newest partition, as a pattern for the next ones: name, bounds and storage. Times without a zone are
# UTC, as in the session. A bound that is not finite is NULL.
NEWEST: Final = r"""
SELECT n.nspname::text, c.relname::text,
       CASE WHEN isfinite(b.since::timestamptz) THEN b.since::timestamptz END,
       CASE WHEN isfinite(b.until::timestamptz) THEN b.until::timestamptz END,
       c.reloptions, s.spcname::text, c.relreplident = 'f'
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_partitioned_table p ON p.partrelid = i.inhparent
LEFT JOIN pg_tablespace s ON s.oid = c.reltablespace
CROSS JOIN LATERAL (
    SELECT (regexp_match(bound, 'FROM \(''([^'']+)''\)'))[1], (regexp_match(bound, 'TO \(''([^'']+)''\)'))[1]
    FROM pg_get_expr(c.relpartbound, c.oid) AS e (bound)) AS b (since, until)
WHERE i.inhparent = %(oid)s::oid AND c.oid <> p.partdefid
ORDER BY b.until::timestamptz DESC NULLS FIRST LIMIT 1"""
# The rights of others to the table: a clean-up needs them for each partition.
GRANTS: Final = """
SELECT e.privilege_type, CASE WHEN e.grantee = 0 THEN 'PUBLIC' ELSE e.grantee::regrole::text END,
       CASE WHEN e.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END
FROM pg_class c, aclexplode(c.relacl) e WHERE c.oid = %(oid)s::oid AND e.grantee <> c.relowner
ORDER BY 1, 2"""
GRANT: Final = "GRANT {privilege} ON {leaf} TO {grantee}{option}"
# The indexes are made before, so that the attach only connects them: it waits for no writer, and no writer
# waits for it. A default partition is locked for it, which the limits keep short.
CREATE: Final = """
CREATE TABLE {leaf} (LIKE {table} INCLUDING ALL EXCLUDING IDENTITY EXCLUDING COMMENTS){storage}{tablespace}"""
REPLICA_IDENTITY: Final = "ALTER TABLE {leaf} REPLICA IDENTITY FULL"
OWNER: Final = "ALTER TABLE {leaf} OWNER TO {owner}"
BRIEFLY: Final = "SET LOCAL statement_timeout = 40; SET LOCAL lock_timeout = 20"
ATTACH: Final = "ALTER TABLE {table} ATTACH PARTITION {leaf} FOR VALUES FROM ({since}) TO ({until})"
# The settings of pg_partman, if it is installed, and whether this role may read them: it makes the months of
# the tables in them, and may remove months, too.
PARTMAN: Final = """
SELECT format('%I.part_config', n.nspname),
       has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'part_config'
WHERE e.extname = 'pg_partman'"""
IS_PARTMANS: Final = "SELECT EXISTS (SELECT FROM {config} WHERE parent_table = %(table)s)"
