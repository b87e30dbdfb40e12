"""`outbox adopt` for migration tools: prepare and switch, and the way back, in a session of their own.

Invariants:
- The tool's transaction is not used: the switch commits before the tool records the migration, and finds
  its work done if the migration runs again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from psycopg.conninfo import make_conninfo

from outbox_pipelines.config.file import read_file
from outbox_pipelines.core import log
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing.adopt import steps
from outbox_pipelines.settings import Settings, load_settings

# Of a tool's own options, those that libpq knows under the same name and that say how to connect.
_OPTIONS = ("passfile", "service", "sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "channel_binding")


def dsn_of(given: Mapping[str, object], options: Mapping[str, object]) -> str:
    """Return a connection string of what a tool knows; of its options, those that libpq has."""
    known = {name: str(options[name]) for name in _OPTIONS if options.get(name)}
    return make_conninfo(**{name: str(value) for name, value in given.items() if value}, **known)


def forwards(dsn: str, config: Path | str, schema: str, accept: Sequence[str], seconds: float) -> None:
    """Prepare and switch."""
    settings = _settings(dsn, config, schema)
    steps.prepare(settings)
    switched = steps.switch(settings, list(accept), seconds=seconds, say=log.say)
    if switched.state == "draining":
        log.say(f"new events wait for the old rows of {config}: run `outbox adopt drain`")


def backwards(dsn: str, config: Path | str, schema: str, seconds: float) -> None:
    """Undo the switch.

    Raises:
        NotReadyError: the table is not drained, or events of the outbox are not published.
    """
    steps.back(_settings(dsn, config, schema), seconds=seconds, say=log.say)


def _settings(dsn: str, config: Path | str, schema: str) -> Settings:
    path = Path(config)
    if not path.is_file():
        raise SetupError(f"{path} is not a file: name the outbox.toml that describes the table in [table]")
    found = read_file(path).shared
    if found.mistakes:
        raise SetupError("; ".join(found.mistakes))
    table = found.values.get("table") or {}
    return load_settings(dsn=dsn, table=table).model_copy(update={"db_schema": schema})
