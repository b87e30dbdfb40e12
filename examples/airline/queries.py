"""The SQL of the demo. The SQL of the airline is in `airline`, next to its transactions."""

from typing import Final

# One demo at a time in a schema: the next one would drop it under the first one's feet.
TRY_LOCK: Final = "SELECT pg_try_advisory_lock(hashtext('outbox demo'), hashtext(%s))"
# The comment distinguishes a demo's schema from another schema of this name.
COMMENT: Final = """
SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = %s"""
DROP: Final = "DROP SCHEMA {schema} CASCADE"
CREATE: Final = "CREATE SCHEMA {schema}"
SET_COMMENT: Final = "COMMENT ON SCHEMA {schema} IS {comment}"

DROP_DATABASE: Final = "DROP DATABASE IF EXISTS {name} WITH (FORCE)"
CREATE_DATABASE: Final = "CREATE DATABASE {name}"

# The relay's own numbers, for the progress line and the summary; the verification does not ask it. Each
# session that takes the shard counts the epoch up.
RELAYED: Final = """
SELECT coalesce(sum(events), 0)::bigint, (SELECT epoch FROM outbox_shards WHERE shard = 0),
       percentile_cont(0.5) WITHIN GROUP (ORDER BY latency), max(latency)
FROM outbox_progress"""

# What the airline's tables say: every operation of every flight, as seconds since 1970.
FLIGHTS: Final = """
SELECT id, tail_number, extract(epoch FROM scheduled_for)::bigint, extract(epoch FROM departed_at)::bigint,
       extract(epoch FROM arrived_at)::bigint, extract(epoch FROM cancelled_at)::bigint
FROM flights"""
LAST_FLIGHT: Final = "SELECT coalesce(max(id), 0) FROM flights"
# How many events an aggregate should have sent: by its own counter, and by what happened to its flights.
MOVEMENTS: Final = """
WITH happened AS (
    SELECT id, tail_number, movements,
           1 + num_nonnulls(departed_at, arrived_at, cancelled_at) AS operations
    FROM flights
)
SELECT 'aircraft', tail_number, a.movements, coalesce(sum(h.operations), 0)::bigint
FROM aircraft a LEFT JOIN happened h USING (tail_number) GROUP BY tail_number
UNION ALL
SELECT 'flight', id::text, movements, operations FROM happened WHERE tail_number IS NULL"""

# How many events the board should handle, and has handled.
DEPARTURES: Final = "SELECT count(departed_at) FROM flights"
HANDLED: Final = """
SELECT (SELECT count(*) FROM processed_events WHERE source = %(source)s)
     - (SELECT count(*) FROM inbox WHERE source = %(source)s AND state IN ('waiting', 'failed'))"""
# What the board shows, beside the same asked of the airline's tables: rows that only one of them has, too.
DIFFERENCES: Final = """
WITH shown AS (
    SELECT 'carrier' AS kind, carrier AS name,
           format('%s departures, %s minutes late', departures, minutes_late) AS says
    FROM board_carriers
    UNION ALL
    SELECT 'aircraft', tail_number, format('at %s with flight %s', airport, flight) FROM board_aircraft
), departed AS (
    SELECT left(number, 2) AS carrier, tail_number, origin, id, departed_at,
           extract(epoch FROM departed_at - scheduled_for)::int / 60 AS late
    FROM flights WHERE departed_at IS NOT NULL
), truth AS (
    SELECT 'carrier' AS kind, carrier AS name,
           format('%s departures, %s minutes late', count(*), sum(late)) AS says
    FROM departed GROUP BY carrier
    UNION ALL
    (SELECT DISTINCT ON (tail_number) 'aircraft', tail_number, format('at %s with flight %s', origin, id)
     FROM departed WHERE tail_number IS NOT NULL ORDER BY tail_number, departed_at DESC, id DESC)
)
SELECT kind, name, shown.says, truth.says FROM shown FULL JOIN truth USING (kind, name)
WHERE shown.says IS DISTINCT FROM truth.says ORDER BY kind DESC, name"""

# Days that were: the owner of the outbox may write them, if it says so in the transaction. The airline's
# first days come again, each at the same time of a later day.
DECLARE_BACKFILL: Final = "SET LOCAL outbox.backfill = on"
WRITE_AGAIN: Final = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at)
SELECT aggregate_type, aggregate_id, event_type, payload,
       (%(day)s::date + ((payload ->> 'at')::timestamptz AT TIME ZONE 'UTC')::time) AT TIME ZONE 'UTC'
FROM outbox
WHERE ((payload ->> 'at')::timestamptz AT TIME ZONE 'UTC')::date = (
    SELECT min((scheduled_for AT TIME ZONE 'UTC')::date) + %(number)s::int FROM flights)
ORDER BY seq"""
# What was written just now, once more: for a few events, whatever their days are.
WRITE_AGAIN_AS_OF: Final = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at)
SELECT aggregate_type, aggregate_id, event_type, payload,
       (%(day)s::date + ((payload ->> 'at')::timestamptz AT TIME ZONE 'UTC')::time) AT TIME ZONE 'UTC'
FROM outbox WHERE created_at > now() - interval '1 hour'
ORDER BY seq"""
WELL_TRAVELLED: Final = "SELECT tail_number FROM aircraft ORDER BY movements DESC, tail_number LIMIT 1"

# For `make demo-archive`: a day that is over, and the board of another service.
WRITE_PAST: Final = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at)
VALUES ('aircraft', %s, %s, %s, %s)"""
CREATE_BOARD: Final = """
CREATE SCHEMA {schema}
CREATE TABLE boarded (
    flight    int,
    passenger int,
    aircraft  text NOT NULL,
    route     text NOT NULL,
    at        timestamptz NOT NULL,
    name      text NOT NULL,
    PRIMARY KEY (flight, passenger)
)"""
SHOW_ON_BOARD: Final = """
INSERT INTO boarded VALUES (%(flight)s, %(passenger)s, %(aircraft)s, %(route)s, %(at)s, %(name)s)"""
BOARD: Final = "SELECT * FROM boarded ORDER BY flight, passenger"
# In DuckDB, of the archive: what the passenger's key no longer decrypts is NULL.
WHO_IS_ERASED: Final = (
    "SELECT payload ->> 'passenger' AS passenger, count(*) AS events FROM events "
    "WHERE decrypted(payload) ->> 'name' IS NULL GROUP BY ALL"
)
