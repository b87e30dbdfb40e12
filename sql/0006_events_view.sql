-- Locks: none
-- Every event in the common textbook shape, read-only; nothing of it is stored. processed_at is exact to
-- the second, and a second late.
CREATE VIEW outbox_events AS
SELECT e.id,
       e.seq,
       e.aggregate_type,
       e.aggregate_id,
       e.event_type,
       e.payload AS event_data,
       e.headers,
       e.idempotency_key,
       e.correlation_id,
       e.causation_id,
       e.traceparent,
       e.version,
       e.created_at,
       CASE
           WHEN p.state = 'failed' THEN 'FAILED'
           WHEN p.state = 'discarded' THEN 'DISCARDED'
           WHEN p.seq IS NULL AND late.day IS NULL AND outbox_covers(s.done, s.target, s.last_seq, e.tx, e.seq)
               THEN 'PROCESSED'
           ELSE 'PENDING'
       END AS status,
       CASE WHEN p.seq IS NULL AND late.day IS NULL THEN coalesce(r.published_at, (
           SELECT g.at
           FROM outbox_progress g
           WHERE g.shard = outbox_shard_of(e.aggregate_type, e.aggregate_id, g.shards)
             AND g.at >= e.created_at
             AND outbox_covers(g.done, g.target, g.last_seq, e.tx, e.seq)
           ORDER BY g.at
           LIMIT 1
       )) END AS processed_at,
       coalesce(p.attempts, r.attempts, 0) AS retry_count,
       p.last_error
FROM outbox e
JOIN outbox_shards s ON s.shard = outbox_shard_of(e.aggregate_type, e.aggregate_id, s.shards)
LEFT JOIN outbox_parked p ON p.seq = e.seq AND p.id = e.id
LEFT JOIN outbox_released r ON r.seq = e.seq AND r.id = e.id
-- No relay reads a closed day: a row written into it past the guards is not published, whatever the position is.
LEFT JOIN outbox_days late ON late.day = (e.created_at AT TIME ZONE 'UTC')::date
    AND NOT pg_visible_in_snapshot(e.tx, late.published);

INSERT INTO outbox_migrations (name) VALUES ('0006_events_view');
