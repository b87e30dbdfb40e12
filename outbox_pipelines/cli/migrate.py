"""The command `outbox migrate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click

from outbox_pipelines.cli.options import TEXT
from outbox_pipelines.core.table_locks import reading_only
from outbox_pipelines.core.text import plain
from outbox_pipelines.settings import Settings

_HOW: Final = "-- As the owner: psql -v ON_ERROR_STOP=1 -f FILE, then `outbox migrate`."


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; report differences and exit 1 if there are any.")
@click.option(
    "--print", "prints", is_flag=True, help="Change nothing; print the SQL of the missing migrations."
)
@click.option("--to", metavar="NAME", type=TEXT, help="The last migration to apply or print (default: all).")
@click.option(
    "--grants",
    "grants_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file of roles and their kinds: give these roles exactly these rights.",
)
@click.pass_obj
def migrate(settings: Settings, check: bool, prints: bool, to: str | None, grants_file: Path | None) -> None:
    """Create or update the outbox's tables in OUTBOX_SCHEMA (default: public)."""
    from outbox_pipelines.database import grants, schema

    if (prints or to) and (check or grants_file):
        raise click.UsageError("--print and --to go without --check and --grants")
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
    if prints:
        with reading_only():
            statements = schema.pending(settings, to)
        click.echo(_HOW if statements else "-- nothing to do")
        for statement in statements:
            click.echo(f"{statement};")
        return
    applied = schema.migrate(settings, to)
    if applied:
        click.echo(f"applied {', '.join(applied)}")
    lines = grants.apply(settings, wanted) if wanted is not None else []
    for line in lines:
        click.echo(plain(line))
    if not (applied or lines):
        click.echo("nothing to do")
