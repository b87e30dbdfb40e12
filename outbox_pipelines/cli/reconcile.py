"""The command `outbox reconcile DAY`: find events that were lost between table, topics and consumers."""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path

import click

from outbox_pipelines.cli.options import DAY, TEXT
from outbox_pipelines.core import log
from outbox_pipelines.core.text import plain
from outbox_pipelines.settings import Settings


@click.command()
@click.argument("day", type=DAY)
@click.option(
    "--consumer",
    "names",
    type=TEXT,
    multiple=True,
    help="Only this consumer (name from [consumers.NAME] in outbox.toml); repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--handled",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write when each consumer handled which event to this Parquet file.",
)
@click.option(
    "--slices",
    type=click.IntRange(1, 250),
    default=1,
    show_default=True,
    help="Compare the day in this many parts, one after the other, to use less disk.",
)
@click.pass_obj
def reconcile(
    settings: Settings, day: date, names: tuple[str, ...], as_json: bool, handled: Path | None, slices: int
) -> None:
    """Compare a day's events with the topics and with what each consumer processed.

    Finds missing, phantom, duplicated, out-of-order and lagging events, with at most ten examples of each.
    DAY is a UTC day in the table or the archive. Changes nothing and does not affect consumers. Exits with 0
    if all are equal, and with 1 if anything differs or cannot be verified.
    """
    from outbox_pipelines.reconciliation import reconcile as days

    report = days.reconcile(settings, day, names, log.say, handled, slices)
    click.echo(json.dumps(report.described(), indent=2) if as_json else "\n".join(map(plain, report.lines())))
    if not report.equal:
        sys.exit(1)
