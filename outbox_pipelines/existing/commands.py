"""The commands `outbox table …`: describe an existing outbox table, and check it."""

from __future__ import annotations

import json
import sys

import click

from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings


@click.group()
def table() -> None:
    """Describe and check an outbox table that exists already (OUTBOX_TABLE_FILE)."""


@table.command()
@click.argument("name")
@click.pass_obj
def describe(settings: Settings, name: str) -> None:
    """Write a description of the table NAME, for you to check: a file for OUTBOX_TABLE_FILE.

    NAME may have a schema (default: OUTBOX_SCHEMA). Columns are guessed from their names and types; each
    guess has a comment. What cannot be guessed is a commented line to complete: then exits with 2. For
    example: outbox table describe outbox > table.toml
    """
    from outbox_pipelines.existing import describe as module

    described = module.describe(settings, name)
    click.echo(described.text, nl=False)
    if described.incomplete:
        raise SetupError(
            f"the description of {name} is incomplete: complete its commented lines for "
            f"{', '.join(described.incomplete)}"
        )


@table.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def check(settings: Settings, as_json: bool) -> None:
    """Show everything to correct before the table is relayed, with the statements that correct it.

    Changes nothing. Exits with 1 if the relay would refuse the table; a warning is about speed, or about rows
    that could not be published.
    """
    from outbox_pipelines.existing import check as module

    checked = module.read(settings)
    if as_json:
        findings = [
            {"severity": module.severity(each), "text": each.text, "statements": each.statements}
            for each in checked.findings
        ]
        click.echo(json.dumps({"table": checked.table, "findings": findings}, indent=2))
    else:
        click.echo(module.render(checked))
    if checked.is_wrong:
        sys.exit(1)
