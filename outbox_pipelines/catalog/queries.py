"""SQL of the catalogue. Table names are unqualified: the search_path finds them."""

from typing import Final

# A report that nobody waits for: it leaves cores to whoever is on duty.
TUNE: Final = "SET jit = off; SET TimeZone = 'UTC'; SET max_parallel_workers_per_gather = 2"

# The rows of all attached days, read once. Grouped by both types first: an aggregate with DISTINCT would keep
# parallel workers out.
TYPES: Final = """
SELECT event_type, sum(events)::bigint, min(first_at), max(last_at),
       array_agg(aggregate_type ORDER BY aggregate_type)
FROM (SELECT event_type, aggregate_type, count(*) AS events,
             min(created_at) AS first_at, max(created_at) AS last_at
      FROM outbox GROUP BY event_type, aggregate_type) each
GROUP BY event_type
ORDER BY event_type"""
