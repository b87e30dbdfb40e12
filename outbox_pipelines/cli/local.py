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
from outbox_pipelines.local import stack_client
from outbox_pipelines.local.stack_client import Stack
from outbox_pipelines.local.stack_state import KEEP
from outbox_pipelines.settings import load_settings


@click.group()
def local() -> None:
    """Run PostgreSQL and Kafka on this machine, from wheels, for evaluation and tests.

    They listen on 127.0.0.1 only, are shared by all programs that you start, and stop automatically a minute
    after their last user. Data and logs are in OUTBOX_LOCAL_DIR (~/.cache/outbox-pipelines/local). If
    OUTBOX_DSN or OUTBOX_KAFKA names a server, that server is used instead of a local one.

    PostgreSQL requires a password. It is in a file that only you can read; the DSN names this file
    (passfile=), and you can give roles that you create the same password. If PGPASSWORD is set, libpq sends
    that instead: unset it. Drivers that do not use libpq, such as Go's lib/pq, may not support passfile=:
    remove it from the DSN and set PGPASSFILE to the same file. Kafka requires no password: other users of
    this machine can read and write topics.
    """


@local.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...]) -> None:
    """Run COMMAND with PostgreSQL and Kafka.

    OUTBOX_DSN and OUTBOX_KAFKA are set for COMMAND; its exit code is returned, and signals are forwarded to
    it. When it ends, the servers stop, unless another program uses them or `outbox local up` keeps them.
    Their data stays for the next time.

    \b
    Example:
      outbox local run -- pytest
    """
    if shutil.which(command[0]) is None:
        raise SetupError(f"outbox local run: command not found: {command[0]}")
    settings = load_settings()
    # A signal during the start must also end the servers in order.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with stack_client.stack(settings, _say) as servers:
            code = stack_client.run(command, {**os.environ, **_variables(servers)})
    finally:
        if not (settings.dsn and settings.kafka):
            stack_client.stop(stack_client.home_of(settings), even_if_kept=False)
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
    with stack_client.stack(settings, _say) as servers:
        if settings.dsn and settings.kafka:
            _say("OUTBOX_DSN and OUTBOX_KAFKA already name servers: nothing was started")
        else:
            stack_client.home_of(settings).ask(KEEP)
        click.echo(_exports(servers))


@local.command()
@click.option("--force", is_flag=True, help="Stop the servers even while other programs use them.")
@click.option("--forget", is_flag=True, help="Also remove their data: all databases and topics.")
def down(force: bool, forget: bool) -> None:
    """Stop PostgreSQL and Kafka now; their data stays, unless --forget is given.

    Exits with 1, and stops nothing, while another program uses them, unless --force is given.
    """
    home = stack_client.home_of(load_settings())
    if stack_client.running(home) is None:
        _say("no local servers are running")
    elif not stack_client.stop(home, force=force):
        _say("other programs use the local servers: end them first, or add --force")
        sys.exit(1)
    if forget and not stack_client.forget(home):
        _say("another program has started the local servers again: nothing was removed")
        sys.exit(1)


@local.command()
@click.option("--json", "as_json", is_flag=True, help="Print dsn, kafka, directory and kept as JSON.")
def env(as_json: bool) -> None:
    """Print the variables that name the running servers, for `eval "$(outbox local env)"`.

    Exits with 1 if no server is running.
    """
    home = stack_client.home_of(load_settings())
    state = stack_client.running(home)
    if state is None or not (state.dsn or state.kafka):
        _say("no local servers running: start them with `outbox local up` or `outbox local run -- COMMAND`")
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
    # The standard output is for the shell that evaluates it, and for COMMAND.
    click.echo(line, err=True)
