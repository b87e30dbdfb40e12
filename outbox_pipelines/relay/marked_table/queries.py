"""All SQL of the relay of a marked table, built for one table and its columns.

`Statements` fills in the names in braces, once; `pending` is a condition that a partial index of the table
should have. Values of a status column are literals in the SQL, so that the planner can use that index.

`key` identifies a row: its `seq`, or its `id` in a table without an integer. The rows of such a table are
numbered when they are claimed (see `keys`); `number` is 0 in the statements that claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final, LiteralString

from psycopg import sql

from outbox_pipelines.parsers.table_mapping import METADATA, Mapping
from outbox_pipelines.relay.marked_table.keys import IdKeys, Keys, SeqKeys
from outbox_pipelines.relay.queries import FITTING

# --- the right to relay the table -------------------------------------------------------------------------

# Polled, because a statement that waits would delay vacuum.
TRY_LOCK: Final = "SELECT pg_try_advisory_lock(%(key)s::bigint)"
# By each of the relays that share a table without an order.
TRY_SHARE: Final = "SELECT pg_try_advisory_lock_shared(%(key)s::bigint)"
UNLOCK: Final = "SELECT pg_advisory_unlock(%(key)s::bigint)"
# Alone in its transaction: takes and releases the lock, which is possible only while no claim is open.
NO_CLAIMS: Final = "SELECT pg_try_advisory_xact_lock(%(key)s::bigint)"
OWNER: Final[LiteralString] = """
SELECT l.pid, a.application_name,
       extract(epoch FROM clock_timestamp() - a.backend_start)::float8,
       to_char(a.backend_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid = %(key)s::bigint >> 32 AND l.objid = %(key)s::bigint & 4294967295"""
# A lock of two numbers, one of the table and one of its description; then the sessions that have one for
# another description. In this order: of two relays that start at the same time, at least one finds the other.
DESCRIBE: Final = """
SELECT pg_try_advisory_lock_shared(%(table)s::bigint::bit(32)::int, %(digest)s::bigint::bit(32)::int)"""
DESCRIBED_OTHERWISE: Final = """
SELECT l.pid, a.application_name
FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.mode = 'ShareLock'
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid = %(table)s::bigint AND l.objid <> %(digest)s::bigint ORDER BY l.pid"""
PID: Final = "SELECT pg_backend_pid()"

# The beginning of a claim. The shared lock comes first: a new owner waits until it is free, so a relay that
# still owns the table after that stays its owner until this claim ends. The name is
# compared because `outbox adopt` renames the table: nothing is claimed from another relation.
BEGIN: Final = """
BEGIN ISOLATION LEVEL READ COMMITTED;
SELECT pg_advisory_xact_lock_shared({claims});
SELECT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND pid = {pid}
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid = {key}::bigint >> 32 AND objid = {key}::bigint & 4294967295)
   AND to_regclass({table}) = {oid}::oid"""

# --- pg_catalog ---------------------------------------------------------------------------------------------

# By name: a lookup by `regclass` fails without the right to use the schema, which is to be reported.
TABLE: Final = """
SELECT c.oid::bigint, c.relkind::text, n.nspname::text, c.relname::text,
       format('%%I.%%I', n.nspname, c.relname),
       (SELECT format('%%I.%%I', s.nspname, r.relname)
        FROM pg_class r JOIN pg_namespace s ON s.oid = r.relnamespace
        WHERE c.relispartition AND r.oid = pg_partition_root(c.oid)),
       has_schema_privilege(n.oid, 'USAGE'), has_table_privilege(c.oid, 'SELECT'),
       has_any_column_privilege(c.oid, 'UPDATE'), row_security_active(c.oid), quote_ident(current_user)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relname = %(table)s AND n.nspname = coalesce(%(schema)s::text, current_schema())"""
# Tables that may be meant.
ELSEWHERE: Final = """
SELECT n.nspname || '.' || c.relname
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE lower(c.relname) = lower(%(table)s) AND c.relkind IN ('r', 'p') AND NOT c.relispartition
ORDER BY 1 LIMIT 5"""

# A domain counts as its base type.
COLUMNS: Final = """
SELECT a.attname::text, t.typname::text, t.typtype::text, format_type(t.oid, NULL),
       format('%%I.%%I', (SELECT nspname FROM pg_namespace WHERE oid = t.typnamespace), t.typname),
       format_type(a.atttypid, a.atttypmod), a.attnotnull, shown.given,
       a.attidentity <> '' OR coalesce(shown.given LIKE 'nextval(%%', false), EXISTS (
           SELECT FROM pg_index i
           WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum),
       has_column_privilege(a.attrelid, a.attnum, 'UPDATE'),
       ARRAY(SELECT e.enumlabel::text FROM pg_enum e WHERE e.enumtypid = t.oid ORDER BY e.enumsortorder)
