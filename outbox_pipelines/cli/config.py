"""The commands of the first day: `outbox init`, `outbox config …` and `outbox migrate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import click

from outbox_pipelines.cli import refusals
from outbox_pipelines.cli.options import TEXT
from outbox_pipelines.config import schema as config_schema
from outbox_pipelines.config.file import NAME, SECRET, config_path, entry_names, read_config_file
from outbox_pipelines.config.sections import RULES, SECTIONS, WHOLE
from outbox_pipelines.config.tables import is_reference, is_secret
from outbox_pipelines.core import scripts
from outbox_pipelines.core.secret import HIDDEN, redacted
from outbox_pipelines.core.table_locks import reading_only
from outbox_pipelines.core.text import counted, plain
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing.describe import candidates
from outbox_pipelines.settings import Settings, Values, values_of, warn_of_mistyped


@click.group()
def config() -> None:
    """Check and show the settings: outbox.toml and the environment."""


@config.command()
def check() -> None:
    """Show all mistakes in outbox.toml and in the environment, with their lines.

    Also files that do not exist, and settings that contradict each other. Exits with 1 if there are any. Asks
    neither a database nor Kafka.
    """
    warn_of_mistyped()
    all_values = _all_values()
    found = [each for values in all_values.values() for each in values.all_mistakes()]
    found += [each for name, values in all_values.items() for each in refusals.find(name, values)]
    # Several outboxes share what the file says for all.
    mistakes = dict.fromkeys(map(redacted, found))
    for line in mistakes:
        click.echo(plain(line))
    if mistakes:
        sys.exit(1)
    if any(refusals.lacks_kafka(values) for values in all_values.values()):
        click.echo("kafka is not set, without which `outbox relay` does not start: for example broker:9092")
    where = config_path() or f"no {NAME}: the environment alone"
    outboxes = counted(len(all_values), "outbox", "outboxes")
    is_empty = config_path() and not any(values.places for values in all_values.values())
    click.echo(plain(f"{where}: {'sets nothing; ' if is_empty else ''}{outboxes}, no mistake"))


@config.command()
@click.option("--outbox", metavar="NAME", type=TEXT, help="One of several outboxes of outbox.toml.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(outbox: str | None, as_json: bool) -> None:
    """Show the value of each setting, and where it comes from. Secrets are shown as ***."""
    all_values = _all_values()
    if outbox is None and len(all_values) == 1:
        [outbox] = all_values
    if outbox not in all_values:
        names = ", ".join(name for name in all_values if name is not None)
        wrong = f"no outbox {outbox}" if outbox else "several outboxes"
        if not names:
            raise SetupError(f"{wrong}: {NAME} lists no outboxes; leave out --outbox")
        raise SetupError(f"{wrong}: choose with --outbox NAME: {names}")
    values = all_values[outbox]
    settings = values.checked()
    found = {
        section: {key: _shown(settings, values, name) for key, name in entry_names(section).items()}
        for section in SECTIONS
    }
    for section, name in WHOLE.items():
        shown = _shown(settings, values, name)
        # A type may be called user.password_changed.
        entries = shown["value"] if section in RULES else _masked(shown["value"])
        found[section] = {key: {**shown, "value": each} for key, each in entries.items()}
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for section, entries in found.items():
        click.echo(f"[{section}]")
        for key, (value, origin) in ((key, each.values()) for key, each in entries.items()):
            # TOML has no null.
            text = f"# {key} =" if value is None else f"{key} = {config_schema.literal(value)}"
            click.echo(plain(f"{text:<50} # {origin}"))
        click.echo()


@config.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of outbox.toml, for editors.

    For example: outbox config schema > outbox.schema.json, with `#:schema outbox.schema.json` as the first
    line of outbox.toml.
    """
    click.echo(json.dumps(config_schema.json_schema(), indent=2))


