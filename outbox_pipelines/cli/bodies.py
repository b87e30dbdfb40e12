"""The commands `outbox bodies …`: check and sweep the store of large payloads."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import date
from typing import TYPE_CHECKING

import click

from outbox_pipelines.cli.options import DAY
from outbox_pipelines.core.text import counted, plain, size
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.days.bodies.check import Checked
    from outbox_pipelines.days.bodies.sweep import Swept


@click.group()
def bodies() -> None:
    """Check the bodies of large payloads, and remove those to which no event refers (OUTBOX_BODIES)."""


@bodies.command("check")
@click.option("--since", type=DAY, help="First day of the events (default: seven days before today).")
@click.option("--until", type=DAY, help="Last day (default: today).")
@click.option("--digest", is_flag=True, help="Also read each body, and compare its sha256.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def check_bodies(
    settings: Settings, since: date | None, until: date | None, digest: bool, as_json: bool
) -> None:
    """Check that the body of each event that has a reference is in the store, with the right size.

    Reads delayed events, days in the table from their rows, and dropped days from OUTBOX_ARCHIVE. Prints the
    events whose bodies are missing or differ, also those of references within a payload, and exits with 1 if
    there are any, or if a day cannot be read. Requires the role that owns the outbox.
    """
    from outbox_pipelines.days.bodies.check import check

    results = []
    for result in check(settings, since, until, digest=digest):
        results.append(result)
        if not as_json:
            _show_checked(result)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(result) for result in results], indent=2, default=str))
    elif not results:
        click.echo("no event of these days refers to a body")
    if any(result.problems or (result.why_not and not result.is_expected) for result in results):
        sys.exit(1)


@bodies.command("sweep")
@click.option("--since", type=DAY, help="First day of the bodies (default: seven days before today).")
@click.option("--until", type=DAY, help="Last day (default: today).")
@click.option("--dry-run", is_flag=True, help="Remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def sweep_bodies(
    settings: Settings, since: date | None, until: date | None, dry_run: bool, as_json: bool
) -> None:
    """Remove bodies to which no event refers: those of transactions that were rolled back.

    A day is swept once it and the next day are closed. If its references cannot be read completely, its
    bodies stay; if that needs an action, the command exits with 1. Other objects of the store are not
    touched. Requires the role that owns the outbox.
    """
    from outbox_pipelines.days.bodies.sweep import sweep

    results = []
    for result in sweep(settings, since, until, dry_run=dry_run):
        results.append(result)
        if not as_json:
            _show_swept(result, dry_run=dry_run)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(result) for result in results], indent=2, default=str))
    elif not results:
        click.echo("no bodies of these days")
    if any(result.why_not and not result.is_expected for result in results):
        sys.exit(1)


@bodies.command("adopt")
@click.option(
    "--force", is_flag=True, help="Also if another outbox has adopted it, which then cannot sweep it."
)
@click.pass_obj
def adopt_store(settings: Settings, force: bool) -> None:
    """Declare that only this outbox's writers store bodies in OUTBOX_BODIES, so that it can be swept.

    Run it once for each store. A copy of the database is another outbox: it has no events of later bodies.
    """
    from outbox_pipelines.days.bodies.store import adopt

    click.echo(f"{adopt(settings, force)} has the bodies of this outbox")


def _show_checked(each: Checked) -> None:
    result = f"{len(each.problems):,} missing or different" if each.problems else "all there"
    if each.why_not:
        result = f"not checked: {each.why_not}"
    bodies = f"{counted(each.references, 'body', 'bodies')} ({size(each.size)})"
    click.echo(plain(f"{each.day or 'delayed'}  {bodies}, {result}"))
    for problem in each.problems:
        key = "" if problem.key is None else f"{problem.key}: "
        click.echo(plain(f"  event {problem.event_id}: {key}{problem.what}"))


def _show_swept(each: Swept, *, dry_run: bool) -> None:
    done = f"{each.unreferenced:,} {'to remove' if dry_run else 'removed'} ({size(each.size)})"
    result = f"stay: {each.why_not}" if each.why_not else done
    bodies = counted(each.objects, "body", "bodies") if each.objects else "bodies"
    click.echo(plain(f"{each.day}  {bodies}, {result}"))
