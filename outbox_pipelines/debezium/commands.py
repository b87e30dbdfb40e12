"""The commands `outbox debezium …`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from outbox_pipelines.debezium.names import REFERENCE, reference
from outbox_pipelines.errors import SetupError
from outbox_pipelines.options import SECONDS
from outbox_pipelines.settings import Settings
from outbox_pipelines.text import plain, to_json

if TYPE_CHECKING:
    from outbox_pipelines.debezium.connect import Connect

_ACTIONS: Final = {"pause": "paused", "resume": "resumed", "stop": "stopped", "restart": "restarted"}

Options = Callable[[Any], Any]


def _reference(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        return reference(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_SECONDS = click.option(
    "--seconds",
    type=SECONDS,
    default=60.0,
    show_default=True,
    help="How long to wait for the connector, at most.",
)


def reach_options(command: Any) -> Any:
    """Add the options that say how Debezium reaches the database."""
    options = (
        click.option("--host", help="Host under which the workers reach the database (default: OUTBOX_DSN)."),
        click.option("--port", type=click.IntRange(1, 65535), help="Its port (default: OUTBOX_DSN)."),
        click.option("--user", help="Role that Debezium logs in as (default: OUTBOX_DSN)."),
        click.option(
            "--password",
            metavar="REFERENCE",
            default=REFERENCE,
            show_default=True,
            callback=_reference,
            help="Where the workers find its password, by one of their config providers: "
            "'${file:/secrets/outbox.properties:password}' with config.providers=file, '${env:NAME}' with "
            "config.providers=env. The password itself is never written; '' for a role without one.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _place(command: Any) -> Any:
    """Add the options that say how Debezium reaches the database, and what it reads there."""
    publication = click.option("--publication", help="Name of the publication (default: that of the slot).")
    slot = click.option("--slot", help="Name of the slot (default: debezium_DATABASE_SCHEMA).")
    return reach_options(slot(publication(command)))


@click.group()
def debezium() -> None:
    """Publish the outbox with Debezium in a Kafka Connect cluster (OUTBOX_CONNECT), instead of the relay."""


@debezium.command("config")
@_place
@click.pass_obj
def config_command(settings: Settings, /, **place: Any) -> None:
    """Print the connector's configuration as JSON, which makes its messages equal to the relay's.

    Needs no Kafka Connect and no database. What Debezium cannot make equal is refused.
    """
    click.echo(to_json(_config(settings, **place), indent=2))


@debezium.command("register")
@_place
@click.option("--replace", is_flag=True, help="Give an existing connector this configuration.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the steps; change nothing.")
@_SECONDS
@click.pass_obj
def register_command(
    settings: Settings, /, replace: bool, dry_run: bool, seconds: float, **place: Any
) -> None:
    """Make publication and slot, and register the connector; events that commit from then on are published.

    Kafka Connect validates the configuration first; each wrong setting is printed in a line. If the
    connector does not run, what was made is removed again.
    """
    from outbox_pipelines.debezium.registration import InvalidError, register

    config = _config(settings, **place)
    try:
        changed = register(
            settings, config, replace=replace, dry_run=dry_run, seconds=seconds, say=click.echo
        )
    except InvalidError as error:
        for line in error.lines:
            click.echo(plain(line), err=True)
        raise SetupError(
            f"Kafka Connect refuses {len(error.lines)} settings of the configuration: correct them as it says"
        ) from None
    if not changed:
        click.echo("nothing to do: the connector is registered with this configuration")


@debezium.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.pass_obj
def status_command(settings: Settings, as_json: bool) -> None:
    """Show connector, task and slot, and each problem with its remedy. Exit 1 if a person must act."""
    from outbox_pipelines.debezium.reading import read

    found = read(settings)
    if as_json:
        click.echo(to_json(asdict(found) | {"problems": found.problems}, indent=2))
    else:
        for line in [*found.lines(), *(f"! {problem}" for problem in found.problems)]:
            click.echo(plain(line))
    sys.exit(1 if found.problems else 0)


@debezium.command("delete")
@click.option("--dry-run", is_flag=True, help="Print what would be removed; change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_SECONDS
@click.pass_obj
def delete_command(settings: Settings, dry_run: bool, yes: bool, as_json: bool, seconds: float) -> None:
    """Remove the connector, its slot and its publication, so that the server keeps no log for them.

    Events that it has not sent stay in the table, and a relay publishes them. Exit 1 if there is nothing.
    """
    from outbox_pipelines.debezium.names import connector_name
    from outbox_pipelines.debezium.registration import delete

    name = connector_name(settings)
    if not (dry_run or yes):
        question = f"remove the connector {name} with its slot?"
        if not sys.stdin.isatty():
            raise click.UsageError(f"{question} Without a terminal, add --yes")
        click.confirm(question, abort=True, err=True)
    slot = _slot(settings)
    lines: list[str] = []
    say = lines.append if as_json else click.echo
    found = delete(settings, slot=slot, publication=slot, seconds=seconds, dry_run=dry_run, say=say)
    if as_json:
        shown = {"action": "delete", "connector": name, "dry_run": dry_run, "found": found, "steps": lines}
        click.echo(json.dumps(shown))
    elif not found:
        click.echo("there was no connector and no slot")
    sys.exit(0 if found else 1)


def _act(settings: Settings, action: str, call: Callable[[Connect, str], None], as_json: bool) -> None:
    from outbox_pipelines.debezium.connect import Connect, MissingError
    from outbox_pipelines.debezium.names import connector_name

    name = connector_name(settings)
    try:
        call(Connect(settings.require_connect()), name)
    except MissingError:
        raise SetupError(
            f"there is no connector {name}: run `outbox debezium register`, or set OUTBOX_CONNECTOR"
        ) from None
    if as_json:
        click.echo(json.dumps({"action": action, "connector": name}))
    else:
        click.echo(f"connector {name}: {_ACTIONS[action]}")


_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@debezium.command("pause")
@_JSON
@click.pass_obj
def pause_command(settings: Settings, as_json: bool) -> None:
    """Let the connector rest: it sends nothing, and the server keeps its log."""
    _act(settings, "pause", lambda cluster, name: cluster.pause(name), as_json)


@debezium.command("resume")
@_JSON
@click.pass_obj
def resume_command(settings: Settings, as_json: bool) -> None:
    """Let a connector that was paused or stopped continue, without a gap."""
    _act(settings, "resume", lambda cluster, name: cluster.resume(name), as_json)


@debezium.command("stop")
@_JSON
@click.pass_obj
def stop_command(settings: Settings, as_json: bool) -> None:
    """End the connector's task, which commits its progress; its slot keeps the log until `resume`."""
    _act(settings, "stop", lambda cluster, name: cluster.stop(name), as_json)


@debezium.command("restart")
@_JSON
@click.pass_obj
def restart_command(settings: Settings, as_json: bool) -> None:
    """Start the connector and its task again, after the cause of a failure was corrected."""
    _act(settings, "restart", lambda cluster, name: cluster.restart(name), as_json)


def _config(
    settings: Settings, *, slot: str | None, publication: str | None, password: str, **where: Any
) -> dict[str, str]:
    from outbox_pipelines.debezium.config import connector

    name = slot or _slot(settings)
    return connector(settings, slot=name, publication=publication or name, password=password, **where)


def _slot(settings: Settings) -> str:
    """Return the usual name of the slot."""
    from outbox_pipelines.debezium.config import database
    from outbox_pipelines.debezium.names import slot_name

    return slot_name(settings, database(settings))
