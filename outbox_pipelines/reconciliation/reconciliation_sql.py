"""SQL of reconciliation, for PostgreSQL (names unqualified: the search_path finds them) and for DuckDB."""

from typing import Final, LiteralString

from outbox_pipelines.days.partitions.partitions_sql import ATTACHED

# --- PostgreSQL: the outbox -----------------------------------------------------------------------------

# One core: the comparison is not urgent.
TUNE: Final = "SET max_parallel_workers_per_gather = 0"

# Whether the day's rows are visible through the outbox; whether its partition can be read directly.
WHERE_IT_IS: Final[LiteralString] = f"""
SELECT coalesce((SELECT {ATTACHED} FROM pg_class c WHERE oid = to_regclass(%(leaf)s)), false),
       coalesce(has_table_privilege(to_regclass(%(leaf)s), 'SELECT'), false),
       (clock_timestamp() AT TIME ZONE 'UTC')::date"""

# One statement, and so one moment: an event that is released in between is parked or published, never both.
# By the parent, to which operators have rights; of a partition that is detached, from it.
CLOSED_EVENTS: Final = """
SELECT o.id::text AS id, o.seq, o.aggregate_type, o.aggregate_id, o.event_type, o.created_at,
       coalesce(p.state, 'published') AS state
FROM {table} o
LEFT JOIN outbox_parked p ON p.seq = o.seq AND p.id = o.id
WHERE o.created_at >= {start} AND o.created_at < {stop}"""
# In one that is not closed the shards' positions tell.
OPEN_EVENTS: Final = """
SELECT o.id::text AS id, o.seq, o.aggregate_type, o.aggregate_id, o.event_type, o.created_at,
       coalesce(p.state, CASE WHEN outbox_covers(s.done, s.target, s.last_seq, o.tx, o.seq)
                              THEN 'published' ELSE 'pending' END) AS state
FROM {table} o
JOIN outbox_shards s ON s.shard = outbox_shard_of(o.aggregate_type, o.aggregate_id, s.shards)
LEFT JOIN outbox_parked p ON p.seq = o.seq AND p.id = o.id
WHERE o.created_at >= {start} AND o.created_at < {stop}"""

# What became of dead letters after the day's file was written.
PARKED: Final = """
SELECT id::text AS id, seq, state FROM outbox_parked
WHERE created_at >= {start} AND created_at < {stop}"""
# The audit is never purged. A replay comes late by nature.
REPLAYED: Final = """
SELECT unnest(events) AS seq FROM outbox_audit WHERE action = 'replay' AND at >= {start}"""

# By the primary key of each day that is attached.
KNOWN: Final = "SELECT id::text FROM outbox WHERE id = ANY (%(ids)s::uuid[])"

# What decides about the topics of events; NULL stands for any.
GRANTED: Final = "SELECT DISTINCT unnest(aggregate_types) FROM outbox_writers"
TYPES_OF: Final = "SELECT DISTINCT aggregate_type, event_type FROM outbox WHERE id = ANY (%(ids)s)"

# Other days whose events the table does not show: whether they are archived, and whether they are beside this
# one.
OTHERS: Final[LiteralString] = f"""
SELECT d.day, d.manifest_sha256 IS NOT NULL, d.day IN (%(day)s::date - 1, %(day)s::date + 1)
FROM outbox_days d
LEFT JOIN pg_class c ON c.oid = to_regclass('outbox_' || to_char(d.day, 'YYYYMMDD'))
WHERE d.day <> %(day)s AND (c.oid IS NULL OR NOT {ATTACHED}) ORDER BY d.day"""

# --- PostgreSQL: a consumer -----------------------------------------------------------------------------

HAS_TABLES: Final = """
SELECT to_regclass('processed_events') IS NOT NULL, to_regclass('inbox') IS NOT NULL"""

# Only the partitions of these days, and the one of ids that tell no time. A record with a content is one of a
# replay, or of an id that is no UUID.
PROCESSED: Final = """
SELECT event_id::text AS id, processed_at AS handled_at FROM processed_events
WHERE source = {source} AND content IS NULL
  AND (bucket = ANY ({buckets}) AND event_id >= {first}::uuid AND event_id < {end}::uuid OR bucket = -1)"""
