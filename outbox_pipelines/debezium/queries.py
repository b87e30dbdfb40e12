"""SQL about the connector's slot and publication."""

from __future__ import annotations

from typing import Final, LiteralString

FACTS: Final = """
SELECT current_setting('wal_level'),
       (SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user), current_user::text,
       (SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = %(user)s),
       current_setting('max_replication_slots')::int, (SELECT count(*) FROM pg_replication_slots),
       to_regclass(%(table)s)::oid"""

# NULL: there is none. What it leaves out of the table: columns (15+) or rows (15+), read from the row as
# JSON because older servers lack them. For a publication of all tables there is no such row.
PUBLICATION: Final = """
SELECT p.pubinsert, p.pubviaroot,
       p.puballtables OR EXISTS (
           SELECT FROM pg_publication_tables t
           WHERE t.pubname = p.pubname
             AND (t.schemaname, t.tablename) = (SELECT n.nspname, c.relname
                                                FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                                                WHERE c.oid = %(table)s)),
       (SELECT array_agg(a.attname::text ORDER BY a.attnum)
        FROM pg_publication_rel r, pg_attribute a
        WHERE r.prpubid = p.oid AND r.prrelid = %(table)s AND a.attrelid = r.prrelid
          AND a.attname = ANY (%(columns)s) AND jsonb_typeof(to_jsonb(r) -> 'prattrs') = 'array'
          AND NOT to_jsonb(r) -> 'prattrs' @> to_jsonb(a.attnum)),
       EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = %(table)s
                 AND to_jsonb(r) ->> 'prqual' IS NOT NULL)
FROM pg_publication p WHERE p.pubname = %(publication)s"""

# Whether it is lost: only older servers lack the second column.
SLOT: Final = """
SELECT database, plugin, active_pid,
       wal_status = 'lost' OR to_jsonb(r) ->> 'invalidation_reason' IS NOT NULL
FROM pg_replication_slots r WHERE slot_name = %(slot)s"""

# On 17 and later a standby can have it as well.
MAKE_SLOT: Final = "SELECT pg_create_logical_replication_slot(%(slot)s, 'pgoutput')"
MAKE_FAILOVER_SLOT: Final = (
    "SELECT pg_create_logical_replication_slot(%(slot)s, 'pgoutput', failover => true)"
)
DROP_PUBLICATION: Final = "DROP PUBLICATION IF EXISTS {}"
MAKE_PUBLICATION: Final = (
    "CREATE PUBLICATION {} FOR TABLE {} WITH (publish = 'insert', publish_via_partition_root = true)"
)

# A relay publishes the same events.
RELAY: Final = """
SELECT owner FROM outbox_shards
WHERE owner IS NOT NULL AND heartbeat > clock_timestamp() - interval '10 seconds'
  AND connector_state IS DISTINCT FROM 'publishes' LIMIT 1"""

# The relay has left its slot to it.
FOLLOWED: Final = "SELECT connector FROM outbox_shards WHERE connector = %(connector)s LIMIT 1"

STATE: Final = """
SELECT r.active, pg_wal_lsn_diff(pg_current_wal_insert_lsn(), r.confirmed_flush_lsn)::bigint,
       pg_wal_lsn_diff(pg_current_wal_insert_lsn(), r.restart_lsn)::bigint,
       wal_status = 'lost' OR to_jsonb(r) ->> 'invalidation_reason' IS NOT NULL,
       r.catalog_xmin::text::bigint
FROM pg_replication_slots r WHERE r.slot_name = %(slot)s AND r.database = current_database()"""

# The oldest event that began after the last one that the connector has confirmed. Connect knows transactions
# without their epoch: the latest of that number is meant. Both conditions, because a transaction with a
# higher id may have committed earlier; then it began earlier as well.
WAITING: Final[LiteralString] = """
WITH now AS (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS xmax),
     confirmed AS (SELECT (xmax - ((xmax - %(tx)s) & 4294967295))::text::xid8 AS tx FROM now)
SELECT extract(epoch FROM clock_timestamp() - min(o.created_at))::float8
FROM (SELECT created_at FROM outbox
      WHERE tx > (SELECT tx FROM confirmed) AND created_at > to_timestamp(%(at)s)
      ORDER BY tx LIMIT 1000) o"""
# The same of a table whose rows have no transaction.
WAITING_IN_TABLE: Final[LiteralString] = """
SELECT extract(epoch FROM clock_timestamp() - oldest)::float8
FROM (SELECT {created_at}::timestamptz AS oldest FROM {table}
      WHERE {created_at} > to_timestamp(%(at)s) ORDER BY {created_at} LIMIT 1) o"""
