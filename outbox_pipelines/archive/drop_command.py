"""The command `outbox partitions drop`."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import date
from typing import TYPE_CHECKING

import click

from outbox_pipelines.core.text import plain
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.options import DAY
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.archive.drop import Dropped


@click.command("drop")
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
    from outbox_pipelines.archive import drop

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
    proven = "" if each.rows is None else f", {each.rows:,} rows proven equal"
    return f"{each.day}  {'dropped' if each.now else 'was already dropped'}{proven}"
