"""The page settings.md, made of `Settings`: `.venv/bin/python docs/settings_page.py` writes it."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Final, Literal

from pydantic.fields import FieldInfo

from outbox_pipelines.settings import Settings

PAGE: Final = Path(__file__).parent / "settings.md"
GROUPS: Final = {
    "Several outboxes": "name outboxes_file",
    "Servers and tables": "dsn kafka kafka_config_file db_schema table_file connect connector",
    "Topics": "topic topic_map_file create_topics create_topics_pattern create_topics_max topic_partitions "
    "topic_replication",
    "Messages": "value_format header_names flat_members tombstones cloudevents_source",
    "Delivery": "delivery transaction_seconds batch_events batch_bytes lease_seconds breaker_seconds",
    "Rejected events": "max_attempts retry_seconds on_dead_letter dead_letter_topics dead_letter_command",
    "Metrics, logs and traces": "metrics_port metrics_address log_level log_format tracing",
    "Days and the archive": "partitions_ahead close_after_minutes archive archive_readers retention_days "
    "key_retention_days clean_after_hours months_ahead expectations",
    "Checks and alerts": "warn_at error_at alerts alert_after_seconds ui_url runbook_url",
    "Event catalog and consumers": "catalog_file consumers_file consumer_dsn consumer_schema drain_consumers",
    "Dagster": "session_seconds run_retention_days",
    "Local stack": "local_dir local_jars local_postgres local_grace_seconds",
}
INTRODUCTION: Final = """\
<!-- Generated from the settings: run `.venv/bin/python docs/settings_page.py`. Do not edit. -->
# Settings
A setting is an environment variable, or a line `NAME=value` in the file that `OUTBOX_SETTINGS_FILE` names. If
both have a value, the environment wins. An empty variable counts as not set. A name that is almost that of a
setting is logged as a warning.

Each command except `outbox lint-writes` checks all values when it starts; a file of Kafka settings that it
may not read, only if it needs Kafka. If a value is wrong, it prints one line that names the setting, and ends
with exit code 2. Passwords and tokens never appear in messages:
`OUTBOX_DSN`, `OUTBOX_CONSUMER_DSN`, `OUTBOX_ALERTS`, `OUTBOX_CONNECT` and `OUTBOX_DEAD_LETTER_COMMAND` are
secrets.
Passwords in other settings are refused.

In Dagster, an outbox can override each of them: see [Outboxes in a Dagster project](dagster.md).
"""


def name_of(field: str) -> str:
    """The environment variable of a setting."""
    return Settings.model_fields[field].alias or f"OUTBOX_{field.upper()}"


def page() -> str:
    """The whole page, in Markdown."""
    parts = [INTRODUCTION]
    for title, fields in GROUPS.items():
        rows = [_row(field) for field in fields.split()]
        parts.append(
            "\n".join(
                [f"## {title}", "| Setting | Values | Default | Meaning |", "|---|---|---|---|", *rows, ""]
            )
        )
    return "\n".join(parts)


def _row(name: str) -> str:
    field = Settings.model_fields[name]
    return f"| `{name_of(name)}` | {_values(field)} | {_default(field)} | {field.description} |"


def _default(field: FieldInfo) -> str:
    value = field.default
    if isinstance(value, bool):
        return f"`{value}`".lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value in (None, "") or str(value) == "" else f"`{value}`"


def _values(field: FieldInfo) -> str:
    kinds = [
        kind for kind in (typing.get_args(field.annotation) or [field.annotation]) if kind is not type(None)
    ]
    if typing.get_origin(field.annotation) is Literal:
        return ", ".join(f"`{value}`" for value in kinds)
    (kind,) = kinds
    if kind is bool:
        return "`true`, `false`"
    if kind is Path:
        return "path"
    if kind not in (int, float):
        return "text"
    bounds = {
        limit: f"{getattr(bound, limit):g}"
        for bound in field.metadata
        for limit in ("ge", "gt", "le")
        if getattr(bound, limit, None) is not None
    }
    number = "whole number" if kind is int else "number"
    if {"ge", "le"} <= bounds.keys():
        return f"{number}, {bounds['ge']} to {bounds['le']}"
    words = {"ge": "at least", "gt": "more than", "le": "at most"}
    return ", ".join([number, *(f"{words[limit]} {bound}" for limit, bound in bounds.items())])


if __name__ == "__main__":
    PAGE.write_text(page())
