"""All SQL of an existing table: its relay, its catalog, its status, its dead letters, its months.

`table_statements` fills in the names in braces for one table; `pending` is a condition that a partial index
of the table should have. Values of a status column are literals in the SQL, so that the planner can use that
index.

`key` identifies a row: its `seq`, or its `id` in a table without an integer. The rows of such a table are
numbered when they are claimed (see `table_statements`); `number` is 0 in the statements that claim.
"""

from __future__ import annotations

from typing import Final, LiteralString

from outbox_pipelines.database.locks import AdvisoryLock
from outbox_pipelines.relay.relay_sql import FITTING

# --- the right to relay the table -------------------------------------------------------------------------

# Polled, because a statement that waits would delay vacuum.
TRY_LOCK: Final = "SELECT pg_try_advisory_lock(%(key)s::bigint)"
# By each of the relays that share a table without an order.
TRY_SHARE: Final = "SELECT pg_try_advisory_lock_shared(%(key)s::bigint)"
UNLOCK: Final = "SELECT pg_advisory_unlock(%(key)s::bigint)"
# Alone in its transaction: takes and releases the lock, which is possible only while no claim is open.
NO_CLAIMS: Final = "SELECT pg_try_advisory_xact_lock(%(key)s::bigint)"
OWNER: Final[LiteralString] = """
SELECT l.pid, a.application_name,
       extract(epoch FROM clock_timestamp() - a.backend_start)::float8,
       to_char(a.backend_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid = %(key)s::bigint >> 32 AND l.objid = %(key)s::bigint & 4294967295"""
# A lock of two numbers, one of the table and one of its description; then the sessions that have one for
# another description. In this order: of two relays that start at the same time, at least one finds the other.
DESCRIBE: Final = """
SELECT pg_try_advisory_lock_shared(%(table)s::bigint::bit(32)::int, %(digest)s::bigint::bit(32)::int)"""
DESCRIBED_OTHERWISE: Final = """
SELECT l.pid, a.application_name
FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.mode = 'ShareLock'
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid = %(table)s::bigint AND l.objid <> %(digest)s::bigint ORDER BY l.pid"""
PID: Final = "SELECT pg_backend_pid()"

# The beginning of a claim. The shared lock comes first: a new owner waits until it is free, so a relay that
# still owns the table after that stays its owner until this claim ends. The name is
# compared because `outbox adopt` renames the table: nothing is claimed from another relation.
BEGIN: Final = """
BEGIN ISOLATION LEVEL READ COMMITTED;
SELECT pg_advisory_xact_lock_shared({claims});
SELECT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND pid = {pid}
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid = {key}::bigint >> 32 AND objid = {key}::bigint & 4294967295)
   AND to_regclass({table}) = {oid}::oid"""

# For the sessions that claim. A session that waits for an exclusive lock of the table, as ALTER TABLE does,
# may wait for a claim in flight, and everything else waits behind it: PostgreSQL sees no deadlock, since the
# claim's session only looks idle.
BRIEFLY: Final = "SET lock_timeout = '250ms'"
AT_LENGTH: Final = "SET LOCAL lock_timeout = 0"
# Without a claim's locks, and while other claims are open: then the relay starts over, which releases them.
PATIENTLY: Final = "SET LOCAL lock_timeout = '10s'"
SET_PATIENCE: Final = "SET lock_timeout = '10s'"
# For the status, whose reader can do more about it than wait.
FOR_A_WHILE: Final = "SET lock_timeout = '5s'"

# --- pg_catalog ---------------------------------------------------------------------------------------------

# By name: a lookup by `regclass` fails without the right to use the schema, which is to be reported.
TABLE: Final = """
SELECT c.oid::bigint, c.relkind::text, n.nspname::text, c.relname::text,
       format('%%I.%%I', n.nspname, c.relname),
       (SELECT format('%%I.%%I', s.nspname, r.relname)
        FROM pg_class r JOIN pg_namespace s ON s.oid = r.relnamespace
        WHERE c.relispartition AND r.oid = pg_partition_root(c.oid)),
       has_schema_privilege(n.oid, 'USAGE'), has_table_privilege(c.oid, 'SELECT'),
       has_any_column_privilege(c.oid, 'UPDATE'), row_security_active(c.oid), quote_ident(current_user)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relname = %(table)s AND n.nspname = coalesce(%(schema)s::text, current_schema())"""
