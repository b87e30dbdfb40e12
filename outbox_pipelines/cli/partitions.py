"""The commands `outbox partitions …`: manage the days of the outbox."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Final

import click

from outbox_pipelines.cli.options import DAY
from outbox_pipelines.core.text import counted, plain, size
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.days.archive.drop import Dropped

_PLACES: Final = {
    "attached": "",
    "detaching": ", detaching",
    "detached": ", detached",
    "gone": ", no partition",
}


@click.group()
def partitions() -> None:
    """List the outbox's days, create future partitions, and close and drop past days."""


@partitions.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def list_days(settings: Settings, as_json: bool) -> None:
    """List each day: state, events (~ is an estimate), size on disk, archive time and last proof."""
    from outbox_pipelines.days.partitions import calendar

    days = calendar.read(settings)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(day) for day in days], indent=2, default=str))
        return
    click.echo("day         state             events        size  archived          proven (UTC)")
    for day in days:
        state = day.state if day.state == "dropped" else f"{day.state}{_PLACES[day.partition]}"
        about = "~" if day.archived_at is None and day.rows else ""
        line = (
            f"{day.day}  {state:<12} {about + format(day.rows, ','):>11} {size(day.size):>11}  "
            f"{_minute(day.archived_at):<16}  {_minute(day.proven_at)}"
        )
        click.echo(plain(line).rstrip())


@partitions.command()
@click.option(
    "--ahead",
    "days",
    type=click.IntRange(1, 400),
    help="Number of days ahead (default: OUTBOX_PARTITIONS_AHEAD).",
)
@click.option(
    "--since", type=DAY, help="Also create past days, from this one on, for a backfill; see docs/days.md."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def ensure(settings: Settings, days: int | None, since: date | None, as_json: bool) -> None:
    """Create the partitions of the coming days, by the database's clock; existing ones do not change.

    A partition that was dropped manually is created again if its day is open and not over. Writers do not
    wait. Requires the role that owns the outbox. Exits with 1 if fewer than 7 days ahead, without a gap, have
    a partition afterwards.
    """
    from outbox_pipelines.days.partitions import FEW_AHEAD, ahead

    ensured = ahead.ensure(settings, days, since)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(ensured)))
    else:
        click.echo(f"created {ensured.made}; {ensured.ahead} future days have a partition")
    if ensured.ahead < FEW_AHEAD:
        is_short = days is not None and ensured.ahead >= days
        remedy = (
            "increase --ahead"
            if is_short
            else "a day has no partition, and none could be created. See `outbox partitions list`; a "
            "detached day returns with `outbox partitions attach DAY`"
        )
        click.echo(f"outbox: fewer than {FEW_AHEAD} days ahead: {remedy}", err=True)
        sys.exit(1)


@partitions.command("close")
@click.argument("day", type=DAY, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def close_days(settings: Settings, day: date | None, as_json: bool) -> None:
    """Close past days: they accept no more inserts and can be archived.

    A day closes OUTBOX_CLOSE_AFTER_MINUTES after its end, once no transaction that began before its end still
    runs and each of its events is published or a dead letter. If a day stays open, prints the reason and
    exits with 1.
    """
    from outbox_pipelines.days.partitions import close

    closings = close.close(settings, day)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(each) for each in closings], indent=2, default=str))
    else:
        for each in closings:
            click.echo(f"{each.day}  {'closed' if each.closed else plain(f'stays open: {each.why_not}')}")
        if not closings:
            click.echo("no day to close: all past days are closed")
    if not all(each.closed for each in closings):
        sys.exit(1)


@partitions.command("reopen")
@click.argument("day", type=DAY)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.pass_obj
def reopen_day(settings: Settings, day: date, yes: bool) -> None:
    """Reopen a closed day that is not archived yet, for example one that a fast clock closed too early."""
    from outbox_pipelines.days.partitions import close

    close.require_reopenable(settings, day)
    if not yes:
        click.confirm("Relays restart, and the day accepts inserts again. Reopen it?", abort=True)
    close.reopen(settings, day)
    click.echo(f"{day} is open")


@partitions.command("attach")
@click.argument("day", type=DAY)
@click.pass_obj
def attach_day(settings: Settings, day: date) -> None:
    """Attach a day's partition that an interrupted drop left detached; its rows become visible again.

    Writers do not wait. To bring back a dropped day, run `outbox archive restore DAY --attach`.
    """
    from outbox_pipelines.days.partitions import close

    was_detached = close.attach(settings, day)
    click.echo(f"{day}  {'attached' if was_detached else 'was already attached'}")


@partitions.command("purge")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def purge_rows(settings: Settings, as_json: bool) -> None:
    """Delete old idempotency keys (OUTBOX_IDEMPOTENCY_KEY_RETENTION_DAYS), and progress of archived days."""
    from outbox_pipelines.days.partitions import close

    purged = dataclasses.asdict(close.purge(settings))
    click.echo(
        json.dumps(purged) if as_json else ", ".join(f"{count:,} {what}" for what, count in purged.items())
    )


@partitions.command("drop")
@click.argument("day", type=DAY, required=False)
@click.option("--due", is_flag=True, help="All days past OUTBOX_RETENTION_DAYS, instead of DAY.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def drop_days(settings: Settings, day: date | None, due: bool, as_json: bool) -> None:
    """Drop a closed and archived day, after proving that its rows and its file are equal.

    The rows are compared again, regardless of earlier proofs; if they differ, the day is not dropped. Writers
    do not wait. With OUTBOX_ARCHIVE=none, days are dropped without an archive: only their dead letters are
    kept.
    """
    from outbox_pipelines.days.archive import drop

    if (day is None) != due:
        raise click.UsageError("give either DAY or --due")
    days = [day] if day else drop.due(settings)
    dropped: list[drop.Dropped] = []
    worst: SetupError | None = None
    for each in days:
        try:
            dropped.append(drop.drop(settings, each))
        except UnavailableError:
            raise
        except SetupError as error:
            # A day that cannot be dropped does not block the others.
            if day is not None:
                raise
            click.echo(plain(f"outbox: {error}"), err=True)
            worst = error
            continue
        if not as_json:
            click.echo(_dropped(dropped[-1]))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(each) for each in dropped], indent=2, default=str))
    elif not days:
        click.echo("no day to drop: no archived day is past the retention")
    if worst is not None:
        sys.exit(1)


def _dropped(each: Dropped) -> str:
    proven = "" if each.rows is None else f", {counted(each.rows, 'row')} proven equal"
    return f"{each.day}  {'dropped' if each.now else 'was already dropped'}{proven}"


def _minute(at: datetime | None) -> str:
    return "-" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M}"
