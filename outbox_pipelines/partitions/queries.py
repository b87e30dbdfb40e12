"""SQL of the outbox's days. Table names are unqualified: the search_path finds them."""

from typing import Final

# Rows by the server's own count, which a crash forgets: exact numbers would read each day.
DAYS: Final = """
SELECT d.day, d.state, coalesce(c.relispartition, false),
       greatest(c.reltuples::bigint, pg_stat_get_live_tuples(c.oid), 0),
       coalesce(pg_total_relation_size(c.oid), 0)
FROM outbox_days d
LEFT JOIN pg_class c ON c.oid = to_regclass('outbox_' || to_char(d.day, 'YYYYMMDD'))
ORDER BY d.day"""

# By the database's clock, and from tomorrow: an open day without a partition takes nothing.
AHEAD: Final = """
SELECT count(*) FROM outbox_days d
JOIN pg_class c ON c.oid = to_regclass('outbox_' || to_char(d.day, 'YYYYMMDD')) AND c.relispartition
WHERE d.state = 'open' AND d.day > (clock_timestamp() AT TIME ZONE 'UTC')::date"""

ENSURE: Final = "SELECT outbox_ensure_partitions(%(days)s)"
# For a role that may not own the table.
ENSURE_IF_OWNER: Final = """
SELECT CASE WHEN pg_has_role(relowner, 'USAGE') THEN outbox_ensure_partitions(%(days)s) END
FROM pg_class WHERE oid = 'outbox'::regclass"""
