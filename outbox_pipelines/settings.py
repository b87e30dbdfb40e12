"""The settings of one outbox: loaded, checked, and asked for.

Invariants:
- A setting is named ``OUTBOX_<FIELD>``, in the environment or in the file that ``OUTBOX_SETTINGS_FILE`` names
  (lines ``NAME=value``); the environment wins.
- Values are checked once, here and in `config.types`; a wrong one is a `SetupError` that names the setting
  and the remedy.
- What holds a password or a token is a `Secret`. No other setting may: credentials in one are refused.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    PydanticBaseSettingsSource,
)

from outbox_pipelines.config.fields import Fields
from outbox_pipelines.core.secret import Secret, first_line, register, register_dsn, register_variables
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
# Of which the log has a line.
_mistyped: Final[set[str]] = set()
SECRET: Final = frozenset({"dsn", "consumer_dsn", "alerts", "connect", "dead_letter_command"})
NO_ARCHIVE: Final = "none"
"""As OUTBOX_ARCHIVE: days are dropped without being archived."""


class Settings(Fields):
    """The settings of the commands, the relay and Dagster's definitions."""

    @property
    def archives(self) -> bool:
        """Whether closed days are archived at all."""
        return self.archive not in ("", "none")

    def require_dsn(self) -> str:
        """The database's connection string; `SetupError` where none was given."""
        if not self.dsn:
            raise SetupError(
                "no database is named: set OUTBOX_DSN, for example postgresql://user@host/db, "
                "or start a local one with `outbox local run -- COMMAND`"
            )
        return self.dsn.reveal()

    def of_consumer(self) -> Settings:
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

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Settings:
        """The same with other values, which are not checked; secrets stay secrets."""
        given = dict(update or {})
        if unknown := given.keys() - Settings.model_fields.keys():
            raise TypeError(f"no settings: {', '.join(sorted(unknown))}")
        for name in SECRET & given.keys():
            given[name] = Secret(given[name])
            register(given[name].reveal())
        for name in {"dsn", "consumer_dsn"} & given.keys():
            register_dsn(given[name].reveal())
        return super().model_copy(update=given, deep=deep)

    def require_connect(self) -> str:
        """The address of Kafka Connect; `SetupError` where none was given."""
        if not self.connect:
            raise SetupError("no Kafka Connect is named: set OUTBOX_CONNECT, for example http://connect:8083")
        return self.connect.reveal()

    def require_kafka(self) -> str:
        """The bootstrap servers; `SetupError` where none were given."""
        if not self.kafka:
            raise SetupError(
                "no Kafka is named: set OUTBOX_KAFKA, for example broker:9092, "
                "or start a local one with `outbox local run -- COMMAND`"
            )
        return self.kafka


def load_settings(**overrides: Any) -> Settings:
    """The settings from the environment and the file of OUTBOX_SETTINGS_FILE; overrides by field name win.

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
    path = os.environ.get("OUTBOX_SETTINGS_FILE")
    if path and not Path(path).is_file():
        raise SetupError(
            f"OUTBOX_SETTINGS_FILE names {path}, which is not a file: correct the path or unset it"
        )
    try:
        in_file = DotEnvSettingsSource(Settings, env_file=path).env_vars if path else {}
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(
            f"OUTBOX_SETTINGS_FILE={path} cannot be read as UTF-8 text: {first_line(error)}"
        ) from None
    _warn_of_mistyped({name.upper() for name in (*os.environ, *in_file)})
    try:
        return Settings(_env_file=path, **given)
    except ValidationError as error:
        raise SetupError("; ".join(_one_line(problem) for problem in error.errors())) from None


def _warn_of_mistyped(names: set[str]) -> None:
    """Log what is almost a setting, once in a process; no error, since a program may have such a name."""
    known = {f"OUTBOX_{name.upper()}" for name in setting_names()} | {"OUTBOX_SETTINGS_FILE"}
    for name in sorted(names - known - _mistyped):
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
    try:
        return _Given(**given)
    except ValidationError as error:
        raise SetupError("; ".join(_one_line(problem) for problem in error.errors())) from None


class _Given(Settings):
    """Settings without the environment."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def setting_names() -> dict[str, str]:
    """Return the field of each setting by its name in a file: in lower case, without OUTBOX_."""
    return {
        (field.alias or name).lower().removeprefix("outbox_"): name
        for name, field in Settings.model_fields.items()
    }


def _one_line(problem: Any) -> str:
    field = str(problem["loc"][0]) if problem["loc"] else "settings"
    name = field if field.startswith("OUTBOX_") else f"OUTBOX_{field.upper()}"
    # These can contain a secret in the wrong place, so their values are not shown either.
    is_shown = name.removeprefix("OUTBOX_").lower() not in {
        *SECRET,
        "archive",
        "kafka",
        "kafka_config_file",
        "schema",
        "ui_url",
        "runbook_url",
    }
    value = f"={problem['input']}:" if is_shown else ""
    return f"{name}{value} {problem['msg'].removeprefix('Value error, ')}"