FROM pg_attribute a
JOIN pg_type declared ON declared.oid = a.atttypid
JOIN pg_type t ON t.oid = CASE WHEN declared.typtype = 'd' THEN declared.typbasetype ELSE declared.oid END
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
CROSS JOIN LATERAL (SELECT pg_get_expr(d.adbin, d.adrelid)) AS shown (given)
WHERE a.attrelid = %(oid)s::oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""

# The end of the newest partition by time, if it is near and no default one takes the rows after it. Times
# without a zone are UTC, as in the session.
ENDING: Final = r"""
SELECT to_char(max(b.until::timestamptz), 'YYYY-MM-DD HH24:MI'), max(b.until::timestamptz) < clock_timestamp()
FROM pg_partitioned_table p
JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
JOIN pg_inherits i ON i.inhparent = p.partrelid JOIN pg_class c ON c.oid = i.inhrelid
CROSS JOIN LATERAL (
    SELECT (regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \(''([^'']+)''\)'))[1]) AS b (until)
WHERE p.partrelid = %(oid)s::oid AND p.partstrat = 'r' AND p.partnatts = 1 AND p.partdefid = 0
  AND a.atttypid IN ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype)
HAVING NOT bool_or(b.until IS NULL)
   AND max(b.until::timestamptz) < clock_timestamp() + interval '7 days'"""

# Values of a column that are cheap to know: from statistics, and from a few rows.
FREQUENT: Final = """
SELECT DISTINCT unnest(most_common_vals::text::text[]) FROM pg_stats
WHERE schemaname = %(schema)s AND tablename = %(table)s AND attname = %(column)s"""
FEW: Final = "SELECT DISTINCT {column}::text FROM (SELECT {column} FROM {table} LIMIT 1000) AS few"

# The CHECK constraints of one column alone.
CHECKS: Final = """
SELECT c.conname::text, pg_get_expr(c.conbin, c.conrelid)
FROM pg_constraint c JOIN pg_attribute a ON a.attrelid = c.conrelid AND c.conkey = ARRAY[a.attnum]
WHERE c.conrelid = %(oid)s::oid AND c.contype = 'c' AND a.attname = %(column)s ORDER BY 1"""

# The tables that contain rows, each with whether it has an index over pending rows in their order (a partial
# one, or one that begins with the status), and one that begins with the key. A condition is compared as text:
# a wrong guess causes only a warning.
LEAVES: Final = """
SELECT (SELECT format('%%I.%%I', n.nspname, c.relname)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = leaf), EXISTS (
    SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = leaf AND i.indisvalid AND a.attname = %(order)s
      AND strpos(pg_get_expr(i.indpred, i.indrelid), %(marker)s) > 0
      AND strpos(pg_get_expr(i.indpred, i.indrelid), %(value)s) > 0
), EXISTS (
    SELECT FROM pg_index i
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    JOIN pg_attribute b ON b.attrelid = i.indrelid AND b.attnum = i.indkey[1]
    WHERE i.indrelid = leaf AND i.indisvalid AND i.indpred IS NULL
      AND a.attname = %(marker)s AND b.attname = %(order)s AND %(has_status)s
), EXISTS (
    SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = leaf AND i.indisvalid AND i.indpred IS NULL AND a.attname = %(key)s)
FROM (SELECT relid FROM pg_partition_tree(%(oid)s::oid::regclass) WHERE isleaf AND relid <> %(oid)s::oid
      UNION ALL
      SELECT oid FROM pg_class WHERE oid = %(oid)s::oid AND relkind = 'r') AS leaves (leaf)"""