INBOX: Final = """
SELECT message_id::text AS id, state, coalesce(last_error, '') AS error FROM inbox
WHERE source = {source} AND state IN ('waiting', 'failed', 'discarded')"""
# Rows of a day are pruned together, when the last is a day old. One that was handled on the day itself, by
# whatever source, shows that they were not.
FIRST_KEPT: Final = """
SELECT (extract(epoch FROM min(processed_at)) * 1000)::bigint FROM processed_events
WHERE bucket = ANY (%(buckets)s) AND event_id >= %(first)s::uuid AND event_id < %(end)s::uuid"""

# --- DuckDB ---------------------------------------------------------------------------------------------

TABLES: Final = """
SET TimeZone = 'UTC';
CREATE SEQUENCE kind_numbers;
CREATE TABLE kinds (
    kind UINTEGER DEFAULT nextval('kind_numbers'), aggregate_type VARCHAR, event_type VARCHAR,
    topic UINTEGER);
CREATE TABLE topics (topic UINTEGER, name VARCHAR, kept_from BIGINT, doubt VARCHAR);
CREATE TYPE state AS ENUM (
    'published', 'pending', 'waiting', 'retrying', 'replaying', 'failed', 'discarded');
CREATE TABLE unknown (
    side VARCHAR, id UUID, topic UINTEGER, partition INTEGER, "offset" BIGINT)"""

# The rows that steps pass on: the columns of each kind, as views of the files have them.
_PLACE: Final = {"topic": "UINTEGER", "partition": "INTEGER", "offset": "BIGINT"}
COLUMNS: Final[dict[str, dict[str, str]]] = {
    "written": {
        **{"id": "UUID", "seq": "BIGINT", "aggregate": "UBIGINT", "kind": "UINTEGER"},
        **{"state": "state", "created_ms": "BIGINT"},
    },
    "parked": {"id": "UUID", "seq": "BIGINT", "state": "state"},
    "replayed": {"seq": "BIGINT"},
    "messages": {"id": "UUID", **_PLACE, "at_ms": "BIGINT"},
    "unreadable": _PLACE,
    "processed": {"id": "UUID", "handled_at": "TIMESTAMPTZ"},
    "inbox": {"id": "UUID", "state": "VARCHAR", "error": "VARCHAR"},
    "placed": {"id": "UUID", "seq": "BIGINT", "aggregate": "UBIGINT", "kind": "UINTEGER", **_PLACE},
    "handled": {"consumer": "VARCHAR", "event_id": "VARCHAR", "handled_at": "TIMESTAMPTZ"},
}
VIEW: Final = "CREATE OR REPLACE VIEW {name} AS SELECT {columns} FROM read_parquet({files})"
EMPTY: Final = "CREATE OR REPLACE VIEW {name} AS SELECT {columns} WHERE false"

ADD_KINDS: Final = """
INSERT INTO kinds (aggregate_type, event_type)
SELECT DISTINCT aggregate_type, event_type FROM batch
ANTI JOIN kinds USING (aggregate_type, event_type)"""
# An aggregate as 64 bits: of 10 million two are the same once in 400,000 days.
SCATTER_EVENTS: Final = """
SELECT id, seq, hash(aggregate_type, aggregate_id) AS aggregate, kind, state,
       epoch_ms(created_at) AS created_ms, hash(id::UUID) % {slices} AS slice
FROM batch JOIN kinds USING (aggregate_type, event_type) ORDER BY slice"""
# The rest of the rows that have an id.
SCATTER: Final = "SELECT *, hash(id::UUID) % {slices} AS slice FROM batch ORDER BY slice"
# Read by every slice.
KEEP_ALL: Final = "SELECT *, 0 AS slice FROM batch"

KINDS: Final = "SELECT kind, aggregate_type, event_type FROM kinds ORDER BY kind"
ADD_TOPICS: Final = "INSERT INTO topics (topic, name, kept_from, doubt) SELECT * FROM batch"
ADD_ROUTED: Final = "INSERT INTO kinds SELECT * FROM batch"

# A dead letter of the file that is parked no more was published since; a discarded one is purged with time.
MAKE_EVENTS: Final = """
CREATE TABLE events AS
SELECT w.* REPLACE (coalesce(p.state, CASE WHEN {is_archived} AND w.state = 'failed' THEN 'published'
                                           ELSE w.state END) AS state)
FROM written w LEFT JOIN parked p ON p.seq = w.seq AND p.id = w.id"""

