"""SQL that checks the rows of one day before they are archived."""

from typing import Any, Final, LiteralString

from psycopg import sql

# Larger sorts and hashes go to disk. No parallel workers: one process takes a second for two million rows,
# and the other cores stay free for applications and the relay.
TUNE: Final = "SET work_mem = '64MB'; SET max_parallel_workers_per_gather = 0"

EXISTS: Final = "SELECT to_regclass(%(leaf)s) IS NOT NULL"

MOST_NAMED: Final = 20
"""How many types are named; more are only counted."""

# One read of the rows, grouped by type: there are few groups, so that memory does not grow with the day. In
# addition the index of seq, whose order shows repetitions without a sort; and the keys, only if any exist.
# `known` is null without an event catalog. Only objects need required members: others are counted separately.
FACTS: Final[LiteralString] = """
WITH required AS MATERIALIZED (
    SELECT key AS event_type, ARRAY(SELECT jsonb_array_elements_text(value)) AS members
    FROM jsonb_each(%(required)s::jsonb)
), types AS MATERIALIZED (
    SELECT o.event_type, count(*) AS events, min(o.created_at) AS first_at, max(o.created_at) AS last_at,
           count(o.idempotency_key) AS keys,
           count(*) FILTER (WHERE o.created_at < {start} OR o.created_at >= {stop}) AS outside,
           count(*) FILTER (WHERE coalesce(o.aggregate_type, '') = '' OR coalesce(o.aggregate_id, '') = ''
                            OR coalesce(o.event_type, '') = '' OR o.idempotency_key = '') AS nameless,
           count(*) FILTER (WHERE jsonb_typeof(o.payload) <> 'object'
                            AND (jsonb_typeof(o.payload) <> 'null' OR NOT %(tombstones)s)) AS not_objects,
           count(*) FILTER (WHERE jsonb_typeof(o.payload) = 'object'
                            AND NOT o.payload ?& r.members) AS lacking
    FROM {leaf} o LEFT JOIN required r USING (event_type)
    GROUP BY o.event_type
), lacking AS (
    SELECT event_type, lacking FROM types WHERE lacking > 0 ORDER BY lacking DESC LIMIT %(most)s
), unknown AS MATERIALIZED (
    SELECT event_type, events FROM types WHERE event_type <> ALL (%(known)s::text[])
), most_unknown AS (
    SELECT event_type, events FROM unknown ORDER BY events DESC, event_type LIMIT %(most)s
)
SELECT coalesce(sum(events), 0)::bigint AS events, count(*) AS types,
       min(first_at) AS first_at, max(last_at) AS last_at,
       coalesce(sum(outside), 0)::bigint AS outside,
       (SELECT count(*) FROM (SELECT FROM {leaf} GROUP BY seq HAVING count(*) > 1) twice) AS seqs_twice,
       CASE WHEN sum(keys) > 1 THEN (
           SELECT count(*) FROM (SELECT FROM {leaf} WHERE idempotency_key IS NOT NULL
                                 GROUP BY idempotency_key HAVING count(*) > 1) twice
       ) ELSE 0 END AS keys_twice,
       coalesce(sum(nameless), 0)::bigint AS nameless,
       coalesce(sum(not_objects), 0)::bigint AS not_objects,
       coalesce(sum(lacking), 0)::bigint AS lacking,
       (SELECT count(*) FROM unknown) AS unknown_types,
       (SELECT coalesce(jsonb_object_agg(event_type, lacking), '{{}}') FROM lacking) AS lacking_by_type,
       (SELECT coalesce(jsonb_object_agg(event_type, events), '{{}}') FROM most_unknown) AS unknown_by_type
FROM types"""


def of_day(query: LiteralString, leaf: str, **bounds: Any) -> sql.Composed:
    """Return a query with the name of a partition, and the day's bounds."""
    return sql.SQL(query).format(
        leaf=sql.Identifier(leaf), **{name: sql.Literal(value) for name, value in bounds.items()}
    )