# In a marked table, an id may be any text. As a key it is complete: its index bounds it.
_FITTING: Final[LiteralString] = FITTING.replace(
    "id::text", "CASE WHEN octet_length(id) <= %(most)s THEN id ELSE left(id, 999) END", 1
)

# --- the events -------------------------------------------------------------------------------------------

# In a cursor, so that large payloads can be fetched a few at a time from one snapshot; and because a cursor
# is planned for its first rows, by the index. A plain query sorted the whole backlog for each claim if the
# backlog had grown since the last ANALYZE. NO KEY, so that inserts into tables with a foreign key to this one
# are not blocked; NOWAIT, because later rows would overtake a row that is skipped (SKIP LOCKED where nothing
# is ordered).
CLAIM: Final = """
DECLARE claim NO SCROLL CURSOR FOR
SELECT {fitting} FROM (
    SELECT {texts} FROM {table} AS t WHERE {where} ORDER BY {order} LIMIT %(limit)s
    FOR NO KEY UPDATE OF t {if_locked}) AS event"""
FETCH: Final = "FETCH {count} FROM claim"
# The aggregates of rows that another session has locked.
LOCKED: Final = """
WITH due AS MATERIALIZED (
    SELECT {key} AS key, {aggregate_type}::text AS type, {aggregate_id}::text AS name
    FROM {table} AS t WHERE {where} ORDER BY {order} LIMIT %(limit)s
), free AS MATERIALIZED (
    SELECT {key} AS key FROM {table} AS t WHERE {where} ORDER BY {order} LIMIT %(limit)s
    FOR NO KEY UPDATE OF t SKIP LOCKED
)
SELECT DISTINCT type, name FROM due WHERE key NOT IN (SELECT key FROM free)"""
ANY: Final = "SELECT EXISTS (SELECT FROM {table} AS t WHERE {where})"

# Conditions that are added to `pending`. Lists are subqueries, which PostgreSQL hashes. Aggregates are
# compared in the columns' own types, so that an index on them can be used.
AMONG: Final = """({aggregate_type}, {aggregate_id}) IN (SELECT * FROM unnest(
    %(types)s::text[]::{aggregate_type_type}[], %(ids)s::text[]::{aggregate_id_type}[]))"""
NOT_AMONG: Final = """({aggregate_type}, {aggregate_id}) NOT IN (SELECT * FROM unnest(
    %(types)s::text[]::{aggregate_type_type}[], %(ids)s::text[]::{aggregate_id_type}[]))"""
NOT_BUSY: Final = "{key} NOT IN (SELECT unnest(%(busy)s::{key_type}[]))"
UP_TO: Final = "{up_to}"

# `is_pending` and `is_unprocessed` are the same conditions, for rows whose keys are given. In a table without
# an integer, no partial index matches them: with old statistics, PostgreSQL would read all pending rows by
# such an index for each mark, instead of these rows by their keys.
#
# Marks exactly the acknowledged rows: a range would also mark rows that were committed after the claim. Not
# now(), which is the time when the claim began.
MARK: Final = """
UPDATE {table} AS t SET {processed} WHERE {is_unprocessed} AND {key} = ANY (%(keys)s::{key_type}[])"""
UNMARKED: Final = """
SELECT count(*) FROM {table} AS t WHERE {is_unprocessed} AND {key} = ANY (%(keys)s::{key_type}[])"""
# The end of a run until empty, as text for `UP_TO`.
LAST: Final = "SELECT {last} FROM {table} AS t WHERE {pending}"

# --- rejections -------------------------------------------------------------------------------------------

