"""SQL of `outbox adopt`: what it reads of pg_catalog, its state, its locks. DDL is made in `ddl`."""

from __future__ import annotations

from typing import Final, LiteralString

from outbox_pipelines.database.locks import AdvisoryLock

# --- pg_catalog -----------------------------------------------------------------------------------------

# Everything about the table that the switch depends on, as one value: it is compared again under the lock.
FACTS: Final = """
WITH t AS (SELECT c.* FROM pg_class c WHERE c.oid = %(oid)s::oid)
SELECT jsonb_build_object(
    'oid', t.oid::bigint, 'schema', n.nspname, 'name', t.relname, 'kind', t.relkind,
    'owner', t.relowner::regrole::text, 'is_logged', t.relpersistence = 'p',
    'is_owner', pg_has_role(t.relowner, 'USAGE'),
    'may_create', has_schema_privilege(t.relnamespace, 'CREATE'),
    'has_policies', t.relrowsecurity,
    'is_inherited', t.relispartition OR t.relhassubclass AND t.relkind = 'r',
    'rows', CASE WHEN t.relkind = 'p' THEN (
        SELECT coalesce(sum(greatest(l.reltuples, 0)), 0)::bigint FROM pg_partition_tree(t.oid) p
        JOIN pg_class l ON l.oid = p.relid WHERE p.isleaf) ELSE greatest(t.reltuples, 0)::bigint END,
    'columns', (
        SELECT jsonb_agg(jsonb_build_object(
            'name', a.attname, 'type', format_type(a.atttypid, a.atttypmod), 'base', b.typname,
            'kind', b.typtype, 'not_null', a.attnotnull, 'default', pg_get_expr(d.adbin, d.adrelid),
            'identity', a.attidentity, 'is_generated', a.attgenerated <> '',
            'sequence', pg_get_serial_sequence(quote_ident(n.nspname) || '.' ||
                                               quote_ident(t.relname), a.attname),
            'labels', (SELECT jsonb_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_enum e
                       WHERE e.enumtypid = b.oid)) ORDER BY a.attnum)
        FROM pg_attribute a
        JOIN pg_type y ON y.oid = a.atttypid
        JOIN pg_type b ON b.oid = CASE WHEN y.typtype = 'd' THEN y.typbasetype ELSE y.oid END
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped),
    'checks', (
        SELECT jsonb_agg(jsonb_build_object('name', o.conname, 'condition', pg_get_expr(o.conbin, o.conrelid))
                         ORDER BY o.conname)
        FROM pg_constraint o WHERE o.conrelid = t.oid AND o.contype = 'c'),
    'exclusions', (SELECT jsonb_agg(o.conname ORDER BY o.conname) FROM pg_constraint o
                   WHERE o.conrelid = t.oid AND o.contype = 'x'),
    'references', (SELECT jsonb_agg(o.conrelid::regclass::text || '.' || o.conname ORDER BY 1)
                   FROM pg_constraint o WHERE o.confrelid = t.oid AND o.contype = 'f' AND o.conparentid = 0),
    'foreign_keys', (SELECT jsonb_agg(o.conname ORDER BY o.conname) FROM pg_constraint o
                     WHERE o.conrelid = t.oid AND o.contype = 'f'),
    'uniques', (
        SELECT jsonb_agg(jsonb_build_object('name', x.relname, 'columns', (
            SELECT jsonb_agg(a.attname ORDER BY k.n)
            FROM unnest(i.indkey[0:i.indnkeyatts - 1]) WITH ORDINALITY k (attnum, n)
            LEFT JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum = k.attnum), 'is_partial',
            coalesce(
                pg_get_expr(i.indpred, i.indrelid) !~ '^\\(\\S+ IS NOT NULL\\)$', false)) ORDER BY x.relname)
        FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid WHERE i.indrelid = t.oid AND i.indisunique),
    'indexed', (
        SELECT jsonb_agg(DISTINCT a.attname ORDER BY a.attname)
        FROM pg_index i JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum = i.indkey[0]
        WHERE i.indrelid = t.oid AND i.indisvalid
          AND coalesce(pg_get_expr(i.indpred, i.indrelid) = format('(%%I IS NOT NULL)', a.attname), true)),
    'triggers', (SELECT jsonb_agg(g.tgname ORDER BY g.tgname) FROM pg_trigger g
                 WHERE g.tgrelid = t.oid AND NOT g.tgisinternal AND g.tgenabled <> 'D'
                   AND g.tgname NOT LIKE 'adopted\\_%%'),
    'rules', (SELECT jsonb_agg(r.rulename ORDER BY 1) FROM pg_rewrite r WHERE r.ev_class = t.oid),
    'rules_elsewhere', (
        SELECT jsonb_agg(DISTINCT format('%%s of %%s', r.rulename, r.ev_class::regclass)) FROM pg_depend p
        JOIN pg_rewrite r ON r.oid = p.objid
        WHERE p.classid = 'pg_rewrite'::regclass
          AND p.refclassid = 'pg_class'::regclass AND p.refobjid = t.oid
          AND r.ev_class <> t.oid AND r.rulename <> '_RETURN'),
    'views', (
        SELECT jsonb_agg(DISTINCT v.oid::regclass::text) FROM pg_depend p
        JOIN pg_rewrite r ON r.oid = p.objid JOIN pg_class v ON v.oid = r.ev_class
        WHERE p.classid = 'pg_rewrite'::regclass AND r.rulename = '_RETURN'
          AND p.refclassid = 'pg_class'::regclass AND p.refobjid = t.oid
          AND v.oid <> t.oid AND NOT EXISTS (
              SELECT FROM pg_trigger g WHERE g.tgrelid = v.oid AND g.tgname = 'adopted_insert')),
    'functions', (
        SELECT jsonb_agg(DISTINCT p.objid::regprocedure::text) FROM pg_depend p
        WHERE p.classid = 'pg_proc'::regclass AND p.refclassid = 'pg_class'::regclass AND p.refobjid = t.oid),
    'publications', (SELECT jsonb_agg(DISTINCT b.pubname ORDER BY b.pubname)
                     FROM pg_publication_rel r JOIN pg_publication b ON b.oid = r.prpubid
                     WHERE r.prrelid IN (SELECT t.oid UNION SELECT relid FROM pg_partition_tree(t.oid))))
FROM t JOIN pg_namespace n ON n.oid = t.relnamespace"""
OID: Final = "SELECT to_regclass(%(name)s)::oid::bigint"
# The rights of others, so that they keep them on the view; without UPDATE: see `Ddl.switch`.
GRANTS: Final = """
SELECT format('GRANT %%s%%s ON %%s TO %%s%%s', g.privilege_type, g.columns, %(view)s::text,
              CASE WHEN g.grantee = 0 THEN 'PUBLIC' ELSE g.grantee::regrole::text END,
              CASE WHEN g.is_grantable THEN ' WITH GRANT OPTION' END)
FROM (
    SELECT e.privilege_type, '' AS columns, e.grantee, e.is_grantable
    FROM pg_class c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) e
    WHERE c.oid = %(oid)s::oid
    UNION ALL
    SELECT e.privilege_type, format(' (%%I)', a.attname), e.grantee, e.is_grantable
    FROM pg_attribute a, aclexplode(a.attacl) e WHERE a.attrelid = %(oid)s::oid AND NOT a.attisdropped
) g
WHERE g.privilege_type IN ('SELECT', 'INSERT', 'DELETE')
  AND g.grantee <> (SELECT oid FROM pg_roles WHERE rolname = current_user)
ORDER BY 1"""
# Others that may insert.
WRITERS: Final = """
SELECT DISTINCT CASE WHEN g.grantee = 0 THEN 'PUBLIC' ELSE g.grantee::regrole::text END
FROM (
    SELECT e.grantee, e.privilege_type
    FROM pg_class c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) e
    WHERE c.oid = %(oid)s::oid
    UNION ALL
    SELECT e.grantee, e.privilege_type FROM pg_attribute a, aclexplode(a.attacl) e
    WHERE a.attrelid = %(oid)s::oid AND NOT a.attisdropped
) g
WHERE g.privilege_type = 'INSERT' AND g.grantee <> (SELECT oid FROM pg_roles WHERE rolname = current_user)
ORDER BY 1"""
# Rows that the append-only outbox would have refused: of some, so that it takes a second at most.
REFUSED: Final = """
SELECT count(*) FROM (SELECT * FROM {table} LIMIT 100000) AS t
WHERE '' IN ({names}) OR octet_length(t.{payload}::text) > {most}"""
# Statements that users have sent, where the server counts them.
HAS_STATEMENTS: Final = "SELECT to_regclass('public.pg_stat_statements') IS NOT NULL"
CONFLICTS: Final = """
SELECT left(regexp_replace(query, '\\s+', ' ', 'g'), 120) FROM public.pg_stat_statements s
JOIN pg_database d ON d.oid = s.dbid AND d.datname = current_database()
WHERE query ~* ('insert\\s+into\\s+\\S*' || %(name)s || '\\M') AND query ~* '\\mon\\s+conflict\\M'
ORDER BY 1 LIMIT 5"""

