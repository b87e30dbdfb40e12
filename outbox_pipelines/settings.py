"""The settings of one outbox: loaded, checked, and asked for.

Invariants:
- A setting is the variable ``OUTBOX_<FIELD>``, or an entry of `outbox.toml`. What an outbox of several has
  in its own section wins over the environment, and the environment over the file.
- Values are checked once, here and in `config`; a wrong one is a `SetupError` that names the setting, where
  it stands, and the remedy.
- What holds a password or a token is a `Secret`. No other setting may: credentials in one are refused.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from pydantic import ConfigDict, PrivateAttr, ValidationError, ValidationInfo, field_validator

from outbox_pipelines.config import fields
from outbox_pipelines.config.file import (
    NOT_SHARED,
    SECRET,
    VARIABLE,
    ConfigFile,
    Entries,
    read_config_file,
    setting_names,
)
from outbox_pipelines.config.sections import RULES
from outbox_pipelines.config.tables import EntriesError
from outbox_pipelines.core.secret import (
    Secret,
    has_password,
    redacted,
    register,
    register_dsn,
    register_variables,
)
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
# Of which the log has a line.
_mistyped: Final[set[str]] = set()
NO_ARCHIVE: Final = "none"
"""As OUTBOX_ARCHIVE: days are dropped without being archived."""
# These can contain a secret in the wrong place, so no message shows their values.
_NOT_SHOWN: Final = SECRET | {
    *("archive", "bodies", "consumers", "db_schema", "kafka", "kafka_config", "registry_url", "runbook_url"),
    *("table", "ui_url"),
}

# In place of a library's words, which do not say what to write.
_WHY: Final = {
    "string_type": "is not a text: write it in quotes",
    "path_type": "is not a path: write it in quotes",
}


class OutboxSettings(fields.Lease, fields.Outbox):
    """What every part may know: the outbox and its servers."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)
    _inherited: frozenset[str] = PrivateAttr(frozenset())

    @property
    def inherited(self) -> frozenset[str]:
        """The fields of one of several outboxes whose values are not of its own section."""
        return self._inherited

    def inheriting(self, names: Iterable[str]) -> Self:
        """Return the same, with these fields as `inherited`."""
        made = self.model_copy()
        made._inherited = frozenset(names)
        return made

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_flag(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would take `true` for 1.
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("write a number or a text, not true or false")
        return value

    @field_validator("*")
    @classmethod
    def _has_no_password(cls, value: Any, info: ValidationInfo) -> Any:
        # Names are printed, sent to Kafka and stored by Dagster.
        if info.field_name not in SECRET and isinstance(value, str | Path) and has_password(str(value)):
            raise ValueError(
                "has a password in it: remove it; one of the database belongs in OUTBOX_DSN, of Kafka in "
                "OUTBOX_KAFKA_CONFIG"
            )
        return value

    def require_dsn(self) -> str:
        """The database's connection string; `SetupError` where none was given."""
        if not self.dsn:
            raise SetupError(
                "no database is named: set OUTBOX_DSN, for example postgresql://user@host/db, "
                "or start a local one with `outbox local run -- COMMAND`"
            )
        return self.dsn.reveal()

    def require_kafka(self) -> str:
        """The bootstrap servers; `SetupError` where none were given."""
        if not self.kafka:
            raise SetupError(
                "no Kafka is named: set OUTBOX_KAFKA, for example broker:9092, "
                "or start a local one with `outbox local run -- COMMAND`"
            )
        return self.kafka

    def require_connect(self) -> str:
        """The address of Kafka Connect; `SetupError` where none was given."""
        if not self.connect_url:
            raise SetupError(
                "no Kafka Connect is named: set OUTBOX_CONNECT_URL, for example http://connect:8083"
            )
        return self.connect_url.reveal()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """The same with other values, which are not checked; secrets stay secrets."""
        given = dict(update or {})
        if unknown := given.keys() - Settings.model_fields.keys():
            raise TypeError(f"no settings: {', '.join(sorted(unknown))}")
        for name in SECRET & given.keys():
            given[name] = Secret(given[name])
            register(given[name].reveal())
        for name in {"dsn", "consumer_dsn", "keys_dsn"} & given.keys():
            register_dsn(given[name].reveal())
        return super().model_copy(update=given, deep=deep)


class MessageSettings(fields.Topics, fields.Messages, fields.Registry, OutboxSettings):
    """What an event becomes, and where."""


class RelaySettings(fields.Relay, MessageSettings):
    """What publishes."""


class DaySettings(fields.Days, OutboxSettings):
    """What days become."""

    @property
    def archives(self) -> bool:
        """Whether closed days are archived at all."""
        return self.archive not in ("", "none")


class CheckSettings(fields.Checks, DaySettings):
    """What is wrong, and who learns of it."""


class ProcessSettings(fields.Telemetry, RelaySettings, CheckSettings):
    """What a relay needs as a process: it also serves what is measured, and makes the coming days."""


class ConsumerSettings(fields.Consumer, OutboxSettings):
    """What consumers need."""

    def of_consumer(self) -> Self:
        """Return the settings with a consumer's database in the place of the outbox's.

        Raises:
            SetupError: OUTBOX_CONSUMER_DSN is not set.
        """
        if not self.consumer_dsn:
            raise SetupError(
                "no consumer's database is named: set OUTBOX_CONSUMER_DSN, for example "
                "postgresql://user@host/db, and OUTBOX_CONSUMER_SCHEMA if its tables are not in public"
            )
        return self.model_copy(update={"dsn": self.consumer_dsn.reveal(), "db_schema": self.consumer_schema})


class ErasureSettings(fields.Erasure, OutboxSettings):
    """What erasure by subject needs."""


class LocalSettings(fields.Local, OutboxSettings):
    """What the local stack needs."""


class Settings(LocalSettings, fields.Dagster, ErasureSettings, ConsumerSettings, ProcessSettings):
    """The settings of the commands and of Dagster's definitions, of which a part gets a group."""


@dataclass(frozen=True, slots=True)
class Values:
    """The values of the settings of one outbox, and where each comes from; not checked yet."""

    values: dict[str, Any]
    """By field; without defaults."""
    origins: dict[str, str]
    """By field: the variable, or the file and its line."""
    mistakes: tuple[str, ...] = ()
    """What is wrong with the file, a line each."""
    config: ConfigFile | None = None
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By field that the file has: where it is there; also of a value that may not be there."""

    def checked(self) -> Settings:
        """Return the settings.

        Raises:
            SetupError: values do not fit; the message names each.
        """
        try:
            found = Settings(**self.values)
        except ValidationError as error:
            raise SetupError("; ".join((*self.mistakes, *self._lines(error)))) from None
        if self.mistakes:
            raise SetupError("; ".join(self.mistakes))
        return found

    def all_mistakes(self) -> list[str]:
        """Return what is wrong, a line for each."""
        try:
            Settings(**self.values)
        except ValidationError as error:
            return [*self.mistakes, *self._lines(error)]
        return list(self.mistakes)

    def without_mistakes(self) -> Settings:
        """Return the settings with the default in place of each value that does not fit."""
        try:
            return Settings(**self.values)
        except ValidationError as error:
            wrong = {_field(problem) for problem in error.errors()}
            return Settings(**{name: value for name, value in self.values.items() if name not in wrong})

    def where(self, name: str, within: tuple[str, ...] = ()) -> str:
        """Return where a setting, or what is within its table, is: the file and the line, or the variable."""
        place = self.places.get(name)
        if self.config is None or place is None:
            return self.origins.get(name, variable(name))
        return self.config.at(place, within)

    def _lines(self, error: ValidationError) -> list[str]:
        return [line for problem in error.errors() for line in self._lines_of(problem)]

    def _lines_of(self, problem: Any) -> list[str]:
        name = _field(problem)
        cause = problem.get("ctx", {}).get("error")
        if name in self.places and isinstance(cause, EntriesError):
            return [redacted(f"{self.where(name, within)} {why}") for within, why in cause.each]
        origin = self.where(name, tuple(map(str, problem["loc"][1:])))
        given = problem["input"]
        # A table may be long, and what is wrong in it is named.
        is_shown = name not in _NOT_SHOWN and len(problem["loc"]) == 1 and not isinstance(given, dict)
        shown = f"={given}:" if is_shown else ""
        within = ""
        if name in RULES and len(problem["loc"]) > 1:
            _, event_type, *steps = problem["loc"]
            within = " ".join((f" [{event_type}]", *map(str, steps))) + ":"
        why = _WHY.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
        return [redacted(f"{origin}{shown}{within} {why}")]


def _field(problem: Any) -> str:
    """Return the field that pydantic names, maybe by its alias."""
    location = str(problem["loc"][0]) if problem["loc"] else "settings"
    name = location.lower().removeprefix("outbox_") if location.startswith("OUTBOX_") else location
    return setting_names().get(name, name)


def variable(field: str) -> str:
    """Return the environment variable of a setting."""
    return Settings.model_fields[field].alias or f"OUTBOX_{field.upper()}"


def values_of(config: ConfigFile | None, outbox: str | None, given: Mapping[str, Any]) -> Values:
    """Return the values of one outbox.

    Args:
        config: the file; None if there is none.
        outbox: the name of one of several; None for the only one.
        given: values by field that win over all others, also None.
    """
    environment = {
        name: os.environ[variable(name)]
        for name in Settings.model_fields
        # An empty variable counts as not set.
        if os.environ.get(variable(name))
    }
    entries = own = Entries()
    if config is not None:
        # What needs no outbox, such as the local stack, takes a name for `{outbox}` as if it were one.
        name = str(given.get("name") or environment.get("name") or Settings.model_fields["name"].default)
        entries = config.for_all(name) if outbox is None else config.of(outbox)
        own = entries if outbox is None else config.outboxes[outbox]
    values = dict(entries.values)
    places = dict(entries.places)
    origins = {name: config.at(place) for name, place in places.items()} if config is not None else {}
    for name, value in environment.items():
        if outbox is None or (name not in NOT_SHARED and name not in own.values):
            values[name] = value
            origins[name] = variable(name)
            places.pop(name, None)
    for name, value in given.items():
        values[name] = value
        origins.pop(name, None)
        places.pop(name, None)
    mistakes = config.shared.mistakes if config is not None else []
    own_mistakes = own.mistakes if outbox is not None else ()
    return Values(values, origins, (*mistakes, *own_mistakes), config, places)


def load_settings(**overrides: Any) -> Settings:
    """The settings from the environment and `outbox.toml`; overrides by field name win.

    Raises:
        SetupError: a value does not fit; the message names the setting.
    """
    return load_settings_with({name: value for name, value in overrides.items() if value is not None})


def load_settings_with(given: Mapping[str, Any]) -> Settings:
    """Return the same; a given None wins as well.

    Raises:
        SetupError: a value does not fit; the message names the setting.
    """
    register_variables()
    warn_of_mistyped()
    return values_of(read_config_file(), None, given).checked()


def warn_of_mistyped() -> None:
    """Log what is almost a setting, once in a process; no error, since a program may have such a name."""
    known = {f"OUTBOX_{name.upper()}" for name in setting_names()} | {VARIABLE}
    for name in sorted(os.environ.keys() - known - _mistyped):
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.9) if name.startswith("OUTBOX_") else ()
        if close:
            _mistyped.add(name)
            _LOG.warning("%s is not a setting and has no effect: did you mean %s?", name, close[0])


def make_settings(**given: Any) -> Settings:
    """Return settings of these values and the defaults alone, whatever the environment says.

    Raises:
        SetupError: a value does not fit; the message names the setting.
    """
    if unknown := given.keys() - Settings.model_fields.keys():
        raise TypeError(f"no settings: {', '.join(sorted(unknown))}")
    return Values(given, {}).checked()
