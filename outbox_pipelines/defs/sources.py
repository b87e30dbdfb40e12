"""Where the settings of an outbox come from: its own values and variables, a file, the environment.

Invariants:
- Secrets are in environment variables. A definition holds their names only.
- What an outbox sets itself wins over the file, and the file over the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from outbox_pipelines.config.file import MAY_BE_PLAIN, SECRET, config_path, setting_names
from outbox_pipelines.core.secret import has_password
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings, load_settings_with

if TYPE_CHECKING:
    from outbox_pipelines.outboxes import Outboxes

# What belongs to the process, and not to one of its outboxes.
_NOT_HERE: Final = frozenset({"name"})


def load(
    name: str, dsn_variable: str | None, variables: Mapping[str, str], values: Mapping[str, Any]
) -> Settings:
    """Return the settings of an outbox.

    Raises:
        SetupError: a value is invalid, or a variable is not set; the message names it.
    """
    given = {_field(key): value for key, value in values.items()}
    for field, value in given.items():
        if value is None:
            raise SetupError(f"{field} has no value: a template may name a variable that is not set")
    for field in given.keys() & SECRET:
        if field not in MAY_BE_PLAIN or has_password(str(given[field])):
            raise SetupError(
                f"{field} is a secret, and has no place in a definition: put it into an environment "
                f"variable, and give its name ({'dsn_variable' if field == 'dsn' else f'variables: {field}'})"
            )
    named = {**variables, **({"dsn": dsn_variable} if dsn_variable else {})}
    given |= {_field(key): _variable(variable) for key, variable in named.items()}
    if config_path() and "dsn" not in given and (found := _outboxes(given)).file:
        return found.get(name)
    return load_settings_with({"name": name, **given})


def _outboxes(given: Mapping[str, Any]) -> Outboxes:
    from outbox_pipelines.outboxes import load_outboxes

    if given:
        return load_outboxes(**given)
    path = config_path()
    changed = path.stat().st_mtime_ns if path else 0
    return _unchanged(changed, frozenset(os.environ.items()))


@lru_cache(maxsize=1)
def _unchanged(changed: int, environment: frozenset[tuple[str, str]]) -> Outboxes:
    """Return the outboxes of the file; read again only after a change, since every tick asks for each."""
    from outbox_pipelines.outboxes import load_outboxes

    return load_outboxes()


def shared_tables(settings: Mapping[str, Settings]) -> list[str]:
    """Return a line for each group of these outboxes, by name, that have the same tables."""
    known = {name: one for name, one in settings.items() if one.dsn}
    if len(known) < 2:
        return []
    from outbox_pipelines.outboxes import Outboxes

    return Outboxes(known).shared_tables()


def _field(key: str) -> str:
    field = setting_names().get(key, key)
    if field not in Settings.model_fields or field in _NOT_HERE:
        raise SetupError(f"there is no setting {key!r}: see docs/settings.md, in lower case without OUTBOX_")
    return field


def _variable(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise SetupError(
            f"the environment variable {variable} is not set: set it for Dagster's code server and for runs"
        )
    return value
