"""The commands `outbox quality …` and `outbox alerts …`."""

from __future__ import annotations

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
