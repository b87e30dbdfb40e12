"""SQL of the archive, for PostgreSQL (names unqualified: the search_path finds them) and for DuckDB."""

from collections.abc import Sequence
from typing import Any, Final, LiteralString

from psycopg import sql

from outbox_pipelines.days.archive.manifest import BUCKET, EXTRA_TEXT, OWN, Column, is_text, row_text
from outbox_pipelines.days.partitions.partitions_sql import ATTACHED

SOURCE: Final = """
SELECT system_identifier, current_database(), current_schema() FROM pg_control_system()"""

# --- which archive it is --------------------------------------------------------------------------------

# The archive's identity, which is the same for all days, and the number of archived days.
KNOWN_ARCHIVE: Final = """
SELECT archive, sum(count(*)) OVER ()::bigint FROM outbox_days WHERE archive IS NOT NULL
GROUP BY archive ORDER BY max(archived_at) DESC LIMIT 1"""
ARCHIVED_DAYS: Final = """
SELECT day, manifest_sha256 FROM outbox_days WHERE manifest_sha256 IS NOT NULL ORDER BY day"""
ADOPT: Final = "UPDATE outbox_days SET archive = %(archive)s WHERE manifest_sha256 IS NOT NULL"
LOCK_ARCHIVE: Final = """
SELECT pg_advisory_xact_lock(hashtextextended('outbox archive', 'outbox'::regclass::oid::bigint))"""

# --- writing --------------------------------------------------------------------------------------------

# The columns that users have added, and whether PostgreSQL computes them.
ADDED: Final = """
SELECT attname, format_type(atttypid, atttypmod), attgenerated <> ''
FROM pg_attribute
WHERE attrelid = to_regclass(%(leaf)s) AND attnum > 0 AND NOT attisdropped AND attname <> ALL (%(own)s)
ORDER BY attnum"""

# How values of users' types are printed, in addition to what `session` sets.
PRINT: Final = "SET lc_monetary = 'C'"

# A sort with limited memory. More parallel workers would take cores from the application.
TUNE: Final = "SET work_mem = '64MB'; SET max_parallel_workers_per_gather = 1"

# The numbers of shards that the outbox had while the day's events were published.
DIVISIONS: Final = "SELECT DISTINCT shards FROM outbox_progress"

# Progress is written after the event, by the same database's clock: rows from before the day are not needed.
PROGRESS: Final = """
SELECT shard, at, done::text, target::text, last_seq FROM outbox_progress
WHERE shards = %(shards)s AND at >= %(day)s::date::timestamp AT TIME ZONE 'UTC'
ORDER BY shard, at"""

# The aggregate types of a day, as far as they are few: one scan, since no index begins with the type.
MOST_TYPES: Final = 1000
TYPES: Final = """
SELECT array_agg(aggregate_type ORDER BY aggregate_type COLLATE "C"), count(*)
FROM (SELECT DISTINCT aggregate_type FROM {leaf} LIMIT {most} + 1) AS first"""

# Order by aggregate makes files a quarter smaller, and reading the history of one aggregate four times as
# fast. `tx` and the shards are not written to the file; they determine the time of publishing.
ROWS: Final[LiteralString] = """
SELECT o.id::text, o.seq, o.aggregate_type, o.aggregate_id, o.event_type, o.payload::text, o.headers::text,
       o.idempotency_key, o.correlation_id, o.causation_id, o.traceparent, o.version, o.created_at,
       CASE WHEN p.seq IS NULL THEN 'PROCESSED' WHEN p.state = 'discarded' THEN 'DISCARDED' ELSE 'FAILED' END,
       r.published_at, coalesce(p.attempts, r.attempts, 0), p.last_error{extra},
       o.tx::text::bigint{shards}
FROM {leaf} o
LEFT JOIN outbox_parked p ON p.seq = o.seq AND p.id = o.id
LEFT JOIN outbox_released r ON r.seq = o.seq AND r.id = o.id
ORDER BY {aggregate}, o.seq"""
# Type and id as one key, the type as one character: PostgreSQL compares the first 8 bytes of the first key
# fastest. The same order with any number of types: positions are searched one by one, and there are no
# characters above 1,114,111, nor surrogates.
BY_FEW_TYPES: Final = 'chr(31 + array_position({types}, o.aggregate_type)) || o.aggregate_id COLLATE "C"'
BY_MANY_TYPES: Final = 'o.aggregate_type COLLATE "C", o.aggregate_id COLLATE "C"'
SHARD: Final[LiteralString] = ", outbox_shard_of(o.aggregate_type, o.aggregate_id, {shards})"

