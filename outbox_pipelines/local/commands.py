"""`outbox local`: start, share and stop the local PostgreSQL and Kafka from a shell."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys

import click

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import client, foreground
from outbox_pipelines.local.client import Stack
from outbox_pipelines.local.state import KEEP
from outbox_pipelines.settings import load_settings


@click.group()
def local() -> None:
    """PostgreSQL and Kafka on this machine, from wheels, for trying things out.

    They listen on 127.0.0.1 only, are shared by everything you start, and stop by themselves a minute after
    their last user. Data and logs lie in OUTBOX_LOCAL_DIR (~/.cache/outbox-pipelines/local). A server that
    you name yourself, in OUTBOX_DSN or OUTBOX_KAFKA, is used instead of a local one.

    PostgreSQL asks for a password. It is in a file that only you can read; the DSN names this file
    (passfile=), and roles that you create may be given the same password. If PGPASSWORD is set, libpq sends
    that instead: unset it. Drivers that are not libpq's, such as Go's lib/pq, may not know passfile=:
    remove it from the DSN and set PGPASSFILE to the same file. Kafka asks for no password: other users of
    this machine can read and write topics.
    """


@local.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...]) -> None:
    """Run COMMAND with PostgreSQL and Kafka for as long as it lasts.

    COMMAND finds them in OUTBOX_DSN and OUTBOX_KAFKA; its exit code is passed on, and signals go to it.
    When it ends, the servers stop, unless somebody else uses them or `outbox local up` keeps them. Their data
    stays for the next time.

    \b
    Example:
      outbox local run -- pytest
    """
    if shutil.which(command[0]) is None:
        raise SetupError(f"outbox local run: there is no command {command[0]}")
    settings = load_settings()
    # While the servers start, too, an end by signal is an orderly one: they must not stay behind.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with client.stack(settings, _say) as servers:
            code = foreground.run(command, {**os.environ, **_variables(servers)})
    finally:
        if not (settings.dsn and settings.kafka):
            client.stop(client.home_of(settings), even_if_kept=False)
    sys.exit(code)


@local.command()
def up() -> None:
    """Start PostgreSQL and Kafka and keep them until `outbox local down`.

    \b
    Example:
      outbox local up
      eval "$(outbox local env)"
    """
    settings = load_settings()
    with client.stack(settings, _say) as servers:
        if settings.dsn and settings.kafka:
            _say("OUTBOX_DSN and OUTBOX_KAFKA name servers already: nothing was started")
        else:
            client.home_of(settings).ask(KEEP)
        click.echo(_exports(servers))


@local.command()
@click.option("--force", is_flag=True, help="Stop even while others use the servers.")
@click.option("--forget", is_flag=True, help="Remove their data, too: all databases and topics.")
def down(force: bool, forget: bool) -> None:
    """Stop PostgreSQL and Kafka now; their data stays, unless --forget is given.

    Exits with 1, and stops nothing, while something else uses them, unless --force is given.
    """
    home = client.home_of(load_settings())
    if client.running(home) is None:
        _say("nothing runs")
    elif not client.stop(home, force=force):
        _say("others use the local servers: end those first, or add --force")
        sys.exit(1)
    if forget and not client.forget(home):
        _say("somebody has just started the local servers again: nothing was removed")
        sys.exit(1)


@local.command()
@click.option("--json", "as_json", is_flag=True, help="Print dsn, kafka, directory and kept as JSON.")
def env(as_json: bool) -> None:
    """Print the variables that name the running servers, for `eval "$(outbox local env)"`.

    Exits with 1 where nothing runs.
    """
    home = client.home_of(load_settings())
    state = client.running(home)
    if state is None or not (state.dsn or state.kafka):
        _say("no local servers run: start them with `outbox local up` or `outbox local run -- COMMAND`")
        sys.exit(1)
    if as_json:
        found = {"dsn": state.dsn, "kafka": state.kafka}
        click.echo(json.dumps({**found, "directory": str(home.path), "kept": home.asked(KEEP)}))
    else:
        click.echo(_exports(Stack(state.dsn, state.kafka)))


def _variables(servers: Stack) -> dict[str, str]:
    named = {"OUTBOX_DSN": servers.dsn, "OUTBOX_KAFKA": servers.kafka}
    return {name: value for name, value in named.items() if value}


def _exports(servers: Stack) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in _variables(servers).items())


def _say(line: str) -> None:
    # The standard output belongs to what a shell evaluates, and to COMMAND.
    click.echo(line, err=True)
