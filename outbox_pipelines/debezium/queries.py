"""SQL about the connector's slot, and the events that it has not confirmed."""

from __future__ import annotations

from typing import Final, LiteralString

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
