"""SQL of the event catalog. Table names are unqualified: the search_path finds them."""

from typing import Final

# The report is not urgent: it leaves cores to the application.
TUNE: Final = "SET max_parallel_workers_per_gather = 2"

# The rows of all attached days, read once. Grouped by both types first: an aggregate with DISTINCT would
# prevent parallel workers.
TYPES: Final = """
SELECT event_type, sum(events)::bigint, min(first_at), max(last_at),
       array_agg(aggregate_type ORDER BY aggregate_type)
FROM (SELECT event_type, aggregate_type, count(*) AS events,
             min(created_at) AS first_at, max(created_at) AS last_at
      FROM outbox GROUP BY event_type, aggregate_type) each
GROUP BY event_type
ORDER BY event_type"""