# From when to when the ids of the day's events were drawn, and whether others tell no time.
SPAN: Final = """
SELECT min(id) FILTER (WHERE is_timed) AS first, max(id) FILTER (WHERE is_timed) AS last
FROM (SELECT id, uuid_extract_version(id::UUID) = 7 AS is_timed FROM batch)"""

# Of messages of other days nothing is kept: their ids tell.
SCATTER_MESSAGES: Final = """
SELECT *, hash(id) % {{slices}} AS slice FROM (
    SELECT TRY_CAST(id AS UUID) AS id, topic, partition, "offset", at_ms FROM batch)
WHERE id IS NOT NULL
  AND (id >= '{first}'::UUID AND id < '{end}'::UUID OR uuid_extract_version(id) <> 7)
ORDER BY slice"""
SCATTER_UNREADABLE: Final = """
SELECT topic, partition, "offset", "offset" % {{slices}} AS slice FROM batch
WHERE TRY_CAST(id AS UUID) IS NULL AND at_ms >= {start_ms} AND at_ms < {end_ms} ORDER BY slice"""

# Events beside the places they have come to; a duplicate in one partition counts as the first of it.
COMPARE: Final = """
CREATE TABLE compared AS
SELECT coalesce(e.id, m.id) AS id, e.seq, e.aggregate, e.kind, e.state, e.created_ms,
       m.topic, m.partition, m."offset", m.times, m.at_ms
FROM events e FULL JOIN (
    SELECT id, topic, partition, min("offset") AS "offset", min(at_ms) AS at_ms, count(*) AS times
    FROM messages GROUP BY id, topic, partition
) m ON m.id = e.id"""
# Places in other topics than the one of their kind are none for consumers; an event keeps one row.
SET_ASTRAY_ASIDE: Final = """
CREATE TABLE astray AS
SELECT c.*, k.topic AS meant FROM compared c JOIN kinds k USING (kind)
WHERE c."offset" IS NOT NULL AND c.topic IS DISTINCT FROM k.topic;
DELETE FROM compared WHERE (id, topic) IN (SELECT id, topic FROM astray);
INSERT INTO compared (id, seq, aggregate, kind, state, created_ms)
SELECT DISTINCT id, seq, aggregate, kind, state, created_ms FROM astray ANTI JOIN compared USING (id)"""

# An event's first place in each partition, for the step that looks at whole aggregates.
PLACED: Final = """
SELECT id, seq, aggregate, kind, topic, partition, "offset" FROM compared
WHERE seq IS NOT NULL AND "offset" IS NOT NULL"""
SCATTER_PLACED: Final = "SELECT *, aggregate % {slices} AS slice FROM batch ORDER BY slice"
# Its first time in a partition, behind a later event of its aggregate.
FIND_LATE: Final = """
CREATE TABLE late AS
SELECT * FROM (
    SELECT id, seq, kind, topic, partition, "offset", max(seq) OVER (
               PARTITION BY topic, partition, aggregate ORDER BY "offset"
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM placed)
WHERE seq < before"""

# Ids of this day that are of none of its events. Of one that tells no time the message's time decides.
FIND_UNKNOWN: Final = """
INSERT INTO unknown SELECT 'topics', id, topic, partition, "offset" FROM compared
WHERE seq IS NULL AND CASE WHEN uuid_extract_version(id) = 7
                           THEN id >= '{first}'::UUID AND id < '{end}'::UUID
                           ELSE at_ms >= {start_ms} AND at_ms < {end_ms} END"""
# How many are left, and whether some do not tell when they were drawn.
UNKNOWN_LEFT: Final = """
SELECT count(*), coalesce(bool_or(uuid_extract_version(id) <> 7), false) FROM unknown WHERE side = '{side}'"""
UNKNOWN: Final = "SELECT DISTINCT id::VARCHAR FROM unknown WHERE side = '{side}'"
MAKE_FOUND: Final = "CREATE OR REPLACE TABLE found (id UUID)"
ADD_FOUND: Final = "INSERT INTO found SELECT id::UUID FROM batch"
FORGET_FOUND: Final = "DELETE FROM unknown WHERE side = '{side}' AND id IN (FROM found)"

# --- DuckDB: findings of the topics ---------------------------------------------------------------------
# Each answers rows of (id, seq, kind, topic, partition, offset, detail).

