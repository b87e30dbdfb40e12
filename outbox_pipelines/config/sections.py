"""The sections of `outbox.toml`, and which fields each has."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel

from outbox_pipelines.config import fields

SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "outbox": fields.Outbox,
    "topics": fields.Topics,
    "messages": fields.Messages,
    "registry": fields.Registry,
    "relay": fields.Relay,
    "telemetry": fields.Telemetry,
    "days": fields.Days,
    "checks": fields.Checks,
    "consumer": fields.Consumer,
    "erasure": fields.Erasure,
    "dagster": fields.Dagster,
    "local": fields.Local,
}
"""The sections of `outbox.toml`, in the order of its documentation, and their fields."""
WHOLE: Final = {
    "kafka": "kafka_config",
    "table": "table",
    "event_types": "event_types",
    "aggregate_types": "aggregate_types",
    "consumers": "consumers",
}
"""Sections that are the value of one field."""
RULES: Final = frozenset({"event_types", "aggregate_types"})
"""Of these, those with names of types in them, which are no names of secrets."""
