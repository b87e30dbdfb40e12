"""What is found in the data: the commands `outbox quality …`, `outbox alerts …`, `outbox reconcile DAY`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outbox_pipelines.cli.options import DAY, TEXT
from outbox_pipelines.core import log
from outbox_pipelines.core.text import plain
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.quality.expectations.checkpoint import Finding


@click.group()
def quality() -> None:
    """What Great Expectations finds in the data; OUTBOX_EXPECTATIONS may name a project of yours."""


@quality.command("day")
@click.argument("day", type=DAY)
@click.pass_obj
def of_day(settings: Settings, day: date) -> None:
    """Validate the events of an archived day. Exits with 1 if an expectation is not met."""
    from outbox_pipelines.quality.expectations.archived_day import validate

    result = validate(settings, day)
    click.echo(str(result.sample))
    _report(((name, each) for name, found in result.findings.items() for each in found), result.pages)


@quality.command("hour")
@click.pass_obj
def of_hour(settings: Settings) -> None:
    """Validate latency and failures of the last hour. Exits with 1 if an expectation is not met."""
    from outbox_pipelines.quality.expectations import checkpoint, hour

    pages = None if settings.expectations is None else checkpoint.pages(settings.expectations)
    _report((("last_hour", each) for each in hour.validate(settings)), pages)


def _report(found: Iterable[tuple[str, Finding]], pages: Path | None) -> None:
    failed = False
    for check, each in found:
        failed = failed or bool(each.status)
        click.echo(f"{each.status.name:<5} {check}: {each.text}")
    if pages is not None:
        click.echo(f"pages: {pages}")
    if failed:
        sys.exit(1)


@click.group()
def alerts() -> None:
    """Alerts (OUTBOX_ALERTS), which Dagster's sensor `alerts` sends."""


@alerts.command("test")
@click.pass_obj
def test(settings: Settings) -> None:
    """Send a test message to every address. Exits with 1 if an address does not accept it."""
    from outbox_pipelines.quality import alerts
    from outbox_pipelines.quality.alerts import Message, where

    title = f"{where(settings)}: a test"
    outcomes = alerts.send(
        settings, [Message(title, "Alerts of this outbox arrive here. No action is needed.", True)]
    )
    failed = [each for each in outcomes if each.unsent]
    for each in failed:
        click.echo(f"outbox: {each.address} did not accept the message: {each.why}", err=True)
    if failed:
        sys.exit(1)
    click.echo(f"sent to {len(outcomes)}")


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
    from outbox_pipelines.reconciliation import steps as days

    report = days.reconcile(settings, day, names, log.say, handled, slices)
    click.echo(json.dumps(report.described(), indent=2) if as_json else "\n".join(map(plain, report.lines())))
    if not report.equal:
        sys.exit(1)
