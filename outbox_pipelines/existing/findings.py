"""What can be wrong with a table as a whole, and how to correct it.

Invariants:
- A mismatch that would lose an event, or fail at the first one, is an error; one that only costs speed, loses
  counts at a restart, or concerns rows that the table allows and may not have, is a warning.
- Each finding says how to correct it. Its statements can be run as they are, in their order, one at a time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import existing_sql
from outbox_pipelines.existing.pg_catalog import Column, Relation, elsewhere
from outbox_pipelines.existing.table_statements import COUNTED, DEAD

_LIMIT: Final = re.compile(r"\((\d+)\)$")
_RELATIONS: Final = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "i": "an index",
    "I": "an index",
    "S": "a sequence",
    "c": "a composite type",
    "t": "a TOAST table",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to correct in a table or in its description."""

    problem: str
    remedy: str = ""
    """What to do; with `statements`, the words before the first of them."""
    statements: tuple[str, ...] = ()
    is_error: bool = True

    @property
    def text(self) -> str:
        """The problem and the remedy, without the statements."""
        return f"{self.problem}: {self.remedy}".removesuffix(": ")

    def __str__(self) -> str:
        if not self.statements:
            return self.text
        more = len(self.statements) - 1
        space = " " if self.remedy else ": "
        likewise = f" (likewise for {more} more partitions)" if more else ""
        return f"{self.text}{space}{self.statements[0]}{likewise}"


def refuse(findings: list[Finding]) -> None:
    """Raise the first error as a `SetupError`."""
    for finding in findings:
        if finding.is_error:
            raise SetupError(str(finding))


def unsuitable(relation: Relation) -> Finding | None:
    """Return why a relation cannot be a marked table."""
    if relation.root is not None and relation.kind in ("r", "p", "f"):
        return Finding(f"{relation.spelled} is a partition", f"name its parent, {relation.root}")
    if relation.kind not in ("r", "p"):
        what = _RELATIONS.get(relation.kind, "something different")
        remedy = "name the table that has the events"
        if relation.kind == "v":
            remedy += "; if `outbox adopt` has made it a view, relay the append-only outbox, without [table]"
        return Finding(f"{relation.spelled} is not a table but {what}", remedy)
    return None


def lacking_rights(relation: Relation) -> list[Finding]:
    """Return the rights to the whole table that the role lacks."""
    table, user = relation.spelled, relation.user
    findings: list[Finding] = []
    if not relation.may_use:
        schema = identifier(relation.schema)
        findings.append(lacks(f"role {user} may not use schema {schema}", f"USAGE ON SCHEMA {schema}", user))
    if not (relation.may_read and relation.may_write):
        findings.append(lacks(f"role {user} may not relay {table}", f"SELECT, UPDATE ON {table}", user))
    if relation.is_filtered:
        findings.append(
            Finding(
                f"row security of {table} hides rows from role {user}, so their events would be lost",
                "relay as the owner of the table if its row security is not forced, or",
                (f"ALTER ROLE {user} BYPASSRLS",),
            )
        )
    return findings


def lacks(problem: str, right: str, user: str) -> Finding:
    return Finding(problem, statements=(f"GRANT {right} TO {user}",))


def missing_table(connection: Connection, mapping: Mapping) -> Finding:
    problem = f"table {mapping} does not exist (OUTBOX_TABLE)"
    remedy = "correct `name` in [table]"
    if others := elsewhere(connection, mapping.table):
        return Finding(problem, f"{remedy}; there is {', '.join(others)}")
    return Finding(
        problem, remedy + ("" if mapping.schema else '; write "schema.table" if it is not in OUTBOX_SCHEMA')
    )