# --- state ----------------------------------------------------------------------------------------------

# By a column: the adopted table itself may be called like this.
IS_THERE: Final = """
SELECT EXISTS (SELECT FROM pg_attribute
               WHERE attrelid = to_regclass('outbox_adopted') AND attname = 'kept_as')"""
MAY_USE: Final = "SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = %(schema)s"
STATE: Final = """
SELECT relation::bigint, schema::text, name::text, kept_as::text, state, accepted, switched_at,
       returned::text, file, proven_at, slot::text, switched_lsn::text
FROM outbox_adopted"""
PREPARED: Final = """
INSERT INTO outbox_adopted (relation, schema, name, kept_as)
VALUES (%(oid)s::oid, %(schema)s, %(name)s, %(kept_as)s)"""
FORGET_FINISHED: Final = "DELETE FROM outbox_adopted WHERE state = 'finished'"
# What is left to drain is looked up after the lock has ended. The position in the log is read under the lock
# of the table: who has written into it has committed before, and its commit is in the log.
SWITCHED: Final = """
UPDATE outbox_adopted SET state = 'draining', accepted = {accepted},
    switched_at = coalesce(switched_at, clock_timestamp()), returned = NULL,
    slot = {slot}, switched_lsn = pg_current_wal_insert_lsn()
WHERE relation = {oid}"""
DRAINED: Final = "UPDATE outbox_adopted SET state = 'adopted' WHERE state = 'draining'"
# Read after the view is dropped: its lock proves that every transaction that wrote through it has ended.
RETURNING: Final = "UPDATE outbox_adopted SET state = 'returning', returned = pg_current_snapshot()"
RETURNED: Final = "UPDATE outbox_adopted SET state = 'prepared', returned = NULL WHERE state = 'returning'"
ARCHIVED: Final = "UPDATE outbox_adopted SET file = %(file)s, proven_at = clock_timestamp()"
FINISHED: Final = "UPDATE outbox_adopted SET state = 'finished'"

