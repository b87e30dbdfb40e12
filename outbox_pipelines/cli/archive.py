"""The commands `outbox archive …`: manage days as Parquet files, for operators and analysts."""

from __future__ import annotations

import json
import sys
from datetime import date
from typing import TYPE_CHECKING

import click

from outbox_pipelines.cli import archive_query as query_commands
from outbox_pipelines.cli.option_types import DAY
from outbox_pipelines.core import log
from outbox_pipelines.core.text import plain
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.days.archive.manifest import Manifest


@click.group()
def archive() -> None:
    """Archive closed days as Parquet files, and prove, restore and query them (OUTBOX_ARCHIVE)."""


@archive.command("day")
@click.argument("day", type=DAY)
@click.option("--again", is_flag=True, help="Also if the day is archived; the new file replaces the old one.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
@click.pass_obj
def archive_day(settings: Settings, day: date, again: bool, as_json: bool) -> None:
    """Write the archive file of a past day, and prove it.

    Closes the day first. Exits with 1 if the day cannot be closed, or if file and rows differ.
    """
    from outbox_pipelines.days.archive import day as days

    def say(rows: int) -> None:
        log.say(f"{day}: {rows:,} rows written", rows=rows)

    archived = days.archive(settings, day, progress=say, again=again)
    proof = days.verify(settings, day)
    if as_json:
        click.echo(archived.manifest.to_bytes(), nl=False)
    else:
        click.echo(_line(archived.manifest) + ("" if archived.written else ", already archived"))
    _report(day, proof.differences)


@archive.command("verify")
@click.argument("day", type=DAY)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def verify_day(settings: Settings, day: date, as_json: bool) -> None:
    """Prove that a day's file and its rows are equal; for a dropped day, that its file has not changed.

    If they differ, prints the rows that differ and exits with 1.
    """
    from outbox_pipelines.days.archive import day as days

    proof = days.verify(settings, day)
    if as_json:
        click.echo(
            json.dumps({"day": str(day), "rows": proof.rows, "differences": proof.differences}, indent=2)
        )
    elif proof.equal:
        click.echo(f"{day}: {proof.rows:,} rows proven equal")
    _report(day, proof.differences)


@archive.command("restore")
@click.argument("day", type=DAY)
@click.option(
    "--attach",
    is_flag=True,
    help="Attach the table to the outbox, as a closed day.",
)
@click.pass_obj
def restore_day(settings: Settings, day: date, attach: bool) -> None:
    """Restore a day as the table outbox_restored_YYYYMMDD, proven equal to its manifest.

    Restored events are not published again. To publish them, insert them as new events: see docs/days.md.
    """
    from outbox_pipelines.days.archive import restore

    def say(rows: int) -> None:
        log.say(f"{day}: {rows:,} rows restored", rows=rows)

    restored = restore.restore(settings, day, attach, say)
    click.echo(f"{day}: {restored.rows:,} rows in {restored.table}, proven equal to the manifest")


@archive.command("adopt")
@click.option(
    "--force",
    is_flag=True,
    help="Also if archived days are missing there, or another outbox owns it; that outbox is then rejected.",
)
@click.pass_obj
def adopt_archive(settings: Settings, force: bool) -> None:
    """Make the location in OUTBOX_ARCHIVE the archive of this outbox, after a deliberate move.

    Not needed if all files were copied, including `_outbox/archive.json`. Exits with 1 if manifests of
    archived days are missing there.
    """
    from outbox_pipelines.days.archive import identity

    adopted = identity.adopt(settings, force)
    click.echo(
        f"{settings.archive} is the archive of this outbox; it has {adopted.days} of its archived days"
    )
    if adopted.missing:
        click.echo(
            f"outbox: {len(adopted.missing)} archived days are missing there, first {adopted.missing[0]}. "
            "For days that still have rows, run `outbox archive day DAY --again`; dropped days exist only in "
            "the former archive",
            err=True,
        )


def _line(manifest: Manifest) -> str:
    return f"{manifest.day}: {manifest.rows:,} rows, {manifest.size / 1e6:,.1f} MB in {manifest.file}"


def _report(day: date, differences: tuple[str, ...]) -> None:
    for difference in differences:
        click.echo(plain(f"outbox: {day}: {difference}"), err=True)
    if differences:
        sys.exit(1)


archive.add_command(query_commands.query)
archive.add_command(query_commands.history)
