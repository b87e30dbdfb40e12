"""Fills in the SQL of a marked table for one table and its columns; the numbers of its rows, and their keys.

Invariants:
- A statement is built once for each set of conditions.
- Names are quoted, and values are literals; nothing in a table's description can become SQL.
- Only refusals of a relay count, and only a relay makes dead letters: an earlier publisher may have counted
  every poll of an outage in `retry_count`. The beginning of `last_error` says who counted.
- The core knows a row by a number that is greater than those of all rows before it in its claim and in
  earlier claims, so that numbers order the events of an aggregate as they are published. In a table with an
  integer it is that integer. Otherwise each claim gives its rows new numbers, which are negative, since they
  mean nothing outside of this process; those of published rows are forgotten.
- Keys are for one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, LiteralString, Protocol

from psycopg import sql

from outbox_pipelines.config.table_mapping import METADATA, Mapping
from outbox_pipelines.core.event import Event
from outbox_pipelines.existing.existing_sql import FITTING_ANY_ID
from outbox_pipelines.relay.relay_sql import FITTING

COUNTED: Final = "outbox: "
"""The beginning of `last_error` in a row whose attempts a relay has counted."""
DEAD: Final = "outbox: dead letter: "
"""The same in a dead letter, if no status and no `failed_at` says so."""
_NOT_KEPT: Final = "unknown: the table has no last_error; see the relay's log"
_FIRST: Final = -(2**62)


class Keys(Protocol):
    """Numbers and keys of one table's rows."""

    def numbered(self, events: list[Event]) -> list[Event]:
        """Return claimed events with their numbers as `seq`."""

    def number(self, key: str) -> int:
        """Return the number of a row that was not claimed yet."""

    def array(self, numbers: Iterable[int]) -> str:
        """Return the keys of rows, as PostgreSQL's text form of an array: quicker than to adapt thousands."""

    def forget(self, numbers: Iterable[int]) -> None:
        """These rows are published."""


class SeqKeys:
    """Of a table with an integer."""

    def numbered(self, events: list[Event]) -> list[Event]:
        return events

    def number(self, key: str) -> int:
        return int(key)

    def array(self, numbers: Iterable[int]) -> str:
        return array(numbers)

    def forget(self, numbers: Iterable[int]) -> None: ...


class IdKeys:
    """Of a table whose rows have only an id."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}
        self._last = _FIRST

    def numbered(self, events: list[Event]) -> list[Event]:
        return [event._replace(seq=self.number(event.id)) for event in events]

    def number(self, key: str) -> int:
        self._last += 1
        self._ids[self._last] = key
        return self._last

    def array(self, numbers: Iterable[int]) -> str:
        return "{" + ",".join(_quoted(self._ids[number]) for number in numbers) + "}"

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._ids.pop(number, None)


def array(numbers: Iterable[int]) -> str:
    """Return PostgreSQL's text form of an array of numbers."""
    return "{" + ",".join(map(str, numbers)) + "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


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
    has_text_payload: bool = False
    """Whether a payload may be something other than JSON."""


class Statements:
    """The statements above, for one table.

    Args:
        with_time: whether each event's metadata contains its time, as `created-at`.
        as_json: whether a payload that is not JSON cannot be read, since it would be part of a JSON value.
    """

    def __init__(
        self, mapping: Mapping, types: Types, *, max_attempts: int, with_time: bool, as_json: bool = False
    ) -> None:
        # The target of a SET has no table name in front of it; everywhere else the name must be unambiguous.
        targets: dict[str, sql.Composable] = {}
        columns: dict[str, sql.Composable] = {}
        for ours, theirs in mapping.columns.items():
            targets[f"set_{ours}"], columns[ours] = sql.Identifier(theirs), sql.Identifier("t", theirs)
        has_names = _has_names(columns, types.nullable)
        for name in types.nullable:
            # NULL equals nothing, so that such a row could not be left out: rows without a name have "".
            columns[name] = sql.SQL("coalesce({}::text, '')").format(columns[name])
        must_be_json = as_json and types.has_text_payload
        columns["printed"] = sql.SQL("{payload}::json" if must_be_json else "{payload}").format(**columns)
        if mapping.aggregate_type:
            columns["aggregate_type"] = _aggregate_type(mapping, columns)
        key = columns["seq" if mapping.order == "seq" else "id"]
        columns["attempts"] = _attempts(columns, max_attempts)
        conditions = _conditions(mapping, columns)
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
            "fitting": sql.SQL(FITTING_ANY_ID if mapping.order == "seq" else FITTING),
            "due_in": _due_in(columns),
            "reason": _reason(columns),
            "no_reason": sql.Literal("no reason" if "last_error" in columns else _NOT_KEPT),
            "tries": _tries(columns),
            "set_reason": _set_reason(targets | columns, types),
            "time": columns.get("created_at", sql.SQL("NULL::timestamptz")),
            "processed": _processed(mapping, targets),
            "failure": columns.get("failed_at", sql.SQL("NULL::timestamptz")),
            "revived": _revived(mapping, targets),
            "refused": _refused(mapping, targets | columns, types),
            "aggregate_type_type": sql.SQL(types.aggregate_type),
            "aggregate_id_type": sql.SQL(types.aggregate_id),
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


