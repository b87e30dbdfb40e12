"""SQL of migrating and comparing the schema: what describes it, what endangers it, how a migration locks.

Table names are unqualified: the search_path finds them.
"""

from __future__ import annotations

import zlib
from typing import Final

# One line for each object that the migrations create. The search_path is the schema, so that every name is
# printed relative to it. Days are left out, because they are created from the table, except for disabled
# triggers. The server's version decides which function generates ids (0001), and how definitions are printed;
# the form says which version of this query printed them.
DESCRIBE: Final = """
WITH here AS (
    SELECT oid AS schema, quote_ident(nspname) AS name FROM pg_namespace WHERE nspname = %(schema)s
),
relations AS (
    SELECT c.* FROM pg_class c, here
    WHERE c.relnamespace = here.schema AND c.relname LIKE 'outbox%%'
      AND NOT c.relispartition AND c.relname !~ '^outbox_(restored_)?[0-9]{8}$'
),
lines AS (
    SELECT format('server %%s form %%s',
                  current_setting('server_version_num')::int / 10000, %(form)s::text) AS line
    UNION ALL
    SELECT format('table %%s%%s', r.relname, CASE r.relpersistence WHEN 'u' THEN ' (unlogged)' END)
    FROM relations r WHERE r.relkind IN ('r', 'p')
    UNION ALL
    SELECT format('row security of %%s: %%s', r.relname,
                  CASE WHEN r.relrowsecurity OR r.relforcerowsecurity THEN 'on' ELSE 'off' END)
    FROM relations r WHERE r.relkind IN ('r', 'p')
    UNION ALL
    SELECT format('rules of %%s: %%s', r.relname,
                  coalesce(string_agg(w.rulename, ', ' ORDER BY w.rulename), 'none'))
    FROM relations r LEFT JOIN pg_rewrite w ON w.ev_class = r.oid WHERE r.relkind IN ('r', 'p')
    GROUP BY r.relname
    UNION ALL
    -- A day that is attached is described by its name alone: see above.
    SELECT format('partition %%s.%%s%%s', r.relname, c.relname,
                  CASE WHEN c.oid = p.partdefid THEN ', the default: it prevents that days are dropped' END)
    FROM relations r JOIN pg_inherits i ON i.inhparent = r.oid JOIN pg_class c ON c.oid = i.inhrelid
    LEFT JOIN pg_partitioned_table p ON p.partrelid = r.oid
    WHERE c.relkind IN ('r', 'p', 'f') AND (c.relname !~ '^outbox_[0-9]{8}$' OR c.oid = p.partdefid)
    UNION ALL
    SELECT format('foreign key %%s of %%s to %%s', o.conname, o.conrelid::regclass, r.relname)
    FROM relations r JOIN pg_constraint o ON o.confrelid = r.oid AND o.contype = 'f' AND o.conparentid = 0
    WHERE o.conrelid NOT IN (SELECT oid FROM relations)
    UNION ALL
    SELECT format('trigger %%s.%%s', t.tgrelid::regclass, t.tgname)
    FROM pg_trigger t JOIN pg_inherits leaf ON leaf.inhrelid = t.tgrelid
    WHERE leaf.inhparent IN (SELECT oid FROM relations) AND t.tgparentid = 0 AND NOT t.tgisinternal
      AND t.tgname NOT IN ('outbox_no_truncate', 'outbox_closed')
    UNION ALL
    SELECT format('column %%s.%%s %%s%%s%%s%%s%%s', r.relname, a.attname,
                  format_type(a.atttypid, a.atttypmod),
                  CASE WHEN a.attnotnull THEN ' not null' END,
                  CASE WHEN a.attidentity <> '' THEN ' identity' END,
                  CASE WHEN a.attgenerated <> '' THEN ' generated' END,
                  ' default ' || replace(pg_get_expr(d.adbin, d.adrelid), 'outbox_uuidv7()', 'uuidv7()'))
    FROM relations r
    JOIN pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN pg_attrdef d ON d.adrelid = r.oid AND d.adnum = a.attnum
    WHERE r.relkind IN ('r', 'p')
    UNION ALL
    SELECT format('constraint %%s.%%s %%s', r.relname, o.conname, pg_get_constraintdef(o.oid, true))
    FROM relations r JOIN pg_constraint o ON o.conrelid = r.oid WHERE o.contype <> 'n'
    UNION ALL
    SELECT format('index %%s %%s', x.relname, pg_get_indexdef(i.indexrelid, 0, true))
    FROM relations r JOIN pg_index i ON i.indrelid = r.oid JOIN pg_class x ON x.oid = i.indexrelid
    UNION ALL
    SELECT format('trigger %%s.%%s%%s %%s', coalesce(r.relname, t.tgrelid::regclass::text), t.tgname,
                  CASE t.tgenabled WHEN 'D' THEN ' (disabled)' WHEN 'R' THEN ' (replica only)' END,
                  pg_get_triggerdef(t.oid, true))
    FROM pg_trigger t
    LEFT JOIN relations r ON r.oid = t.tgrelid
    LEFT JOIN pg_inherits leaf ON leaf.inhrelid = t.tgrelid AND t.tgenabled IN ('D', 'R')
    -- `outbox adopt back` makes that one.
    WHERE t.tgname <> 'adopted_returned'
      AND (r.oid IS NOT NULL AND NOT t.tgisinternal OR leaf.inhparent IN (SELECT oid FROM relations))
    UNION ALL
    SELECT format('sequence %%s %%s increment %%s cache %%s%%s', r.relname, s.seqtypid::regtype,
                  s.seqincrement, s.seqcache, CASE WHEN s.seqcycle THEN ' cycle' END)
    FROM relations r JOIN pg_sequence s ON s.seqrelid = r.oid
    UNION ALL
    SELECT format('view %%s %%s', r.relname, md5(pg_get_viewdef(r.oid)))
    FROM relations r WHERE r.relkind = 'v'
    UNION ALL
    SELECT format('function %%s(%%s) %%s', p.proname, pg_get_function_arguments(p.oid), md5(concat_ws(
               ' ', pg_get_function_result(p.oid), p.prolang, p.prokind, p.provolatile, p.proparallel,
               p.proisstrict, p.prosecdef, p.prosrc,
               pg_get_function_sqlbody(p.oid),
               (SELECT string_agg(CASE WHEN c = format('search_path=pg_catalog, %%s, pg_temp', here.name)
                                       THEN 'search_path' ELSE c END, ' ' ORDER BY c)
                FROM unnest(p.proconfig) c))))
    FROM pg_proc p, here WHERE p.pronamespace = here.schema AND p.proname LIKE 'outbox%%'
    UNION ALL
    -- What runs with the owner's rights, or as a trigger, is called by those alone who were granted it. Every
    -- role may call outbox_may_write, but need not in a hardened database.
    SELECT format('function %%s may be called by every role', p.proname)
    FROM pg_proc p, here WHERE p.pronamespace = here.schema AND p.proname LIKE 'outbox%%'
      AND (p.prosecdef OR p.prorettype = 'trigger'::regtype OR p.proname = 'outbox_unrestricted')
      AND p.proname <> 'outbox_may_write'
      AND (p.proacl IS NULL OR EXISTS (SELECT FROM aclexplode(p.proacl) WHERE grantee = 0))
)
SELECT line FROM lines ORDER BY 1
"""
FORM: Final = f"{zlib.crc32(DESCRIBE.encode()):08x}"

