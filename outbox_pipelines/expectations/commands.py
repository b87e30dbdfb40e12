"""The commands `outbox quality …`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outbox_pipelines.options import DAY
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.expectations.checkpoint import Finding


@click.group()
def quality() -> None:
    """What Great Expectations finds in the data; OUTBOX_EXPECTATIONS may name a project of yours."""


@quality.command("day")
@click.argument("day", type=DAY)
@click.pass_obj
def of_day(settings: Settings, day: date) -> None:
    """Validate the events of an archived day. Exits with 1 if an expectation is not met."""
    from outbox_pipelines.expectations.day import validate

    result = validate(settings, day)
    click.echo(str(result.sample))
    _report(((name, each) for name, found in result.findings.items() for each in found), result.pages)


@quality.command("hour")
@click.pass_obj
def of_hour(settings: Settings) -> None:
    """Validate lag and failures of the last hour. Exits with 1 if an expectation is not met."""
    from outbox_pipelines.expectations import checkpoint, hour

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
