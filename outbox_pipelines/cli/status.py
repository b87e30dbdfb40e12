"""The command `outbox status`: one outbox in full, or all in a line each."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Final

import click

from outbox_pipelines.cli.options import chosen
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