def _conditions(mapping: Mapping, columns: dict[str, sql.Composable]) -> dict[str, sql.Composable]:
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
    elif "last_error" in columns:
        given_up = _begins_with(columns, DEAD)
        if "retry_count" in columns:
            # An UPDATE that sets the count to 0 is enough to try it again.
            given_up = sql.SQL("{} AND coalesce({retry_count}, 0) > 0").format(given_up, **columns)
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
    # With its type: ORDER BY refuses a bare constant.
    return sql.SQL("(") + sql.SQL(" || ").join(parts) + sql.SQL(")::text")


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

    This is the first of two steps: see `relay_sql`.
    """
    usual = sql.SQL(
        "{number}::bigint AS seq, {id}::text AS id, {aggregate_type}::text AS aggregate_type, "
        "{aggregate_id}::text AS aggregate_id, {event_type}::text AS event_type, "
        "CASE WHEN {has_names} AND coalesce(pg_column_size({payload}), 0) <= %(most)s "
        "THEN coalesce({printed}::text, 'null') END AS payload, "
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


def _begins_with(columns: dict[str, sql.Composable], text: str) -> sql.Composable:
    return sql.SQL("coalesce(starts_with({last_error}::text, {text}), false)").format(
        **columns, text=sql.Literal(text)
    )


def _attempts(columns: dict[str, sql.Composable], max_attempts: int) -> sql.Composable:
    """Return how often relays have refused the row."""
    if "retry_count" not in columns:
        return sql.SQL("0")
    if "last_error" in columns:
        is_ours = _begins_with(columns, COUNTED)
    else:
        # The relay would have made a dead letter of a row with so many.
        is_ours = sql.SQL("{retry_count} < {most}").format(**columns, most=sql.Literal(max_attempts))
    return sql.SQL("CASE WHEN {} THEN coalesce({retry_count}, 0)::int ELSE 0 END").format(is_ours, **columns)


def _tries(columns: dict[str, sql.Composable]) -> sql.Composable:
    """Return the attempts of a dead letter; NULL if the row does not tell."""
    if "last_error" in columns:
        return columns["attempts"]
    return columns.get("retry_count", sql.SQL("NULL"))


def _reason(columns: dict[str, sql.Composable]) -> sql.Composable:
    if "last_error" not in columns:
        return sql.SQL("NULL")
    return sql.SQL("regexp_replace({last_error}::text, {beginning}, '')").format(
        **columns, beginning=sql.Literal(f"^({DEAD}|{COUNTED})")
    )


def _set_reason(columns: dict[str, sql.Composable], types: Types) -> sql.Composable:
    """Return what writes a reason other than a refusal: who has counted stays recorded."""
    if "last_error" not in columns:
        return sql.SQL("")
    change = """{set_last_error} =
        ((CASE WHEN {attempts} > 0 THEN {counted} ELSE '' END) || r.error)::{last_error_type}"""
    return sql.SQL(change).format(
        **columns, counted=sql.Literal(COUNTED), last_error_type=sql.SQL(types.last_error)
    )


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


def _revived(mapping: Mapping, columns: dict[str, sql.Composable]) -> sql.Composable:
    """Return what makes a dead letter a pending row that was never tried."""
    changes = {
        "set_status": "{set_status} = {pending_state}",
        "set_failed_at": "{set_failed_at} = NULL",
        "set_retry_count": "{set_retry_count} = 0",
        "set_next_attempt_at": "{set_next_attempt_at} = NULL",
        "set_last_error": "{set_last_error} = NULL",
    }
    state = sql.Literal(mapping.states["pending"])
    chosen = [change for column, change in changes.items() if column in columns]
    return sql.SQL(", ").join(sql.SQL(change).format(**columns, pending_state=state) for change in chosen)


def _refused(mapping: Mapping, columns: dict[str, sql.Composable], types: Types) -> sql.Composable:
    """Return what a refusal writes, as far as there are columns; the last refusal makes a dead letter."""
    is_dead = "false" if columns.keys() & {"status", "failed_at"} else "r.is_last"
    changes = {
        "retry_count": "{set_retry_count} = {attempts} + 1",
        "last_error": f"""{{set_last_error}} =
            ((CASE WHEN {is_dead} THEN {{dead}} ELSE {{counted}} END) || r.error)::{{last_error_type}}""",
        "next_attempt_at": """{set_next_attempt_at} =
            CASE WHEN NOT r.is_last THEN clock_timestamp() + make_interval(secs => r.pause) END""",
        "failed_at": "{set_failed_at} = CASE WHEN r.is_last THEN clock_timestamp() END",
        "status": "{set_status} = CASE WHEN r.is_last THEN {failed_state} ELSE {status} END",
    }
    names = {
        **columns,
        "last_error_type": sql.SQL(types.last_error),
        "failed_state": sql.Literal(mapping.states["failed"]),
        "dead": sql.Literal(DEAD),
        "counted": sql.Literal(COUNTED),
    }
    chosen = [sql.SQL(change).format(**names) for column, change in changes.items() if column in columns]
    return sql.SQL(", ").join(chosen)
