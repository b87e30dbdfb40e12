"""Change data capture: the commands `outbox cdc …`, `outbox cutover` and `outbox debezium …`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from outbox_pipelines.cli.options import TEXT, seconds_option
from outbox_pipelines.config import parsed
from outbox_pipelines.core.text import plain, to_json
from outbox_pipelines.debezium.connector_config import REFERENCE, reference
from outbox_pipelines.settings import Settings

if TYPE_CHECKING:
    from outbox_pipelines.quality.slots import Slots

_SECONDS = seconds_option("How long to wait for running transactions, or for the relay, at most.")


@click.group()
def cdc() -> None:
    """Manage change data capture: reading events from PostgreSQL's log, by a replication slot."""


@cdc.command("setup")
@_SECONDS
@click.pass_obj
def setup_command(settings: Settings, seconds: float) -> None:
    """Make the publication and the slot; running relays continue from the slot without a gap.

    Prints each step. If something is missing (wal_level, a right), prints what to run. If it fails, it leaves
    no slot behind.
    """
    from outbox_pipelines.relay.read.slot.slot_setup import set_up

    parsed.refuse_existing_table(settings)
    made = set_up(settings, seconds=seconds, say=_say)
    click.echo("nothing to do: relays read from the slot already" if made is None else "relays read from it")


@cdc.command("drop")
@_SECONDS
@click.pass_obj
def drop_command(settings: Settings, seconds: float) -> None:
    """Drop the slot and the publication; running relays continue between snapshots without a gap."""
    from outbox_pipelines.relay.read.slot.slot_setup import remove

    parsed.refuse_existing_table(settings)
    if not remove(settings, seconds=seconds, say=_say, publication=True):
        click.echo("there was no slot")


@cdc.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.pass_obj
def status_command(settings: Settings, as_json: bool) -> None:
    """Show the slot: who reads it, how much log it keeps, what threatens it. Exit 1 if a person must act."""
    from outbox_pipelines.relay.read.slot.slot_cutover import read

    parsed.refuse_existing_table(settings)
    found = read(settings)
    if as_json:
        shown = {
            "source": found.source,
            **asdict(found),
            "problems": found.problems,
            "warnings": found.warnings,
        }
        click.echo(json.dumps(shown, indent=2))
    else:
        _show(found)
    sys.exit(1 if found.problems else 0)


@click.command()
@click.option(
    "--to",
    "target",
    type=click.Choice(["cdc", "polling"]),
    required=True,
    help="cdc: from a replication slot. polling: between snapshots.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be done.")
@_SECONDS
@click.pass_obj
def cutover(settings: Settings, target: str, dry_run: bool, seconds: float) -> None:
    """Change where relays read events, while writers run: nothing is lost, repeated or reordered.

    The position is kept: it says which transactions are published, whatever the source. If the
    command is interrupted, run it again, with any target.
    """
    from outbox_pipelines.relay.read.slot import slot_cutover

    parsed.refuse_existing_table(settings)
    if dry_run:
        for line in slot_cutover.plan(settings, target):
            _say(line)
    else:
        slot_cutover.run(settings, target, seconds=seconds, say=_say)


def _show(found: Slots) -> None:
    for line in found.lines():
        _say(line)
    for problem in found.problems:
        _say(f"! {problem}")


def _say(line: str) -> None:
    # It may name a session, whose name is of its own choice.
    click.echo(plain(line))


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
def debezium_config(settings: Settings, /, **place: Any) -> None:
    """Print the connector's configuration as JSON, which makes its messages equal to the relay's.

    Send it with PUT to /connectors/NAME/config of Kafka Connect. Needs no Kafka Connect and no database. What
    Debezium cannot make equal is refused.
    """
    click.echo(to_json(_config(settings, **place), indent=2))


@debezium.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.pass_obj
def debezium_status(settings: Settings, as_json: bool) -> None:
    """Show connector, task and slot (OUTBOX_CONNECT_URL), and each problem with its remedy.

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
