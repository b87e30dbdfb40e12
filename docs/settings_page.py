"""The page settings.md, made of `Settings`: `.venv/bin/python docs/settings_page.py` writes it."""

# ruff: noqa: E501 - lines of the page

from __future__ import annotations

import typing
from pathlib import Path
from typing import Final, Literal

from pydantic.fields import FieldInfo

from outbox_pipelines.config.fields import SECTIONS
from outbox_pipelines.settings import Settings, variable

_HEAD: Final = ("| Setting | Values | Default | Meaning |", "|---|---|---|---|")
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
- The file is `outbox.toml` in the working directory, or what `OUTBOX_CONFIG` names. The environment wins over it. It can
  also list [several outboxes](outboxes.md).
- An entry is the variable's name in lower case, without `OUTBOX_`, in the section in which it stands below.
- A table (`topic_map`, `header_names`, `warn_at`, …) is a table in the file, and in a variable `name=value,name=value` or a
  JSON object.
- A path in the file is relative to the file. An empty variable counts as not set. A variable whose name is almost that
  of a setting is logged as a warning.

| Command | What it does |
|---|---|
| `outbox init` | writes a first file, with what it finds in the database, and its JSON Schema |
| `outbox config check` | shows all mistakes in the file and the environment, with their lines; exit code 1 if there are any, 2 if the file is not TOML |
| `outbox config show` | shows the value of each setting, and where it comes from |
| `outbox config schema` | prints the JSON Schema, with which editors complete and check the file (`#:schema` in its first line) |

Each command except `outbox lint-writes` checks all values when it starts; files with Kafka's secrets it reads only if it
needs Kafka. If a value is wrong, it prints one line that names the setting and where it stands,
and ends with exit code 2.

## Kafka's client
```toml
[kafka]                                            # the same as OUTBOX_KAFKA_CONFIG
security.protocol = "SASL_SSL"
sasl.mechanism = "SCRAM-SHA-512"
sasl.username = "outbox"
sasl.password = { file = "/run/secrets/kafka" }    # read again for each new client
```

## Secrets
`OUTBOX_DSN`, `OUTBOX_CONSUMER_DSN`, `OUTBOX_ALERTS`, `OUTBOX_CONNECT` and `OUTBOX_DEAD_LETTER_COMMAND` are secrets. The
file names where each is: `dsn = { env = "ORDERS_DSN" }`, or `dsn = { file = "/run/secrets/orders" }`. A `dsn`,
`consumer_dsn` or `connect` without a password may be written as it is. Passwords and tokens never appear in messages, and
passwords in other settings are refused.

In Dagster, an outbox can override each setting: see [Outboxes in a Dagster project](dagster.md).
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [INTRODUCTION]
    for section, model in SECTIONS.items():
        rows = [_row(field) for field in model.model_fields]
        title = f"## {str(model.__doc__).removesuffix('.')}"
        parts.append("\n".join([title, f"In the file: `[{section}]`.", "", *_HEAD, *rows, ""]))
    return "\n".join(parts)


def _row(name: str) -> str:
    field = Settings.model_fields[name]
    return f"| `{variable(name)}` | {_values(field)} | {_default(field)} | {field.description} |"


def _default(field: FieldInfo) -> str:
    value = field.default
    if isinstance(value, bool):
        return f"`{value}`".lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value in (None, "", {}) or str(value) == "" else f"`{value}`"


def _values(field: FieldInfo) -> str:
    if typing.get_origin(field.annotation) is dict:
        return "table"
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
