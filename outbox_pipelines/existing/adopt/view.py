"""The view that takes the table's name, and the function behind its INSERT, made for one table.

Invariants:
- The columns of the view have the names, types and order of the table's: prepared statements stay valid.
- Names are quoted, and values are literals of PostgreSQL: no name of the table is SQL.
"""

from __future__ import annotations

from typing import Final, LiteralString

from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.existing import table_statements as marked
from outbox_pipelines.existing.adopt import objections
from outbox_pipelines.existing.adopt.adopted_table import Column, Facts

# A number inside of a UUID: version 8 of RFC 9562, "for custom content".
_NUMBERED: Final = "('00000000-0000-8000-8000-' || lpad(to_hex({number}), 12, '0'))::uuid"
_UUID: Final = "^[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$"

_INSERT: Final[LiteralString] = """
CREATE OR REPLACE FUNCTION {schema}.adopted_insert() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, {schema}, pg_temp AS {body}"""
_NO_PUBLIC: Final[LiteralString] = "REVOKE EXECUTE ON FUNCTION {schema}.adopted_insert() FROM PUBLIC"
_BODY: Final[LiteralString] = """
DECLARE
    drawn   bigint;
    made_at timestamptz;
BEGIN
{checks}
    drawn := nextval('outbox_seq');
    INSERT INTO {schema}.outbox (seq, {columns})
    VALUES (drawn, {values}) RETURNING created_at INTO made_at;
    -- An event that waits for a delayed one returns nothing.
    made_at := coalesce(made_at, transaction_timestamp());
{returned}
    RETURN NEW;
END """
# Writers that delete at once what they have inserted: the row counts, so that ORMs do not miss it. The event
# is not deleted. An old row is.
_DELETE: Final[LiteralString] = """
CREATE OR REPLACE FUNCTION {schema}.adopted_delete() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, {schema}, pg_temp AS {body}"""
_NO_PUBLIC_DELETE: Final[LiteralString] = "REVOKE EXECUTE ON FUNCTION {schema}.adopted_delete() FROM PUBLIC"
_DELETE_BODY: Final[LiteralString] = """
BEGIN
{old}
    RETURN OLD;
END """
_DELETE_OLD: Final[LiteralString] = "    DELETE FROM {kept} AS o WHERE o.{id} = OLD.{id};"
# The last condition leaves one partition to look into.
_OWN_EVENTS: Final[LiteralString] = """
SELECT {new} FROM (
    SELECT *, payload AS event_data FROM {schema}.outbox
    WHERE tx = pg_current_xact_id_if_assigned() AND created_at = transaction_timestamp()) AS e"""
_NOT_NULL: Final[LiteralString] = """
    IF num_nulls({values}) > 0 THEN
        RAISE EXCEPTION 'null value in column % of % violates not-null constraint',
            (SELECT name FROM unnest({names}::text[], ARRAY[{nulls}]) AS c (name, missing)
             WHERE missing LIMIT 1), {table}
            USING ERRCODE = 'not_null_violation';
    END IF;"""
_DRAWN: Final[LiteralString] = """
    IF num_nonnulls({values}) > 0 THEN
        RAISE EXCEPTION 'outbox adopt: % of % is drawn by the database', {names}, {table}
            USING ERRCODE = 'generated_always', HINT = 'Leave the column out of the INSERT.';
    END IF;"""
_PENDING: Final[LiteralString] = """
    IF {condition} THEN
        RAISE EXCEPTION 'outbox adopt: an event is pending when it is inserted into %', {table}
            USING ERRCODE = 'check_violation', HINT = 'Leave {marker} out of the INSERT.';
    END IF;"""
_CHECK: Final[LiteralString] = """
    IF (SELECT ({condition}) IS FALSE FROM (SELECT NEW.*) AS row) THEN
        RAISE EXCEPTION 'new row for relation % violates check constraint %', {table}, {name}
            USING ERRCODE = 'check_violation', CONSTRAINT = {name};
    END IF;"""
