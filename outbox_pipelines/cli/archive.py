"""The commands `outbox archive …` that write, prove, register and restore days, and adopt an archive."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import date
from typing import TYPE_CHECKING

import click

from outbox_pipelines.cli.archive_changes import expire_days, list_changes, mention_iceberg, redact_day
from outbox_pipelines.cli.archive_reading import history, query, write_report
from outbox_pipelines.cli.options import DAY
from outbox_pipelines.core import log
from outbox_pipelines.core.text import counted, plain
from outbox_pipelines.days import iceberg
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.days.archive.manifest import Change, Manifest


@click.group()
def archive() -> None:
    """Archive closed days as Parquet files, and prove, restore and query them (OUTBOX_ARCHIVE)."""


archive.add_command(redact_day)
archive.add_command(expire_days)
archive.add_command(list_changes)
archive.add_command(query)
archive.add_command(write_report)
archive.add_command(history)


@archive.command("day")
@click.argument("day", type=DAY)
@click.option("--again", is_flag=True, help="Also if the day is archived; the new file replaces the old one.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
@click.pass_obj
def archive_day(settings: Settings, day: date, again: bool, as_json: bool) -> None:
    """Write the archive file of a past day, and prove it.

    Closes the day first. Exits with 1 if the day cannot be closed, if file and rows differ, or with
    --again if the day is dropped.
    """
    from outbox_pipelines.days.archive import day as days

    def say(rows: int) -> None:
        log.say(f"{day}: {counted(rows, 'row')} written", rows=rows)

    archived = days.archive(settings, day, progress=say, again=again)
    proof = days.verify(settings, day)
    if as_json:
        click.echo(archived.manifest.to_bytes(), nl=False)
    else:
        click.echo(_line(archived.manifest) + ("" if archived.written else ", already archived"))
        mention_iceberg(settings, is_changed=again)
    _report(day, proof.differences)


@archive.command("verify")
@click.argument("day", type=DAY)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def verify_day(settings: Settings, day: date, as_json: bool) -> None:
    """Prove that a day's file and its rows are equal; for a dropped day, that its file has not changed.

    Also prints what `redact` and `expire` have changed.

    If they differ, prints the rows that differ and exits with 1, also if the day's directory has another
    Parquet file. With OUTBOX_ICEBERG, the Iceberg table must have the day, too.
    """
    from outbox_pipelines.days.archive import day as days

    proof = days.verify(settings, day)
    differences = proof.differences
    if not as_json and proof.equal:
        click.echo(f"{day}: {counted(proof.rows, 'row')} proven equal")
        _show(proof.changes)
    if settings.iceberg:
        differences += iceberg.compare(settings, day)
    if as_json:
        changes = [each.model_dump(mode="json") for each in proof.changes]
        found = {"day": str(day), "rows": proof.rows, "differences": differences, "changes": changes}
        click.echo(json.dumps(found, indent=2))
    _report(day, differences)


@archive.command("register")
@click.option("--again", is_flag=True, help="In a new table, which replaces the present one in the catalog.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def register_days(settings: Settings, again: bool, as_json: bool) -> None:
    """Register the archived days in the Iceberg table of OUTBOX_ICEBERG, and create it.

    Registers what the table lacks, and days that were archived again; no file is written or moved. Exits
    with 1 if a day cannot be registered, or was changed by another engine.
    """
    done = iceberg.register(settings, again=again)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(done), indent=2, default=str))
    else:
        click.echo(
            f"{done.table}: {counted(len(done.added), 'day')} added, {len(done.replaced)} replaced, "
            f"{done.unchanged} unchanged"
        )
    for difference in done.differences:
        click.echo(plain(f"outbox: {difference}"), err=True)
    if done.differences:
        sys.exit(1)


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

    Restored events are not published again: see outbox replay.
    """
    from outbox_pipelines.days.archive import restore

    def say(rows: int) -> None:
        log.say(f"{day}: {counted(rows, 'row')} restored", rows=rows)

    restored = restore.restore(settings, day, attach, say)
    click.echo(f"{day}: {counted(restored.rows, 'row')} in {restored.table}, proven equal to the manifest")
    _show(restored.changes)


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
    for day in adopted.changed:
        click.echo(
            f"outbox: {day}: this database did not know of its changes, and has them from the manifest now: "
            f"check them with `outbox archive changes`, and the day with `outbox archive verify {day}`",
            err=True,
        )
    if adopted.missing:
        click.echo(
            f"outbox: missing there: {counted(len(adopted.missing), 'archived day')}, first "
            f"{adopted.missing[0]}. For days that still have rows, run `outbox archive day DAY --again`; "
            "dropped days exist only in the former archive",
            err=True,
        )


def _line(manifest: Manifest) -> str:
    return (
        f"{manifest.day}: {counted(manifest.rows, 'row')}, {manifest.size / 1e6:,.1f} MB in {manifest.file}"
    )


def _show(changes: tuple[Change, ...]) -> None:
    for change in changes:
        click.echo(plain(f"changed: {change}"))


def _report(day: date, differences: tuple[str, ...]) -> None:
    for difference in differences:
        click.echo(plain(f"outbox: {day}: {difference}"), err=True)
    if differences:
        sys.exit(1)