_ABSENT: Final[LiteralString] = """
SELECT c.id, c.seq, c.kind, k.topic, NULL AS partition, NULL AS "offset",
       CASE WHEN t.doubt IS NOT NULL THEN t.doubt
            WHEN c.created_ms < t.kept_from
            THEN 'the topic has messages since '
                || strftime(make_timestamp(t.kept_from * 1000), '%Y-%m-%d %H:%M:%S')
       END AS detail
FROM compared c ANTI JOIN astray USING (id) JOIN kinds k USING (kind)
LEFT JOIN topics t ON t.topic = k.topic
WHERE c.state = 'published' AND c."offset" IS NULL"""
MISSING: Final[LiteralString] = f"SELECT * FROM ({_ABSENT}) WHERE detail IS NULL"
UNKNOWABLE: Final[LiteralString] = f"SELECT * FROM ({_ABSENT}) WHERE detail IS NOT NULL"
WRONG_TOPIC: Final = """
SELECT a.id, a.seq, a.kind, a.topic, a.partition, a."offset",
       coalesce('belongs in ' || t.name, 'has no valid topic') AS detail
FROM astray a LEFT JOIN topics t ON t.topic = a.meant"""
PHANTOM: Final = """
SELECT id, NULL AS seq, NULL AS kind, topic, partition, "offset", NULL AS detail FROM unknown
WHERE side = 'topics'"""
OUT_OF_ORDER: Final = """
SELECT id, seq, kind, topic, partition, "offset", 'behind seq ' || before AS detail FROM late
ANTI JOIN replayed USING (seq)"""
LATE_REPLAYS: Final = """
SELECT id, seq, kind, topic, partition, "offset", 'behind seq ' || before AS detail FROM late
SEMI JOIN replayed USING (seq)"""
_FIRST: Final[LiteralString] = """min(struct_pack(
           at_ms := at_ms, topic := topic, partition := partition, "offset" := "offset")) AS first"""
# As many as are too many: of one that came three times, two.
DUPLICATED: Final[LiteralString] = f"""
SELECT * EXCLUDE first, first.topic, first.partition, first."offset" FROM (
    SELECT id, any_value(seq) AS seq, any_value(kind) AS kind, {_FIRST},
           sum(times) || ' times' AS detail, sum(times) - 1 AS extra
    FROM compared WHERE seq IS NOT NULL AND "offset" IS NOT NULL
      AND (times > 1 OR id IN (SELECT id FROM compared WHERE "offset" IS NOT NULL AND seq IS NOT NULL
                               GROUP BY id HAVING count(*) > 1))
    GROUP BY id)"""
LAGGING: Final = """
SELECT id, seq, kind, NULL AS topic, NULL AS partition, NULL AS "offset", state::VARCHAR AS detail
FROM compared WHERE state IN ('pending', 'waiting', 'retrying', 'replaying') AND "offset" IS NULL"""
UNREADABLE: Final = """
SELECT NULL AS id, NULL AS seq, NULL AS kind, topic, partition, "offset", NULL AS detail FROM unreadable"""
DEAD: Final = """
SELECT id, seq, kind, NULL AS topic, NULL AS partition, NULL AS "offset", NULL AS detail
FROM compared WHERE state = 'failed' AND "offset" IS NULL"""
GIVEN_UP: Final = """
SELECT id, seq, kind, NULL AS topic, NULL AS partition, NULL AS "offset", NULL AS detail
FROM compared WHERE state = 'discarded' AND "offset" IS NULL"""
PUBLISHED: Final = "SELECT count(*) FROM events WHERE state = 'published'"

# --- DuckDB: a consumer ---------------------------------------------------------------------------------

MAKE_CONSUMER: Final = """
CREATE OR REPLACE TABLE committed (topic UINTEGER, partition INTEGER, "offset" BIGINT);
CREATE OR REPLACE TABLE taken (kind UINTEGER)"""
KEEP_HANDLED: Final = """
SELECT $consumer AS consumer, id::VARCHAR AS event_id, handled_at
FROM processed SEMI JOIN events USING (id)"""
HANDLED: Final = "SELECT * FROM handled ORDER BY handled_at, consumer, event_id"
ADD_COMMITTED: Final = "INSERT INTO committed VALUES ($topic, $partition, $offset)"
# An empty list means all.
ADD_TAKEN: Final = """
INSERT INTO taken SELECT kind FROM kinds k JOIN topics t ON t.topic = k.topic
WHERE (len($topics) = 0 OR t.name IN (SELECT unnest($topics)))
  AND (len($event_types) = 0 OR k.event_type IN (SELECT unnest($event_types)))"""