def forgetful(mapping: Mapping, relation: Relation, columns: dict[str, Column]) -> list[Finding]:
    """Return what of refusals and dead letters the rows cannot record."""
    add = f"ALTER TABLE {relation.spelled} ADD COLUMN"
    name_it = "name the column in [table.columns], if necessary after"
    error = columns.get(mapping.columns.get("last_error", ""))
    limit = _LIMIT.search(error.declared) if error else None
    needed = len(COUNTED if {"status", "failed_at"} & mapping.columns.keys() else DEAD)
    if error and limit and int(limit[1]) < needed:
        change = f"ALTER COLUMN {identifier(error.name)} TYPE text"
        return [
            Finding(
                f"column {error.name!r} of {mapping} has no room for the {needed} characters that say who "
                "has refused a row",
                "remove last_error from [table.columns], or",
                (f"ALTER TABLE {relation.spelled} {change}",),
            )
        ]
    if not mapping.remembers_failures:
        return [
            Finding(
                f"{mapping} has no failed_at and no last_error that record dead letters: each is tried "
                "again after every restart",
                name_it,
                (f"{add} failed_at timestamptz",),
                is_error=False,
            )
        ]
    if "retry_count" not in mapping.columns:
        return [
            Finding(
                f"{mapping} has no retry_count: the count of attempts starts from 0 after each restart",
                name_it,
                (f"{add} retry_count int NOT NULL DEFAULT 0",),
                is_error=False,
            )
        ]
    return []


def missing_indexes(
    connection: Connection, mapping: Mapping, relation: Relation, columns: dict[str, Column]
) -> list[Finding]:
    """Return the indexes without which a claim or a mark must read the whole table."""
    order = mapping.columns[mapping.order]
    key = mapping.columns[key_of(mapping)]
    marker = mapping.columns["status" if mapping.has_status else "published_at"]
    pending = mapping.states["pending"]
    # In the form in which pg_get_expr prints it.
    value = f"'{pending}'" if mapping.has_status else "IS NULL"
    if mapping.has_status and (status := columns.get(marker)) is not None and status.is_whole:
        value = f"= {pending}"
    given = {"oid": relation.oid, "order": order, "key": key, "marker": marker, "value": value}
    leaves = connection.execute(existing_sql.LEAVES, {**given, "has_status": mapping.has_status}).fetchall()
    condition = f"{identifier(marker)} {f'= {literal(pending)}' if mapping.has_status else value}"
    over_pending = f" ({identifier(order)}) WHERE {condition}"
    over_keys = f" ({identifier(key)})"
    unordered = [leaf for leaf, is_partial, is_by_status, _ in leaves if not (is_partial or is_by_status)]
    unkeyed = [leaf for leaf, _, _, has_key in leaves if not has_key and key != order]
    return [
        *_missing_index(unordered, "over its pending rows, so each claim reads all of it", over_pending),
        *_missing_index(unkeyed, f"over {key!r}, so each mark reads all of it", over_keys),
    ]


def _missing_index(leaves: list[str], what: str, index: str) -> list[Finding]:
    if not leaves:
        return []
    statements = tuple(f"CREATE INDEX CONCURRENTLY ON {leaf}{index}" for leaf in leaves)
    return [Finding(f"{leaves[0]} has no index {what}", statements=statements, is_error=False)]


def ending(connection: Connection, relation: Relation) -> list[Finding]:
    row = connection.execute(existing_sql.ENDING, {"oid": relation.oid}).fetchone()
    if row is None:
        return []
    end, is_over = row
    problem = (
        f"the newest partition of {relation.spelled} {'ended' if is_over else 'ends'} on {end} UTC, and "
        f"there is no default one: writers {'are' if is_over else 'will then be'} refused"
    )
    remedy = "make the next one, or let `outbox table months` make them (OUTBOX_MONTHS_AHEAD)"
    return [Finding(problem, remedy, is_error=False)]


def key_of(mapping: Mapping) -> str:
    """Return our name of the column by which rows are marked."""
    return "seq" if mapping.order == "seq" else "id"


def identifier(name: str) -> str:
    return sql.Identifier(name).as_string()


def literal(text: str) -> str:
    return sql.Literal(text).as_string()
