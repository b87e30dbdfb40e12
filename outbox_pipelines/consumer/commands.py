"""The commands `outbox consumer …`: the tables beside a consumer's own."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta

import click

from outbox_pipelines.settings import Settings


@click.group()
def consumer() -> None:
    """Make and prune the tables of idempotent consumers, in the database of the consumer (OUTBOX_DSN)."""


@consumer.command("migrate")
@click.pass_obj
def make_tables(settings: Settings) -> None:
    """Create what is missing of the consumer's tables in OUTBOX_SCHEMA; again: changes nothing."""
    from outbox_pipelines.consumer import tables
    from outbox_pipelines.database import connect

    with connect(settings, name="outbox consumer migrate") as connection:
        tables.migrate(connection)
    click.echo("the consumer's tables are there")


@consumer.command("prune")
@click.option(
    "--days",
    type=click.IntRange(1, 50),
    required=True,
    help="Keep what was handled in the last so many days: more than Kafka's topics keep.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def prune_rows(settings: Settings, days: int, as_json: bool) -> None:
    """Forget events that were handled long ago, a day at a time. Run it every day.

    An event that is forgotten and comes again is handled again.
    """
    from outbox_pipelines.consumer import tables
    from outbox_pipelines.database import connect

    with connect(settings, name="outbox consumer prune") as connection:
        pruned = tables.prune(connection, timedelta(days=days))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(pruned)))
        return
    busy = f"; {len(pruned.busy)} in use were left for the next time" if pruned.busy else ""
    click.echo(
        f"{len(pruned.emptied)} days emptied, {pruned.deleted:,} rows without a day and "
        f"{pruned.received:,} of the inbox deleted{busy}"
    )
