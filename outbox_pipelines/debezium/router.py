"""Debezium's outbox event router, set up so that its messages are those of the relay.

Invariants:
- What the router cannot make equal is refused, with the setting to change: it is never published differently.
- The payload is the text that PostgreSQL prints, unchanged: it is not parsed and printed again.
"""

from __future__ import annotations

import string
from typing import Final

from outbox_pipelines.config import parsed
from outbox_pipelines.config.header_names import METADATA
from outbox_pipelines.config.table_mapping import REQUIRED, Mapping
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

_ROUTER: Final = "transforms.outbox."
_DROP: Final = "transforms.withoutId."
_STRING: Final = "org.apache.kafka.connect.storage.StringConverter"
# The router takes one column for the topic, and calls its value so.
_ROUTED: Final = "${routedByValue}"
_RELAY: Final = "or publish with the relay"
OUTBOX: Final = Mapping(
    schema=None,
    table="outbox",
    columns={name: name for name in (*REQUIRED, *(header.replace("-", "_") for header in METADATA))},
    states={},
)
"""The append-only outbox, described as an existing table is."""


def mapping(settings: Settings) -> Mapping:
    """Return the description of the table that the connector publishes."""
    return parsed.mapping(settings) or OUTBOX


def table(settings: Settings) -> tuple[str, str]:
    """Return the schema and the name of the table."""
    found = mapping(settings)
    return found.schema or settings.db_schema, found.table


def router(settings: Settings) -> dict[str, str]:
    """Return the settings of the router and of the converters.

    Raises:
        SetupError: its messages would differ from those of the relay.
    """
    _refuse(settings)
    named = mapping(settings).columns
    names = parsed.header_names(settings)
    field, topic = _topic(settings)
    headers = {
        header: name
        for header, name in names.items()
        if header != "id" and _column(header, named) is not None
    }
    placed = [f"{_column(header, named)}:header:{name}" for header, name in headers.items()]
    # The router names one header itself, always `id`.
    drops_id = names["id"] != "id"
    if drops_id:
        placed.insert(0, f"{named['id']}:header:{names['id']}")
    found = {
        "transforms": "outbox,withoutId" if drops_id else "outbox",
        _ROUTER + "type": "io.debezium.transforms.outbox.EventRouter",
        _ROUTER + "route.by.field": named[field],
        _ROUTER + "route.topic.replacement": topic,
        _ROUTER + "table.field.event.id": named["id"],
        _ROUTER + "table.field.event.key": named["aggregate_id"],
        _ROUTER + "table.field.event.payload": named["payload"],
        _ROUTER + "table.expand.json.payload": "false",
        "key.converter": _STRING,
        "value.converter": _STRING,
        "header.converter": _STRING,
    }
    if placed:
        found[_ROUTER + "table.fields.additional.placement"] = ",".join(placed)
    if drops_id:
        found[_DROP + "type"] = "org.apache.kafka.connect.transforms.DropHeaders"
        found[_DROP + "headers"] = "id"
    return found


def _topic(settings: Settings) -> tuple[str, str]:
    """Return the column by which the router chooses the topic, and the topic with its value."""
    parts = list(string.Formatter().parse(settings.topic))
    fields = {field for _, field, _, _ in parts if field is not None}
    if len(fields) > 1 or any(spec for _, _, spec, _ in parts):
        raise SetupError(
            f"OUTBOX_TOPIC={settings.topic}: Debezium makes a topic of one column, as it is: write a "
            f"template with {{aggregate_type}} or {{event_type}} alone and without :lower, {_RELAY}"
        )
    topic = "".join(literal + (_ROUTED if field is not None else "") for literal, field, _, _ in parts)
    return next(iter(fields), "aggregate_type"), topic


def _refuse(settings: Settings) -> None:
    if settings.value_format != "payload":
        raise SetupError(
            f"OUTBOX_VALUE_FORMAT={settings.value_format}: Debezium sends the payload as it is: set "
            f"OUTBOX_VALUE_FORMAT=payload, {_RELAY}"
        )
    if parsed.topic_map(settings):
        raise SetupError(
            "OUTBOX_TOPIC_MAP: Debezium has one rule for all topics: unset it and write OUTBOX_TOPIC, "
            f"{_RELAY}"
        )
    if settings.tombstones:
        raise SetupError(
            f"OUTBOX_TOMBSTONES: Debezium sends a payload that is null as the text null: unset it, {_RELAY}"
        )
    names = parsed.header_names(settings)
    for header, name in names.items():
        if "," in name or ":" in name or name.strip() != name or (name == "id" and header != "id"):
            raise SetupError(
                f"OUTBOX_HEADER_NAMES: Debezium cannot call the header {header} {name!r}: choose another "
                f"name without a comma and a colon, {_RELAY}"
            )
    _refuse_table(mapping(settings))


def _refuse_table(mapping: Mapping) -> None:
    where = "OUTBOX_TABLE"
    if mapping.aggregate_type:
        raise SetupError(
            f"{where}: the table has no column for the aggregate type, and Debezium makes headers and topics "
            f"of columns: add such a column and name it in [table.columns], {_RELAY}"
        )
    for name in ("headers", "trace_id"):
        if name in mapping.columns:
            raise SetupError(
                f"{where}: Debezium makes no headers of {name} as the relay does: remove {name} from "
                f"[table.columns], {_RELAY}"
            )
    for name in (mapping.table, *mapping.columns.values()):
        if "," in name or ":" in name:
            raise SetupError(
                f"{where}: Debezium cannot be given the name {name!r}: rename it without comma and colon, "
                f"{_RELAY}"
            )


def _column(header: str, named: dict[str, str]) -> str | None:
    return named.get(header.replace("-", "_"))
