"""The command `outbox reconcile DAY`: whether anything was lost on the way."""

from __future__ import annotations

import json
import sys
from datetime import date

import click

from outbox_pipelines import log
from outbox_pipelines.options import DAY
from outbox_pipelines.settings import Settings
from outbox_pipelines.text import plain


@click.command()
@click.argument("day", type=DAY)
@click.option(
    "--consumer",
    "names",
    multiple=True,
    help="This one alone, by its name in OUTBOX_CONSUMERS_FILE; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def reconcile(settings: Settings, day: date, names: tuple[str, ...], as_json: bool) -> None:
    """Compare a day's events with the topics, and with what each consumer has handled.

    Finds what is missing, phantom, duplicated, out of order, lagging; of each ten examples at most. DAY is a
    UTC day, of the table or of the archive. Changes nothing, and no consumer notices. Exits with 0 where all
    is equal, with 1 where anything differs or cannot be told.
    """
    from outbox_pipelines.reconciliation import day as days

    report = days.reconcile(settings, day, names, log.say)
    click.echo(json.dumps(report.described(), indent=2) if as_json else "\n".join(map(plain, report.lines())))
    if not report.equal:
        sys.exit(1)