# Rows of a restored day have the lowest id of an ordinary transaction: see MAKE.
RESTORED_TX: Final = 3
IS_RESTORED: Final = "SELECT EXISTS (SELECT FROM {leaf} WHERE tx = '3')"

ARCHIVED: Final = """
UPDATE outbox_days
SET state = 'archived', events = %(events)s, manifest_sha256 = %(digest)s, archive = %(archive)s,
    archived_at = CASE WHEN manifest_sha256 = %(digest)s THEN archived_at ELSE clock_timestamp() END,
    proven_at = CASE WHEN manifest_sha256 = %(digest)s THEN proven_at END
WHERE day = %(day)s AND state IN ('closed', 'archived')
RETURNING day"""

PROVEN: Final = """
UPDATE outbox_days SET proven_at = CASE WHEN %(equal)s THEN clock_timestamp() END
WHERE day = %(day)s AND manifest_sha256 = %(digest)s"""

# --- changing archived days -----------------------------------------------------------------------------

# While one manifest replaces another, readers accept both.
CHANGING: Final = """
UPDATE outbox_days SET manifest_sha256 = %(former)s || ' ' || %(digest)s
WHERE day = %(day)s AND state = 'dropped' AND manifest_sha256 = %(former)s
RETURNING day"""
CHANGED: Final = """
UPDATE outbox_days SET manifest_sha256 = %(digest)s, events = %(events)s WHERE day = %(day)s"""
CHANGE: Final = """
INSERT INTO outbox_archive_changes
    (manifest_sha256, day, at, changed_by, reason, kind, names, events, rows_before, rows_after,
     former_sha256, former_manifest_sha256)
VALUES (%(led_to)s, %(day)s, %(at)s, %(by)s, %(reason)s, %(kind)s, %(names)s, %(events)s, %(rows_before)s,
        %(rows_after)s, %(sha256)s, %(manifest_sha256)s)
ON CONFLICT (manifest_sha256) DO NOTHING"""
FORMER_DELETED: Final = """
UPDATE outbox_archive_changes SET former_deleted_at = clock_timestamp()
WHERE day = %(day)s AND former_deleted_at IS NULL"""
UNFINISHED: Final = """
SELECT day FROM outbox_days WHERE position(' ' IN manifest_sha256) > 0
UNION SELECT day FROM outbox_archive_changes WHERE former_deleted_at IS NULL
ORDER BY 1"""
CHANGES: Final = """
SELECT day, former_deleted_at, at, changed_by, reason, kind, names, events, rows_before, rows_after,
       former_sha256, former_manifest_sha256
FROM outbox_archive_changes ORDER BY at, day"""
# Days with events that may have expired, and their age in days.
EXPIRABLE: Final = """
SELECT day, age FROM (
    SELECT day, state, manifest_sha256, events, (clock_timestamp() AT TIME ZONE 'UTC')::date - day AS age
    FROM outbox_days) d
WHERE state = 'dropped' AND manifest_sha256 IS NOT NULL AND events > 0 AND age > %(least)s
ORDER BY day"""
# The table that `outbox archive restore` makes, and what parking has copied.
COPIES: Final = """
SELECT to_regclass('outbox_restored_' || to_char(%(day)s::date, 'YYYYMMDD'))::text,
       (SELECT count(*) FROM outbox_parked WHERE created_at >= %(start)s AND created_at < %(stop)s)"""
