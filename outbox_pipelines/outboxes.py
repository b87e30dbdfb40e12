"""The outboxes that commands, a fleet and Dagster serve: one of the environment, or those of a file.

Invariants:
- A value of an outbox wins over the file's defaults, and those over the environment. The DSN, the name and
  the description of an existing table are never inherited: two outboxes would be one.
- A wrong entry is an error of that outbox, in one line; the others are loaded.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from psycopg.conninfo import conninfo_to_dict

from outbox_pipelines.config.outboxes_file import Entry, read_outboxes
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import SECRET, Settings, load_settings_with, setting_names

# Not of an outbox, but of the process that serves it, or of the machine.
_OF_THE_PROCESS: Final = frozenset(
    {"name", "outboxes_file", "local_dir", "local_jars", "local_postgres", "local_grace_seconds"}
)


@dataclass(frozen=True, slots=True)
class Outboxes:
    """Outboxes by name, in the order of the file."""

    settings: dict[str, Settings]
    """Those that can be used."""
    errors: dict[str, str] = field(default_factory=dict)
    """Those that cannot, and why, in a line without the name."""
    file: Path | None = None
    """Where they are listed; None for the only outbox of the environment."""

    @property
    def names(self) -> list[str]:
        """All names, also of those that cannot be used."""
        return [*self.settings, *self.errors]

    def get(self, name: str | None = None) -> Settings:
        """Return an outbox's settings; without a name those of the only one.

        Raises:
            SetupError: there is no such outbox, its entry is wrong, or one of several must be chosen.
        """
        if name is None and len(self.names) > 1:
            raise SetupError(
                f"{self.file} lists {len(self.names)} outboxes: choose one with --outbox NAME "
                f"({', '.join(self.names)})"
            )
        name = name or self.names[0]
        if name in self.errors:
            raise SetupError(f"outbox {name}: {self.errors[name]}")
        if name not in self.settings:
            where = f"{self.file} does not list it" if self.file else "OUTBOX_OUTBOXES_FILE is not set"
            raise SetupError(f"no outbox {name}: {where}; choose {', '.join(self.names)}")
        return self.settings[name]

    def shared_tables(self) -> list[str]:
        """Return a line for each group of outboxes that have the same tables."""
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, settings in self.settings.items():
            groups.setdefault(_tables(settings), []).append(name)
        where = f" from {self.file}" if self.file else ""
        return [
            f"{' and '.join(names)} have the same tables: their relays take turns, and each event is "
            f"published once, by the settings of either; remove all but one{where}"
            for names in groups.values()
            if len(names) > 1
        ]


def load_outboxes(**given: Any) -> Outboxes:
    """Return the outboxes of OUTBOX_OUTBOXES_FILE; if it is not set, the environment's.

    Args:
        given: values that win over all others, also None.

    Raises:
        SetupError: the environment or the file cannot be used; an entry alone does not raise.
    """
    base = load_settings_with(given)
    path = base.outboxes_file
    if path is None:
        return Outboxes({base.name: base})
    found = Outboxes({}, file=path)
    for entry in read_outboxes(path):
        try:
            found.settings[entry.name] = _settings(entry, given)
        except SetupError as error:
            found.errors[entry.name] = str(error)
            found.settings.pop(entry.name, None)
    return found


def _settings(entry: Entry, given: dict[str, Any]) -> Settings:
    if entry.error:
        raise SetupError(entry.error)
    # Two outboxes never share a connector.
    values: dict[str, Any] = {"table_file": None, "connector": "", "name": entry.name, "outboxes_file": None}
    for name, value in entry.values.items():
        values[_field(name)] = value
    for name, variable in entry.variables.items():
        field_name = _field(name, is_variable=True)
        values[field_name] = _value(name, variable)
    if not values.get("dsn"):
        raise SetupError('names no database: add dsn_variable = "ORDERS_DSN" (or dsn = "…")')
    return load_settings_with(values | given)


def _field(name: str, *, is_variable: bool = False) -> str:
    """Return the field of a setting that an outbox can have."""
    known = {key: field for key, field in setting_names().items() if field not in _OF_THE_PROCESS}
    if is_variable:
        known = {key: field for key, field in known.items() if field in SECRET}
    if name in known:
        return known[name]
    shown = f"{name}_variable" if is_variable else name
    close = difflib.get_close_matches(name, known, n=1)
    remedy = (
        f"did you mean {close[0]}{'_variable' if is_variable else ''}?" if close else "see docs/settings.md"
    )
    raise SetupError(f"{shown} is not a setting of an outbox: {remedy}")


def _value(name: str, variable: object) -> str:
    if not isinstance(variable, str):
        raise SetupError(f"{name}_variable must be the name of an environment variable, in quotes")
    value = os.environ.get(variable)
    if not value:
        raise SetupError(f"{name}_variable names {variable}, which is not set: set it, or correct the name")
    return value


def _tables(settings: Settings) -> tuple[object, ...]:
    """Return where an outbox's tables are, as far as its settings tell."""
    parts = conninfo_to_dict(settings.dsn.reveal())
    server = tuple(parts.get(part) for part in ("service", "host", "hostaddr", "port", "dbname"))
    return (*server, settings.db_schema, settings.table_file)
