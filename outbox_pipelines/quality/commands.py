"""The commands `outbox quality …` and `outbox alerts …`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from outbox_pipelines.settings import Settings


@click.group()
def quality() -> None:
    """Results of Great Expectations; `outbox status` shows the same faster."""


@quality.command("docs")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.pass_obj
def docs(settings: Settings, directory: Path) -> None:
    """Validate now, and build Great Expectations' data docs in DIRECTORY.

    Each run adds a result to those in the directory. Prints the path of the start page.
    """
    from outbox_pipelines.quality import health, measurements

    click.echo(health.build_docs(settings, measurements.read(settings), directory))


@click.group()
def alerts() -> None:
    """Alerts (OUTBOX_ALERTS), which Dagster's sensor `alerts` sends."""


@alerts.command("test")
@click.pass_obj
def test(settings: Settings) -> None:
    """Send a test message to every address. Exits with 1 if an address does not accept it."""
    from outbox_pipelines.quality import delivery
    from outbox_pipelines.quality.alerts import Message, where

    title = f"{where(settings)}: a test"
    outcomes = delivery.send(
        settings, [Message(title, "Alerts of this outbox arrive here. No action is needed.", True)]
    )
    failed = [each for each in outcomes if each.unsent]
    for each in failed:
        click.echo(f"outbox: {each.address} did not accept the message: {each.why}", err=True)
    if failed:
        sys.exit(1)
    click.echo(f"sent to {len(outcomes)}")
