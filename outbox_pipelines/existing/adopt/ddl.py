"""The DDL of the switch and of the way back, made for one table.

Invariants:
- What needs no lock that writers notice comes first, so that the lock is held for as little as possible.
- Names are quoted, and values are literals of PostgreSQL: no name of the table is SQL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, LiteralString

from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.existing.adopt import objections
from outbox_pipelines.existing.adopt.adopted_table import Column, Facts
from outbox_pipelines.existing.adopt.view import View, reads_as_of_before
from outbox_pipelines.relay.adoption import ORDER_TRIGGER

_LONGEST: Final = 63
_SUFFIX: Final = "_adopted"
_MADE: Final = "_adopting"
# Functions that refuse; each is one statement for people and programs.
_REFUSE: Final[LiteralString] = """
CREATE OR REPLACE FUNCTION {schema}.{function}() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS {body}"""
_REFUSE_CHANGE: Final[LiteralString] = """
BEGIN
    RAISE EXCEPTION 'outbox adopt: % refused, % is a view of an append-only outbox', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'feature_not_supported',
              HINT = 'The relay of the outbox marks events, and its retention removes them.';
END """
_REFUSE_INSERT: Final[LiteralString] = """
BEGIN
    RAISE EXCEPTION 'outbox adopt: INSERT refused, % takes no new rows', TG_TABLE_NAME
        USING ERRCODE = 'feature_not_supported', HINT = {hint};
END """
_REFUSE_MARK: Final[LiteralString] = """
BEGIN
    RAISE EXCEPTION 'outbox adopt: UPDATE of % refused, events of the append-only outbox are first',
        TG_TABLE_NAME
        USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Run `outbox adopt back` again.';
END """
_REFUSE_FINAL: Final[LiteralString] = """
BEGIN
    RAISE EXCEPTION 'outbox adopt: % of % refused, the table is being archived', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'Run `outbox adopt finish --drop` again, or `outbox adopt back` to use the table.';
END """
_FINAL: Final[tuple[LiteralString, LiteralString]] = ("adopted_final", "adopted_no_truncate")
_REFUSE_EVENT: Final[LiteralString] = """
BEGIN
    RAISE EXCEPTION 'outbox adopt: INSERT refused, events go into % again', {table}
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'Insert there, or run `outbox adopt switch` again.';
END """
_KEYS: Final[LiteralString] = """
CREATE OR REPLACE FUNCTION {schema}.adopted_key() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, {schema}, pg_temp AS {body}"""
# Keys of old rows have the time of the switch; the table's own unique index knows them.
_KEYS_BODY: Final[LiteralString] = """
BEGIN
{snapshot}
    IF EXISTS (SELECT FROM {schema}.outbox_keys k WHERE k.key = {schema}.outbox_key(NEW.{column}::text)
               AND k.created_at IS DISTINCT FROM (SELECT switched_at FROM {schema}.outbox_adopted)) THEN
        RAISE EXCEPTION 'duplicate key value of % in %', {name}, {table} USING ERRCODE = 'unique_violation';
    END IF;
    RETURN NEW;
