"""The file that OUTBOX_OUTBOXES_FILE names: several outboxes, and what they have in common.

Invariants:
- What the file as a whole says is checked here; what an outbox's values mean is checked when it is loaded, so
  that a mistake concerns that outbox alone.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outbox_pipelines.core.secret import redacted

NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Names of outboxes: what Dagster, Prometheus and file systems all accept."""
_VARIABLE: Final = "_variable"
_PLACEHOLDER: Final = "{outbox}"
_EXAMPLE: Final = '[[outbox]] with name = "orders" and dsn_variable = "ORDERS_DSN"'


@dataclass(frozen=True, slots=True)
class Entry:
    """What the file says about an outbox, with the file's defaults."""

    name: str
    values: Mapping[str, Any]
    """By setting in lower case without OUTBOX_."""
    variables: Mapping[str, str]
    """For secrets, the environment variable that holds each."""
    error: str | None = None
    """What is wrong with its name; None if nothing is."""


def read_outboxes(path: Path) -> list[Entry]:
    """Return the outboxes of a file, in its order; raise `ValueError` that says how to correct the file."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read ({error}): name a TOML file with {_EXAMPLE}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is not TOML ({error}): see docs/outboxes.md") from None
    if unknown := content.keys() - {"defaults", "outbox"}:
        raise ValueError(f"has an unknown section {min(unknown)!r}: write [defaults], and {_EXAMPLE}")
    defaults, tables = content.get("defaults", {}), content.get("outbox", [])
    if not (isinstance(defaults, dict) and isinstance(tables, list) and all(map(_is_table, tables))):
        raise ValueError(f"has a value where a section belongs: write [defaults], and {_EXAMPLE}")
    if not tables:
        raise ValueError(f"lists no outbox: add {_EXAMPLE}")
    if "name" in defaults or "dsn" in defaults or f"dsn{_VARIABLE}" in defaults:
        raise ValueError("has a name or a dsn in [defaults]: each outbox has its own")
    # A connection string may have been pasted as a name, and names are printed.
    names = [
        redacted(str(table.get("name", ""))) or f"number {number}" for number, table in enumerate(tables, 1)
    ]
    times = Counter(names)
    return [_entry(name, table, defaults, times[name]) for name, table in zip(names, tables, strict=True)]


def _entry(name: str, table: Mapping[str, Any], defaults: Mapping[str, Any], times: int) -> Entry:
    error = None
    if "name" not in table:
        error = 'has no name: add name = "orders"'
    elif not NAME.fullmatch(name):
        error = f"the name {name!r} cannot be used: write lower-case letters, digits and _, such as orders_eu"
    elif times > 1:
        error = f"{times} outboxes have this name: give each its own"
    inherited = {key: _filled(value, name) for key, value in defaults.items()}
    given = {key: value for key, value in table.items() if key != "name"}
    # A secret's value and its variable exclude each other, also where one is inherited.
    for key in given:
        other = key.removesuffix(_VARIABLE) if key.endswith(_VARIABLE) else f"{key}{_VARIABLE}"
        inherited.pop(other, None)
    both = inherited | given
    return Entry(
        name,
        {key: value for key, value in both.items() if not key.endswith(_VARIABLE)},
        {key.removesuffix(_VARIABLE): value for key, value in both.items() if key.endswith(_VARIABLE)},
        error,
    )


def _filled(value: Any, name: str) -> Any:
    return value.replace(_PLACEHOLDER, name) if isinstance(value, str) else value


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)
