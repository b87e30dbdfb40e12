"""Writes the description of an outbox table that exists already: a file for a person to check and correct.

Invariants:
- The file says of each line why it is so. What cannot be guessed is a commented line to complete.
- Nothing is changed in the database, and no more than a thousand rows are read.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Final

from outbox_pipelines.config.table_mapping import COLUMNS
from outbox_pipelines.core.text import plain, to_json
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import existing_sql, findings, pg_catalog
from outbox_pipelines.existing.guesses import (
    PAGE,
    Guesses,
    KnownTable,
    entries,
    guess,
    guess_values,
    has_time,
    literal_default,
    literals,
    normal,
    recognize,
    status_of,
)
from outbox_pipelines.existing.pg_catalog import Column, Relation
from outbox_pipelines.settings import OutboxSettings

# Entries in the order of the file.
_EVENT: Final = ("id", "seq", "aggregate_type", "aggregate_id", "event_type", "payload")
_MARKS: Final = ("published_at", "status", "processed_at", "failed_at")
_NEEDED: Final = {
    "id": "the id of an event",
    "aggregate_id": "the id of an aggregate",
    "event_type": "the type of an event",
    "payload": "the body of an event",
}
_ASSUMED: Final = {
    "published_at": ", assumed to be null while the row is pending",
    "failed_at": ", assumed to be null unless the event is a dead letter",
}
_MAYBE: Final = {
    "version": "the version of the event's schema (a header)",
    "headers": "an object of headers",
    "next_attempt_at": "the time of the next attempt after a refusal, which the relay writes",
}
_MOST_VALUES: Final = 20
_PART: Final = r'(?:"(?:[^"]|"")+"|[^".][^.]*)'
_USUAL: Final = {"pending": "PENDING", "processed": "PROCESSED", "failed": "FAILED"}


@dataclass(slots=True)
class Description:
    """The section `[table]` of `outbox.toml`."""

    text: str
    incomplete: list[str]
    """The entries that a person must complete before the relay accepts the file."""


@dataclass(slots=True)
class _File:
    """The lines of the file."""

    lines: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)

    def line(self, text: str = "") -> None:
        self.lines.append(text)

    def say(self, text: str) -> None:
        self.lines.append(f"# {plain(text)}")

    def entry(self, name: str, value: str, why: str = "") -> None:
        line = f"{name} = {to_json(value)}"
        self.line(f"{line:<36}  # {plain(why)}" if why else line)

    def blank(self, name: str, value: str, why: str) -> None:
        """Add an entry that is commented out."""
        line = f"{name} = {to_json(value)}"
        self.say(f"{line:<34}  # {why}")


@dataclass(slots=True)
class _States:
    """The values of a status."""

    found: dict[str, str]
    """By meaning."""
    values: list[str]
    """Those that are known."""
    is_closed: bool
    """Whether no other value may be assumed: the column can have no others, or has numbers."""

    @property
    def is_lower(self) -> bool:
        return self.found.get("pending", "").islower()


def describe(settings: OutboxSettings, name: str) -> Description:
    """Return the description of a table, and what is missing in it.

    Raises:
        SetupError: there is no such table, or it cannot be relayed whatever the file says, as that of a
            library whose rows only the library reads.
    """
    with connect(settings, name="outbox: table") as connection:
        relation = _find(connection, name)
        columns = pg_catalog.read_columns(connection, relation.oid)
        known = recognize(columns.values())
        receiver = ""
        if known is None:
            states = _states(connection, relation, list(columns.values()))
            guesses = guess(list(columns.values()), uses_status=states is not None)
        else:
            guesses = entries(known, list(columns.values()))
            _refuse(relation, known, guesses)
            receiver = _receiver(connection, relation, known, columns)
            values = list(known.states.values())
            states = _States(known.states, values, is_closed=True) if known.states else None
        slots = [name for (name,) in connection.execute(existing_sql.SLOTS, {"oid": relation.oid}).fetchall()]
    file = _File()
    file.say(
        f"The outbox table {relation.spelled}, as `outbox table describe` guesses it. Check each line: the "
        "relay"
    )
    file.say("does what is written here. Then run `outbox table check`. See docs/existing-tables.md.")
    if known is not None:
        file.say(f"Recognized as the table of {known.library}: stop its publisher before a relay starts, and")
        file.say("read docs/existing-tables.md#tables-of-other-libraries.")
    if receiver:
        file.say(receiver)
    # As it was asked for: without a schema it is the one of OUTBOX_SCHEMA, in each environment.
    file.line("[table]")
    file.entry("name", f"{relation.schema}.{relation.name}" if "." in name else relation.name)
    has_marks = states is not None or "published_at" in guesses.columns
    slot = slots[0] if len(slots) == 1 and not has_marks else None
    if slot is not None:
        file.entry("slot", slot, "no column says which rows are pending: what reads this slot publishes them")
    else:
        _write_order(file, guesses)
    _write_aggregate_type(file, guesses, known)
    file.line()
    file.line("[table.columns]")
    _write_columns(file, guesses, columns, slots)
    if states is not None:
        _write_states(file, states)
    if guesses.unused:
        file.line()
        names = ", ".join(f"{each.name} ({each.declared})" for each in guesses.unused)
        file.say(f"Not used: {names}")
    return Description("\n".join(file.lines) + "\n", file.incomplete)


def candidates(settings: OutboxSettings) -> tuple[list[str], list[str]]:
    """Return the schemas that have an outbox of this package, and other tables that are called an outbox."""
    with connect(settings, name="outbox: init") as connection:
        return _candidates(connection)


def which(settings: OutboxSettings) -> str:
    """Return which tables are called an outbox, as the remedy of an error."""
    with connect(settings, name="outbox: describe") as connection:
        return _which(_candidates(connection)[1][:5])


def _which(tables: list[str]) -> str:
    there = f"there is {', '.join(tables)}" if tables else "no other table has outbox in its name"
    return f"{there}; give the name, with its schema"


def _candidates(connection: Connection) -> tuple[list[str], list[str]]:
    found = connection.execute(existing_sql.CANDIDATES).fetchall()
    ours = sorted({schema for schema, name, is_ours in found if is_ours and name == "outbox"})
    others = [row for row in found if not (row[2] and row[1].startswith("outbox"))]
    return ours, [f"{schema}.{name}" for schema, name, _ in others]


def _find(connection: Connection, name: str) -> Relation:
    """Return the table that a person means, as SQL would write it, or in upper and lower case."""
    if not re.fullmatch(rf"{_PART}(\.{_PART})?", name):
        raise SetupError(f"{name!r} is not the name of a table: write outbox, or app.outbox with its schema")
    parts = [_spellings(part) for part in re.findall(_PART, name)]
    for *schema, table in itertools.product(*parts):
        relation = pg_catalog.look_up(connection, schema[0] if schema else None, table)
        if relation is not None:
            break
    else:
        others = pg_catalog.elsewhere(connection, parts[-1][0]) or _candidates(connection)[1][:5]
        raise SetupError(f"table {name} does not exist: {_which(others)}")
    if finding := findings.unsuitable(relation):
        raise SetupError(str(finding))
    findings.refuse(findings.lacking_rights(relation))
    if re.search(r"[.%]", relation.schema + relation.name):
        raise SetupError(
            f"{relation.spelled} has a name with a dot or %, which the file cannot contain: rename it"
        )
    return relation


def _refuse(relation: Relation, known: KnownTable, guesses: Guesses) -> None:
    """Raise why the table of a library cannot be relayed as it is."""
    table = f"{relation.spelled} is the table of {known.library}"
    if known.refusal:
        raise SetupError(f"{table}, {known.refusal}")
    if known.missing is not None:
        name, definition, reason = known.missing
        if name not in guesses.columns:
            add = f"ALTER TABLE {relation.spelled} ADD COLUMN {name} {definition}"
            raise SetupError(f"{table}, {reason}: {add}; then describe it again")


def _receiver(
    connection: Connection, relation: Relation, known: KnownTable, columns: dict[str, Column]
) -> str:
    """Return a sentence about the one receiver for which the rows are, if an event has a row for each."""
    if known.one_of is None:
        return ""
    (column,) = (each for each in columns.values() if normal(each.name) == known.one_of)
    found = pg_catalog.occurring(connection, relation, column)
    each_row = f"one row of an event for each {column.name}"
    if len(found) > 1:
        raise SetupError(
            f"{relation.spelled} is the table of {known.library}, with {each_row} ({', '.join(found[:5])}), "
            f"and a relay would publish and complete all: move those of one, {PAGE}"
        )
    return f"It has {each_row}; found: {found[0] if found else 'none'}. The relay completes all of them."


def _spellings(part: str) -> list[str]:
    if part.startswith('"'):
        return [part[1:-1].replace('""', '"')]
    # A shell removes quotes: first as it is, then as SQL reads it.
    return [part, part.lower()]


def _states(connection: Connection, relation: Relation, columns: list[Column]) -> _States | None:
    """Return the values of the status; None if there is none, or another column says what is pending."""
    column = status_of(columns)
    if column is None:
        return None
    default = literal_default(column.default)
    given = {"oid": relation.oid, "column": column.name}
    conditions = [row[1] for row in connection.execute(existing_sql.CHECKS, given).fetchall()]
    if column.labels:
        values = column.labels
    elif conditions:
        named = dict.fromkeys(literals(" ".join(conditions)))
        values = [
            value
            for value in named
            if all(pg_catalog.allows(connection, column, condition, value) for condition in conditions)
        ]
    else:
        values = sorted(
            {*pg_catalog.occurring(connection, relation, column), *([default] if default else [])}
        )
    found = guess_values(values, default)
    if values and "pending" not in found and has_time(columns):
        # Its values mean something different.
        return None
    is_closed = bool(column.labels or conditions) or column.is_whole
    return _States(found, values[:_MOST_VALUES], is_closed)


def _write_order(file: _File, guesses: Guesses) -> None:
    if "seq" in guesses.columns:
        return
    if "created_at" in guesses.columns:
        file.entry(
            "order", "created_at", "no integer that the database counts: a weaker order, see that page"
        )
        return
    file.incomplete.append("order")
    file.say("Complete this line, or the one for seq: nothing in the table orders its rows.")
    file.blank("order", "created_at", 'if created_at = "…" in [table.columns] names a time')


def _write_aggregate_type(file: _File, guesses: Guesses, known: KnownTable | None) -> None:
    if "aggregate_type" in guesses.columns:
        return
    if known is not None:
        file.say("No column has it. For topics by event type, set OUTBOX_EVENT_TYPES.")
        file.entry("aggregate_type", known.aggregate_type)
    else:
        file.say('No column has it: the first word of the event type, or a constant such as "order".')
        file.entry("aggregate_type", "{event_type:first}")


def _write_columns(file: _File, guesses: Guesses, columns: dict[str, Column], slots: list[str]) -> None:
    """Write [table.columns]; with one slot, the file names it and needs no marks."""
    for ours in (*_EVENT, *_MARKS, *(name for name in COLUMNS if name not in (*_EVENT, *_MARKS))):
        if found := guesses.columns.get(ours):
            reason = f"{found.reason}{_ASSUMED.get(ours, '')}"
            if ours == "seq" and "created_at" in guesses.columns:
                reason += '; or order = "created_at" at the top'
            if ours == "id" and not columns[found.name].is_distinct:
                reason += ", NOT unique on its own: consumers handle only one of the events with the same id"
            others = f"; could also be {', '.join(found.others)}" if found.others else ""
            file.entry(ours, found.name, reason + others)
        elif ours in _NEEDED:
            file.incomplete.append(ours)
            possible = [each.name for each in columns.values() if each.can_be(ours)]
            hint = f"one of {', '.join(possible)}" if possible else "no column has a type that it can have"
            file.say(f"Complete this line: no column is named like {_NEEDED[ours]}.")
            file.blank(ours, "…", hint)
        elif ours == "seq" and "order" in file.incomplete:
            file.blank(ours, "…", "an integer; ALTER TABLE … ADD COLUMN seq bigserial adds one")
        elif ours == "published_at" and "status" not in guesses.columns and len(slots) != 1:
            file.incomplete.append("published_at or status")
            file.say("Complete one of these lines: no column says which rows are pending.")
            if slots:
                one_of = (
                    f"at the top, in place of order: one of {', '.join(slots)}, whose reader publishes them"
                )
                file.blank("slot", "…", one_of)
            file.blank(ours, "…", "a time, null while the row is pending")
            file.blank("status", "…", "a text, an enum or an integer, with its values in [table.status]")
            if flags := [each.name for each in columns.values() if each.type == "bool"]:
                file.say(f"A boolean ({', '.join(flags)}) cannot be either: ALTER TABLE … ADD COLUMN")
                file.say("published_at timestamptz; UPDATE … SET published_at = now() where it is true.")
    for ours, name in guesses.maybe.items():
        file.blank(ours, name, f"{columns[name].declared}, only if it is {_MAYBE[ours]}")


def _write_states(file: _File, states: _States) -> None:
    file.line()
    file.line("[table.status]")
    known = ", ".join(states.values)
    for meaning, usual in _USUAL.items():
        if value := states.found.get(meaning):
            file.entry(meaning, value, f"values: {known}" if meaning == "pending" else "")
        elif states.is_closed or meaning == "pending":
            file.incomplete.append(meaning)
            file.say(f"Complete this line: no value is named like that of a {meaning} row.")
            file.blank(meaning, "…", f"one of {known}" if known else "the value of a new row")
        else:
            file.entry(
                meaning, usual.lower() if states.is_lower else usual, "assumed: no such value was found"
            )
    if others := [value for value in states.values if value not in states.found.values()]:
        file.say(f"Not pending: {', '.join(others)}")