# By number and key, since a table without an integer knows only the key. Some of the numbers are read; a row
# that lacks a name is not.
EVENTS: Final = """
SELECT {fitting}, attempts FROM (
    SELECT {numbered_texts}, {attempts} AS attempts
    FROM unnest(%(numbers)s::bigint[], %(keys)s::{key_type}[]) AS n (number, key)
    JOIN {table} AS t ON {key} = n.key
    WHERE {is_pending} AND {has_names} AND n.number = ANY (%(seqs)s::bigint[])
    ORDER BY n.number OFFSET 0) AS event
ORDER BY seq"""
REFUSED: Final = """
UPDATE {table} AS t SET {refused}
FROM unnest(%(keys)s::{key_type}[], %(errors)s::text[], %(pauses)s::float8[], %(lasts)s::bool[])
     AS r (key, error, pause, is_last)
WHERE {is_unprocessed} AND {key} = r.key"""
POSTPONED: Final = """
UPDATE {table} AS t SET {set_last_error} = r.error::{last_error_type}
FROM unnest(%(keys)s::{key_type}[], %(errors)s::text[]) AS r (key, error)
WHERE {is_unprocessed} AND {key} = r.key"""
# The first row of each aggregate that an earlier relay has tried.
TRIED: Final = """
SELECT DISTINCT ON ({aggregate_type}, {aggregate_id})
       {aggregate_type}::text, {aggregate_id}::text, {key}::text, {attempts}, {due_in}
FROM {table} AS t WHERE {pending} AND {attempts} > 0
ORDER BY {aggregate_type}, {aggregate_id}, {order}"""
FAILED: Final = (
    "SELECT DISTINCT {aggregate_type}::text, {aggregate_id}::text FROM {table} AS t WHERE {failed}"
)
STILL_FAILED: Final[LiteralString] = f"{FAILED} AND {AMONG}"
UNPUBLISHED: Final = "SELECT count(*) FROM {table} AS t WHERE {where}"

# --- status -------------------------------------------------------------------------------------------------

# Capped: counting millions exactly takes seconds. The oldest row is among the first.
BACKLOG: Final = """
SELECT count(*), extract(epoch FROM clock_timestamp() - min(at))::float8
FROM (SELECT {time} AS at FROM {table} AS t WHERE {pending} ORDER BY {order} LIMIT %(cap)s) AS waiting"""
# Those of them that were rejected, and are tried again: the reasons, with their counts and the count of all.
RETRIED: Final = """
SELECT coalesce(reason, 'no reason'), count(*), sum(count(*)) OVER ()
FROM (SELECT {reason} AS reason, {attempts} AS attempts
      FROM {table} AS t WHERE {pending} ORDER BY {order} LIMIT %(cap)s) AS waiting
WHERE reason IS NOT NULL OR attempts > 0
GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 3"""
# Why they failed, the most frequent first.
REASONS: Final = """
SELECT coalesce(reason, 'no reason'), count(*)
FROM (SELECT {last_error}::text AS reason FROM {table} AS t WHERE {failed} LIMIT %(cap)s) AS failed
GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 3"""
FAILURES: Final = "SELECT count(*) FROM (SELECT FROM {table} AS t WHERE {failed} LIMIT %(cap)s) AS failed"


@dataclass(frozen=True, slots=True)
class Types:
    """Types of the columns whose type the statements name."""

    key: str = "bigint"
    aggregate_type: str = "text"
    aggregate_id: str = "text"
    last_error: str = "text"
    """With its length: a longer reason is truncated."""
    nullable: tuple[str, ...] = ()
    """Our names of the columns without which a row becomes a dead letter, and which allow NULL."""