# A transaction that reads as of before the switch or the way back does not see all keys. It does not see the
# trigger either: an ordinary query reads the catalog as of then.
_SNAPSHOT: Final[LiteralString] = """
    IF current_setting('transaction_isolation') <> 'read committed'
       AND NOT EXISTS (SELECT FROM pg_trigger AS g WHERE g.tgrelid = TG_RELID AND g.tgname = TG_NAME) THEN
        RAISE EXCEPTION 'could not serialize access: outbox adopt has replaced % during the transaction',
            {table}
            USING ERRCODE = 'serialization_failure', HINT = 'Run the transaction again.';
    END IF;"""
_UNIQUE: Final[LiteralString] = """
    IF EXISTS (SELECT FROM {kept} AS o WHERE o.{column} = NEW.{column}) THEN
        RAISE EXCEPTION 'duplicate key value of % in %', {name}, {table} USING ERRCODE = 'unique_violation';
    END IF;"""


class View:
    """The view and its function for one table.

    Args:
        ours: the schema of the append-only outbox.
        name: of the table before the switch, and of the view after it.
        kept: the qualified name of the table after the switch.
    """

    def __init__(self, facts: Facts, mapping: Mapping, ours: str, name: str, kept: sql.Identifier) -> None:
        self._facts, self._mapping, self._ours = facts, mapping, sql.Identifier(ours)
        self._kept = kept
        self._shown = sql.Literal(f"{facts.schema}.{name}")
        self._drawn = objections.drawn(facts, mapping)

    def select(self, table: sql.Identifier | None) -> sql.Composed:
        """Return the query of the view, of the outbox alone or also of the table's rows."""
        columns = self._facts.columns.values()
        new = sql.SQL(", ").join(
            sql.SQL("{} AS {}").format(self._shown_as(column), sql.Identifier(column.name))
            for column in columns
        )
        arms = [sql.SQL("SELECT {} FROM {}.outbox_events AS e").format(new, self._ours)]
        if self._mapping.slot is not None:
            # No other rows, so that a DELETE by id finds its row at once, and clean-up jobs find an end.
            arms = [sql.SQL(_OWN_EVENTS).format(new=new, schema=self._ours)]
        if table is not None:
            old = sql.SQL(", ").join(sql.Identifier("o", column.name) for column in columns)
            arms.insert(0, sql.SQL("SELECT {} FROM {} AS o").format(old, table))
        return sql.SQL(" UNION ALL ").join(arms)

    def functions(self, *, with_table: bool) -> list[str]:
        """Return the statements that make the functions behind INSERT and DELETE."""
        if self._mapping.slot is None:
            return self._insert_function(with_table=with_table)
        return [*self._insert_function(with_table=with_table), *self._delete_function(with_table=with_table)]

    def _delete_function(self, *, with_table: bool) -> list[str]:
        id_column = self._mapping.columns["id"]
        old = sql.SQL(_DELETE_OLD).format(kept=self._kept, id=sql.Identifier(id_column))
        body = sql.SQL(_DELETE_BODY).format(old=old if with_table else sql.SQL(""))
        return [
            sql.SQL(_DELETE).format(schema=self._ours, body=sql.Literal(body.as_string())).as_string(),
            sql.SQL(_NO_PUBLIC_DELETE).format(schema=self._ours).as_string(),
        ]

    def _insert_function(self, *, with_table: bool) -> list[str]:
        columns, values = zip(*self._stored(), strict=True)
        body = sql.SQL(_BODY).format(
            checks=sql.SQL("").join(self._checks(with_table=with_table)),
            schema=self._ours,
            columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
            values=sql.SQL(", ").join(values),
            returned=sql.SQL("\n").join(self._given_back()),
        )
        return [
            sql.SQL(_INSERT).format(schema=self._ours, body=sql.Literal(body.as_string())).as_string(),
            sql.SQL(_NO_PUBLIC).format(schema=self._ours).as_string(),
        ]

    def defaults(self, view: sql.Identifier) -> list[str]:
        """Return the statements that give the view the defaults of the table."""
        drawn = {column.name for column in self._drawn}
        return [
            sql.SQL("ALTER VIEW {} ALTER COLUMN {} SET DEFAULT {}")
            .format(view, sql.Identifier(column.name), sql.SQL(column.default))
            .as_string()
            for column in self._facts.columns.values()
            if column.default is not None and column.name not in drawn and not column.identity
        ]

    def _new(self, column: str) -> sql.Composed:
        return sql.SQL("NEW.{}").format(sql.Identifier(column))

    def _stored(self) -> list[tuple[str, sql.Composable]]:
        """Return the columns of the outbox with their values, in terms of NEW."""
        at = self._mapping.columns
        id_column = self._facts.columns[at["id"]]
        numbered = sql.SQL(_NUMBERED).format(number=sql.SQL("drawn"))
        event_id = numbered if id_column.is_integer else self._new(at["id"])
        new: dict[str, sql.Composable] = {ours: self._new(theirs) for ours, theirs in at.items()}
        new["id"] = event_id
        stored: list[tuple[str, sql.Composable]] = [
            ("id", event_id),
            ("aggregate_type", self._aggregate_type()),
            ("payload", sql.SQL("coalesce({}::jsonb, 'null'::jsonb)").format(self._new(at["payload"]))),
        ]
        texts = (
            "aggregate_id",
            "event_type",
            "idempotency_key",
            "correlation_id",
            "causation_id",
        )
        stored += [(name, new[name] + sql.SQL("::text")) for name in texts if name in at]
        if "trace_id" in at:
            stored.append(("traceparent", marked.traceparent(new)))
        elif "traceparent" in at:
            stored.append(("traceparent", new["traceparent"] + sql.SQL("::text")))
        if (headers := marked.own_headers(self._mapping, new)) is not None:
            stored.append(("headers", sql.SQL("nullif({}, '{{}}')").format(headers)))
        if "version" in at:
            stored.append(("version", self._new(at["version"]) + sql.SQL("::int")))
        return stored

    def _aggregate_type(self) -> sql.Composable:
        if not self._mapping.aggregate_type:
            return self._new(self._mapping.columns["aggregate_type"]) + sql.SQL("::text")
        parts: list[sql.Composable] = []
        event_type = self._new(self._mapping.columns["event_type"])
        for text, spec in self._mapping.aggregate_type:
            parts.append(sql.Literal(text))
            if spec is not None:
                part = "{}::text" if spec == "" else "split_part({}::text, '.', 1)"
                parts.append(sql.SQL(part).format(event_type))
        return sql.SQL(" || ").join(parts)

    def _checks(self, *, with_table: bool) -> list[sql.Composable]:
        """Return what the table would have refused, as statements of the function."""
        drawn = {column.name for column in self._drawn}
        required = [
            column.name
            for column in self._facts.columns.values()
            if column.not_null and column.name not in drawn and not column.identity
        ]
        made: list[sql.Composable] = []
        if drawn:
            made.append(self._of(_DRAWN, sorted(drawn)))
        if required:
            made.append(
                sql.SQL(_NOT_NULL).format(
                    values=sql.SQL(", ").join(map(self._new, required)),
                    names=sql.Literal(required),
                    nulls=sql.SQL(", ").join(
                        sql.SQL("{} IS NULL").format(self._new(name)) for name in required
                    ),
                    table=self._shown,
                )
            )
        if self._mapping.slot is None:
            made.append(self._is_pending())
        for name, expression in self._facts.checks:
            made.append(
                sql.SQL(_CHECK).format(
                    condition=sql.SQL(expression), table=self._shown, name=sql.Literal(name)
                )
            )
        unique = objections.looked_up(self._facts, self._mapping) if with_table else []
        if with_table:
            made.append(reads_as_of_before(self._shown))
        for column in unique:
            if column not in drawn:
                names = {"column": sql.Identifier(column), "name": sql.Literal(column), "table": self._shown}
                made.append(sql.SQL(_UNIQUE).format(kept=self._kept, **names))
        return made

    def _is_pending(self) -> sql.Composed:
        marker = self._mapping.columns["status" if self._mapping.has_status else "published_at"]
        condition = sql.SQL("{} IS NOT NULL").format(self._new(marker))
        if self._mapping.has_status:
            pending = sql.Literal(self._mapping.states["pending"])
            condition = sql.SQL("{}::text IS DISTINCT FROM {}").format(self._new(marker), pending)
        return sql.SQL(_PENDING).format(
            condition=condition, table=self._shown, marker=sql.SQL(marker.replace("'", "''"))
        )

    def _of(self, statement: LiteralString, names: list[str]) -> sql.Composed:
        values = sql.SQL(", ").join(self._new(name) for name in names)
        return sql.SQL(statement).format(
            values=values, names=sql.Literal(", ".join(names)), table=self._shown
        )

    def _given_back(self) -> list[sql.Composable]:
        """Return the assignments for RETURNING: what the database has decided."""
        made: list[sql.Composable] = [
            sql.SQL("    {} := drawn;").format(self._new(column.name)) for column in self._drawn
        ]
        if (name := self._mapping.columns.get("created_at")) is not None:
            zone = " AT TIME ZONE 'UTC'" if self._facts.columns[name].base == "timestamp" else ""
            made.append(sql.SQL("    {} := made_at" + zone + ";").format(self._new(name)))
        return made

    def _shown_as(self, column: Column) -> sql.Composable:
        """Return how a column of the table is shown for an event of the outbox."""
        value = self._value(column)
        return sql.SQL("({})::{}").format(value, sql.SQL(column.type))

    def _value(self, column: Column) -> sql.Composable:
        if column in self._drawn:
            return sql.SQL("e.seq")
        ours = [ours for ours, theirs in self._mapping.columns.items() if theirs == column.name]
        if not ours:
            return sql.SQL(objections.literal(column) or "NULL")
        (name,) = ours
        if name == "status":
            states = {word: sql.Literal(value) for word, value in self._mapping.states.items()}
            return sql.SQL(
                "CASE e.status WHEN 'PENDING' THEN {pending} WHEN 'PROCESSED' THEN {processed} ELSE "
                "{failed} END"
            ).format(**states)
        if name in ("created_at", "published_at", "processed_at"):
            source = "created_at" if name == "created_at" else "processed_at"
            zone = " AT TIME ZONE 'UTC'" if column.base == "timestamp" else ""
            return sql.SQL(f"e.{source}{zone}")
        if name in ("failed_at", "next_attempt_at"):
            return sql.SQL("NULL")
        if name == "trace_id":
            return _parsed(sql.SQL("(e.headers ->> {})").format(sql.Literal(column.name)), name, column)
        if name == "payload":
            value = sql.SQL("e.event_data")
            return value if column.not_null else sql.SQL("nullif({}, 'null'::jsonb)").format(value)
        return _parsed(sql.Identifier("e", name), name, column)


def reads_as_of_before(table: sql.Literal) -> sql.Composed:
    """Return the check that refuses a transaction that began to read before the names changed."""
    return sql.SQL(_SNAPSHOT).format(table=table)


def _parsed(value: sql.Composable, name: str, column: Column) -> sql.Composable:
    """Return a text of the outbox as a value of a column; NULL if another writer's text is none."""
    if name in ("retry_count", "version", "id", "headers"):
        return value
    if column.base == "uuid":
        return sql.SQL("CASE WHEN {0} ~ {1} THEN {0} END").format(value, sql.Literal(_UUID))
    if column.is_integer or column.base == "numeric":
        return sql.SQL("CASE WHEN {0} ~ '^-?[0-9]{{1,18}}$' THEN {0} END").format(value)
    if column.labels:
        labels = sql.SQL(", ").join(map(sql.Literal, column.labels))
        return sql.SQL("CASE WHEN {0} IN ({1}) THEN {0} END").format(value, labels)
    return value
