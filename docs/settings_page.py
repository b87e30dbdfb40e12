"""The page settings.md, made of `Settings`: `.venv/bin/python docs/settings_page.py` writes it."""

# ruff: noqa: E501 - lines of the page

from __future__ import annotations

import typing
from pathlib import Path
from typing import Final, Literal

from pydantic.fields import FieldInfo

from outbox_pipelines.config.sections import SECTIONS
from outbox_pipelines.settings import Settings, variable

PAGE: Final = Path(__file__).parent / "settings.md"
INTRODUCTION: Final = """\
<!-- Generated from the settings: run `.venv/bin/python docs/settings_page.py`. Do not edit. -->
# Settings
A setting is an entry of `outbox.toml`, or an environment variable:
```toml
#:schema outbox.schema.json
[outbox]
dsn = { env = "OUTBOX_DSN" }
kafka = "broker:9092"

[topics]
topic_partitions = 12      # the same as OUTBOX_TOPIC_PARTITIONS=12
```
- The file is `outbox.toml` in the working directory, or what `OUTBOX_CONFIG` names; the environment wins over it. It can list
  [several outboxes](outboxes.md).
- An entry is the variable's name in lower case, without `OUTBOX_`, in the section named below.
- A table (`event_types`, `header_names`, `warn_at`, …) is in a variable `name=value,name=value` or a JSON object.
- A path in the file is relative to it. An empty variable counts as not set.

Commands:
- `outbox init` writes a first file, with what it finds in the database, and its JSON Schema
- `outbox config check` shows all mistakes, also missing files and settings that contradict each other; exit code 1 if there
  are any, 2 if the file is not TOML
- `outbox config show` shows the value of each setting, and where it comes from
- `outbox config schema` prints the JSON Schema for editors; it has the limits of numbers

Each command except `outbox lint-writes` checks all values when it starts, and ends with exit code 2 if one is wrong;
`archive_retention_days` is checked where it is used.

## Kafka's client
```toml
[kafka]                                            # the same as OUTBOX_KAFKA_CONFIG
security.protocol = "SASL_SSL"
sasl.mechanism = "SCRAM-SHA-512"
sasl.username = "outbox"
sasl.password = { file = "/run/secrets/kafka" }    # read again for each new client
```

## Secrets
Settings that hold a password, a token or a command are secrets. The file names where each is: `dsn = { env = "ORDERS_DSN" }`,
or `dsn = { file = "/run/secrets/orders" }`. A `dsn`, `consumer_dsn`, `keys_dsn` or `connect` without a password may be written as it is.
Secrets never appear in messages, and passwords in other settings are refused.

[In Dagster](dagster.md), an outbox can override each setting. Below, each has its default in parentheses, then other values.
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [INTRODUCTION]
    for section, model in SECTIONS.items():
        rows = [_row(field) for field in model.model_fields]
        title = f"## {str(model.__doc__).removesuffix('.')}"
        parts.append("\n".join([title, f"In the file: `[{section}]`.", "", *rows, ""]))
    return "\n".join(parts)


def _row(name: str) -> str:
    """An entry of the list: the variable, its default, the other values, and the description."""
    field = Settings.model_fields[name]
    others = [f"`{value}`" for value in _values(field) if value != field.default]
    values = ", ".join(filter(None, [_default(field), *others]))
    return f"- `{variable(name)}`{f' ({values})' if values else ''}: {field.description}"


def _default(field: FieldInfo) -> str:
    value = field.default
    if isinstance(value, bool):
        return f"`{value}`".lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value in (None, "", {}) or str(value) == "" else f"`{value}`"


def _values(field: FieldInfo) -> tuple[str, ...]:
    return typing.get_args(field.annotation) if typing.get_origin(field.annotation) is Literal else ()


if __name__ == "__main__":
    PAGE.write_text(page())