class Statements:
    """The statements above, for one table.

    Args:
        with_time: whether each event's metadata contains its time, as `created-at`.
    """

    def __init__(self, mapping: Mapping, types: Types, *, max_attempts: int, with_time: bool) -> None:
        # The target of a SET has no table name in front of it; everywhere else the name must be unambiguous.
        targets: dict[str, sql.Composable] = {}
        columns: dict[str, sql.Composable] = {}
        for ours, theirs in mapping.columns.items():
            targets[f"set_{ours}"], columns[ours] = sql.Identifier(theirs), sql.Identifier("t", theirs)
        has_names = _has_names(columns, types.nullable)
        for name in types.nullable:
            # NULL equals nothing, so that such a row could not be left out: rows without a name have "".
            columns[name] = sql.SQL("coalesce({}::text, '')").format(columns[name])
        if mapping.aggregate_type:
            columns["aggregate_type"] = _aggregate_type(mapping, columns)
        key = columns["seq" if mapping.order == "seq" else "id"]
        conditions = _conditions(mapping, columns, max_attempts)
        texts = partial(_texts, mapping, columns, has_names, with_time=with_time)
        parts = (mapping.schema, mapping.table) if mapping.schema else (mapping.table,)
        self._names: dict[str, sql.Composable] = {
            **targets,
            **columns,
            **conditions,
            "table": sql.Identifier(*parts),
            **_ordering(mapping, columns),
            **{f"is_{name}": _by_key(mapping, conditions[name]) for name in ("pending", "unprocessed")},
            "if_locked": sql.SQL("SKIP LOCKED" if mapping.is_shared else "NOWAIT"),
            "key": key,
            "key_type": sql.SQL(types.key),
            "has_names": has_names,
            "texts": texts(columns.get("seq", sql.SQL("0"))),
            "numbered_texts": texts(sql.SQL("n.number")),
            "fitting": sql.SQL(_FITTING if mapping.order == "seq" else FITTING),
            "attempts": _attempts(columns),
            "due_in": _due_in(columns),
            "reason": sql.SQL("{last_error}::text" if "last_error" in columns else "NULL").format(**columns),
            "time": columns.get("created_at", sql.SQL("NULL::timestamptz")),
            "processed": _processed(mapping, targets),
            "refused": _refused(mapping, targets | columns, types, max_attempts),
            "aggregate_type_type": sql.SQL(types.aggregate_type),
            "aggregate_id_type": sql.SQL(types.aggregate_id),
            "last_error_type": sql.SQL(types.last_error),
        }
        self._made: dict[tuple[str, ...], bytes] = {}
        self.keys: Keys = SeqKeys() if mapping.order == "seq" else IdKeys()
        self.counts_attempts = "retry_count" in columns
        self.writes_refusals = bool(columns.keys() & {"retry_count", "last_error", "next_attempt_at"})
        self.writes_refusals |= mapping.remembers_failures
        self.writes_errors = "last_error" in columns
        self.nullable = types.nullable

    def __call__(self, statement: LiteralString, *conditions: LiteralString) -> bytes:
        """Return a statement for this table; its `where` is `pending` and the given conditions."""
        made = self._made.get((statement, *conditions))
        if made is None:
            added = [sql.SQL(condition).format(**self._names) for condition in conditions]
            where = sql.SQL(" AND ").join([self._names["pending"], *added])
            made = sql.SQL(statement).format(**self._names, where=where).as_bytes()
            self._made[statement, *conditions] = made
        return made


def _conditions(
    mapping: Mapping, columns: dict[str, sql.Composable], max_attempts: int
) -> dict[str, sql.Composable]:
    """Return the conditions for pending rows, for failed rows, and for unprocessed rows (both of these)."""
    if mapping.has_status:
        state = sql.SQL("{status} = {value}")
        return {
            "pending": state.format(**columns, value=sql.Literal(mapping.states["pending"])),
            "unprocessed": state.format(**columns, value=sql.Literal(mapping.states["pending"])),
            "failed": state.format(**columns, value=sql.Literal(mapping.states["failed"])),
        }
    unprocessed = sql.SQL("{published_at} IS NULL").format(**columns)
    given_up: sql.Composable = sql.SQL("false")
    if "failed_at" in columns:
        given_up = sql.SQL("{failed_at} IS NOT NULL").format(**columns)
    elif "retry_count" in columns:
        given_up = sql.SQL("coalesce({retry_count}, 0) >= {most}").format(
            **columns, most=sql.Literal(max_attempts)
        )
    both = sql.SQL("{unprocessed} AND {given_up}")
    return {
        "pending": sql.SQL("{unprocessed} AND NOT ({given_up})").format(
            unprocessed=unprocessed, given_up=given_up
        ),
        "unprocessed": unprocessed,
        "failed": both.format(unprocessed=unprocessed, given_up=given_up),
    }