END """


@dataclass(frozen=True, slots=True)
class TableChange:
    """Statements of one transaction."""

    before: tuple[str, ...]
    """Under locks that no writer notices."""
    short: tuple[str, ...]
    """Under `ACCESS EXCLUSIVE`, which they take first."""

    @property
    def statements(self) -> tuple[str, ...]:
        return (*self.before, *self.short)


def kept_name(table: str) -> str:
    """Return the name of the table after the switch."""
    return _with(table, _SUFFIX)


class Ddl:
    """The statements for one table.

    Args:
        ours: the schema of the append-only outbox.
        name: of the table before the switch, and of the view after it.
    """

    def __init__(self, facts: Facts, mapping: Mapping, ours: str, name: str) -> None:
        self._facts, self._mapping, self._ours = facts, mapping, sql.Identifier(ours)
        self._view = sql.Identifier(facts.schema, name)
        self._name = sql.Identifier(name)
        self._kept_name = sql.Identifier(kept_name(name))
        self._kept = sql.Identifier(facts.schema, kept_name(name))
        # The view is complete before it gets its name.
        self._made = sql.Identifier(facts.schema, _with(name, _MADE))
        self._shown = sql.Literal(f"{facts.schema}.{name}")
        self._drawn = objections.drawn(facts, mapping)
        self._of_view = View(facts, mapping, ours, name, self._kept)

    @property
    def made(self) -> str:
        """The quoted name of the view while it is made."""
        return self._made.as_string()

    def hold(self) -> str:
        """Return the statement after which no other session changes the table; writers continue."""
        return self._text("LOCK TABLE {view} IN SHARE UPDATE EXCLUSIVE MODE")

    def switch(self, grants: list[str], writers: list[str]) -> TableChange:
        """Return the statements of the switch.

        Args:
            grants: the statements that give others their rights to the view under the name `made`.
            writers: who may insert, as SQL.
        """
        # For lastval(), which drivers call after an INSERT.
        readers = [
            f"GRANT SELECT ON SEQUENCE {self._ours.as_string()}.outbox_seq TO {writer}"
            for writer in writers
            if self._drawn
        ]
        hint = sql.Literal(f"Insert into {self._view.as_string()}.")
        before = [
            self.hold(),
            self._refusal("adopted_refuse", _REFUSE_CHANGE),
            self._refusal("adopted_frozen", sql.SQL(_REFUSE_INSERT).format(hint=hint).as_string()),
            *self._of_view.functions(with_table=True),
            sql.SQL("CREATE VIEW {} AS\n{}").format(self._made, self._of_view.select(self._view)).as_string(),
            *self._of_view.defaults(self._made),
            self._trigger("adopted_insert", "INSTEAD OF INSERT ON {made}"),
            *self._changes(),
            # SELECT … FOR UPDATE, which needs this right, locks no row behind a view: a publisher that was
            # forgotten would publish everything again and again.
            self._text("REVOKE UPDATE ON {made} FROM CURRENT_USER"),
            *grants,
            *readers,
        ]
        short = [
            self._text("LOCK TABLE {view} IN ACCESS EXCLUSIVE MODE"),
            *self._without_triggers(self._view),
            self._text("DROP TRIGGER IF EXISTS adopted_returned ON {ours}.outbox"),
            *self._raised("outbox_seq", [(column.name, self._view) for column in self._drawn]),
            self._text("ALTER TABLE {view} RENAME TO {kept_name}"),
            self._text("ALTER VIEW {made} RENAME TO {name}"),
            self._trigger("adopted_frozen", "BEFORE INSERT ON {kept}"),
        ]
        return TableChange(tuple(before), tuple(short))

    def back(self) -> TableChange:
        """Return the statements of the way back."""
        events = sql.SQL(_REFUSE_EVENT).format(table=self._shown).as_string()
        before = [
            self._refusal("adopted_returned", events),
            self._refusal("adopted_order", _REFUSE_MARK),
        ]
        short = [
            self._text("DROP VIEW {view}"),
            # It waits for transactions that have written into the outbox themselves, and keeps out others:
            # the table's relay would not wait for what they commit later.
            self._trigger("adopted_returned", "BEFORE INSERT ON {ours}.outbox", each="STATEMENT"),
            *self._without_triggers(self._kept),
            *(self._lowered(column) for column in self._drawn),
            self._text("ALTER TABLE {kept} RENAME TO {name}"),
        ]
        if self._mapping.slot is None:
            short.append(self._trigger(ORDER_TRIGGER, "BEFORE UPDATE ON {view}", runs="adopted_order"))
        if (key := self._mapping.columns.get("idempotency_key")) is not None:
            column = sql.Identifier(key)
            body = sql.SQL(_KEYS_BODY).format(
                schema=self._ours,
                snapshot=reads_as_of_before(self._shown),
                column=column,
                name=sql.Literal(key),
                table=self._shown,
            )
            before += [
                sql.SQL(_KEYS).format(schema=self._ours, body=sql.Literal(body.as_string())).as_string(),
                self._text("REVOKE EXECUTE ON FUNCTION {ours}.adopted_key() FROM PUBLIC"),
            ]
            trigger = sql.SQL(
                "CREATE TRIGGER adopted_key BEFORE INSERT ON {view} FOR EACH ROW "
                "WHEN (NEW.{column} IS NOT NULL) EXECUTE FUNCTION {ours}.adopted_key()"
            )
            short.append(trigger.format(view=self._view, ours=self._ours, column=column).as_string())
        return TableChange(tuple(before), tuple(short))

    def returned(self) -> TableChange:
        """Return the statements that let the relay of the table continue."""
        return TableChange((), (self._text(f"DROP TRIGGER IF EXISTS {ORDER_TRIGGER} ON {{view}}"),))

    def freeze(self) -> TableChange:
        """Return the statements after which no row of the table changes."""
        short = [
            *self.thaw().short,
            self._trigger("adopted_final", "BEFORE UPDATE OR DELETE ON {kept}"),
            self._trigger(
                "adopted_no_truncate", "BEFORE TRUNCATE ON {kept}", each="STATEMENT", runs="adopted_final"
            ),
        ]
        return TableChange(
            (self._refusal("adopted_final", sql.SQL(_REFUSE_FINAL).as_string()),), tuple(short)
        )

    def thaw(self) -> TableChange:
        """Return the statements that undo `freeze`."""
        return TableChange(
            (), tuple(self._text("DROP TRIGGER IF EXISTS " + name + " ON {kept}") for name in _FINAL)
        )

    def leave(self) -> TableChange:
        """Return the statements after which the view does not contain the table."""
        function = self._of_view.functions(with_table=False)
        return TableChange(tuple(function), (self._replaced(None),))

    def join(self) -> TableChange:
        """Return the statements that undo `leave`."""
        function = self._of_view.functions(with_table=True)
        return TableChange(tuple(function), (self._replaced(self._kept),))

    def drop(self) -> TableChange:
        """Return the statements that drop the table, which no writer uses after `leave`."""
        kept = [column for column in self._facts.columns.values() if column.sequence and not column.identity]
        owned = [f"ALTER SEQUENCE {column.sequence} OWNED BY NONE" for column in kept]
        return TableChange((*owned, self._text("DROP TABLE {kept}")), ())

    def _replaced(self, table: sql.Identifier | None) -> str:
        select = self._of_view.select(table)
        return sql.SQL("CREATE OR REPLACE VIEW {} AS\n{}").format(self._view, select).as_string()

    def _text(self, statement: LiteralString) -> str:
        names = {"view": self._view, "kept": self._kept, "name": self._name, "ours": self._ours}
        return sql.SQL(statement).format(**names, kept_name=self._kept_name, made=self._made).as_string()

    def _trigger(
        self,
        name: LiteralString,
        event: LiteralString,
        *,
        each: LiteralString = "ROW",
        runs: LiteralString = "",
    ) -> str:
        """Return the statement that creates a trigger.

        Args:
            event: when it runs, and the table or view.
            runs: its function, if that has not its name.
        """
        runs = f"EXECUTE FUNCTION {{ours}}.{runs or name}()"
        return self._text(f"CREATE TRIGGER {name} {event} FOR EACH {each} {runs}")

    def _changes(self) -> list[str]:
        """Return the triggers for UPDATE and DELETE."""
        if self._mapping.slot is None:
            return [self._trigger("adopted_refuse", "INSTEAD OF UPDATE OR DELETE ON {made}")]
        return [
            self._trigger("adopted_refuse", "INSTEAD OF UPDATE ON {made}"),
            self._trigger("adopted_delete", "INSTEAD OF DELETE ON {made}"),
        ]

    def _refusal(self, function: str, body: str) -> str:
        names = {"schema": self._ours, "function": sql.Identifier(function), "body": sql.Literal(body)}
        return sql.SQL(_REFUSE).format(**names).as_string()

    def _without_triggers(self, table: sql.Identifier) -> list[str]:
        names = ("adopted_key", "adopted_frozen", ORDER_TRIGGER, *_FINAL)
        return [
            sql.SQL("DROP TRIGGER IF EXISTS {} ON {}").format(sql.Identifier(name), table).as_string()
            for name in names
        ]

    def _raised(self, sequence: str, columns: list[tuple[str, sql.Identifier]]) -> list[str]:
        """Let the outbox draw numbers above those of the table."""
        return [
            sql.SQL(
                "SELECT setval({sequence}, greatest((SELECT max({column}) FROM {table}), "
                "(SELECT last_value FROM {ours}.outbox_seq), {drawn}, 1))"
            )
            .format(
                sequence=sql.Literal(f"{self._ours.as_string()}.{sequence}"),
                column=sql.Identifier(column),
                table=table,
                ours=self._ours,
                drawn=sql.SQL(f"(SELECT last_value FROM {self._facts.columns[column].sequence})"),
            )
            .as_string()
            for column, table in columns
        ]

    def _lowered(self, column: Column) -> str:
        """Let the table draw numbers above those of the outbox."""
        return (
            sql.SQL(
                "SELECT setval({}, greatest((SELECT last_value FROM {}.outbox_seq), (SELECT last_value "
                "FROM {})))"
            )
            .format(sql.Literal(column.sequence), self._ours, sql.SQL(column.sequence or ""))
            .as_string()
        )


def _with(table: str, suffix: str) -> str:
    """Return a name with a suffix, cut to what PostgreSQL keeps of a name."""
    return table.encode()[: _LONGEST - len(suffix)].decode(errors="ignore") + suffix