# In DuckDB.
SELECTED: Final = """
SELECT file_row_number FROM (
    SELECT *, created_at::DATE AS event_date
    FROM read_parquet({file}, file_row_number = true, hive_partitioning = false))
WHERE ({where}
)"""

# --- history of an aggregate ----------------------------------------------------------------------------

HISTORY: Final = """
SELECT seq, id::text, created_at, event_type, event_data::text, headers::text, idempotency_key,
       correlation_id, causation_id, traceparent, version, status, processed_at, retry_count, last_error
FROM outbox_events
WHERE aggregate_type = %(aggregate_type)s AND aggregate_id = %(aggregate_id)s"""

# What became of dead letters of dropped days: only columns that an analyst may read (0008_roles.sql).
SINCE_ARCHIVED: Final = """
SELECT seq, id::text,
       CASE state WHEN 'failed' THEN 'FAILED' WHEN 'discarded' THEN 'DISCARDED' ELSE 'PENDING' END,
       NULL::timestamptz, attempts, last_error
FROM outbox_parked WHERE seq = ANY (%(seqs)s)
UNION ALL
SELECT seq, id::text, 'PROCESSED', published_at, attempts, NULL
FROM outbox_released WHERE seq = ANY (%(seqs)s)"""

# For each day: whether it is attached, the digest of its manifest, and whether its partition exists.
WHERE_DAYS_ARE: Final[LiteralString] = f"""
SELECT d.day, {ATTACHED}, d.manifest_sha256, c.oid IS NOT NULL
FROM outbox_days d
LEFT JOIN pg_class c ON c.oid = to_regclass('outbox_' || to_char(d.day, 'YYYYMMDD'))
ORDER BY d.day"""

# --- sums -----------------------------------------------------------------------------------------------

_POSTGRES_TEXT: Final[LiteralString] = row_text("(extract(epoch FROM created_at) * 1000000)::bigint")
_DUCKDB_TEXT: Final[LiteralString] = row_text("epoch_us(created_at)")
_POSTGRES_DIGEST: Final[LiteralString] = (
    f"('x' || encode(substring(sha256(convert_to({_POSTGRES_TEXT}, 'UTF8')) FOR 7), 'hex'))::bit(56)::bigint"
)
_DUCKDB_DIGEST: Final[LiteralString] = f"('0x' || substr(sha256({_DUCKDB_TEXT}), 1, 14))::BIGINT"

# More workers than TUNE: the proof is CPU-bound, and only the drop waits for it.
SUM_TUNE: Final[LiteralString] = f"{PRINT}; SET max_parallel_workers_per_gather = 4"
SUMS: Final[LiteralString] = f"""
SELECT seq / {BUCKET}, count(*), sum({_POSTGRES_DIGEST}) FROM {{leaf}} GROUP BY 1 ORDER BY 1"""
FILE_SUMS: Final = f"""
SELECT seq // {BUCKET}, count(*), sum({_DUCKDB_DIGEST}) FROM read_parquet($file) GROUP BY 1 ORDER BY 1"""

# The rows of a bucket that differs, for the report.
DIGESTS: Final[LiteralString] = f"""
SELECT id::text, seq, {_POSTGRES_DIGEST} FROM {{leaf}}
WHERE seq >= {{bucket}} * {BUCKET} AND seq < ({{bucket}} + 1) * {BUCKET} ORDER BY seq"""
FILE_DIGESTS: Final = f"""
SELECT id, seq, {_DUCKDB_DIGEST} FROM read_parquet($file)
WHERE seq >= $bucket * {BUCKET} AND seq < ($bucket + 1) * {BUCKET} ORDER BY seq"""
# How many events of the former file have other content in the new one, are missing there, and were not in the
# former one. By a hash of the key: a join by text needs four times as much memory.
_EVENTS: Final = f"SELECT hash(seq, id) AS event, {_DUCKDB_DIGEST} AS digest FROM read_parquet"
FILES_DIFFER: Final = f"""
SELECT count(*) FILTER (former.digest <> new.digest), count(*) FILTER (new.event IS NULL),
       count(*) FILTER (former.event IS NULL)
FROM ({_EVENTS}($file)) AS former FULL JOIN ({_EVENTS}($new)) AS new USING (event)"""

