"""The commands `outbox quality …` and `outbox alerts …`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outbox_pipelines.cli.options import DAY
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
    from outbox_pipelines.quality import alert_delivery
    from outbox_pipelines.quality.alerts import Message, where

    title = f"{where(settings)}: a test"
    outcomes = alert_delivery.send(
        settings, [Message(title, "Alerts of this outbox arrive here. No action is needed.", True)]
    )
    failed = [each for each in outcomes if each.unsent]
    for each in failed:
        click.echo(f"outbox: {each.address} did not accept the message: {each.why}", err=True)
    if failed:
        sys.exit(1)
    click.echo(f"sent to {len(outcomes)}")