# Tables that may be meant.
ELSEWHERE: Final = """
SELECT n.nspname || '.' || c.relname
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE lower(c.relname) = lower(%(table)s) AND c.relkind IN ('r', 'p') AND NOT c.relispartition
ORDER BY 1 LIMIT 5"""

# A domain counts as its base type.
COLUMNS: Final = """
SELECT a.attname::text, t.typname::text, t.typtype::text, format_type(t.oid, NULL),
       format('%%I.%%I', (SELECT nspname FROM pg_namespace WHERE oid = t.typnamespace), t.typname),
       format_type(a.atttypid, a.atttypmod), a.attnotnull, shown.given,
       a.attidentity <> '' OR coalesce(shown.given LIKE 'nextval(%%', false), EXISTS (
           SELECT FROM pg_index i
           WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum),
       has_column_privilege(a.attrelid, a.attnum, 'UPDATE'),
       ARRAY(SELECT e.enumlabel::text FROM pg_enum e WHERE e.enumtypid = t.oid ORDER BY e.enumsortorder)
FROM pg_attribute a
JOIN pg_type declared ON declared.oid = a.atttypid
JOIN pg_type t ON t.oid = CASE WHEN declared.typtype = 'd' THEN declared.typbasetype ELSE declared.oid END
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
CROSS JOIN LATERAL (SELECT pg_get_expr(d.adbin, d.adrelid)) AS shown (given)
WHERE a.attrelid = %(oid)s::oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""

# The end of the newest partition by time, if it is near and no default one takes the rows after it: such a
# one has no end here. Times without a zone are UTC, as in the session.
ENDING: Final = r"""
SELECT to_char(max(b.until::timestamptz), 'YYYY-MM-DD HH24:MI'), max(b.until::timestamptz) < clock_timestamp()
FROM pg_partitioned_table p
JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
JOIN pg_inherits i ON i.inhparent = p.partrelid JOIN pg_class c ON c.oid = i.inhrelid
CROSS JOIN LATERAL (
    SELECT (regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \(''([^'']+)''\)'))[1]) AS b (until)
WHERE p.partrelid = %(oid)s::oid
  AND a.atttypid IN ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype)
HAVING NOT bool_or(b.until IS NULL)
   AND max(b.until::timestamptz) < clock_timestamp() + interval '7 days'"""

# The slots whose readers may publish the table: a publication has it.
SLOTS: Final = """
SELECT r.slot_name::text FROM pg_replication_slots r
WHERE r.database = current_database() AND r.plugin = 'pgoutput' AND NOT r.temporary AND EXISTS (
    SELECT FROM pg_publication p JOIN pg_publication_tables t ON t.pubname = p.pubname
    JOIN pg_namespace n ON n.nspname = t.schemaname
    JOIN pg_class c ON (c.relname, c.relnamespace) = (t.tablename, n.oid)
    WHERE p.pubinsert
      AND c.oid IN (SELECT %(oid)s::oid UNION SELECT relid FROM pg_partition_tree(%(oid)s::oid)))
ORDER BY 1"""

# Values of a column that are cheap to know: from statistics, and from a few rows.
FREQUENT: Final = """
SELECT DISTINCT unnest(most_common_vals::text::text[]) FROM pg_stats
WHERE schemaname = %(schema)s AND tablename = %(table)s AND attname = %(column)s"""
FEW: Final = "SELECT DISTINCT {column}::text FROM (SELECT {column} FROM {table} LIMIT 1000) AS few"
# Whether another publisher has marked one of a few rows that are pending.
MARKED: Final = """
SELECT EXISTS (SELECT FROM (SELECT {flag} AS is_marked, {time} AS time FROM {table} LIMIT 1000) AS few
               WHERE is_marked AND time IS NULL)"""

# What an earlier publisher has recorded.
COUNT_SOME: Final = "SELECT count(*) FROM (SELECT FROM {table} WHERE {condition} LIMIT 100000) AS few"

# The zone in which sessions write times without one, unless it is that of UTC. Ours is set to UTC.
ZONE: Final = """
SELECT reset_val FROM pg_settings WHERE name = 'TimeZone' AND EXISTS (
    SELECT FROM (VALUES (now()), (now() + interval '6 months')) AS moment (at)
    WHERE at AT TIME ZONE reset_val <> at AT TIME ZONE 'UTC')"""

# The CHECK constraints of one column alone.
CHECKS: Final = """
SELECT c.conname::text, pg_get_expr(c.conbin, c.conrelid)
FROM pg_constraint c JOIN pg_attribute a ON a.attrelid = c.conrelid AND c.conkey = ARRAY[a.attnum]
WHERE c.conrelid = %(oid)s::oid AND c.contype = 'c' AND a.attname = %(column)s ORDER BY 1"""

# The tables that contain rows, each with whether it has an index over pending rows in their order (a partial
# one, or one that begins with the status), and one that begins with the key. A condition is compared as text:
# a wrong guess causes only a warning.
LEAVES: Final = """
SELECT (SELECT format('%%I.%%I', n.nspname, c.relname)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = leaf), EXISTS (
    SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = leaf AND i.indisvalid AND a.attname = %(order)s
      AND strpos(pg_get_expr(i.indpred, i.indrelid), %(marker)s) > 0
      AND strpos(pg_get_expr(i.indpred, i.indrelid), %(value)s) > 0
), EXISTS (
    SELECT FROM pg_index i
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    JOIN pg_attribute b ON b.attrelid = i.indrelid AND b.attnum = i.indkey[1]
    WHERE i.indrelid = leaf AND i.indisvalid AND i.indpred IS NULL
      AND a.attname = %(marker)s AND b.attname = %(order)s AND %(has_status)s
), EXISTS (
    SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = leaf AND i.indisvalid AND i.indpred IS NULL AND a.attname = %(key)s)
FROM (SELECT relid FROM pg_partition_tree(%(oid)s::oid::regclass) WHERE isleaf
      UNION ALL
      SELECT oid FROM pg_class WHERE oid = %(oid)s::oid AND relkind = 'r') AS leaves (leaf)"""

# In a marked table, an id may be any text. As a key it is complete: its index bounds it.
FITTING_ANY_ID: Final[LiteralString] = FITTING.replace(
    "id::text", "CASE WHEN octet_length(id) <= %(most)s THEN id ELSE left(id, 999) END", 1
)

# --- the events -------------------------------------------------------------------------------------------

# In a cursor, so that large payloads can be fetched a few at a time from one snapshot; and because a cursor
# is planned for its first rows, by the index. A plain query sorted the whole backlog for each claim if the
# backlog had grown since the last ANALYZE. NO KEY, so that inserts into tables with a foreign key to this one
# are not blocked; NOWAIT, because later rows would overtake a row that is skipped (SKIP LOCKED where nothing
# is ordered).
CLAIM: Final = """
DECLARE claim NO SCROLL CURSOR FOR
SELECT {fitting} FROM (
    SELECT {texts} FROM {table} AS t WHERE {where} ORDER BY {order} LIMIT %(limit)s
    FOR NO KEY UPDATE OF t {if_locked}) AS event"""
FETCH: Final = "FETCH {count} FROM claim"
# The aggregates of rows that another session has locked.
LOCKED: Final = """
WITH due AS MATERIALIZED (
    SELECT {key} AS key, {aggregate_type}::text AS type, {aggregate_id}::text AS name
    FROM {table} AS t WHERE {where} ORDER BY {order} LIMIT %(limit)s
), free AS MATERIALIZED (
    SELECT {key} AS key FROM {table} AS t WHERE {where} ORDER BY {order} LIMIT %(limit)s
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
SELECT DISTINCT type, name FROM due WHERE key NOT IN (SELECT key FROM free)"""
ANY: Final = "SELECT EXISTS (SELECT FROM {table} AS t WHERE {where})"

# Conditions that are added to `pending`. Lists are subqueries, which PostgreSQL hashes. Aggregates are
# compared in the columns' own types, so that an index on them can be used.
AMONG: Final = """({aggregate_type}, {aggregate_id}) IN (SELECT * FROM unnest(
    %(types)s::text[]::{aggregate_type_type}[], %(ids)s::text[]::{aggregate_id_type}[]))"""
NOT_AMONG: Final = """({aggregate_type}, {aggregate_id}) NOT IN (SELECT * FROM unnest(
    %(types)s::text[]::{aggregate_type_type}[], %(ids)s::text[]::{aggregate_id_type}[]))"""
NOT_BUSY: Final = "{key} NOT IN (SELECT unnest(%(busy)s::{key_type}[]))"
UP_TO: Final = "{up_to}"

# `is_pending` and `is_unprocessed` are the same conditions, for rows whose keys are given. In a table without
# an integer, no partial index matches them: with old statistics, PostgreSQL would read all pending rows by
# such an index for each mark, instead of these rows by their keys.
#
# Marks exactly the acknowledged rows: a range would also mark rows that were committed after the claim. Not
# now(), which is the time when the claim began.
MARK: Final = """
UPDATE {table} AS t SET {processed} WHERE {is_unprocessed} AND {key} = ANY (%(keys)s::{key_type}[])"""
UNMARKED: Final = """
SELECT count(*) FROM {table} AS t WHERE {is_unprocessed} AND {key} = ANY (%(keys)s::{key_type}[])"""
# The end of a run until empty, as text for `UP_TO`.
LAST: Final = "SELECT {last} FROM {table} AS t WHERE {pending}"

# --- rejections -------------------------------------------------------------------------------------------

# By number and key, since a table without an integer knows only the key. Some of the numbers are read; a row
# that lacks a name is not.
EVENTS: Final = """
SELECT {fitting}, attempts FROM (
    SELECT {numbered_texts}, {attempts} AS attempts
    FROM unnest(%(numbers)s::bigint[], %(keys)s::{key_type}[]) AS n (number, key)
    JOIN {table} AS t ON {key} = n.key
    WHERE {is_pending} AND {has_names} AND n.number = ANY (%(seqs)s::bigint[])
    ORDER BY n.number OFFSET 0) AS event
ORDER BY seq"""
# Only what is pending: of relays that share a table, another one may have made it a dead letter.
REFUSED: Final = """
UPDATE {table} AS t SET {refused}
FROM unnest(%(keys)s::{key_type}[], %(errors)s::text[], %(pauses)s::float8[], %(lasts)s::bool[])
     AS r (key, error, pause, is_last)
WHERE {is_pending} AND {key} = r.key"""
POSTPONED: Final = """
UPDATE {table} AS t SET {set_reason}
FROM unnest(%(keys)s::{key_type}[], %(errors)s::text[]) AS r (key, error)
WHERE {is_pending} AND {key} = r.key"""
# The first row of each aggregate that an earlier relay has tried.
TRIED: Final = """
SELECT DISTINCT ON ({aggregate_type}, {aggregate_id})
       {aggregate_type}::text, {aggregate_id}::text, {key}::text, {attempts}, {due_in}
FROM {table} AS t WHERE {pending} AND {attempts} > 0
ORDER BY {aggregate_type}, {aggregate_id}, {order}"""
FAILED: Final = (
    "SELECT DISTINCT {aggregate_type}::text, {aggregate_id}::text FROM {table} AS t WHERE {failed}"
)
STILL_FAILED: Final[LiteralString] = f"{FAILED} AND {AMONG}"
UNPUBLISHED: Final = "SELECT count(*) FROM {table} AS t WHERE {where}"

# --- status -------------------------------------------------------------------------------------------------

# Capped: counting millions exactly takes seconds. The oldest row is among the first. A time that no clock
# shows, or that is in the future, is no age.
BACKLOG: Final = """
SELECT count(*), extract(epoch FROM clock_timestamp()
           - min(least(at, clock_timestamp())) FILTER (WHERE isfinite(at)))::float8
FROM (SELECT {time} AS at FROM {table} AS t WHERE {pending} ORDER BY {order} LIMIT %(cap)s) AS waiting"""
# Those of them that were rejected, and are tried again: the reasons, with their counts and the count of all.
RETRIED: Final = """
SELECT coalesce(reason, {no_reason}), count(*), sum(count(*)) OVER ()
FROM (SELECT {reason} AS reason, {attempts} AS attempts
      FROM {table} AS t WHERE {pending} ORDER BY {order} LIMIT %(cap)s) AS waiting
WHERE reason IS NOT NULL OR attempts > 0
GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 3"""
# Why they failed, the most frequent first.
REASONS: Final = """
SELECT coalesce(reason, {no_reason}), count(*)
FROM (SELECT {reason} AS reason FROM {table} AS t WHERE {failed} LIMIT %(cap)s) AS failed
GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 3"""
FAILURES: Final = "SELECT count(*) FROM (SELECT FROM {table} AS t WHERE {failed} LIMIT %(cap)s) AS failed"

# --- dead letters -----------------------------------------------------------------------------------------

# The conditions of a command; null for those that are not given.
_MEANT: Final = """{failed}
    AND (%(ids)s::text[] IS NULL OR {id}::text = ANY (%(ids)s::text[]))
    AND (%(event_type)s::text IS NULL OR {event_type}::text = %(event_type)s)
    AND (%(aggregate_type)s::text IS NULL OR {aggregate_type}::text = %(aggregate_type)s)
    AND (%(aggregate_id)s::text IS NULL OR {aggregate_id}::text = %(aggregate_id)s)
    AND (%(error)s::text IS NULL OR strpos({reason}, %(error)s) > 0)
    AND (%(since)s::timestamptz IS NULL OR {failure} >= %(since)s)
    AND (%(until)s::timestamptz IS NULL OR {failure} <= %(until)s)"""
COUNT_DEAD_LETTERS: Final[LiteralString] = f"""
SELECT coalesce({{reason}}, {{no_reason}}), count(*) FROM {{table}} AS t WHERE {_MEANT}
GROUP BY 1 ORDER BY 2 DESC, 1"""
LIST_DEAD_LETTERS: Final[LiteralString] = f"""
SELECT {{id}}::text, NULL, {{aggregate_type}}::text, {{aggregate_id}}::text, {{event_type}}::text, 'failed',
       {{tries}}, {{failure}}::timestamptz, {{time}}::timestamptz, coalesce({{reason}}, {{no_reason}})
FROM {{table}} AS t WHERE {_MEANT}
ORDER BY {{failure}} DESC NULLS LAST, {{time}} DESC NULLS LAST LIMIT %(limit)s"""
# All columns, as PostgreSQL prints them: what the application added may be the reason.
SHOW_UNPUBLISHED: Final = """
SELECT CASE WHEN octet_length(shown) <= %(most)s THEN shown END
FROM (SELECT row_to_json(t)::text AS shown FROM {table} AS t
      WHERE (({pending}) OR ({failed})) AND {id}::text = %(id)s) AS found"""
REPLAY: Final[LiteralString] = f"UPDATE {{table}} AS t SET {{revived}} WHERE {_MEANT}"

# --- months -----------------------------------------------------------------------------------------------

MONTHS_LOCK: Final = AdvisoryLock("%(key)s::bigint")
# How the table is partitioned, and by whom it can be changed.
PARTITIONED: Final = """
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
NEWEST_PARTITION: Final = r"""
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
CREATE_PARTITION: Final = """
CREATE TABLE {leaf} (LIKE {table} INCLUDING ALL EXCLUDING IDENTITY EXCLUDING COMMENTS){storage}{tablespace}"""
REPLICA_IDENTITY: Final = "ALTER TABLE {leaf} REPLICA IDENTITY FULL"
SET_OWNER: Final = "ALTER TABLE {leaf} OWNER TO {owner}"
ATTACH_BRIEFLY: Final = "SET LOCAL statement_timeout = 40; SET LOCAL lock_timeout = 20"
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

# --- a first look at a database -----------------------------------------------------------------------------

# Tables that may be an outbox, by their name: for a first look at a database. The third column: whether the
# schema has the tables of this package.
CANDIDATES: Final = r"""
SELECT n.nspname, c.relname, EXISTS (
  SELECT FROM pg_class AS s WHERE s.relnamespace = c.relnamespace AND s.relname = 'outbox_shards'
)
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relname ILIKE '%outbox%' AND c.relkind IN ('r', 'p') AND NOT c.relispartition
  AND n.nspname NOT LIKE 'pg\_%' AND n.nspname <> 'information_schema'
ORDER BY 1, 2
"""
