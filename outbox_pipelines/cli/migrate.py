"""The command `outbox migrate`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from outbox_pipelines.core.table_locks import reading_only
from outbox_pipelines.core.text import plain
from outbox_pipelines.settings import Settings


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; report differences and exit 1 if there are any.")
@click.option(
    "--grants",
    "grants_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file of roles and their kinds: give these roles exactly these rights.",
)
@click.pass_obj
def migrate(settings: Settings, check: bool, grants_file: Path | None) -> None:
    """Create or update the outbox's tables in OUTBOX_SCHEMA (default: public)."""
    from outbox_pipelines.database import grants, schema

    wanted = grants.read(grants_file) if grants_file else None
    if check:
        with reading_only():
            differences = schema.drift(settings)
            if wanted is not None and not any(line.startswith("not applied") for line in differences):
                differences += grants.apply(settings, wanted, check=True)
        for line in differences:
            click.echo(plain(line))
        if differences:
            sys.exit(1)
        click.echo("the schema is up to date")
        return
    applied = schema.migrate(settings)
    if applied:
        click.echo(f"applied {', '.join(applied)}")
    lines = grants.apply(settings, wanted) if wanted is not None else []
    for line in lines:
        click.echo(plain(line))
    if not (applied or lines):
        click.echo("nothing to do")