def _has_names(columns: dict[str, sql.Composable], nullable: tuple[str, ...]) -> sql.Composable:
    if not nullable:
        return sql.SQL("true")
    return sql.SQL("num_nulls({}) = 0").format(sql.SQL(", ").join(columns[name] for name in nullable))


def _by_key(mapping: Mapping, condition: sql.Composable) -> sql.Composable:
    return condition if mapping.order == "seq" else sql.SQL("({}) IS TRUE").format(condition)


def _aggregate_type(mapping: Mapping, columns: dict[str, sql.Composable]) -> sql.Composable:
    """Return the aggregate type of a table without such a column: text, and the event type, or part of it."""
    parts: list[sql.Composable] = []
    for literal, spec in mapping.aggregate_type:
        parts.append(sql.Literal(literal))
        if spec is not None:
            part = "{event_type}::text" if spec == "" else "split_part({event_type}::text, '.', 1)"
            parts.append(sql.SQL(part).format(**columns))
    return sql.SQL("(") + sql.SQL(" || ").join(parts) + sql.SQL(")")


def _ordering(mapping: Mapping, columns: dict[str, sql.Composable]) -> dict[str, sql.Composable]:
    """Return the order of rows, the end of what is pending, and a condition for all up to it."""
    if mapping.order == "seq":
        parts = {
            "order": "{seq}",
            "last": "coalesce(max({seq}), 0)::text",
            "up_to": "{seq} <= %(last)s::bigint",
        }
    else:
        # A row without a time is the last.
        parts = {
            "order": "{created_at}, {id}",
            "last": "coalesce(max({created_at})::text, '-infinity')",
            "up_to": "({created_at} <= %(last)s OR {created_at} IS NULL)",
        }
    return {name: sql.SQL(part).format(**columns) for name, part in parts.items()}


def _texts(
    mapping: Mapping,
    columns: dict[str, sql.Composable],
    has_names: sql.Composable,
    number: sql.Composable,
    *,
    with_time: bool,
) -> sql.Composable:
    """Return the columns in the order of `Event`; metadata is built only for rows that have some.

    This is the first of two steps: see `relay.queries`.
    """
    usual = sql.SQL(
        "{number}::bigint AS seq, {id}::text AS id, {aggregate_type}::text AS aggregate_type, "
        "{aggregate_id}::text AS aggregate_id, {event_type}::text AS event_type, "
        "CASE WHEN {has_names} AND coalesce(pg_column_size({payload}), 0) <= %(most)s "
        "THEN coalesce({payload}::text, 'null') END AS payload, "
    ).format(number=number, has_names=has_names, **columns)
    metadata = {name: columns[name] for name in METADATA if name in columns}
    if "trace_id" in columns:
        metadata["traceparent"] = traceparent(columns)
    members = [
        sql.SQL("{}, {}").format(sql.Literal(name.replace("_", "-")), value)
        for name, value in metadata.items()
    ]
    given = [columns[name] for name in (*METADATA, "trace_id", "headers") if name in columns]
    if with_time:
        time = """'created-at', to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
        members.append(sql.SQL(time).format(columns["created_at"]))
        given.append(columns["created_at"])
    if not given:
        return usual + sql.SQL("NULL::text AS metadata")
    made = sql.SQL("jsonb_strip_nulls(jsonb_build_object({}))").format(sql.SQL(", ").join(members))
    if headers := own_headers(mapping, columns):
        made = sql.SQL("{} || jsonb_build_object('headers', {})").format(made, headers)
    sizes = sql.SQL(" + ").join(sql.SQL("coalesce(pg_column_size({}), 0)").format(part) for part in given)
    case = sql.SQL(
        "CASE WHEN num_nonnulls({}) = 0 THEN NULL WHEN {} > %(most)s THEN '' ELSE ({})::text END AS metadata"
    )
    return usual + case.format(sql.SQL(", ").join(given), sizes, made)


def own_headers(mapping: Mapping, columns: dict[str, sql.Composable]) -> sql.Composable | None:
    """Return the headers of the row's own, as a JSON object; None if the table has none."""
    parts: list[sql.Composable] = []
    if "trace_id" in columns:
        trace_id = "jsonb_strip_nulls(jsonb_build_object({name}, {trace_id}::text))"
        parts.append(sql.SQL(trace_id).format(**columns, name=sql.Literal(mapping.columns["trace_id"])))
    if "headers" in columns:
        parts.append(sql.SQL("coalesce(nullif({headers}::jsonb, 'null'), '{{}}')").format(**columns))
    return sql.SQL(" || ").join(parts) if parts else None


