"""The section `[table]`: an existing table that has the events, and the names of its columns.

Invariants:
- A `Mapping` is complete and consistent; `existing.examine` checks that the table matches it.
- The named columns define the shape: either `published_at` or `status`, never both. A table that what reads a
  replication slot publishes has neither: only `outbox adopt` and `outbox debezium` take it.
- It says what orders the rows: an integer, `seq`, or the times of a table that has none; or that
  nothing needs to, so that several relays can share the table.
"""

from __future__ import annotations

import json
import re
import string
import zlib
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from outbox_pipelines.config.tables import as_table, each_checked

# Columns with these names unless the section gives others.
REQUIRED: Final = ("id", "seq", "aggregate_type", "aggregate_id", "event_type", "payload")
# Columns that are used only if the section names them. Those for a message's headers:
METADATA: Final = ("idempotency_key", "correlation_id", "causation_id", "traceparent", "version")
_OPTIONAL: Final = ("created_at", "headers", "trace_id", *METADATA)
# Columns that the relay writes:
WRITTEN: Final = (
    "published_at",
    "status",
    "processed_at",
    "failed_at",
    "retry_count",
    "last_error",
    "next_attempt_at",
)
COLUMNS: Final = (*REQUIRED, *_OPTIONAL, *WRITTEN)
STATES: Final = {"pending": "PENDING", "processed": "PROCESSED", "failed": "FAILED"}
# One column may be these: an integer is an id, and an event without an aggregate is its own.
_SHARED: Final = frozenset({"id", "seq", "aggregate_id"})
_ENTRIES: Final = frozenset({"name", "order", "aggregate_type", "slot", "columns", "status"})
_SLOT: Final = re.compile(r"[a-z0-9_]{1,63}")
# What orders the rows.
ORDERS: Final = ("seq", "created_at", "none")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A marked table and its columns."""

    schema: str | None
    """None for OUTBOX_SCHEMA."""
    table: str
    columns: dict[str, str]
    """Column names of the table, by our names; without optional columns that the section does not name."""
    states: dict[str, str]
    """The values of `status`: pending, processed, failed."""
    order: str = "seq"
    """What orders the rows: `seq`, or `created_at` and then `id` in a table without an integer."""
    aggregate_type: tuple[tuple[str, str | None], ...] = ()
    """For a table without such a column: literals, each followed by the event type (``""``), the part of it
    before the first dot (``"first"``), or nothing (None)."""
    is_shared: bool = False
    """Whether several relays publish the table at the same time, in no order."""
    slot: str | None = None
    """The slot whose reader, such as Debezium, publishes the table; None if a relay does."""

    @property
    def has_status(self) -> bool:
        """Whether a status marks pending rows; otherwise `published_at` does, which is null until then."""
        return "status" in self.columns

    @property
    def remembers_failures(self) -> bool:
        """Whether the table has a column that records dead letters."""
        return any(name in self.columns for name in ("status", "failed_at", "last_error"))

    @property
    def digest(self) -> int:
        """32 bits that differ if the columns, their meaning or the order differ."""
        named = asdict(replace(self, schema=None, table=""))
        # Without what is empty: an entry that a later version adds changes nothing for files without it.
        content = {name: value for name, value in named.items() if value}
        return zlib.crc32(json.dumps(content, sort_keys=True).encode())

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}" if self.schema else self.table


def read_mapping(given: Any) -> Mapping:
    """Return the mapping of a table of the settings; raise `ValueError` that says how to correct it."""
    content = as_table(given)
    if unknown := sorted(content.keys() - _ENTRIES):
        raise ValueError(
            f"has an unknown entry {unknown[0]!r}: use name, order, aggregate_type, slot, columns, status"
        )
    schema, table = _table(content.get("name"))
    named = _names(content, "columns", COLUMNS)
    if "slot" in content:
        return _read_by_slot(content, schema, table, named)
    given_order = _order(content.get("order", "seq"), named)
    # Of rows that need no order, the oldest come first all the same.
    is_shared = given_order == "none"
    order = ("seq" if "seq" in named else "created_at") if is_shared else given_order
    aggregate_type = _aggregate_type(content.get("aggregate_type"), named)
    columns = {name: name for name in REQUIRED} | named
    if order == "created_at":
        columns = {"created_at": "created_at"} | columns
        del columns["seq"]
    if aggregate_type:
        del columns["aggregate_type"]
    _check_shape(columns)
    states = _names(content, "status", tuple(STATES))
    if states and "status" not in columns:
        raise ValueError('has [table.status], but no column: write status = "status" in [table.columns]')
    states = STATES | states
    if len(set(states.values())) < len(states):
        raise ValueError("has one value twice in [table.status]: pending, processed and failed must differ")
    return Mapping(schema, table, columns, states, order, aggregate_type, is_shared)


def _read_by_slot(content: dict[str, Any], schema: str | None, table: str, named: dict[str, str]) -> Mapping:
    """Return the mapping of a table without marks, whose order is that of the commits in the log."""
    slot = content["slot"]
    if not isinstance(slot, str) or not _SLOT.fullmatch(slot):
        raise ValueError(f"has slot = {slot!r}: write the name of the slot, as in pg_replication_slots")
    if marks := [name for name in WRITTEN if name in named]:
        raise ValueError(
            f"names {marks[0]} and slot: keep slot if its reader, such as Debezium, publishes the table, or "
            f"{marks[0]} if a relay does"
        )
    for name in ("order", "status"):
        if name in content:
            raise ValueError(f"has {name} and slot: remove {name}, since the log orders what a slot delivers")
    aggregate_type = _aggregate_type(content.get("aggregate_type"), named)
    columns = {name: name for name in REQUIRED if name != "seq"} | named
    if aggregate_type:
        del columns["aggregate_type"]
    _check_taken(columns)
    order = "seq" if "seq" in columns else "created_at"
    return Mapping(schema, table, columns, dict(STATES), order, aggregate_type, slot=slot)


def _order(value: Any, named: dict[str, str]) -> str:
    if value not in ORDERS:
        raise ValueError(
            f'has order = {value!r}: write order = "seq" if an integer column orders the rows, '
            'order = "created_at" if only their times do, or order = "none" if consumers need no order'
        )
    if value == "created_at" and "seq" in named:
        raise ValueError('names seq, but has order = "created_at": remove one of them')
    return str(value)


def _aggregate_type(value: Any, named: dict[str, str]) -> tuple[tuple[str, str | None], ...]:
    if value is None:
        return ()
    if "aggregate_type" in named:
        raise ValueError("has aggregate_type twice: keep that in [table.columns], or that in [table]")
    usage = 'write a constant such as "order", "{event_type}", or "{event_type:first}" for its first word'
    if not isinstance(value, str) or not value or "\0" in value or "%" in value:
        raise ValueError(f"has aggregate_type = {value!r}: {usage}")
    try:
        parts = list(string.Formatter().parse(value))
    except ValueError as error:
        raise ValueError(f"has aggregate_type = {value!r} ({error}): {usage}") from None
    for _, field, spec, conversion in parts:
        if field is not None and (field != "event_type" or conversion or spec not in ("", "first")):
            raise ValueError(f"has aggregate_type = {value!r}: {usage}")
    return tuple((literal, None if field is None else spec) for literal, field, spec, _ in parts)


def _table(value: Any) -> tuple[str | None, str]:
    if not isinstance(value, str) or not value:
        raise ValueError('names no table: write name = "outbox" or name = "schema.outbox"')
    parts = value.split(".")
    if len(parts) > 2 or not all(parts):
        raise ValueError(f"has name = {value!r}: write a name, or a schema, a dot and a name, without quotes")
    _check_name("name", value)
    return (parts[0], parts[1]) if len(parts) == 2 else (None, parts[0])


def _names(content: dict[str, Any], section: str, known: tuple[str, ...]) -> dict[str, str]:
    found = content.get(section, {})
    if not isinstance(found, dict):
        raise ValueError(f'has {section} as a value: write a section [table.{section}] with lines name = "…"')

    def one(name: str, value: Any) -> str:
        if name not in known:
            raise ValueError(f"has an unknown {name!r} in [table.{section}]: use {', '.join(known)}")
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"has {name} = {value!r} in [table.{section}]: write a name in quotes, or leave it out"
            )
        _check_name(name, value)
        return value

    return each_checked([(section, found)], lambda _, names: each_checked(names.items(), one))[section]


def _check_name(what: str, name: str) -> None:
    # Statements contain these names together with parameters, which begin with %.
    if "%" in name or "\0" in name:
        raise ValueError(f"has {what} = {name!r}, a name that cannot be used: rename the column or table")


def _check_shape(columns: dict[str, str]) -> None:
    if "status" in columns and "published_at" in columns:
        raise ValueError(
            "names published_at and status, but only one can mark pending rows: keep published_at (null "
            "while pending), or status with processed_at for the time"
        )
    if "status" not in columns and "published_at" not in columns:
        raise ValueError(
            "does not say which rows are pending: name published_at (null while pending), or status, in "
            '[table.columns]; or write slot = "…" in [table] if what reads that slot, such as Debezium, '
            "publishes the table"
        )
    if "processed_at" in columns and "status" not in columns:
        raise ValueError("names processed_at without status: call it published_at, or name the status column")
    _check_taken(columns)


def _check_taken(columns: dict[str, str]) -> None:
    taken: dict[str, str] = {}
    for ours, theirs in columns.items():
        if theirs in taken and not {ours, taken[theirs]} <= _SHARED:
            raise ValueError(f"maps both {ours} and {taken[theirs]} to {theirs!r}: each needs its own column")
        taken[theirs] = ours