@click.command()
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path), default=NAME)
def init(path: Path, force: bool) -> None:
    """Write a first outbox.toml (to PATH), and its JSON Schema beside it.

    OUTBOX_DSN and OUTBOX_KAFKA say what to ask: the file gets the schema of an outbox that the database has
    already, and Kafka's address. Secrets stay in the environment.
    """
    if path.exists() and not force:
        raise SetupError(f"{path} exists: edit it, name another file, or add --force to replace it")
    # Not from a file: it may be the one to replace, and wrong.
    settings = values_of(None, None, {}).checked()
    ours, others = candidates(settings) if settings.dsn else ([], [])
    given: dict[str, Any] = {"dsn": {"env": "OUTBOX_DSN"}}
    if settings.kafka:
        given["kafka"] = settings.kafka
    if len(ours) == 1:
        given["schema"] = ours[0]
    beside = path.with_name(config_schema.SCHEMA_NAME)
    try:
        path.write_text(config_schema.first_file({"outbox": given}))
        beside.write_text(json.dumps(config_schema.json_schema(), indent=2) + "\n")
    except OSError as error:
        raise SetupError(f"{error.filename} cannot be written: {error.strerror}: name another file") from None
    click.echo(plain(f"wrote {path} and {beside}"))
    if not settings.dsn:
        click.echo("the database was not asked: set OUTBOX_DSN, for example postgresql://user@host/db")
    if len(ours) > 1:
        click.echo(plain(f"there is an outbox in {', '.join(ours)}: choose the schema"))
    for table in others:
        click.echo(plain(f"{table} may be an outbox too: `outbox table describe {table}` describes it"))
    if not settings.kafka:
        click.echo("kafka is not set: write the address of a broker, such as broker:9092")
    click.echo(f"next: `outbox config check`, `outbox {'status' if ours else 'migrate'}`, `outbox relay`")


def _all_values() -> dict[str | None, Values]:
    """The values of each outbox; the only one has no name."""
    config = read_config_file()
    if config is None or not config.outboxes:
        return {None: values_of(config, None, {})}
    return {name: values_of(config, name, {}) for name in config.outboxes}


def _shown(settings: Settings, values: Values, name: str) -> dict[str, Any]:
    value = getattr(settings, name)
    if name in SECRET:
        value = HIDDEN if value else None
    elif isinstance(value, Path):
        value = str(value)
    elif name in RULES:
        value = {each: rule.model_dump(exclude_none=True) for each, rule in value.items()}
    return {"value": value, "origin": values.origins.get(name, "default")}


def _masked(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The table without secrets; where they stand is none."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found[key] = value if is_reference(value) else _masked(value, f"{prefix}{key}.")
        else:
            found[key] = HIDDEN if is_secret(f"{prefix}{key}", value) else value
    return found


_HOW: Final = "-- As the owner: psql -v ON_ERROR_STOP=1 -f FILE, then `outbox migrate`."


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; report differences and exit 1 if there are any.")
@click.option(
    "--print", "prints", is_flag=True, help="Change nothing; print the SQL of the missing migrations."
)
@click.option("--to", metavar="NAME", type=TEXT, help="The last migration to apply or print (default: all).")
@click.option(
    "--print-drop",
    is_flag=True,
    help="Change nothing; print the SQL that drops the outbox, unless events in it are not published.",
)
@click.option(
    "--grants",
    "grants_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file of roles and their kinds: give these roles exactly these rights.",
)
@click.pass_obj
def migrate(
    settings: Settings,
    check: bool,
    prints: bool,
    to: str | None,
    print_drop: bool,
    grants_file: Path | None,
) -> None:
    """Create or update the outbox's tables in OUTBOX_SCHEMA (default: public)."""
    from outbox_pipelines.database import grants, schema

    if (prints or to) and (check or grants_file):
        raise click.UsageError("--print and --to go without --check and --grants")
    if print_drop:
        if check or prints or to or grants_file:
            raise click.UsageError("--print-drop goes without other options")
        click.echo(f"{scripts.dropping(settings.db_schema)};")
        return
    wanted = grants.read(grants_file) if grants_file else None
    if check:
        with reading_only():
            differences = schema.drift(settings)
            if wanted is not None and not any(line.startswith("not applied") for line in differences):
                differences += grants.apply(settings, wanted, check=True)
        for line in differences:
            click.echo(plain(line))
        if differences:
            sys.exit(1)
        click.echo("the schema is up to date")
        return
    if prints:
        with reading_only():
            statements = schema.pending(settings, to)
        click.echo(_HOW if statements else "-- nothing to do")
        for statement in statements:
            click.echo(f"{statement};")
        return
    applied = schema.migrate(settings, to)
    if applied:
        click.echo(f"applied {', '.join(applied)}")
    lines = grants.apply(settings, wanted) if wanted is not None else []
    for line in lines:
        click.echo(plain(line))
    if not (applied or lines):
        click.echo("nothing to do")
