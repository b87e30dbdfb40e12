"""The commands `outbox archive …` that change archived days: redact, expire, and what they changed."""

from __future__ import annotations

import json
import sys
from datetime import date

import click

from outbox_pipelines.cli.options import DAY, TEXT
from outbox_pipelines.core.text import counted, plain
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings


@click.command("redact")
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
    from outbox_pipelines.cli.dead_letters import actor
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
    mention_iceberg(settings, is_changed=bool(done.events))


@click.command("expire")
@click.option("--dry-run", is_flag=True, help="Only count; remove nothing.")
@click.pass_obj
def expire_days(settings: Settings, dry_run: bool) -> None:
    """Remove archived events of dropped days that are older than OUTBOX_ARCHIVE_RETENTION_DAYS.

    A day is written again without them, and the former file is deleted. Also completes interrupted changes.
    Exits with 1 if a day cannot be changed.
    """
    from outbox_pipelines.cli.dead_letters import actor
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
        mention_iceberg(settings, is_changed=True)
        if settings.bodies:
            span = f"--since {days[0]} --until {days[-1]}"
            click.echo(f"bodies of removed events may be left: run `outbox bodies sweep {span}`")
    if failed:
        sys.exit(1)


@click.command("changes")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def list_changes(settings: Settings, as_json: bool) -> None:
    """List what `redact` and `expire` have changed in archived days: when, by whom, why."""
    from outbox_pipelines.days.archive import recorded_changes

    found = recorded_changes.recorded(settings)
    if as_json:
        shown = [{**each._asdict(), "change": each.change.model_dump(mode="json")} for each in found]
        click.echo(json.dumps(shown, indent=2, default=str))
        return
    for each in found:
        left = "" if each.former_deleted_at else " (interrupted: run `outbox archive expire`)"
        click.echo(plain(f"{each.day}: {each.change}{left}"))


def mention_iceberg(settings: Settings, *, is_changed: bool) -> None:
    """Say that the Iceberg table must be brought up to date, if there is one and a file has changed."""
    if is_changed and settings.iceberg:
        click.echo("the Iceberg table has the former file: run `outbox archive register`")