# --- restoring ------------------------------------------------------------------------------------------

KNOWN: Final = "SELECT state, manifest_sha256 FROM outbox_days WHERE day = %(day)s"

# The columns of the outbox, as a file has them.
COLUMNS: Final = tuple(name for name in OWN if name != "tx")
# A column of the file that the table no longer has; as text if its type no longer exists.
TYPE_EXISTS: Final = "SELECT to_regtype(%(type)s) IS NOT NULL"
ADD_COLUMN: Final = "ALTER TABLE {leaf} ADD COLUMN {name} {type}"
# 3 is the lowest id of an ordinary transaction: it is visible in every snapshot. Creating the indexes after
# loading the rows takes a third of the time. They equal those of the outbox: ATTACH would create others.
MAKE: Final = """
CREATE TABLE {leaf} (LIKE outbox INCLUDING ALL EXCLUDING INDEXES EXCLUDING IDENTITY);
ALTER TABLE {leaf} ALTER COLUMN tx SET DEFAULT '3'"""
COPY: Final = "COPY {leaf} ({columns}) FROM STDIN (FORMAT csv)"
MADE: Final = """
ALTER TABLE {leaf} ALTER COLUMN tx SET DEFAULT pg_current_xact_id();
ALTER TABLE {leaf} ADD PRIMARY KEY (id, created_at);
CREATE INDEX ON {leaf} (tx, seq, hashtextextended(aggregate_id, hashtext(aggregate_type)));
CREATE INDEX ON {leaf} (seq, (hashtextextended(aggregate_id, hashtext(aggregate_type)) + 0));
CREATE INDEX ON {leaf} USING brin (aggregate_id text_bloom_ops) WITH (pages_per_range = 32)"""
# As before the drop: no insert, no change. With the CHECK, ATTACH does not scan the rows.
ATTACH_RESTORED: Final = """
CREATE TRIGGER outbox_no_truncate BEFORE TRUNCATE ON {leaf} FOR EACH STATEMENT
EXECUTE FUNCTION outbox_refuse_change();
CREATE TRIGGER outbox_closed BEFORE INSERT ON {leaf} FOR EACH ROW
EXECUTE FUNCTION outbox_refuse_late_insert();
ALTER TABLE {leaf} ENABLE ALWAYS TRIGGER outbox_closed;
ALTER TABLE {leaf} ADD CHECK (created_at >= {start} AND created_at < {stop});
SET LOCAL lock_timeout = '2s';
ALTER TABLE outbox ATTACH PARTITION {leaf} FOR VALUES FROM ({start}) TO ({stop})"""
RESTORED: Final = """
UPDATE outbox_days SET state = 'archived', dropped_at = NULL, proven_at = clock_timestamp()
WHERE day = %(day)s"""
# Whether a column has a value that a file without the column would lose.
HAS_VALUES: Final = "SELECT EXISTS (SELECT FROM {leaf} WHERE {name} IS NOT NULL)"


def texts(columns: Sequence[Column]) -> sql.Composable:
    """Return what replaces `{extra}` in a sum over a table."""
    parts = [sql.SQL(EXTRA_TEXT).format(name=sql.Identifier(column.name)) for column in columns]
    return sql.SQL("").join(parts)


def values(columns: Sequence[Column]) -> sql.Composable:
    """Return what replaces `{extra}` in `ROWS`."""
    return sql.SQL("").join(
        sql.SQL(", o.{}::text" if is_text(column) else ", o.{}").format(sql.Identifier(column.name))
        for column in columns
    )


def of_leaf(query: LiteralString, leaf: str, **parts: Any) -> sql.Composed:
    """Return a query with the name of a partition and further parts filled in."""
    return sql.SQL(query).format(leaf=sql.Identifier(leaf), **parts)
