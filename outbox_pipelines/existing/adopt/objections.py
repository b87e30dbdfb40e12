"""What prevents a table from being adopted, and what its users must accept.

Invariants:
- Nothing that writers or consumers would notice happens unless `plan` names it: as a problem, which nothing
  can accept, or as a consequence, which `switch` carries out only with `--accept NAME`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from outbox_pipelines.config.table_mapping import WRITTEN, Mapping
from outbox_pipelines.core.text import counted
from outbox_pipelines.existing.adopt.adopted_table import Column, Facts
from outbox_pipelines.existing.findings import identifier

_LITERAL: Final = re.compile(r"('([^']|'')*'|-?\d+(\.\d+)?|true|false)(::[\w \"().\[\]]+)?")
MOST_PAYLOAD_BYTES: Final = 1_000_000
"""The largest payload that the append-only outbox takes: see sql/0003_guards.sql."""
_MARKED_CHANGES: Final = (
    "UPDATE and DELETE on the view are refused: stop other publishers and clean-up jobs before the switch"
)
_SLOT_CHANGES: Final = (
    "UPDATE on the view is refused. DELETE of an event that the same transaction has inserted does nothing, "
    "and counts the row; DELETE of an old row deletes it"
)
_TEXTS: Final = frozenset({"text", "varchar", "bpchar", "citext", "name"})


@dataclass(frozen=True, slots=True)
class Judged:
    """What is known before the switch; lines for people."""

    problems: tuple[str, ...]
    """Nothing can be done before these are corrected."""
    consequences: dict[str, str]
    """By the name with which `switch` accepts them."""
    notes: tuple[str, ...]


def drawn(facts: Facts, mapping: Mapping) -> list[Column]:
    """Return the integer columns whose values are the `seq` of the append-only outbox after the switch."""
    names = {mapping.columns[name] for name in ("id", "seq") if name in mapping.columns}
    return [facts.columns[name] for name in sorted(names) if facts.columns[name].is_integer]


def looked_up(facts: Facts, mapping: Mapping) -> list[str]:
    """Return the columns whose value in a new event must not be in an old row.

    An id without an index was not unique in the table either.
    """
    names = ("id", "idempotency_key")
    return [
        mapping.columns[name]
        for name in names
        if name in mapping.columns and mapping.columns[name] in facts.indexed
    ]


def literal(column: Column) -> str | None:
    """Return the default of a column if it is a constant."""
    return column.default if column.default and _LITERAL.fullmatch(column.default) else None


def unmapped(facts: Facts, mapping: Mapping) -> list[Column]:
    """Return the columns that have no counterpart in the append-only outbox."""
    known = set(mapping.columns.values())
    return [column for column in facts.columns.values() if column.name not in known]


def judge(
    facts: Facts, mapping: Mapping, our_schema: str, on_conflict: list[str], refused_rows: int
) -> Judged:
    """Return everything that `plan` reports about a table.

    Args:
        on_conflict: statements that writers have sent.
        refused_rows: rows that the append-only outbox would have refused.
    """
    consequences = dict(_consequences(facts, mapping))
    if refused_rows:
        consequences["values"] = (
            f"{counted(refused_rows, 'row')} (of 100,000 that were read) could not be written after the "
            f"switch: an empty type, id or key, or a payload over {MOST_PAYLOAD_BYTES:,} bytes is refused"
        )
    return Judged(
        tuple(_problems(facts, mapping, our_schema)),
        consequences,
        tuple(_notes(facts, mapping, on_conflict)),
    )


def _problems(facts: Facts, mapping: Mapping, our_schema: str) -> list[str]:
    columns, name = mapping.columns, str(facts)
    problems = []
    if facts.schema == our_schema:
        problems.append(
            f"OUTBOX_SCHEMA={our_schema} is the schema of {name}, so the names of the tables would clash: "
            "set OUTBOX_SCHEMA to a schema of its own, for example outbox"
        )
    if not facts.is_owner:
        problems.append(facts.not_the_owner)
    if not facts.may_create:
        problems.append(
            f"this role may not create objects in schema {facts.schema}: GRANT CREATE ON SCHEMA …"
        )
    if not facts.is_logged:
        problems.append(f"{name} is unlogged or temporary: ALTER TABLE {name} SET LOGGED")
    if facts.is_inherited:
        problems.append(
            f"{name} is part of an inheritance tree: name the partitioned table, or end the inheritance"
        )
    if facts.has_policies:
        problems.append(f"row security of {name} does not apply to a view: DISABLE ROW LEVEL SECURITY first")
    for key in facts.references:
        problems.append(f"foreign key {key} refers to {name}, and none can refer to a view: drop it first")
    for key in facts.foreign_keys:
        problems.append(f"foreign key {key} of {name} has no counterpart: drop it first")
    for exclusion in facts.exclusions:
        problems.append(f"exclusion constraint {exclusion} of {name} cannot be kept: drop it first")
    for rule in facts.rules:
        problems.append(f"rule {rule} of {name} cannot be kept: drop it first")
    for rule in facts.rules_elsewhere:
        problems.append(f"rule {rule} has {name} in its action and would follow the rename: drop it first")
    for function in facts.functions:
        problems.append(
            f"function {function} has {name} in its body and would follow the rename: drop it first"
        )
    for column in facts.columns.values():
        if column.is_generated:
            problems.append(
                f"column {column.name} of {name} is generated, which a view cannot be: drop it first"
            )
    if columns["aggregate_id"] in (columns["id"], columns.get("seq")):
        problems.append(
            f"column {columns['aggregate_id']} of {name} is id and aggregate_id: map a column aggregate_id, "
            "added if necessary"
        )
    keys = columns.get("idempotency_key")
    if keys is not None and keys not in facts.indexed:
        problems.append(
            f"column {keys} of {name} has no index, so each INSERT would read the whole table after the "
            f"switch: CREATE INDEX CONCURRENTLY ON {facts.quoted} ({identifier(keys)})"
        )
    problems += _wrong_types(facts, mapping)
    ours = {columns[each] for each in ("id", "seq", "created_at", "aggregate_id") if each in columns}
    problems += [
        f"column {column.name} of {name} is an array of values of its own ({column.type}): not supported"
        for column in facts.columns.values()
        if column.name in ours and column.base.startswith("_")
    ]
    return problems


def _wrong_types(facts: Facts, mapping: Mapping) -> list[str]:
    found = []
    at = {ours: facts.columns[theirs] for ours, theirs in mapping.columns.items()}
    column = at["id"]
    if column.base != "uuid" and not column.is_integer:
        found.append(
            f"column {column.name} of {facts} has type {column.type}, and ids of the append-only outbox "
            f"are UUIDs: {_change(facts, column, 'uuid')}"
        )
    for column in drawn(facts, mapping):
        if column.sequence is None:
            found.append(
                f"column {column.name} of {facts} has no sequence, so its writers choose the numbers, "
                "which the append-only outbox draws: add an identity"
            )
    if at["payload"].base in _TEXTS and mapping.slot is None:
        column = at["payload"]
        found.append(
            f"column {column.name} of {facts} has type {column.type}, and the append-only outbox takes "
            f"jsonb: {_change(facts, column, 'jsonb')}"
        )
    if "version" in at and not at["version"].is_integer:
        column = at["version"]
        found.append(
            f"column {column.name} of {facts} (version) has type {column.type}, and the append-only outbox "
            "takes an integer: remove it from [table.columns]"
        )
    return found


def _change(facts: Facts, column: Column, kind: str) -> str:
    name = identifier(column.name)
    change = f"ALTER TABLE {facts.quoted} ALTER COLUMN {name} TYPE {kind} USING {name}::{kind}"
    return f"{change} (it rewrites the table, and writers wait)"


def _consequences(facts: Facts, mapping: Mapping) -> list[tuple[str, str]]:
    columns = mapping.columns
    consequences = []
    id_column = facts.columns[columns["id"]]
    if id_column.is_integer:
        consequences.append(
            (
                "ids",
                f"{columns['id']} is an integer. It stays one in the table, and continues to count; but "
                f"the header "
                "`id` of new events is a UUID that contains it (00000000-0000-8000-8000-00000000002a for "
                "42), and "
                "a writer that sends a number of its own is refused: also one that draws it itself from the "
                "sequence. RETURNING and lastval() give it; pg_get_serial_sequence finds no sequence of a "
                "view. Consumers must treat the header as text",
            )
        )
    for column in unmapped(facts, mapping):
        shown = f"the constant {literal(column)}" if literal(column) else "NULL"
        consequences.append(
            (
                f"column:{column.name}",
                f"column {column.name} has no counterpart: a SELECT of a new event shows {shown}, whatever "
                "was inserted. Map it in [table.columns] (correlation_id, headers, …) to keep and publish it",
            )
        )
    for unique in facts.uniques:
        if not _is_kept(unique.columns, mapping):
            what = ", ".join(name or "an expression" for name in unique.columns)
            consequences.append(
                (f"unique:{unique.name}", f"unique index {unique.name} ({what}) does not apply to new events")
            )
    if (key := columns.get("idempotency_key")) and not any(
        unique.columns == (key,) and not unique.is_partial for unique in facts.uniques
    ):
        consequences.append(
            ("keys", f"{key} is not unique now; after the switch a second event with a key is refused")
        )
    for trigger in facts.triggers:
        consequences.append((f"trigger:{trigger}", f"trigger {trigger} does not fire for new events"))
    for view in facts.views:
        consequences.append(
            (
                f"view:{view}",
                f"view {view} follows the rename: it shows old rows only, and must be dropped before "
                "`finish --drop`",
            )
        )
    for publication in facts.publications if mapping.slot is None else ():
        consequences.append(
            (f"publication:{publication}", f"publication {publication} does not get new events")
        )
    payload = facts.columns[columns["payload"]]
    if payload.base in _TEXTS and mapping.slot is not None:
        consequences.append(
            (
                "json",
                f"{payload.name} is text. After the switch a text that is not JSON is refused, and payloads "
                "are published as jsonb prints them: spaces, order and repetition of keys are not kept",
            )
        )
    if payload.base == "json":
        consequences.append(
            (
                "json",
                "payloads become jsonb: spaces, the order of keys and repeated keys are not kept; \\u0000 "
                "and numbers out of the range of numeric are refused",
            )
        )
    return consequences


def _is_kept(names: tuple[str | None, ...], mapping: Mapping) -> bool:
    columns = mapping.columns
    kept = {columns[name] for name in ("id", "seq") if name in columns}
    # A partitioned table's key contains the column of the partitions, too.
    if names and set(names) & kept:
        return True
    return names == (columns.get("idempotency_key"),)


def _notes(facts: Facts, mapping: Mapping, on_conflict: list[str]) -> list[str]:
    found = [
        "INSERT … ON CONFLICT does not work on a view: with columns or a constraint it is an error, "
        "without them "
        "a known key raises unique_violation instead of being skipped. Change such code before the switch",
        *(f"this database has run: {text}" for text in on_conflict),
        _MARKED_CHANGES if mapping.slot is None else _SLOT_CHANGES,
        "TRUNCATE, COPY … TO, SELECT … FOR UPDATE, ctid, tableoid and foreign keys do not work on a view; "
        "so that the latter is refused, no role gets UPDATE on the view (superusers have all rights)",
        "the append-only outbox refuses an empty aggregate_type, aggregate_id, event_type or key, and a "
        f"payload over {MOST_PAYLOAD_BYTES:,} bytes",
        "errors of the database name other constraints than before",
    ]
    if facts.columns[mapping.columns["id"]].base == "uuid":
        found.append(
            "an id that is in the old table is refused as before; that two new events have the same id is "
            "not checked"
        )
    if "created_at" in mapping.columns:
        found.append(
            f"{mapping.columns['created_at']} of a new event is the begin of its transaction, by the "
            "database's clock, also if the writer sends a time"
        )
    if used := [columns for ours, columns in mapping.columns.items() if ours in WRITTEN]:
        found.append(f"{', '.join(used)}: of new events, they show what the relay of the outbox has done")
    return found
