"""The commands `outbox status`, of one outbox in full or of all in a line each, and `outbox shards …`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Final

import click

from outbox_pipelines.cli.dead_letters import actor
from outbox_pipelines.cli.options import chosen, seconds_option, settings_of
from outbox_pipelines.config import parsed
from outbox_pipelines.core import log
from outbox_pipelines.core.text import counted, plain
from outbox_pipelines.errors import LockedError, SetupError
from outbox_pipelines.settings import Settings

_VERSION: Final = {"version": 1}
_SCHEMA: Final = Path(__file__).parents[1] / "quality" / "status.schema.json"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --all an array.")
@click.option("--json-schema", is_flag=True, help="Print the JSON Schema of what --json prints.")
@click.option("--check", is_flag=True, help="Exit 1 if a check is at ERROR.")
@click.option("--all", "of_all", is_flag=True, help="Print a line for each outbox, worst first.")
@click.pass_context
def status(context: click.Context, as_json: bool, json_schema: bool, check: bool, of_all: bool) -> None:
    """Show backlog, lag, parked events, the owner of each shard, and failed checks.

    The checks are those of Dagster's asset outbox/health; OUTBOX_WARN_AT and OUTBOX_ERROR_AT change their
    thresholds. With --all, exits with 2 if an outbox cannot be read; its line says why.
    """
    if json_schema:
        click.echo(_SCHEMA.read_text("utf-8"), nl=False)
        return
    outboxes, name = chosen(context)
    if of_all and name is not None:
        raise SetupError("--outbox names one outbox and --all asks for every one: omit one of them")
    if of_all:
        from outbox_pipelines.relay.fleet import summary

        found = summary.read(outboxes)
        if as_json:
            click.echo(json.dumps([_VERSION | dataclasses.asdict(each) for each in found], indent=2))
        else:
            click.echo(summary.render(found))
        for line in outboxes.shared_tables():
            click.echo(f"outbox: {line}", err=True)
        if any(each.status == summary.UNAVAILABLE for each in found):
            sys.exit(2)
        if check and any(each.status == "error" for each in found):
            sys.exit(1)
        return
    settings = outboxes.get(name)
    try:
        _status(settings, as_json=as_json, check=check)
    except LockedError:
        raise
    except SetupError as error:
        if as_json:
            click.echo(json.dumps(_VERSION | {"error": str(error)}, indent=2))
        raise


def _status(settings: Settings, *, as_json: bool, check: bool) -> None:
    from outbox_pipelines.quality import rules
    from outbox_pipelines.quality.status_text import described, render
    from outbox_pipelines.relay import kinds

    kind = kinds.of(settings)
    try:
        found = kind.measure(settings)
    except LockedError as error:
        rest = kind.what_is_not_locked(settings)
        if as_json:
            click.echo(json.dumps(_VERSION | {"error": str(error), **rest}, indent=2))
        else:
            # Figures only: what is a list names sessions and owners, which the reason does for the lock.
            groups = (what if isinstance(what, dict) else {name: what} for name, what in rest.items())
            for name, what in (each for group in groups for each in group.items()):
                if isinstance(what, int | float):
                    click.echo(f"{name}: {what:,}")
        raise
    results = rules.judge(settings, found)
    if as_json:
        checks = [described(result) for result in results]
        click.echo(json.dumps(_VERSION | dataclasses.asdict(found) | {"checks": checks}, indent=2))
    else:
        click.echo(render(found, results))
    if check and rules.worst(results) is rules.Status.ERROR:
        sys.exit(1)


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
@seconds_option("Stop waiting after this time and change nothing.")
@click.pass_obj
def set_shards(settings: Settings, /, number: int, seconds: float) -> None:
    """Change the number of shards online.

    All relays settle what they have read and stop at a common barrier; the new shards start from it: no event
    is lost, duplicated or reordered. Every current shard needs a running relay: the command waits for it
    first. Then publishing pauses, usually for one or two seconds, at most until the command ends. If the
    command is killed, the pause ends after ten seconds.
    """
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
