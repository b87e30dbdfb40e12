"""Compares a table with its mapping: one list of findings, for the relay's start and `outbox table check`."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.database import Connection
from outbox_pipelines.existing.columns import NAMES, ageless, mismatches, unwritable, wrong_states
from outbox_pipelines.existing.findings import (
    Finding,
    ending,
    forgetful,
    lacking_rights,
    missing_indexes,
    missing_table,
    refuse,
    unsuitable,
)
from outbox_pipelines.existing.pg_catalog import Column, look_up, read_columns
from outbox_pipelines.existing.statements import Types


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found in a table, in the order in which to correct it."""

    oid: int | None
    """None without such a table."""
    columns: dict[str, Column]
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class Found:
    """A table that matches its mapping."""

    oid: int
    types: Types
    warnings: list[str]


def check(connection: Connection, mapping: Mapping) -> Found:
    """Compare the table with its mapping.

    Raises:
        SetupError: it does not match.
    """
    found = examine(connection, mapping)
    refuse(found.findings)
    assert found.oid is not None
    return Found(found.oid, _types(mapping, found.columns), [str(finding) for finding in found.findings])


def examine(connection: Connection, mapping: Mapping) -> Examined:
    """Return everything that is to be corrected in the table or in the mapping."""
    place = look_up(connection, mapping.schema, mapping.table)
    if place is None:
        return Examined(None, {}, [missing_table(connection, mapping)])
    if finding := unsuitable(place):
        return Examined(None, {}, [finding])
    columns = read_columns(connection, place.oid)
    of_columns = [
        finding
        for ours, theirs in mapping.columns.items()
        # One column may be both; what a seq must be is enough for an id.
        if not (ours == "id" and theirs == mapping.columns.get("seq"))
        for finding in mismatches(mapping, place, ours, theirs, columns)
    ]
    if mapping.slot is not None:
        # Nothing is marked or claimed.
        return Examined(place.oid, columns, [*lacking_rights(place), *of_columns])
    findings = [
        *lacking_rights(place),
        *of_columns,
        *unwritable(mapping, place, columns),
        *wrong_states(connection, mapping, place, columns),
        *forgetful(mapping, place, columns),
        *ageless(mapping, place),
        *missing_indexes(connection, mapping, place),
        *ending(connection, place),
    ]
    return Examined(place.oid, columns, findings)


def _types(mapping: Mapping, columns: dict[str, Column]) -> Types:
    theirs = {ours: columns[name] for ours, name in mapping.columns.items()}
    nullable = [ours for ours in NAMES if ours in theirs and not theirs[ours].never_null]

    def compared(ours: str) -> str:
        # The statements read "" for NULL, which is no value of other types.
        return theirs[ours].spelled if ours in theirs and ours not in nullable else "text"

    last_error = theirs.get("last_error")
    return Types(
        key="bigint" if mapping.order == "seq" else theirs["id"].spelled,
        aggregate_type=compared("aggregate_type"),
        aggregate_id=compared("aggregate_id"),
        last_error=last_error.declared if last_error else "text",
        nullable=tuple(nullable),
        has_text_payload=theirs["payload"].is_text,
    )
