"""The commands `outbox table …`: describe an existing outbox table, check it, clean it, make its months."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

from outbox_pipelines.core.signals import until_signal
from outbox_pipelines.core.text import counted, plain
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings


@click.group()
def table() -> None:
    """Describe and check an outbox table that exists already (OUTBOX_TABLE)."""


@table.command()
@click.argument("name", metavar="NAME", required=False)
@click.pass_obj
def describe(settings: Settings, name: str | None) -> None:
    """Print the section [table] of outbox.toml for the table NAME, for you to check.

    NAME may have a schema (default: OUTBOX_SCHEMA). Columns are guessed from their names and types; each
    guess has a comment. What cannot be guessed is a commented line to complete: then exits with 2. For
    example: outbox table describe outbox >> outbox.toml
    """
    from outbox_pipelines.existing import describe as module

    if name is None:
        raise SetupError(f"no table is named: {module.which(settings)}")
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


@table.command("clean")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def clean_table(settings: Settings, as_json: bool) -> None:
    """Remove rows that were published OUTBOX_CLEAN_AFTER_HOURS ago, and months that have only such rows.

    Rows are archived in OUTBOX_ARCHIVE first, with a proof (none: they are not). Pending rows and dead
    letters stay. Batches are small: none holds a lock for more than 50 ms. Ctrl-C ends after the current one.
    """
    from outbox_pipelines.existing.cleaning.clean_up import clean

    with until_signal() as stop:
        cleaned = clean(settings, stop)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(cleaned), indent=2))
        return
    longest = f", the longest batch in {cleaned.longest * 1000:.0f} ms" if cleaned.deleted else ""
    click.echo(plain(f"{cleaned.table}: {counted(cleaned.deleted, 'row')} deleted{longest}"))
    lines = [f"  dropped {name}" for name in cleaned.dropped]
    lines += [f"  archived in {name}" for name in cleaned.files]
    lines += [f"  note: {note}" for note in cleaned.notes]
    for line in lines:
        click.echo(plain(line))


@table.command("months")
@click.option(
    "--ahead",
    type=click.IntRange(1, 120),
    help="Number of months after the current one (default: OUTBOX_MONTHS_AHEAD).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def make_months(settings: Settings, ahead: int | None, as_json: bool) -> None:
    """Make the missing partitions of the current and of coming months.

    For a table that is partitioned by ranges of one time. The first one begins where the newest partition
    ends; names, storage parameters and privileges are as those of the others. Not for tables of pg_partman.
    """
    from outbox_pipelines.existing.months import ensure

    done = ensure(settings, ahead)
    until = None if done.until is None else done.until.isoformat()
    if as_json:
        click.echo(json.dumps({"table": done.table, "made": done.made, "until": until}, indent=2))
        return
    click.echo(plain(f"{done.table}: {counted(len(done.made), 'partition')} made; the newest ends {until}"))
    for name in done.made:
        click.echo(plain(f"  made {name}"))
