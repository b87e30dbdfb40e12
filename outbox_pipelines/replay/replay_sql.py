"""The SQL of replays."""

from __future__ import annotations

from typing import Final, LiteralString

from outbox_pipelines.days.partitions.partitions_sql import ATTACHED

# --- the record of replays ------------------------------------------------------------------------------

BEGIN: Final = """
SELECT outbox_replay_begin(%(selection)s, %(target)s, %(files)s, %(events)s, %(last_seq)s, %(reason)s,
                           %(on_behalf_of)s, %(notes)s)"""
ADVANCE: Final = "SELECT outbox_replay_advance(%(id)s, %(seq)s, %(sent)s, %(state)s, %(error)s)"
# An event that commits late may be published, and then sent, after the events were counted.
LIST: Final = """
SELECT id, started_at, actor, on_behalf_of, reason, selection, target, files, greatest(events, sent),
       last_seq, position, sent, state, error, progress_at, notes
FROM outbox_replays WHERE %(id)s::uuid IS NULL OR id = %(id)s ORDER BY started_at DESC, id DESC"""

# --- where events are -----------------------------------------------------------------------------------

DAYS: Final[LiteralString] = f"""
SELECT d.day, {ATTACHED}, d.manifest_sha256, c.oid IS NOT NULL
FROM outbox_days d
LEFT JOIN pg_class c ON c.oid = to_regclass('outbox_' || to_char(d.day, 'YYYYMMDD'))
ORDER BY d.day"""
RANGE: Final = """
SELECT min(seq), max(seq) FROM outbox WHERE created_at >= %(start)s AND created_at < %(stop)s"""
# The last seq of each part of a window whose text is about so many bytes.
CUTS: Final = """
SELECT max(seq) FROM (
    SELECT seq, sum(octet_length(payload::text) + coalesce(octet_length(headers::text), 0))
                OVER (ORDER BY seq) AS upto
    FROM outbox
    WHERE created_at >= %(start)s AND created_at < %(stop)s AND seq >= %(first)s AND seq <= %(last)s) sized
GROUP BY upto / %(most)s ORDER BY 1"""
# The columns of an archive file. When an event was published is looked up only if it is asked for.
ROWS: Final[LiteralString] = """
SELECT id::text, seq, aggregate_type, aggregate_id, event_type, event_data::text, headers::text,
       idempotency_key, correlation_id, causation_id, traceparent, version, created_at, status,
       {published_at}, retry_count, last_error
FROM outbox_events
WHERE created_at >= %(start)s AND created_at < %(stop)s AND seq >= %(first)s AND seq <= %(last)s
    AND status = 'PROCESSED'"""
# Of dead letters in files, those that were published later: such a one has left outbox_parked, and the last
# action on it was a replay. outbox_released does not keep them as long as the audit does.
PUBLISHED_SINCE: Final = """
SELECT f.seq FROM unnest(%(seqs)s::bigint[], %(ids)s::uuid[]) AS f (seq, id)
JOIN (SELECT DISTINCT ON (e.seq) e.seq, a.action
      FROM outbox_audit a, unnest(a.events) AS e (seq)
      WHERE a.action IN ('replay', 'discard') AND a.events && %(seqs)s::bigint[]
      ORDER BY e.seq, a.number DESC) last ON last.seq = f.seq AND last.action = 'replay'
WHERE NOT EXISTS (SELECT FROM outbox_parked p WHERE p.seq = f.seq AND p.id = f.id)"""

# --- DuckDB ---------------------------------------------------------------------------------------------

# An archive has the day by the names of its directories; here also of days in the table.
DATED: Final = "SELECT *, created_at::DATE AS event_date FROM ({source})"
# The fields of an event. Metadata as the relay reads it: in the order in which jsonb has the names.
SELECTED: Final = """
SELECT seq, id, aggregate_type, aggregate_id, event_type, payload, '{{' || nullif(concat_ws(', ',
    '"version": ' || version, {time}
    '"traceparent": ' || to_json(traceparent), '"causation-id": ' || to_json(causation_id),
    '"correlation-id": ' || to_json(correlation_id), '"idempotency-key": ' || to_json(idempotency_key),
    '"headers": ' || headers), '') || '}}' AS metadata
FROM ({source})
WHERE seq >= {first} AND seq <= {last} AND status = 'PROCESSED' AND {condition}"""
TIME: Final = """'"created-at": "' || strftime(created_at, '%Y-%m-%dT%H:%M:%S.%fZ') || '"',"""
COUNT: Final = """
SELECT created_at::DATE, aggregate_type, event_type, count(*), min_by(id, seq)
FROM ({source})
WHERE seq >= {first} AND seq <= {last} AND status = 'PROCESSED' AND {condition}
GROUP BY ALL"""
DEAD: Final = """
SELECT seq, id FROM ({source}) WHERE seq >= {first} AND seq <= {last} AND status = 'FAILED'"""
REVIVED: Final = """
SELECT * REPLACE (CASE WHEN status = 'FAILED' AND seq IN ({seqs}) THEN 'PROCESSED' ELSE status END AS status)
FROM ({source})"""
