"""The commands `outbox shards …`."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

from outbox_pipelines.cli.options import SECONDS, settings_of
from outbox_pipelines.config import parsed
from outbox_pipelines.core import log
from outbox_pipelines.core.text import counted, plain
from outbox_pipelines.settings import Settings


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_context
def shards(context: click.Context, as_json: bool) -> None:
    """Show the owner of each shard; `outbox shards set N` changes the number of shards."""
    from outbox_pipelines.quality import outbox_measurements
    from outbox_pipelines.quality import status_text as rendering

    if context.invoked_subcommand is not None:
        return
    settings = settings_of(context)
    parsed.refuse_existing_table(settings)
    found = outbox_measurements.read(settings).shards
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
    from outbox_pipelines.cli.dead_letters import actor
    from outbox_pipelines.relay.lease.resharding import NotAllThereError, change

    parsed.refuse_existing_table(settings)
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
    click.echo(counted(number, "shard") + ("" if changed else ": nothing to change"))