TAKEN_TOPICS: Final = "SELECT DISTINCT topic FROM kinds SEMI JOIN taken USING (kind)"
EXPECTED: Final = """
SELECT count(DISTINCT id) FROM compared SEMI JOIN taken USING (kind) WHERE "offset" IS NOT NULL"""

# Messages of the day that it has no record of: passed over, or not reached. Where its group has no offset
# the time decides: {grace_ms} is long enough for all.
FIND_UNHANDLED: Final[LiteralString] = f"""
CREATE OR REPLACE TABLE unhandled AS
SELECT id, seq, kind, first.topic, first.partition, first."offset", first.at_ms, is_passed FROM (
    SELECT id, any_value(seq) AS seq, any_value(kind) AS kind, {_FIRST},
           bool_or(CASE WHEN committed IS NULL THEN at_ms < {{grace_ms}}
                        ELSE "offset" < committed END) AS is_passed
    FROM (
        SELECT c.*, o."offset" AS committed
        FROM compared c SEMI JOIN taken USING (kind) ANTI JOIN processed USING (id)
        LEFT JOIN committed o ON o.topic = c.topic AND o.partition = c.partition
        WHERE c.seq IS NOT NULL AND c."offset" IS NOT NULL)
    GROUP BY id)"""
ANY_PASSED: Final = "SELECT count(*) > 0 FROM unhandled WHERE is_passed"
FIND_STRANGE: Final = """
INSERT INTO unknown
SELECT '{side}', id, NULL, NULL, NULL FROM processed ANTI JOIN events USING (id)
WHERE id >= '{first}'::UUID AND id < '{end}'::UUID AND uuid_extract_version(id) = 7"""

_UNHANDLED: Final[LiteralString] = """
SELECT id, seq, kind, topic, partition, "offset", NULL AS detail FROM unhandled """
# {kept_ms}: what came to the topic since then is certainly kept.
NOT_HANDLED: Final[LiteralString] = _UNHANDLED + "WHERE is_passed AND at_ms >= {kept_ms}"
FORGOTTEN: Final[LiteralString] = _UNHANDLED + "WHERE is_passed AND at_ms < {kept_ms}"
# Also of a message that its topic no longer has: the inbox proves that it came.
_RECEIVED: Final[LiteralString] = f"""
SELECT id, seq, kind, first.topic, first.partition, first."offset", detail FROM (
    SELECT id, any_value(seq) AS seq, any_value(kind) AS kind, {_FIRST}, any_value(error) AS detail
    FROM (SELECT c.*, i.error FROM compared c SEMI JOIN taken USING (kind) JOIN inbox i ON i.id = c.id
          WHERE i.state = '{{state}}')
    GROUP BY id)"""
CONSUMER_LAGGING: Final[LiteralString] = (
    _UNHANDLED.replace("NULL AS detail", "'not received' AS detail")
    + "WHERE NOT is_passed UNION ALL "
    + _RECEIVED.replace("{state}", "waiting").replace("any_value(error) AS", "'received, not handled' AS")
)
CONSUMER_DEAD: Final[LiteralString] = _RECEIVED.replace("{state}", "failed")
CONSUMER_GIVEN_UP: Final[LiteralString] = _RECEIVED.replace("{state}", "discarded")
STRANGE: Final = """
SELECT id, NULL AS seq, NULL AS kind, NULL AS topic, NULL AS partition, NULL AS "offset", NULL AS detail
FROM unknown WHERE side = '{side}'"""

# Of an answer as above, the count and the first few, with names for numbers.
COUNT: Final = "SELECT coalesce(sum({amount}), 0)::BIGINT FROM ({finding})"
EXAMPLES: Final = """
SELECT f.id::VARCHAR, f.seq, k.event_type, t.name, f.partition, f."offset", f.detail
FROM ({finding}) f LEFT JOIN kinds k ON k.kind = f.kind LEFT JOIN topics t ON t.topic = f.topic
ORDER BY f.seq, t.name, f.partition, f."offset", f.id, f.detail LIMIT {limit}"""
