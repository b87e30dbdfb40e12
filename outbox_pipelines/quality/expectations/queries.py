"""SQL of the measurements of the last hour. Table names are unqualified."""

from typing import Final

# What relays have recorded: at most one row for each second and shard, while events are published. A row in
# the future is from before the clock of the database went back.
PUBLISHED: Final = """
SELECT at, shard, events, lag AS lag_seconds FROM outbox_progress
WHERE at > clock_timestamp() - interval '1 hour' AND at <= clock_timestamp() ORDER BY at, shard"""

# A row for each minute, also for one without a failure. Dead letters are counted when they failed; events
# that were published after a rejection, when they were published.
FAILED: Final = """
SELECT m.at, coalesce(d.events, 0) AS dead_letters, coalesce(r.events, 0) AS published_late
FROM generate_series(date_trunc('minute', clock_timestamp()) - interval '59 minutes',
                     date_trunc('minute', clock_timestamp()), interval '1 minute') AS m(at)
LEFT JOIN (SELECT date_trunc('minute', failed_at) AS at, count(*) AS events FROM outbox_parked
           WHERE state IN ('failed', 'replaying') AND failed_at > clock_timestamp() - interval '1 hour'
           GROUP BY 1) d USING (at)
LEFT JOIN (SELECT date_trunc('minute', published_at) AS at, count(*) AS events FROM outbox_released
           WHERE published_at > clock_timestamp() - interval '1 hour' AND attempts > 0
           GROUP BY 1) r USING (at)
ORDER BY m.at"""