# A role that may create objects in the schema could have its own called instead of PostgreSQL's: PostgreSQL
# chooses the function or operator that fits a call best, wherever in the search_path it is.
OPEN_TO_ALL: Final = """
SELECT quote_ident(n.nspname) FROM pg_namespace n
WHERE n.nspname = %(schema)s AND has_schema_privilege('public', n.oid, 'CREATE')"""
SHADOWS: Final = """
SELECT 'function ' || p.oid::regprocedure::text FROM pg_proc p
JOIN pg_namespace n ON n.oid = p.pronamespace AND n.nspname = %(schema)s
JOIN pg_roles r ON r.oid = p.proowner
WHERE NOT r.rolsuper AND p.proowner NOT IN (n.nspowner, current_user::regrole)
  AND EXISTS (SELECT FROM pg_proc o
              WHERE o.pronamespace = 'pg_catalog'::regnamespace AND o.proname = p.proname)
  AND NOT EXISTS (SELECT FROM pg_depend d
                  WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e')
UNION ALL
SELECT 'operator ' || p.oid::regoperator::text FROM pg_operator p
JOIN pg_namespace n ON n.oid = p.oprnamespace AND n.nspname = %(schema)s
JOIN pg_roles r ON r.oid = p.oprowner
WHERE NOT r.rolsuper AND p.oprowner NOT IN (n.nspowner, current_user::regrole)
  AND EXISTS (SELECT FROM pg_operator o
              WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprname = p.oprname)
  AND NOT EXISTS (SELECT FROM pg_depend d
                  WHERE d.classid = 'pg_operator'::regclass AND d.objid = p.oid AND d.deptype = 'e')
ORDER BY 1"""
HAS_SCHEMA: Final = "SELECT 1 FROM pg_namespace WHERE nspname = %(schema)s"
APPLIED: Final = """
SELECT name, needs FROM outbox_migrations ORDER BY name"""
IS_THERE: Final = "SELECT to_regclass('outbox_migrations') IS NOT NULL"
RECORD: Final = """
UPDATE outbox_migrations SET description = %(lines)s
WHERE name = (SELECT max(name) FROM outbox_migrations) AND description IS DISTINCT FROM %(lines)s"""
# Without the position of a shard, its events would count as published: relays pass over them, and days close.
SHARDS: Final = "SELECT count(*) = max(shards) FROM outbox_shards"
HIDDEN: Final = """
SELECT string_agg(c.oid::regclass::text, ', ' ORDER BY c.relname), current_user::text
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname LIKE 'outbox%%' AND row_security_active(c.oid)"""
RECORDED: Final = "SELECT description FROM outbox_migrations ORDER BY name DESC LIMIT 1"
ENSURE_PARTITIONS: Final = "SELECT outbox_ensure_partitions(%(days)s)"
# Until the day before yesterday, where it begins: none (0005).
NO_DAYS: Final = "SET LOCAL outbox.first_days = -2"
# Of the session: it lasts over the transactions of a migration.
LOCK: Final = "SELECT pg_advisory_lock(hashtext('outbox migrate'))"
# Roles that a REVOKE, or the owner of the schema, has left without the schema: for them no table or function
# exists.
WITHOUT_SCHEMA: Final = """
SELECT DISTINCT r.rolname FROM pg_namespace n
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname LIKE 'outbox%%'
CROSS JOIN LATERAL (
    SELECT grantee FROM aclexplode(c.relacl)
    UNION
    SELECT a.grantee FROM pg_attribute
    CROSS JOIN LATERAL aclexplode(attacl) a WHERE attrelid = c.oid
) granted
JOIN pg_roles r ON r.oid = granted.grantee
WHERE n.nspname = %(schema)s AND NOT has_schema_privilege(r.oid, n.oid, 'USAGE')
ORDER BY 1"""
# Seconds for which a migration tries to get its locks. Others wait behind a try for 50 ms.
PATIENCE: Final = 60.0
PATIENTLY: Final = f"SET lock_timeout = '{PATIENCE:g}s'"
BRIEFLY: Final = "SET LOCAL lock_timeout = '50ms'"
