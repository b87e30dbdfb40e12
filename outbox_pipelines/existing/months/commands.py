"""The command `outbox table months`."""

from __future__ import annotations

import json

import click

from outbox_pipelines.core.text import plain
from outbox_pipelines.settings import Settings


@click.command("months")
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
    from outbox_pipelines.existing.months.ahead import ensure

    done = ensure(settings, ahead)
    until = None if done.until is None else done.until.isoformat()
    if as_json:
        click.echo(json.dumps({"table": done.table, "made": done.made, "until": until}, indent=2))
        return
    click.echo(plain(f"{done.table}: {len(done.made)} partitions made; the newest ends {until}"))
    for name in done.made:
        click.echo(plain(f"  made {name}"))
