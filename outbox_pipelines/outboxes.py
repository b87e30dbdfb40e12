"""The outboxes that commands, a fleet and Dagster serve: one of the environment, or those of `outbox.toml`.

Invariants:
- What an outbox's own section says wins over the environment, and that over the sections for all. The DSN,
  the name and the description of an existing table are never inherited: two outboxes would be one.
- A wrong section is an error of that outbox, in one line; the others are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from outbox_pipelines.config import parsed
from outbox_pipelines.config.file import ConfigFile, read_config_file
from outbox_pipelines.core.secret import register_variables
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import OutboxSettings, Settings, values_of, warn_of_mistyped


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
            where = f"{self.file} does not list it" if self.file else "no outbox.toml lists several"
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
    """Return the outboxes of `outbox.toml`; if it lists none, the only one of the file and the environment.

    Args:
        given: values that win over all others, also None.

    Raises:
        SetupError: the environment or the file cannot be used; an outbox's own section alone does not raise.
    """
    register_variables()
    warn_of_mistyped()
    config = read_config_file()
    if config is None or not config.outboxes:
        only = values_of(config, None, given).checked()
        return Outboxes({only.name: only}, file=None)
    if config.shared.mistakes:
        raise SetupError("; ".join(config.shared.mistakes))
    found = Outboxes({}, file=config.path)
    for name in config.outboxes:
        try:
            found.settings[name] = _settings(config, name, given)
        except SetupError as error:
            found.errors[name] = str(error)
    return found


def _settings(config: ConfigFile, name: str, given: dict[str, Any]) -> Settings:
    values = values_of(config, name, given)
    if not values.mistakes and not values.values.get("dsn"):
        raise SetupError('names no database: add dsn = { env = "ORDERS_DSN" }')
    found = values.checked()
    own = config.outboxes[name].values.keys() if len(config.outboxes) > 1 else values.values.keys()
    return found.inheriting(values.values.keys() - own)


def _tables(settings: OutboxSettings) -> tuple[object, ...]:
    """Return where an outbox's tables are, as far as its settings tell."""
    parts = conninfo_to_dict(settings.dsn.reveal())
    server = tuple(parts.get(part) for part in ("service", "host", "hostaddr", "port", "dbname"))
    return (*server, settings.db_schema, str(parsed.mapping(settings)))
