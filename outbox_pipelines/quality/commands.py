"""The commands `outbox quality …` and `outbox alerts …`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from outbox_pipelines.settings import Settings


@click.group()
def quality() -> None:
    """What Great Expectations finds; `outbox status` says the same in a moment."""


@quality.command("docs")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.pass_obj
def docs(settings: Settings, directory: Path) -> None:
    """Validate now, and build Great Expectations' data docs in DIRECTORY.

    Each run adds a result to those that the directory holds. Prints the page to begin with.
    """
    from outbox_pipelines.quality import health

    click.echo(health.build_docs(settings, directory))


@click.group()
def alerts() -> None:
    """Messages to people (OUTBOX_ALERTS), which Dagster's sensor `alerts` sends."""


@alerts.command("test")
@click.pass_obj
def test(settings: Settings) -> None:
    """Send a test message to every address. Exits with 1 if one does not take it."""
    from outbox_pipelines.quality import alerts as module

    message = module.Message(
        f"{module.where(settings)}: a test", "Alerts of this outbox arrive here. Nothing is to be done.", True
    )
    failed = module.send(settings, [message])
    for shown in failed:
        click.echo(f"outbox: {shown} did not take the message", err=True)
    if failed:
        sys.exit(1)
    click.echo(f"sent to {module.addresses(settings)}")
