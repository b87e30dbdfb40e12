"""The commands `outbox partitions …`: what an operator types about the days of the outbox."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

from outbox_pipelines.settings import Settings


@click.group()
def partitions() -> None:
    """Show the days of the outbox, and make those ahead."""


@partitions.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def list_days(settings: Settings, as_json: bool) -> None:
    """Show each day: its state, about how many events it has, and its size on disk."""
    from outbox_pipelines.partitions import calendar

    days = calendar.read(settings)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(day) for day in days], indent=2, default=str))
        return
    click.echo("day         state     events (about)        size")
    for day in days:
        state = day.state if day.attached or day.state == "dropped" else f"{day.state}, no partition"
        click.echo(f"{day.day}  {state:<9} {day.rows:>14,} {_size(day.size):>11}")


@partitions.command()
@click.option(
    "--days",
    type=click.IntRange(1, 400),
    help="So many days ahead; OUTBOX_PARTITIONS_AHEAD by default.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def ensure(settings: Settings, days: int | None, as_json: bool) -> None:
    """Make the partitions of the coming days, by the database's clock; what is there stays.

    Writers do not wait for it. It needs the role that owns the outbox. Exits with 1 where fewer than 7 days
    ahead have a partition afterwards.
    """
    from outbox_pipelines.partitions import ahead, calendar

    ensured = ahead.ensure(settings, days)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(ensured)))
    else:
        click.echo(f"made {ensured.made}; {ensured.ahead} days ahead have a partition")
    if ensured.ahead < calendar.FEW_AHEAD:
        click.echo(f"outbox: fewer than {calendar.FEW_AHEAD} days ahead: ask for more with --days", err=True)
        sys.exit(1)


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1024:
            return f"{size:,.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} TB"
