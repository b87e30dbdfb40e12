"""The command `outbox`: what an operator types.

Exit codes: 0 done; 1 the thing asked about is not so; 2 usage or set-up, with one line that says what to do.
"""

from __future__ import annotations

import codecs
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from outbox_pipelines import __version__, log
from outbox_pipelines.archive.commands import archive
from outbox_pipelines.archive.drop_command import drop_days
from outbox_pipelines.catalog.commands import catalog
from outbox_pipelines.consumer.commands import consumer
from outbox_pipelines.core.table_locks import reading_only
from outbox_pipelines.core.text import plain
from outbox_pipelines.debezium.commands import debezium
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.existing.adopt.commands import adopt
from outbox_pipelines.existing.cleaning.commands import clean_table
from outbox_pipelines.existing.commands import describe, table
from outbox_pipelines.existing.months.commands import make_months
from outbox_pipelines.expectations.commands import quality
from outbox_pipelines.lint.commands import lint_writes
from outbox_pipelines.local.commands import local
from outbox_pipelines.options import SECONDS
from outbox_pipelines.outbox_option import add_to, settings_of
from outbox_pipelines.partitions.commands import partitions
from outbox_pipelines.quality.commands import alerts
from outbox_pipelines.reconciliation.commands import reconcile
from outbox_pipelines.relay.cdc.commands import cdc, cutover
from outbox_pipelines.relay.dead_letter_commands import dead_letters
from outbox_pipelines.relay_command import relay
from outbox_pipelines.settings import Settings
from outbox_pipelines.status_command import status


class _Cli(click.Group):
    """Turns the errors that a person has to act on into one line and an exit code."""

    def main(self, *given: Any, **named: Any) -> Any:
        # What a terminal cannot show is written as an escape, and ends no command.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
                stream.reconfigure(errors="backslashreplace")
        return super().main(*given, **named)

    def invoke(self, context: click.Context) -> object:
        import psycopg

        from outbox_pipelines.database import refusal

        try:
            return super().invoke(context)
        except NotReadyError as error:
            _end(str(error), 1)
        except SetupError as error:
            _end(str(error), 2)
        except psycopg.Error as error:
            _end(f"the database refuses: {refusal(error)}", 2)


def limit_locks(command: click.Command, path: list[str]) -> None:
    """Limit how long the command at `path` below another one waits for locks."""
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    assert command.callback is not None
    command.callback = reading_only()(command.callback)


def _end(why: str, code: int) -> NoReturn:
    click.echo(plain(f"outbox: {why}"), err=True)
    sys.exit(code)


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Relay a transactional outbox from PostgreSQL to Kafka.

    Settings come from the environment (OUTBOX_DSN, OUTBOX_KAFKA, …) or from the file that
    OUTBOX_SETTINGS_FILE names; OUTBOX_OUTBOXES_FILE lists several outboxes. Exit codes: 0 success; 1 check
    failed or nothing matched; 2 usage or configuration error.
    """


@cli.command()
@click.option("--check", is_flag=True, help="Change nothing; report differences and exit 1 if there are any.")
@click.option(
    "--grants",
    "grants_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file of roles and their kinds: give these roles exactly these rights.",
)
@click.pass_obj
def migrate(settings: Settings, check: bool, grants_file: Path | None) -> None:
    """Create or update the outbox's tables in OUTBOX_SCHEMA (default: public)."""
    from outbox_pipelines import grants, schema

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
    applied = schema.migrate(settings)
    click.echo(f"applied {', '.join(applied)}" if applied else "nothing to do")
    if wanted is not None:
        for line in grants.apply(settings, wanted):
            click.echo(plain(line))


@cli.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_context
def shards(context: click.Context, as_json: bool) -> None:
    """Show the owner of each shard; `outbox shards set N` changes the number of shards."""
    from outbox_pipelines.quality import measurements
    from outbox_pipelines.quality import status as rendering

    if context.invoked_subcommand is not None:
        return
    found = measurements.read(settings_of(context)).shards
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(shard) for shard in found], indent=2))
    else:
        click.echo("\n".join(plain(f"shard {one.shard}  {rendering.owner(one)}") for one in found))


@shards.command("set")
@click.argument("number", type=click.IntRange(1))
@click.option(
    "--seconds",
    type=SECONDS,
    default=60.0,
    show_default=True,
    help="Stop waiting after this time and change nothing.",
)
@click.pass_obj
def set_shards(settings: Settings, /, number: int, seconds: float) -> None:
    """Change the number of shards online.

    All relays settle what they have read and stop at a common barrier; the new shards start from it: no event
    is lost, duplicated or reordered. Every current shard needs a running relay: the command waits for it
    first. Then publishing pauses, usually for one or two seconds, at most until the command ends. If the
    command is killed, the pause ends after ten seconds.
    """
    from outbox_pipelines.dead_letter_group import actor
    from outbox_pipelines.relay.shards.resharding import NotAllThereError, change

    try:
        changed = change(
            settings,
            number,
            seconds=seconds,
            actor=actor(),
            on_wait=lambda what: log.say(f"waiting: {what}"),
        )
    except NotAllThereError as error:
        click.echo(plain(f"outbox: {error}"), err=True)
        sys.exit(1)
    click.echo(f"{number} shards" + ("" if changed else ": nothing to change"))


cli.add_command(adopt)
cli.add_command(alerts)
cli.add_command(archive)
cli.add_command(catalog)
cli.add_command(cdc)
cli.add_command(consumer)
cli.add_command(cutover)
cli.add_command(dead_letters)
cli.add_command(debezium)
cli.add_command(lint_writes)
cli.add_command(local)
cli.add_command(partitions)
partitions.add_command(drop_days)
cli.add_command(quality)
cli.add_command(reconcile)
cli.add_command(relay)
cli.add_command(status)
cli.add_command(table)
table.add_command(clean_table)
table.add_command(make_months)

# These wait for a lock for some seconds, and then name the session that has it; also `migrate --check`.
READING: Final = (
    *("adopt plan", "archive history", "archive query", "archive verify", "catalog check", "catalog render"),
    *("cdc status", "consumer dead-letters list", "consumer dead-letters show", "consumer status"),
    *("dead-letters list", "dead-letters show", "debezium config", "debezium status"),
    *("partitions list", "quality hour", "reconcile", "shards", "status", "table check", "table describe"),
)
add_to(
    cli,
    # A linter in an application's CI has no settings of a relay.
    excluded=(lint_writes, local),
    many=(status,),
    lists=(relay,),
    # If the output is redirected to that file, the shell has emptied it by now.
    without={describe: "table_file"},
)
for path in READING:
    limit_locks(cli, path.split())
