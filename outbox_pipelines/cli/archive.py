"""The commands `outbox archive …` that write, prove, restore and change days, and adopt an archive."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import date
from typing import TYPE_CHECKING

import click

from outbox_pipelines.cli.archive_reading import history, query, write_report
from outbox_pipelines.cli.dead_letters import actor
from outbox_pipelines.cli.options import DAY, TEXT
from outbox_pipelines.core import log
from outbox_pipelines.core.text import counted, plain
from outbox_pipelines.days import iceberg
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.days.archive.manifest import Change, Manifest


@click.group()
def archive() -> None:
    """Archive closed days as Parquet files, and prove, restore and query them (OUTBOX_ARCHIVE)."""


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
        _mention_iceberg(settings, is_changed=again)
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


@archive.command("redact")
@click.argument("day", type=DAY)
@click.option(
    "--where",
    type=TEXT,
    required=True,
    help="Which events: a condition in DuckDB's SQL on the columns of the archive.",
)
@click.option(
    "--path",
    "paths",
    multiple=True,
    type=TEXT,
    help="A member of the payload: customer.email, or lines[].name for each item of a list; repeatable.",
)
@click.option("--header", "headers", multiple=True, type=TEXT, help="The name of a header; repeatable.")
@click.option("--reason", type=TEXT, help="Why; it is recorded in the manifest and the database.")
@click.option("--dry-run", is_flag=True, help="Only count; write nothing.")
@click.pass_obj
def redact_day(
    settings: Settings,
    day: date,
    where: str,
    paths: tuple[str, ...],
    headers: tuple[str, ...],
    reason: str | None,
    dry_run: bool,
) -> None:
    """Replace values in events of a dropped day by the text outbox-erased, and delete the former file.

    The condition is not recorded. Exits with 1 if it selects nothing; a value that no selected event has is
    refused. An interrupted command is completed by the next one.
    """
    from outbox_pipelines.days.archive.redact import redact

    if reason is None and not dry_run:
        raise SetupError("say why: --reason is required, it is recorded")
    done = redact(settings, day, where, paths, headers, reason=reason or "", actor=actor(), dry_run=dry_run)
    selected = f"{done.selected:,} of {counted(done.rows, 'event')} selected"
    if dry_run:
        click.echo(f"{day}: {selected}, {done.events:,} would be changed")
        return
    end = "the former file is deleted" if done.events else "nothing was left to change"
    click.echo(f"{day}: {selected}, {done.events:,} changed; {end}")
    for copy in done.copies:
        click.echo(plain(f"outbox: {day}: may still have the values: {copy}"), err=True)
    _mention_iceberg(settings, is_changed=bool(done.events))


@archive.command("expire")
@click.option("--dry-run", is_flag=True, help="Only count; remove nothing.")
@click.pass_obj
def expire_days(settings: Settings, dry_run: bool) -> None:
    """Remove archived events of dropped days that are older than OUTBOX_ARCHIVE_RETENTION_DAYS.

    A day is written again without them, and the former file is deleted. Also completes interrupted changes.
    Exits with 1 if a day cannot be changed.
    """
    from outbox_pipelines.days.archive.expire import expire

    days, failed = [], False
    for each in expire(settings, actor=actor(), dry_run=dry_run):
        if each.why_not:
            click.echo(plain(f"outbox: {each.day} stays: {each.why_not}"), err=True)
            failed = failed or not each.is_expected
        elif not each.events:
            click.echo(f"{each.day}: an interrupted change is completed")
        else:
            days.append(each.day)
            verb = "would be removed" if dry_run else "removed"
            types = plain(", ".join(each.types))
            click.echo(f"{each.day}: {each.events:,} of {counted(each.rows, 'event')} {verb} ({types})")
    if not days and not failed:
        click.echo("no archived events have expired")
    if days and not dry_run:
        _mention_iceberg(settings, is_changed=True)
        if settings.bodies:
            span = f"--since {days[0]} --until {days[-1]}"
            click.echo(f"bodies of removed events may be left: run `outbox bodies sweep {span}`")
    if failed:
        sys.exit(1)


@archive.command("changes")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def list_changes(settings: Settings, as_json: bool) -> None:
    """List what `redact` and `expire` have changed in archived days: when, by whom, why."""
    from outbox_pipelines.days.archive import identity

    found = identity.recorded_changes(settings)
    if as_json:
        shown = [{**each._asdict(), "change": each.change.model_dump(mode="json")} for each in found]
        click.echo(json.dumps(shown, indent=2, default=str))
        return
    for each in found:
        left = "" if each.former_deleted_at else " (interrupted: run `outbox archive expire`)"
        click.echo(plain(f"{each.day}: {each.change}{left}"))


def _mention_iceberg(settings: Settings, *, is_changed: bool) -> None:
    """Say that the Iceberg table must be brought up to date, if there is one and a file has changed."""
    if is_changed and settings.iceberg:
        click.echo("the Iceberg table has the former file: run `outbox archive register`")