def traceparent(columns: dict[str, sql.Composable]) -> sql.Composable:
    """Return W3C's form of a trace's id, if it is one; the row stands for the span that wrote it.

    The same row always gives the same span, so that a message that is published twice is the same.
    """
    made = """CASE WHEN replace({trace_id}::text, '-', '') ~ '^(?!0+$)[0-9A-Fa-f]{{32}}$' THEN
        '00-' || lower(replace({trace_id}::text, '-', ''))
        || '-' || encode(substr(sha256(convert_to({id}::text, 'UTF8')), 1, 8), 'hex') || '-01' END"""
    own = "coalesce(nullif({traceparent}::text, ''), " + made + ")" if "traceparent" in columns else made
    return sql.SQL(own).format(**columns)


def _attempts(columns: dict[str, sql.Composable]) -> sql.Composable:
    if "retry_count" not in columns:
        return sql.SQL("0")
    return sql.SQL("coalesce({retry_count}, 0)::int").format(**columns)


def _due_in(columns: dict[str, sql.Composable]) -> sql.Composable:
    if "next_attempt_at" not in columns:
        return sql.SQL("0::float8")
    until = "coalesce(extract(epoch FROM {next_attempt_at} - clock_timestamp()), 0)::float8"
    return sql.SQL(until).format(**columns)


def _processed(mapping: Mapping, columns: dict[str, sql.Composable]) -> sql.Composable:
    if not mapping.has_status:
        return sql.SQL("{set_published_at} = clock_timestamp()").format(**columns)
    state = sql.Literal(mapping.states["processed"])
    changes = [sql.SQL("{set_status} = {state}").format(**columns, state=state)]
    if "set_processed_at" in columns:
        changes.append(sql.SQL("{set_processed_at} = clock_timestamp()").format(**columns))
    return sql.SQL(", ").join(changes)


def _refused(
    mapping: Mapping, columns: dict[str, sql.Composable], types: Types, max_attempts: int
) -> sql.Composable:
    """Return what a refusal writes, as far as there are columns; the last refusal makes a dead letter."""
    count = "{set_retry_count} = coalesce({retry_count}, 0) + 1"
    if not columns.keys() & {"status", "failed_at"}:
        # No other column records that it is a dead letter, also for a row that could not be read.
        count = """{set_retry_count} =
            greatest(coalesce({retry_count}, 0) + 1, CASE WHEN r.is_last THEN {most} END)"""
    changes = {
        "retry_count": count,
        "last_error": "{set_last_error} = r.error::{last_error_type}",
        "next_attempt_at": """{set_next_attempt_at} =
            CASE WHEN NOT r.is_last THEN clock_timestamp() + make_interval(secs => r.pause) END""",
        "failed_at": "{set_failed_at} = CASE WHEN r.is_last THEN clock_timestamp() END",
        "status": "{set_status} = CASE WHEN r.is_last THEN {failed_state} ELSE {status} END",
    }
    names = {
        **columns,
        "last_error_type": sql.SQL(types.last_error),
        "failed_state": sql.Literal(mapping.states["failed"]),
        "most": sql.Literal(max_attempts),
    }
    chosen = [sql.SQL(change).format(**names) for column, change in changes.items() if column in columns]
    return sql.SQL(", ").join(chosen)