# --- the slot by which another program publishes the table ----------------------------------------------

# Why it is lost: only older servers have no reason. The last: its distance from a position.
SLOT: Final = """
SELECT r.database::text, r.slot_type = 'logical', r.plugin::text, r.active_pid,
       CASE WHEN r.wal_status = 'lost'
            THEN coalesce(to_jsonb(r) ->> 'invalidation_reason', 'see max_slot_wal_keep_size')
       END,
       r.confirmed_flush_lsn::text, pg_wal_lsn_diff(%(lsn)s::pg_lsn, r.confirmed_flush_lsn)::bigint
FROM pg_replication_slots r WHERE r.slot_name = %(slot)s"""
# The oldest first, because a slot is decoded as the database was then. Whether it has inserts, other tables,
# and the tables of the append-only outbox.
PUBLICATIONS: Final = """
WITH named AS (
    SELECT n.nspname, c.relname
    FROM (SELECT %(oid)s::oid UNION SELECT relid FROM pg_partition_tree(%(oid)s::oid)) AS t (oid)
    JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace)
SELECT p.pubname::text, p.pubinsert, p.puballtables OR EXISTS (
           SELECT FROM pg_publication_tables t
           WHERE t.pubname = p.pubname AND (t.schemaname, t.tablename) NOT IN (SELECT * FROM named)),
       p.puballtables OR EXISTS (
           SELECT FROM pg_publication_tables t WHERE t.pubname = p.pubname AND t.schemaname = %(ours)s)
FROM pg_publication p
WHERE EXISTS (SELECT FROM pg_publication_tables t
              WHERE t.pubname = p.pubname AND (t.schemaname, t.tablename) IN (SELECT * FROM named))
ORDER BY p.oid"""
# The table itself, and what holds its rows: the log names partitions unless the publication says otherwise.
RELATIONS: Final = (
    "SELECT %(oid)s::oid::bigint UNION SELECT relid::oid::bigint FROM pg_partition_tree(%(oid)s::oid)"
)

# --- the events that the reader of a slot has not published ---------------------------------------------

# Not `outbox_…`: relays that start then compare what has such a name with the migrations.
REST: Final = "adopted_rest"
# It has all of these events, or it does not exist.
REST_EXISTS: Final = f"SELECT to_regclass('{REST}') IS NOT NULL"
DROP_REST: Final = f"DROP TABLE IF EXISTS {REST}"
# With the columns and types of the adopted table, so that values print as they do there; with the marks of a
# marked table, whose relay publishes it.
CREATE_REST: Final[LiteralString] = """
CREATE TABLE {rest} (seq_of_rest bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, {columns},
                     published_at_of_rest timestamptz, retries_of_rest int NOT NULL DEFAULT 0,
                     error_of_rest text)"""
