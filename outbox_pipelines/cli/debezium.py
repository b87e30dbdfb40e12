"""The commands `outbox debezium …`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import click

from outbox_pipelines.cli.options import TEXT
from outbox_pipelines.core.text import plain, to_json
from outbox_pipelines.debezium.connector_config import REFERENCE, reference
from outbox_pipelines.settings import Settings


def _reference(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        return reference(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _place(command: Any) -> Any:
    """Add the options that say how Debezium reaches the database, and what it reads there."""
    options = (
        click.option(
            "--host", type=TEXT, help="Host under which the workers reach the database (default: OUTBOX_DSN)."
        ),
        click.option("--port", type=click.IntRange(1, 65535), help="Its port (default: OUTBOX_DSN)."),
        click.option("--user", type=TEXT, help="Role that Debezium logs in as (default: OUTBOX_DSN)."),
        click.option(
            "--password",
            metavar="REFERENCE",
            default=REFERENCE,
            show_default=True,
            callback=_reference,
            help="Where the workers find its password, by one of their config providers. The password "
            "itself is never written; '' for a role without one.",
        ),
        click.option("--slot", type=TEXT, help="Name of the slot (default: debezium_DATABASE_SCHEMA)."),
        click.option("--publication", type=TEXT, help="Name of the publication (default: that of the slot)."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def debezium() -> None:
    """Configure and watch Debezium in Kafka Connect, which publishes the outbox instead of the relay."""


@debezium.command("config")
@_place
@click.pass_obj
def config_command(settings: Settings, /, **place: Any) -> None:
    """Print the connector's configuration as JSON, which makes its messages equal to the relay's.

    Send it with PUT to /connectors/NAME/config of Kafka Connect. Needs no Kafka Connect and no database. What
    Debezium cannot make equal is refused.
    """
    click.echo(to_json(_config(settings, **place), indent=2))


@debezium.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.pass_obj
def status_command(settings: Settings, as_json: bool) -> None:
    """Show connector, task and slot (OUTBOX_CONNECT), and each problem with its remedy.

    Changes nothing. Exit 1 if a person must act.
    """
    from outbox_pipelines.debezium.connector_reading import read

    found = read(settings)
    if as_json:
        click.echo(to_json(asdict(found) | {"problems": found.problems}, indent=2))
    else:
        for line in [*found.lines(), *(f"! {problem}" for problem in found.problems)]:
            click.echo(plain(line))
    sys.exit(1 if found.problems else 0)


def _config(
    settings: Settings, *, slot: str | None, publication: str | None, password: str, **where: Any
) -> dict[str, str]:
    from outbox_pipelines.debezium.connector_config import connector

    name = slot or _slot(settings)
    return connector(settings, slot=name, publication=publication or name, password=password, **where)


def _slot(settings: Settings) -> str:
    """Return the usual name of the slot."""
    from outbox_pipelines.debezium.connector_config import database, slot_name

    return slot_name(settings, database(settings))