# The relay of a marked table reads what has no mark, in this order.
INDEX_REST: Final[LiteralString] = "CREATE INDEX ON {rest} (seq_of_rest) WHERE published_at_of_rest IS NULL"
# Not INSERT: there may be 200,000 rows, while no other session can read the slot.
COPY_REST: Final[LiteralString] = "COPY {rest} ({names}) FROM STDIN"
# What the relay has not published, and why: rejected events delay the drain.
REST_LEFT: Final = f"""
SELECT count(*), count(*) FILTER (WHERE retries_of_rest > 0), max(error_of_rest)
FROM {REST} WHERE published_at_of_rest IS NULL"""

# --- locks ----------------------------------------------------------------------------------------------

# Two commands at the same time: the second one finds the work done. Only commands wait for this lock.
ONE_COMMAND: Final = (
    "SELECT pg_advisory_xact_lock(hashtextextended('outbox adopt', 'outbox_adopted'::regclass::oid::bigint))"
)
PATIENT: Final = "SET LOCAL lock_timeout = '3s'; SET LOCAL statement_timeout = 0"
IMPATIENT: Final = "SET LOCAL lock_timeout = '50ms'; SET LOCAL statement_timeout = '100ms'"
# Who holds a table or its partitions, the longest transaction first. Of other roles' sessions, a role that is
# not a member of pg_read_all_stats sees no more than the process.
HOLDERS: Final = """
SELECT CASE WHEN l.pid IS NULL THEN format('prepared transaction %%L of %%s', p.gid, p.owner)
       ELSE format('process %%s%%s%%s%%s', l.pid, ' of role ' || a.usename, ', ' || a.state,
                   ', open for ' || extract(epoch FROM clock_timestamp() - a.xact_start)::int || ' s') END
FROM (SELECT DISTINCT pid, virtualtransaction FROM pg_locks
      WHERE locktype = 'relation' AND granted AND pid IS DISTINCT FROM pg_backend_pid()
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND relation = ANY (SELECT unnest(%(oids)s::oid[]) UNION
                            SELECT t.relid FROM unnest(%(oids)s::oid[]) o, pg_partition_tree(o) t)) l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_locks x ON l.pid IS NULL AND x.pid IS NULL AND x.virtualtransaction = l.virtualtransaction
    AND x.locktype = 'transactionid'
LEFT JOIN pg_prepared_xacts p ON p.transaction = x.transactionid
ORDER BY least(a.xact_start, p.prepared) NULLS LAST LIMIT 3"""
SHARDS: Final = "SELECT shard FROM outbox_shards ORDER BY shard"
SHARD: Final = AdvisoryLock("hashtext(%(lock)s)", "%(shard)s")
SHARD_OWNER: Final = "SELECT coalesce(owner, 'another session') FROM outbox_shards WHERE shard = %(shard)s"
TABLE_OWNED: Final = AdvisoryLock("%(key)s::bigint")

# --- what is left ---------------------------------------------------------------------------------------

# Events of before the way back that are not published: nothing before the oldest position is.
LEFT: Final = """
SELECT count(*) FROM (
    SELECT FROM outbox e JOIN outbox_shards s
        ON s.shard = outbox_shard_of(e.aggregate_type, e.aggregate_id, s.shards)
    WHERE e.tx >= (SELECT pg_snapshot_xmin(done) FROM outbox_shards ORDER BY 1 LIMIT 1)
      AND NOT outbox_covers(s.done, s.target, s.last_seq, e.tx, e.seq)
      AND pg_visible_in_snapshot(e.tx, (SELECT returned FROM outbox_adopted))
    LIMIT 100000) e"""
PARKED: Final = """
SELECT count(*) FILTER (WHERE state IN ('waiting', 'retrying', 'replaying')),
       count(*) FILTER (WHERE state = 'failed'), (SELECT count(*) FROM outbox_delayed)
FROM outbox_parked"""
# The time tells the keys of old rows from those of events: see `adopted_key` in `ddl`.
COPY_KEYS: Final = """
INSERT INTO outbox_keys (key, event_id, created_at)
SELECT outbox_key({key}::text), {id}, (SELECT switched_at FROM outbox_adopted)
FROM {table} WHERE {key} IS NOT NULL AND {key}::text <> ''
ON CONFLICT DO NOTHING"""
